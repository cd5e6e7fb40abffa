"""The names of each model family's tensors in its files, as tables, and ours beside them.

A rule reads: this tensor of the file, of this shape, fills this part of our parameter. `{i}` runs
over the layers and `{e}` over the experts. The letters of a shape:

    V vocabulary   D model width   E experts   F width of one expert, or of the dense feed-forward
    Q rows of all query heads   K rows of all key heads (as many as value heads)   H one head

A part names its rows in our parameter: `q`, `k`, `v` in `attention.qkv`, `gate`, `up` in `gate_up`,
`e` the expert, `:` all experts. Nothing is transposed and nothing is computed: loading copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.errors import CheckpointError

Index = tuple[int | slice, ...]

MOST_UNMATCHED = 100_000
"""Tensors that may be missing before a layout is not even looked at."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a table."""

    source: str
    """Name in the file."""
    shape: str
    """Its shape in the letters of this module."""
    target: str
    """Name of our parameter."""
    part: tuple[str, ...] = ()
    """The part of it that is filled; empty for all."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of the files belongs."""

    target: str
    index: Index
    """Of `target`'s tensor; `()` is all of it."""
    shape: tuple[int, ...]
    """What the tensor's shape must be."""


LAYER = "model.layers.{i}."

BODY = (
    Rule("model.embed_tokens.weight", "V D", "embed.weight"),
    Rule(LAYER + "input_layernorm.weight", "D", "layers.{i}.attn_norm.weight"),
    Rule(LAYER + "self_attn.q_proj.weight", "Q D", "layers.{i}.attention.qkv.weight", ("q",)),
    Rule(LAYER + "self_attn.k_proj.weight", "K D", "layers.{i}.attention.qkv.weight", ("k",)),
    Rule(LAYER + "self_attn.v_proj.weight", "K D", "layers.{i}.attention.qkv.weight", ("v",)),
    Rule(LAYER + "self_attn.q_norm.weight", "H", "layers.{i}.attention.q_norm.weight"),
    Rule(LAYER + "self_attn.k_norm.weight", "H", "layers.{i}.attention.k_norm.weight"),
    Rule(LAYER + "self_attn.o_proj.weight", "D Q", "layers.{i}.attention.out.weight"),
    Rule(LAYER + "post_attention_layernorm.weight", "D", "layers.{i}.ffn_norm.weight"),
    Rule("model.norm.weight", "D", "norm.weight"),
)
HEAD = Rule("lm_head.weight", "V D", "lm_head.weight")
GATE = Rule(LAYER + "mlp.gate.weight", "E D", "layers.{i}.moe.gate.weight")

DENSE = (
    Rule(LAYER + "mlp.gate_proj.weight", "F D", "layers.{i}.mlp.gate_up.weight", ("gate",)),
    Rule(LAYER + "mlp.up_proj.weight", "F D", "layers.{i}.mlp.gate_up.weight", ("up",)),
    Rule(LAYER + "mlp.down_proj.weight", "D F", "layers.{i}.mlp.down.weight"),
)

EXPERT = LAYER + "mlp.experts.{e}."
EXPERTS = LAYER + "mlp.experts."
GATE_UP = "layers.{i}.moe.experts.gate_up"
DOWN = "layers.{i}.moe.experts.down"

ONE_PER_EXPERT = (
    GATE,
    Rule(EXPERT + "gate_proj.weight", "F D", GATE_UP, ("e", "gate")),
    Rule(EXPERT + "up_proj.weight", "F D", GATE_UP, ("e", "up")),
    Rule(EXPERT + "down_proj.weight", "D F", DOWN, ("e",)),
)
STACKED = (
    GATE,
    Rule(EXPERTS + "gate_proj", "E F D", GATE_UP, (":", "gate")),
    Rule(EXPERTS + "up_proj", "E F D", GATE_UP, (":", "up")),
    Rule(EXPERTS + "down_proj", "E D F", DOWN),
)
FUSED = (
    GATE,
    Rule(EXPERTS + "gate_up_proj", "E 2F D", GATE_UP),
    Rule(EXPERTS + "down_proj", "E D F", DOWN),
)

