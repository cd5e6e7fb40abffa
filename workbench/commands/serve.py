"""`workbench serve`: the model behind HTTP and gRPC, guarded, observed and drained."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import paths
from workbench.grouped import grouped
from workbench.options import (
    AskedDtypeOption,
    CapacityOption,
    DeterministicOption,
    DevicesOption,
    DraftOptions,
    ExchangeOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    RanksOption,
    ThresholdsOption,
    number_formats,
)

if TYPE_CHECKING:
    from engine.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class AddressOptions:
    """Where the service answers, and whether it speaks TLS."""

    host: Annotated[str, typer.Option(help="Any other address needs --token-file.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000
    grpc_port: Annotated[
        int | None, typer.Option(help="Also answer gRPC there; 0 takes a free port.")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM.")] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM.")] = None

    def options(self) -> dict[str, Any]:
        """Return what the service's config says of it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How the engine runs the model."""

    ranks: RanksOption = 1
    max_ranks: Annotated[
        int | None, typer.Option(help="Most ranks that `scale` may bring in; --ranks without it.")
    ] = None
    devices: DevicesOption = 1
    exchange: ExchangeOption = "grouped"
    dtype: AskedDtypeOption = None
    precision: PrecisionOption = "model"
    thresholds: ThresholdsOption = None
    capacity_factor: CapacityOption = None
    deterministic: DeterministicOption = False
    max_running: Annotated[int, typer.Option(help="Most sequences in one step.")] = 64
    num_blocks: Annotated[int, typer.Option(help="Blocks of the KV cache.")] = 2048
    prefix_reuse: Annotated[
        bool, typer.Option(help="Read what requests with the same beginning left in the cache.")
    ] = True
    threads: Annotated[int | None, typer.Option(help="Threads of one product.")] = None

    def config(self, model: str, drafts: DraftOptions) -> EngineConfig:
        """Return the engine's config.

        Raises:
            ConfigError: an option has a value that is not allowed.
        """
        from engine.config import EngineConfig

        dtype, precision = number_formats(
            self.dtype, self.precision, deterministic=self.deterministic
        )
        cores = os.cpu_count() or 2
        return EngineConfig(
            model=paths.model_folder(model),
            dtype=dtype,
            num_devices=self.devices,
            num_ranks=max(self.ranks, self.max_ranks or 0),
            exchange=self.exchange,
            deterministic=self.deterministic,
            precision=precision,
            precision_file=self.thresholds,
            capacity_factor=self.capacity_factor,
            max_running=self.max_running,
            num_blocks=self.num_blocks,
            prefix_reuse=self.prefix_reuse,
            num_threads=max(1, cores // 2) if self.threads is None else self.threads,
            hash_logits=self.deterministic,
            **drafts.engine_options(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOptions:
    """Who may call, and where it is written down."""

    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hashed keys; see --add-key.")
    ] = None
    add_key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Make a key in --token-file, print it once, and end."),
    ] = None
    scope: Annotated[
        list[str] | None,
        typer.Option(metavar="infer|observe|operate", help="With --add-key, repeated."),
    ] = None
    allow_network: Annotated[
        list[str] | None,
        typer.Option(metavar="CIDR", help="Let only this network in; may be repeated."),
    ] = None
    audit_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default="beside the user's state", help="JSON lines."),
    ] = None

    def options(self) -> dict[str, Any]:
        """Return what the service's config says of it."""
        return {
            "token_file": self.token_file,
            "allowed_networks": tuple(self.allow_network or ()),
            "audit_log": self.audit_log or default_audit_log(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitOptions:
    """How much the service takes on, and when it raises an alert."""

    max_queued: Annotated[int, typer.Option(help="Most requests that wait.")] = 256
    per_minute: Annotated[int, typer.Option(help="Most calls of one key in a minute.")] = 6000
    drain_s: Annotated[float, typer.Option(help="Longest wait for running requests.")] = 60.0
    max_latency_s: Annotated[
        float, typer.Option(help="Mean time of a request that raises an alert.")
    ] = 10.0
    expert_idle_minutes: Annotated[
        float, typer.Option(help="Minutes without tokens after which an expert raises an alert.")
    ] = 5.0

    def options(self) -> dict[str, Any]:
        """Return what the service's config says of it."""
        from engine.serve.config import Limits

        return {
            "limits": Limits(queued=self.max_queued, per_minute=self.per_minute),
            "drain_s": self.drain_s,
            "max_latency_s": self.max_latency_s,
            "expert_idle_minutes": self.expert_idle_minutes,
        }


@grouped
def serve(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    name: Annotated[str, typer.Option(help="The model's name in requests.")] = "",
    address: AddressOptions,
    engine: EngineOptions,
    drafts: DraftOptions,
    keys: KeyOptions,
    limits: LimitOptions,
    as_json: JsonOption = False,
) -> None:
    """Serve the model: OpenAI-compatible, on this machine alone unless told otherwise.

    Ctrl-C or SIGTERM drains: running requests end, new ones are refused, then the service ends.
    """
    from workbench.serving import make_key, require_packages, run

    require_packages()
    if keys.add_key is not None:
        make_key(keys.token_file, keys.add_key, keys.scope or ["infer"], as_json=as_json)
        return
    from engine.serve.config import ServeConfig

    config = ServeConfig(
        engine=engine.config(model, drafts),
        first_ranks=engine.ranks,
        name=name,
        **address.options(),
        **keys.options(),
        **limits.options(),
    )
    raise typer.Exit(run(config, as_json=as_json))


def default_audit_log() -> Path:
    """Return the file under the user's state directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tokenrouter-workbench" / "audit.jsonl"
