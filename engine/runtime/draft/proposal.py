"""What a draft has to do with one sequence, and with one of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from engine.routing.speculation import Figures, Thought, Track
from engine.runtime.draft.network import Memory


@dataclass(slots=True)
class DraftState:
    """What is kept of one sequence."""

    track: Track
    memory: Memory | None = None
    """Made when the draft first thinks about the sequence."""

    @property
    def figures(self) -> Figures:
        """How many proposals were made and accepted."""
        return self.track.figures


@dataclass(slots=True)
class Proposal:
    """The drafts at the end of one chunk."""

    thoughts: list[Thought]
    """As many as were thought of, the proposed ones first."""
    num_drafts: int
    num_kept: int = 0
    """Of the tokens that the chunk's rows drew, those that the request took."""

    @property
    def token_ids(self) -> list[int]:
        """The proposed tokens."""
        return [thought.token_id for thought in self.thoughts[: self.num_drafts]]
