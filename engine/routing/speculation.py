"""Level 3: who writes the next tokens, the draft or the target; and whether drafting pays.

A small draft model proposes the next tokens of a sequence; one pass of the target over all of them
says which stand. The target draws its own token at every position as it does without a draft, and
a proposal is accepted when it is that token:

    drafts   [5, 7, 2]       proposed for positions p, p + 1, p + 2
    drawn    [5, 7, 9, 4]    what the target's rows drew for p to p + 3
    kept     [5, 7, 9]       two accepted, the third is the target's own, the fourth is void

So the text is the target's, whatever was proposed: token for token when greedy, and when sampling
too, because a token is a function of the target's distribution, the seed and the position. The
distribution is the target's exactly, and the same seed gives the same text with and without a
draft. Accepting by chance (`engine.runtime.draft.rejection`) accepts more and keeps only the first.

Whether a token is worth proposing is predicted before it is needed from light features: the
draft's confidence in it, how easily this sequence went lately, and measured times. A sequence that
does not gain is left alone; now and then the draft reads what the target wrote meanwhile and says
what it would have proposed, which shows whether to begin again.

Source: Y. Leviathan et al., Fast inference from transformers via speculative decoding (arXiv
2211.17192); a text that does not depend on its draft: M. Daliri et al., Coupling without
communication and drafter-invariant speculative decoding (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.routing.draft_costs import Confidence, Costs

Shares = np.ndarray[Any, np.dtype[np.float64]]

DEFINITION = (
    "acceptance = accepted / proposed, where a proposal is accepted when it is the token that the "
    "target itself draws there (drawn for rejection sampling: when a chance of min(1, target's / "
    "draft's probability) lets it stand) and all proposals before it were; tokens per target step "
    "= accepted / steps + 1, over all steps of the target that drew a token of the request"
)
"""The one definition of the figures, printed beside them."""

FADE = 0.92
"""What a step leaves of the gains and costs of those before it."""
TRIAL_STEPS = 12
"""Steps of a sequence after which drafting must have paid."""
FIRST_GAP, LONGEST_GAP = 64, 512
"""Tokens until a sequence that did not gain is looked at again; each failure doubles it."""
LOOKED_AT = 16
"""Tokens that are compared then."""
MARGIN = 0.04
"""Share of the time saved that a look must promise."""
MOST_SEQUENCES = 8
"""In steps with more sequences nothing is proposed: a token is worth too little of such a step."""
DISCOURAGED = 0.25
"""With a smaller share of trials that paid lately, new sequences are looked at before they are
drafted for."""
PLAIN_EVERY = 24
"""Steps of an engine after which one runs without drafts, to know what plain steps take."""


def num_kept(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many of the drawn tokens stand; there is one more of them than drafts.

    The drafts [5, 7, 2] of the drawn tokens [5, 7, 9, 4] give 3.
    """
    for place, draft in enumerate(drafts):
        if draft != drawn[place]:
            return place + 1
    return len(drafts) + 1


@dataclass(slots=True)
class Figures:
    """Counts behind the two figures of `DEFINITION`."""

    proposed: int = 0
    """Proposals that the target verified."""
    accepted: int = 0
    steps: int = 0
    """Steps of the target that drew a token."""
    passes: int = 0
    """Tokens that the draft thought of, those not worth proposing included."""

    @property
    def acceptance(self) -> float | None:
        """Accepted / proposed; None without proposals."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_per_step(self) -> float | None:
        """Accepted / steps + 1; None without steps."""
        return self.accepted / self.steps + 1 if self.steps else None

    def add(self, other: Figures) -> None:
        """Count another's counts too."""
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.steps += other.steps
        self.passes += other.passes


@dataclass(slots=True)
class Track:
    """What is known of one sequence's drafts."""

    on: bool = True
    """Whether it is drafted for."""
    ease: float = 0.7
    """Chance of acceptance of what the draft thought of lately."""
    saved_s: float = 0.0
    """Lately, by accepted tokens."""
    spent_s: float = 0.0
    """Lately, on the draft's passes and the target's further rows."""
    steps: int = 0
    """Since it was switched on."""
    gap: int = FIRST_GAP
    look_at: int = 0
    """While off: the number of tokens at which the draft looks again."""
    switched: list[tuple[int, bool]] = field(default_factory=list)
    """At which number of generated tokens it was switched off (False) or on."""
    figures: Figures = field(default_factory=Figures)