FAMILIES: Mapping[str, Mapping[str, tuple[Rule, ...]]] = {
    "qwen3": {"dense": DENSE},
    "qwen3_moe": {
        "one tensor per expert": ONE_PER_EXPERT,
        "stacked experts": STACKED,
        "gate and up fused": FUSED,
    },
}
"""Family -> layout -> the rules of its feed-forward layers; `BODY` and `HEAD` are common to all."""


def closest_layout(names: Collection[str], config: ModelConfig) -> tuple[str, dict[str, Place]]:
    """Return the layout that shares most names with `names`, and the place of each of its tensors.

    Source: the names that transformers' Qwen3 and Qwen3-MoE models save (one tensor per expert) and
    hold in memory (gate and up fused).

    Raises:
        CheckpointError: every layout asks for far more tensors than there are.
    """
    given = set(names)
    head = () if config.tie_word_embeddings else (HEAD,)
    layouts = {layout: BODY + rules + head for layout, rules in FAMILIES[config.family].items()}
    sizes = {layout: num_places(rules, config) for layout, rules in layouts.items()}
    # A config that lies may ask for any number of tensors; name them only while it could be true.
    likely = {
        layout: places(rules, config)
        for layout, rules in layouts.items()
        if sizes[layout] <= MOST_UNMATCHED + len(given)
    }
    if not likely:
        raise CheckpointError(
            f"config.json asks for at least {min(sizes.values())} tensors, but the files hold "
            f"{len(given)}; config and weights belong to two models."
        )
    return max(likely.items(), key=lambda item: len(given & item[1].keys()))


def num_places(rules: tuple[Rule, ...], config: ModelConfig) -> int:
    """Return how many entries `places` would give."""
    return sum(
        (config.num_layers if "{i}" in rule.source else 1)
        * (config.num_experts if "{e}" in rule.source else 1)
        for rule in rules
    )


def places(rules: tuple[Rule, ...], config: ModelConfig) -> dict[str, Place]:
    """Return tensor name in the file -> its place, for all layers and experts of `config`.

    Example, two layers of three experts: `…experts.{e}.up_proj.weight` gives six entries, the last
    one `model.layers.1.mlp.experts.2.up_proj.weight` -> `layers.1.moe.experts.gate_up`,
    `(2, slice(F, 2 * F))`.
    """
    sizes, rows = _sizes(config), _rows(config)
    found = {}
    for rule in rules:
        shape = tuple(sizes[letter] for letter in rule.shape.split())
        for layer, expert in _runs(rule.source, config):
            part = {**rows, "e": expert}
            found[rule.source.format(i=layer, e=expert)] = Place(
                target=rule.target.format(i=layer),
                index=tuple(part[name] for name in rule.part),
                shape=shape,
            )
    return found


def _runs(source: str, config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Yield the (layer, expert) pairs for which a source name stands."""
    for layer in range(config.num_layers if "{i}" in source else 1):
        for expert in range(config.num_experts if "{e}" in source else 1):
            yield layer, expert


def _sizes(config: ModelConfig) -> dict[str, int]:
    width = config.moe_intermediate_size if config.is_moe else config.intermediate_size
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "E": config.num_experts,
        "F": width,
        "2F": 2 * width,
        "Q": config.num_heads * config.head_dim,
        "K": config.num_kv_heads * config.head_dim,
        "H": config.head_dim,
    }


def _rows(config: ModelConfig) -> dict[str, int | slice]:
    size = _sizes(config)
    queries, keys, width = size["Q"], size["K"], size["F"]
    return {
        "q": slice(0, queries),
        "k": slice(queries, queries + keys),
        "v": slice(queries + keys, queries + 2 * keys),
        "gate": slice(0, width),
        "up": slice(width, 2 * width),
        ":": slice(None),
    }
