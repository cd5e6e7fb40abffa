"""How one engine runs a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config.checks import at_least, number, one_of, within
from engine.config.sampling import MAX_SEED
from engine.errors import ConfigError

DTYPES = ("float32", "bfloat16")
PRECISIONS = ("model", "int8", "auto")
MAX_DEVICES = 1024
MAX_RANKS = 64
DEVICES = ("cpu", "cuda")
EXCHANGES = ("naive", "request", "grouped", "overlapped")
MAX_THREADS = 1024
MAX_DRAFT_TOKENS = 16
DRAFT_LENGTHS = ("adaptive", "fixed")
DRAFT_SAMPLINGS = ("same", "rejection")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one engine runs a model."""

    model: str | Path
    """Folder with config.json, safetensors and tokenizer.json."""
    draft: str | Path | None = None
    """Folder of a small model that proposes tokens for this one to verify; None proposes nothing.
    The text stays the same, token for token, whatever is proposed."""
    draft_tokens: int = 4
    """Most tokens proposed in one step."""
    draft_length: str = "adaptive"
    """`adaptive` proposes as many as pay, none where none do; `fixed` always `draft_tokens`."""
    draft_sampling: str = "same"
    """How proposals are accepted when sampling. `same`: those that are the token drawn without a
    draft, so that a seed keeps its text. `rejection`: by chance (Leviathan et al.), so that more
    stand; the distribution stays, the text of a seed does not."""
    dtype: str = "float32"
    """Number format of weights and activations: `float32` or `bfloat16`. The gate stays fp32."""
    precision: str = "model"
    """Number format of the experts: `model` is `dtype`; `int8` quantises their weights by output
    channel at load and their rows, one by one, as they come (W8A8); `auto` holds them in both and
    chooses by unit of rows, see `engine.routing.precision`. All else stays in `dtype`."""
    precision_file: str | Path | None = None
    """Thresholds for `auto`; None takes `precision.json` in the model's folder."""
    predict_ahead: bool = True
    """Whether number formats are predicted for all layers in one go at a step's start, and what a
    draft's tokens are worth once a step, or each when it is asked for. The decisions are the same,
    the time that deciding takes is not; `Engine.predict_ahead` switches it."""
    capacity_factor: float | None = None
    """Times its even share of a step's rows that an expert may take, 1 to 16, usually 1.2 to 2;
    what finds no room is dropped and counted. None drops nothing."""
    deterministic: bool = False
    """Bitwise equal logits whatever else is in the batch; fp32 only, about 4 times slower."""
    num_devices: int = 1
    """Logical devices over which experts and sequences are spread, in this one process."""
    num_ranks: int = 1
    """Processes over which they are spread; above 1, each is a device."""
    run_on: str = "cpu"
    """`cpu`, or `cuda`: each rank on a GPU of its own, which has not been tried on one yet."""
    attention_ranks: int = 0
    """Of the ranks, so many, the first ones, own the sequences and the others hold the experts; 0:
    every rank does both."""
    exchange: str = "grouped"
    """How ranks exchange rows: `naive`, `request`, `grouped` or `overlapped`."""
    small_batch_rows: int = 8
    """Steps with fewer rows, over all ranks, are exchanged request by request; 0 never."""
    exchange_timeout_s: float = 10.0
    """Longest wait for other ranks in one exchange."""
    host_copies: bool = True
    """Whether ranks keep one copy of all experts in the host's memory, so that those of a lost rank
    need not be read from the checkpoint; costs their size once, on Linux."""
    heartbeat_timeout_s: float = 3.0
    """A rank without a sign of life for so long is given up."""
    migration_deadline_s: float = 30.0
    """A new table is given up when a rank has not gathered its experts by then."""
    max_running: int = 64
    """Most sequences in one step."""
    max_step_tokens: int = 256
    """Most rows in one step; longer prompts are prefilled in chunks."""
    block_size: int = 16
    """Tokens in one block of the KV cache."""
    num_blocks: int = 2048
    """Blocks of the KV cache, shared by all sequences."""
    prefix_reuse: bool = False
    """Whether a request reads what others with the same beginning have left in the KV cache."""
    priority_step_s: float = 10.0
    """Seconds of waiting that one step of priority is worth."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; None takes the model's own limit."""
    num_threads: int | None = None
    """Threads of one product; None leaves torch's setting, deterministic mode takes 1."""
    measure_kernels: bool = True
    """Whether an engine in one process tries out at start, for some tenths of a second, which of
    its products are fastest on this processor; without it, and in deterministic mode, a fixed rule
    says."""
    seed: int = 0
    """Base of the seeds of requests that bring none."""
    drill: bool = False
    """Opened to be broken: faults that switch a safeguard off may be set."""
    hash_logits: bool = False
    """Whether completions carry a SHA-256 over the logits they were sampled from."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(f"model ({self.model!r}) must name a folder with config.json.")
        one_of("dtype", self.dtype, DTYPES)
        one_of("precision", self.precision, PRECISIONS)
        for name in ("max_running", "max_step_tokens", "block_size", "num_blocks"):
            at_least(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 1)
        if self.num_threads is not None:
            within("num_threads", self.num_threads, 1, MAX_THREADS)
        within("seed", self.seed, 0, MAX_SEED)
        self._check_draft()
        self._check_places()
        self._check_times()
        self._check_capacity()
        self._check_formats()

    def _check_draft(self) -> None:
        within("draft_tokens", self.draft_tokens, 1, MAX_DRAFT_TOKENS)
        one_of("draft_length", self.draft_length, DRAFT_LENGTHS)
        one_of("draft_sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        if self.deterministic and self.draft_sampling != "same":
            raise ConfigError(
                f"draft_sampling ({self.draft_sampling}) must be same in deterministic mode, where "
                "a seed keeps its text; drop one of the two."
            )
        if self.draft is not None and self.num_ranks > 1:
            raise ConfigError(
                f"draft ({self.draft}) must be left out with num_ranks ({self.num_ranks}): a draft "
                "proposes to one process only; drop one of the two."
            )

    def _check_places(self) -> None:
        within("num_devices", self.num_devices, 1, MAX_DEVICES)
        within("num_ranks", self.num_ranks, 1, MAX_RANKS)
        if self.num_ranks > 1 and self.num_devices not in (1, self.num_ranks):
            raise ConfigError(
                f"num_devices ({self.num_devices}) must be left at 1 with num_ranks "
                f"({self.num_ranks}): each rank is a device."
            )
        if self.attention_ranks:
            if self.num_ranks == 1:
                raise ConfigError(
                    f"attention_ranks ({self.attention_ranks}) must be 0 in one process; give it "
                    "ranks (--ranks)."
                )
            within("attention_ranks", self.attention_ranks, 0, self.num_ranks - 1)
        at_least("attention_ranks", self.attention_ranks, 0)
        one_of("run_on", self.run_on, DEVICES)
        one_of("exchange", self.exchange, EXCHANGES)
        at_least("small_batch_rows", self.small_batch_rows, 0)

    def _check_times(self) -> None:
        for name in ("exchange_timeout_s", "heartbeat_timeout_s", "migration_deadline_s"):
            if not 0 < number(name, getattr(self, name)) <= 3600:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must be above 0 and at most 3600 seconds."
                )
        if not 0 < number("priority_step_s", self.priority_step_s) <= 86400:
            raise ConfigError(
                f"priority_step_s ({self.priority_step_s}) must be above 0 and at most 86400 "
                "seconds."
            )

    def _check_capacity(self) -> None:
        if (factor := self.capacity_factor) is None:
            return
        if not 1 <= number("capacity_factor", factor) <= 16:
            raise ConfigError(
                f"capacity_factor ({factor}) must lie between 1 and 16, usual are 1.2 to 2; "
                "leave it out to drop nothing."
            )
        if self.deterministic:
            raise ConfigError(
                f"capacity_factor ({factor}) must be left out in deterministic mode, because "
                "which rows are dropped depends on the other rows of the step; drop one of "
                "the two."
            )

    def _check_formats(self) -> None:
        if self.deterministic and self.precision != "model":
            why = "a unit's vote depends on the rows beside it"
            raise ConfigError(
                f"precision ({self.precision}) must be model in deterministic mode, "
                f"{'for ' + why if self.precision == 'auto' else 'which runs in fp32'}; drop one "
                "of the two."
            )
        if self.deterministic and self.dtype != "float32":
            raise ConfigError(
                f"dtype ({self.dtype}) must be float32 in deterministic mode; "
                "drop --deterministic or take --dtype float32."
            )
        if self.precision == "auto" and (self.num_ranks > 1 or self.run_on != "cpu"):
            raise ConfigError(
                "precision (auto) must be model or int8 between ranks and on GPUs: formats do not "
                "yet travel with rows; take one process on a CPU for auto."
            )
        if self.precision_file is not None and self.precision != "auto":
            raise ConfigError(
                f"precision_file ({self.precision_file}) has no effect with precision "
                f"{self.precision}; leave it out, or take precision auto."
            )
        if self.deterministic and self.num_threads not in (None, 1):
            raise ConfigError(
                f"num_threads ({self.num_threads}) must be 1 in deterministic mode, because a "
                "product's order of summation changes with its threads."
            )

    @property
    def number_format(self) -> str:
        """The format that experts run rows in when none is chosen by unit."""
        return "int8" if self.precision == "int8" else self.dtype

    @property
    def scheme(self) -> str:
        """The number formats in force, in words."""
        if self.precision == "model":
            return f"all in {self.dtype}, the gate in float32"
        int8 = "int8 (W8A8: weights with one scale an output channel, rows with one scale each)"
        formats = f"{self.dtype} or {int8} by unit" if self.precision == "auto" else int8
        return f"experts in {formats}, all else in {self.dtype}, the gate in float32"
