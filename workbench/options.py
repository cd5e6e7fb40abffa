"""Options that several commands share, and the engine they describe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.config.checks import one_of
from engine.errors import ConfigError
from workbench import paths
from workbench.output import say

if TYPE_CHECKING:
    from engine import Engine
    from engine.events import Sink
    from workbench.policy import Policy

ModelOption = Annotated[
    str,
    typer.Option("--model", metavar="DIR", help="Model folder, or the name of a bundled model."),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", metavar="float32|bfloat16", help="Number format of the weights.")
]
AskedDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="float32|bfloat16",
        help="Number format of the weights.",
        show_default="float32, with --precision auto or bf16 bfloat16",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="auto|bf16|int8|model",
        help="Number format of the experts: chosen by unit of rows, bfloat16 like all else, int8 "
        "weights and rows, or that of --dtype.",
    ),
]
ThresholdsOption = Annotated[
    Path | None,
    typer.Option(
        "--thresholds",
        metavar="FILE",
        help="What --precision auto chooses by.",
        show_default="precision.json in the model's folder",
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="DIR",
        help="Let a small model propose tokens: polyglot-draft, or a folder. Same text, faster "
        "where it pays.",
        show_default=False,
    ),
]
DraftTokensOption = Annotated[
    int, typer.Option("--draft-tokens", help="Most tokens proposed in one step.")
]
DraftLengthOption = Annotated[
    str,
    typer.Option(
        "--draft-length",
        metavar="adaptive|fixed",
        help="Propose as many as pay, or always --draft-tokens.",
    ),
]
DraftSamplingOption = Annotated[
    str,
    typer.Option(
        "--draft-sampling",
        metavar="same|rejection",
        help="When sampling, keep the seed's text, or accept more proposals by chance.",
    ),
]
SHOWN_DEVICES = 4
"""Logical devices of the commands that show where tokens go; with one there is nothing to see."""
DevicesOption = Annotated[
    int, typer.Option("--devices", help="Logical devices the experts are spread over.")
]
RanksOption = Annotated[
    int, typer.Option("--ranks", help="Processes the experts are spread over; 1 is this one.")
]
AttentionRanksOption = Annotated[
    int,
    typer.Option(
        "--attention-ranks",
        help="So many of the ranks own the sequences, the others hold the experts; 0: all do both.",
    ),
]
RunOnOption = Annotated[
    str,
    typer.Option(
        "--run-on", metavar="cpu|cuda", help="cuda gives each rank a GPU of its own; untried."
    ),
]
ExchangeOption = Annotated[
    str,
    typer.Option(
        "--exchange",
        metavar="MODE",
        help="How ranks exchange rows: naive, request, grouped or overlapped.",
    ),
]
CapacityOption = Annotated[
    float | None,
    typer.Option(
        "--capacity-factor",
        metavar="F",
        help="An expert takes at most F times its even share of a step's rows, usually 1.2 to 2; "
        "the rest is dropped and counted. Without it nothing is.",
        show_default=False,
    ),
]
ForceOption = Annotated[
    str | None, typer.Option(metavar="E,E,…", help="Always choose these experts, in every layer.")
]
BanOption = Annotated[
    list[str] | None,
    typer.Option(metavar="[L:]E", help="Never choose this expert; may be repeated."),
]
BiasOption = Annotated[
    list[str] | None,
    typer.Option(metavar="[L:]E=V", help="Add V to the expert's logit; may be repeated."),
]
SmoothingOption = Annotated[
    str | None,
    typer.Option(
        metavar="B[,W[,D]]",
        help="Add B to the logits of experts used in the last W tokens, times D for each token "
        "since.",
    ),
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="Bitwise equal logits in any batch; fp32, two to four times slower."
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Same seed, same prompt: same text.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]
LessonsOption = Annotated[
    Path | None,
    typer.Option(
        "--lessons",
        metavar="DIR",
        help="Folder of your own copies of the lessons.",
        show_default="a place of your own, which is printed",
    ),
]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Where the running drill and journals are kept."),
]


PRECISIONS = ("auto", "bf16", "int8", "model")
"""What --precision takes."""


def number_formats(
    dtype: str | None, precision: str, *, deterministic: bool = False
) -> tuple[str, str]:
    """Return the engine's `dtype` and `precision` for what was asked; None is no --dtype.

    Raises:
        ConfigError: there is no such precision, or `bf16` is asked for together with another
            --dtype or with --deterministic.
    """
    one_of("precision", precision, PRECISIONS)
    if precision == "bf16":
        if deterministic:
            raise ConfigError(
                "--precision bf16 runs all in bfloat16, but --deterministic needs float32; drop "
                "one of the two."
            )
        if dtype not in (None, "bfloat16"):
            raise ConfigError(
                f"--precision bf16 runs all in bfloat16, but --dtype is {dtype}; drop one of them."
            )
        return "bfloat16", "model"
    return dtype or ("bfloat16" if precision == "auto" else "float32"), precision


DRAFTING = {"draft_tokens": 4, "draft_length": "adaptive", "draft_sampling": "same"}
"""How a draft proposes unless told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """Who proposes tokens, and how far."""

    draft: DraftOption = None
    draft_tokens: DraftTokensOption = 4
    draft_length: DraftLengthOption = "adaptive"
    draft_sampling: DraftSamplingOption = "same"

    def engine_options(self) -> dict[str, Any]:
        """Return what the engine's config says of it; say so where an option has no effect."""
        folder = None if self.draft is None else paths.model_folder(self.draft)
        idle = [name for name, usual in DRAFTING.items() if getattr(self, name) != usual]
        if folder is None and idle:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
            say(f"without --draft there is nothing to do for {names}")
        return asdict(self) | {"draft": folder}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions:
    """What is asked of the gate."""

    force_experts: ForceOption = None
    ban_expert: BanOption = None
    bias: BiasOption = None
    smoothing: SmoothingOption = None

    def policy(self) -> Policy:
        """Return it as read.

        Raises:
            ConfigError: a value has another form.
        """
        from workbench.policy import Policy

        return Policy.parse(
            self.force_experts, self.ban_expert or (), self.bias or (), self.smoothing
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """Where the work is spread."""

    ranks: RanksOption = 1
    attention_ranks: AttentionRanksOption = 0
    run_on: RunOnOption = "cpu"
    exchange: ExchangeOption = "grouped"

    def engine_options(self) -> dict[str, Any]:
        """Return what the engine's config says of it."""
        named = asdict(self)
        return {"num_ranks": named.pop("ranks"), **named}


def open_engine(
    *,
    model: str,
    dtype: str | None = None,
    devices: int,
    deterministic: bool,
    sink: Sink,
    hash_logits: bool = False,
    precision: str = "model",
    thresholds: Path | None = None,
    capacity_factor: float | None = None,
    ranks: RankOptions | None = None,
    drafts: DraftOptions | None = None,
) -> Engine:
    """Start an engine as the shared options say; the caller closes it.

    Raises:
        ConfigError: an option has a value that is not allowed.
        CheckpointError: the model folder is missing or damaged.
    """
    from engine import Engine, EngineConfig

    dtype, precision = number_formats(dtype, precision, deterministic=deterministic)
    config = EngineConfig(
        model=paths.model_folder(model),
        dtype=dtype,
        num_devices=devices,
        deterministic=deterministic,
        hash_logits=hash_logits,
        precision=precision,
        precision_file=thresholds,
        capacity_factor=capacity_factor,
        **(ranks or RankOptions()).engine_options(),
        **(drafts or DraftOptions()).engine_options(),
    )
    return Engine(config, sink=sink)
