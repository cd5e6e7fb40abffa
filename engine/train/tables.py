"""Markdown pieces of the models' READMEs: tables, and the two pages they belong to.

Pure functions from measured numbers to text; `report` measures and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import ModelConfig
from engine.train.acceptance import Acceptance
from engine.train.specialisation import Counts, Information

NONSENSE = (
    "The text it writes is locally fluent and globally nonsense: words and clauses follow each"
    " other well, the whole means nothing and no fact in it can be trusted. It is here to show"
    " routing, not to answer."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEReport:
    """All that the README of polyglot-moe shows."""

    config: ModelConfig
    num_parameters: tuple[int, int]
    bits: Mapping[str, float]
    bits_long: Mapping[str, float]
    counts: Mapping[str, Counts]
    information: Sequence[Information]
    masking: Sequence[tuple[int, int, Mapping[str, float]]]
    samples: Mapping[str, tuple[str, str]]
    history: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftReport:
    """All that the README of polyglot-draft shows."""

    config: ModelConfig
    num_parameters: int
    bits: Mapping[str, float]
    accepted: Mapping[str, Sequence[Acceptance]]


def moe_page(report: MoEReport) -> str:
    """Return the README of polyglot-moe."""
    config = report.config
    total, active = report.num_parameters
    return _join(
        "# polyglot-moe",
        f"A small Mixture-of-Experts language model in the Qwen3-MoE layout, trained on"
        f" `data/corpus`: width {config.hidden_size}, {config.num_layers} layers,"
        f" {config.num_heads} heads, {config.num_experts} experts of width"
        f" {config.moe_intermediate_size}, top-{config.top_k} renormalised, vocabulary"
        f" {config.vocab_size}, positions up to {config.max_position_embeddings};"
        f" {total / 1e6:.1f} M parameters, {active / 1e6:.1f} M of them active for one token,"
        " in bf16.",
        NONSENSE,
        "Made by `python -m engine.train`, measured on held-out text by"
        " `python -m engine.train.report`, which writes this page. Data and licences:"
        " `data/corpus/README.md`; the command and its cost: `data/models/README.md`.",
        "## Bits per byte",
        "All held-out text, in windows that start with `<|bos|>`; lower is better. English help"
        " pages, novels and Bible text differ more among themselves than German help pages do, so"
        " compare a row with itself, not with its neighbour.",
        bits_table({"context 256": report.bits, "context 512": report.bits_long}),
        "While training (a sample of the held-out text):",
        history_table(report.history),
        "## What the experts specialise in",
        "Mutual information of domain and expert: the bits that one expert choice tells about the"
        " domain, at most 3 for eight domains. The p value is the share of shuffles that reach as"
        " much when the domains of whole windows are exchanged.",
        information_table(report.information),
        "Share of each domain's slots by expert, in percent (12.5 if even):",
        *(
            part
            for layer in range(config.num_layers)
            for part in (f"Layer {layer}", use_table(report.counts, layer))
        ),
        "## What masking one expert costs",
        "Bits per byte lost in each domain when the gate may not choose one expert of one layer.",
        masking_table(report.masking),
        "## Samples",
        "Greedy text after a prompt, to show what to expect (sampled text repeats itself less):",
        *(
            f"**{name}** `{prompt}`\n\n{_quote(text)}"
            for name, (prompt, text) in report.samples.items()
        ),
    )


def draft_page(report: DraftReport) -> str:
    """Return the README of polyglot-draft."""
    config = report.config
    numbers = [counted.num_proposed for counted in next(iter(report.accepted.values()))]
    return _join(
        "# polyglot-draft",
        f"A small dense model in the Qwen3 layout with the tokenizer of `polyglot-moe`, which"
        f" proposes tokens for it: width {config.hidden_size}, {config.num_layers} layers,"
        f" {report.num_parameters / 1e6:.2f} M parameters, bf16, trained on the same text.",
        NONSENSE,
        "Made by `python -m engine.train --model draft`, then taught what its target writes by"
        " `python -m engine.train.distil`, measured by `python -m engine.train.report`, which"
        " writes this page.",
        "## Acceptance by domain",
        "Greedy decoding after held-out prompts. At each target step the draft has proposed n"
        " tokens; the leading ones that equal the target's own next tokens are accepted."
        " Acceptance = accepted / proposed; tokens per target step = accepted / steps + 1.",
        acceptance_table(report.accepted, numbers),
        "Whether that pays depends on the machine: a step with a draft must cost less than these"
        " tokens per step, in units of a plain step.",
        "## Bits per byte",
        "On the corpus, which is not what it was taught last: it has become better at its target's"
        " text, and worse at other people's.",
        bits_table({"context 256": report.bits}),
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; every cell but a row's first is right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def bits_table(columns: Mapping[str, Mapping[str, float]]) -> str:
    """Return bits per byte, a row per domain and their mean at the end."""
    domains = list(next(iter(columns.values())))
    rows = [[domain, *(f"{bits[domain]:.3f}" for bits in columns.values())] for domain in domains]
    means = [f"{sum(bits.values()) / len(bits):.3f}" for bits in columns.values()]
    return table(["domain", *columns], [*rows, ["mean", *means]])


def history_table(history: Sequence[Mapping[str, Any]]) -> str:
    """Return at most nine checks of the run, evenly spread, the last one included."""
    stride = max(1, -(-len(history) // 8))
    chosen = list(history[::-1][::stride])[::-1]
    domains = list(chosen[-1]["bits_per_byte"]) if chosen else []
    return table(
        ["step", "M tokens", *domains],
        (
            [
                entry["step"],
                f"{entry['tokens'] / 1e6:.1f}",
                *(f"{entry['bits_per_byte'][domain]:.2f}" for domain in domains),
            ]
            for entry in chosen
        ),
    )


def information_table(information: Sequence[Information]) -> str:
    """Return bits and p per layer."""
    return table(
        ["layer", "bits", "p", "shuffles"],
        (
            [layer, f"{found.bits:.3f}", f"{found.p_value:.4f}", found.num_shuffles]
            for layer, found in enumerate(information)
        ),
    )


def use_table(counts: Mapping[str, Counts], layer: int) -> str:
    """Return each domain's use of one layer's experts, in percent."""
    rows = []
    for domain, windows in counts.items():
        slots = windows[:, layer].sum(axis=0)
        rows.append([domain, *(f"{100 * share:.0f}" for share in slots / slots.sum())])
    num_experts = next(iter(counts.values())).shape[2]
    return table(["domain", *(f"e{expert}" for expert in range(num_experts))], rows)


def masking_table(masking: Sequence[tuple[int, int, Mapping[str, float]]]) -> str:
    """Return the cost of masking, a row per layer and expert."""
    domains = list(masking[0][2])
    return table(
        ["layer, expert", *domains],
        (
            [f"{layer}, {expert}", *(f"{lost[domain]:+.3f}" for domain in domains)]
            for layer, expert, lost in masking
        ),
    )


def acceptance_table(accepted: Mapping[str, Sequence[Acceptance]], numbers: Sequence[int]) -> str:
    """Return acceptance and tokens per step by domain, for every number of proposals."""
    totals = [_total(column) for column in zip(*accepted.values(), strict=True)]
    header = ["domain"]
    for number in numbers:
        header += [f"n={number} acceptance", f"n={number} tokens/step"]
    rows = []
    for name, counted in [*accepted.items(), ("all", totals)]:
        cells = [(f"{one.rate:.2f}", f"{one.tokens_per_step:.2f}") for one in counted]
        rows.append([name, *(cell for pair in cells for cell in pair)])
    return table(header, rows)


def _total(column: Sequence[Acceptance]) -> Acceptance:
    total = column[0]
    for counted in column[1:]:
        total += counted
    return total


def _quote(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _join(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"