@dataclass(slots=True)
class Thought:
    """A token that the draft thought of."""

    token_id: int
    confidence: float
    """The draft's probability of it."""
    chance: float
    """Of acceptance, with all before it."""
    shares_V: Shares | None = None
    """The draft's distribution, where the token was drawn from it to be accepted by chance."""


class Speculation:
    """The policy of one engine: how long drafts are, and for whom there are any."""

    def __init__(self, longest: int, *, adaptive: bool = True) -> None:
        """Propose at most `longest` tokens a step; always as many unless `adaptive`."""
        self.longest, self.adaptive = longest, adaptive
        self.costs, self.confidence = Costs(), Confidence()
        self.total = Figures()
        self._since_plain = 0
        self.ahead = True
        """Whether prices are worked out once for all that is asked between two measured times."""
        self._priced: dict[int, tuple[float, float]] = {}
        self._luck = 1.0
        """Share of the last trials that paid."""

    def new_track(self) -> Track:
        """Return what is known of a new sequence: nothing, but how others fared."""
        if self.adaptive and self._luck < DISCOURAGED:
            return Track(on=False, look_at=LOOKED_AT, gap=FIRST_GAP // 2)
        return Track()

    def wants(self, num_sequences: int) -> bool:
        """Say whether this step may have drafts, or runs plain to learn what that takes."""
        if not self.adaptive:
            return True
        if num_sequences > MOST_SEQUENCES:
            return False
        self._since_plain += 1
        if self.costs.knows(num_sequences) and self._since_plain < PLAIN_EVERY:
            return True
        self._since_plain = 0
        return False

    def looks(self, track: Track, num_tokens: int) -> bool:
        """Say whether the draft should look again at a sequence it is switched off for."""
        return num_tokens >= track.look_at

    def worth_thinking(self, track: Track, chance: float, num_sequences: int) -> bool:
        """Say whether one more pass of the draft is expected to pay.

        Args:
            track: the sequence.
            chance: that all it has been proposed in this step is accepted.
            num_sequences: those in the step.
        """
        if not self.adaptive:
            return True
        token_s, row_s = self._prices(num_sequences)
        pass_s = self.costs.pass_s(num_sequences) / num_sequences
        return chance * track.ease * token_s > pass_s + row_s

    def thought(self, track: Track, token_id: int, confidence: float, before: float) -> Thought:
        """Weigh a token that the draft thought of; `before` is the chance of all before it."""
        chance = self.confidence.chance(confidence)
        track.ease += (chance - track.ease) * 0.15
        track.figures.passes += 1
        return Thought(token_id, confidence, before * chance)

    def lengths(self, thoughts: Sequence[Sequence[Thought]], room: int) -> list[int]:
        """Choose how many of each sequence's thoughts are proposed.

        The likeliest of all are taken, as many as pay together: their chances times what a token is
        worth, less what the rows add to the step.

        Args:
            thoughts: by sequence, in the order of their positions; chances never rise.
            room: most rows that the step can take beside one for each sequence.
        """
        if not self.adaptive:
            return _cut([len(own) for own in thoughts], room)
        base = len(thoughts)
        token_s, _ = self._prices(base)
        plain_s = self.costs.step_s(base)
        ranked = sorted(
            ((one.chance, index) for index, own in enumerate(thoughts) for one in own), reverse=True
        )[:room]
        lengths, best, best_s, gain_s = [0] * base, 0, 0.0, 0.0
        for count, (chance, _) in enumerate(ranked, start=1):
            gain_s += chance * token_s
            net_s = gain_s - (self.costs.step_s(base + count) - plain_s)
            if net_s > best_s:
                best, best_s = count, net_s
        for _, index in ranked[:best]:
            lengths[index] += 1
        return lengths

    def judge(self, thoughts: Sequence[Thought], length: int, accepted: int) -> None:
        """Learn from what became of the first `length` thoughts of one sequence in a step."""
        self.total.proposed += length
        self.total.accepted += accepted
        self.total.passes += len(thoughts)
        for place in range(min(length, accepted + 1)):
            self.confidence.judged(thoughts[place].confidence, place < accepted)

    def weigh(
        self, track: Track, accepted: int, spent_s: float, num_sequences: int, num_tokens: int
    ) -> None:
        """Add a step to a sequence's gains and costs, and switch it off when it loses.

        Args:
            track: the sequence.
            accepted: proposals that stood.
            spent_s: its share of the draft's passes and of the target's further rows.
            num_sequences: those in the step.
            num_tokens: generated so far.
        """
        if not self.adaptive:
            return
        token_s, _ = self._prices(num_sequences)
        track.saved_s = track.saved_s * FADE + accepted * token_s
        track.spent_s = track.spent_s * FADE + spent_s
        track.steps += 1
        if track.steps >= TRIAL_STEPS and track.saved_s <= track.spent_s:
            self._luck *= 0.7
            self._switch(track, False, num_tokens)
        elif track.steps == 2 * TRIAL_STEPS:
            self._luck = 0.7 * self._luck + 0.3

    def look(
        self,
        track: Track,
        chances: Sequence[float],
        agrees: Sequence[bool],
        num_tokens: int,
        num_sequences: int = 1,
    ) -> None:
        """Switch a sequence on when the draft would have gained on what the target wrote.

        Args:
            track: the sequence.
            chances: of each of the last tokens, from the draft's confidence in its own thought.
            agrees: whether that thought was the target's token.
            num_tokens: generated so far.
            num_sequences: those in the step.
        """
        saved_s, spent_s = self._replay(chances, agrees, num_sequences)
        if saved_s - spent_s > MARGIN * len(agrees) * self._prices(num_sequences)[0]:
            self._switch(track, True, num_tokens)
            return
        track.gap = min(2 * track.gap, LONGEST_GAP)
        track.look_at = num_tokens + track.gap

    def _replay(
        self, chances: Sequence[float], agrees: Sequence[bool], num_sequences: int
    ) -> tuple[float, float]:
        """Return (seconds saved, seconds spent), had these tokens been drafted."""
        costs = self.costs
        token_s, row_s = self._prices(num_sequences)
        pass_s, plain_s = costs.pass_s(num_sequences), costs.step_s(num_sequences)
        saved_s = spent_s = 0.0
        at = 0
        while at < len(agrees):
            length, chance = 0, 1.0
            while length < self.longest and at + length < len(agrees):
                chance *= chances[at + length]
                spent_s += pass_s / num_sequences
                if chance * token_s <= row_s:
                    break
                length += 1
            spent_s += costs.step_s(num_sequences + length) - plain_s
            accepted = next((n for n in range(length) if not agrees[at + n]), length)
            saved_s += accepted * token_s
            at += accepted + 1
        return saved_s, spent_s

    def _prices(self, num_sequences: int) -> tuple[float, float]:
        """Return the seconds that a token is worth and that a further row costs."""
        if not self.ahead:
            return self._work_out(num_sequences)
        if self.costs.is_new:  # no price stands once another time was measured
            self._priced.clear()
            self.costs.is_new = False
        if (prices := self._priced.get(num_sequences)) is None:
            prices = self._priced[num_sequences] = self._work_out(num_sequences)
        return prices

    def _work_out(self, num_sequences: int) -> tuple[float, float]:
        costs = self.costs
        plain_s = costs.step_s(num_sequences)
        rows = num_sequences * min(2, self.longest)
        row_s = max(0.0, costs.step_s(num_sequences + rows) - plain_s) / rows
        return plain_s / num_sequences, row_s

    def _switch(self, track: Track, on: bool, num_tokens: int) -> None:
        track.on, track.steps = on, 0
        track.saved_s = track.spent_s = 0.0
        track.look_at = num_tokens + track.gap
        track.switched.append((num_tokens, on))


def _cut(lengths: list[int], room: int) -> list[int]:
    """Shorten the longest until all fit in `room`: [3, 1, 2] in 4 is [2, 1, 1]."""
    while sum(lengths) > room:
        lengths[lengths.index(max(lengths))] -= 1
    return lengths
