"""`workbench serve`: the model behind HTTP and gRPC, guarded, observed and drained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from workbench import paths
from workbench.options import (
    AskedDtypeOption,
    DeterministicOption,
    DevicesOption,
    ExchangeOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    RanksOption,
    number_formats,
)

NetworksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-network", metavar="CIDR", help="Let only this network in; may be repeated."
    ),
]
ScopesOption = Annotated[
    list[str] | None,
    typer.Option("--scope", metavar="infer|observe|operate", help="With --add-key, repeated."),
]
AuditOption = Annotated[
    Path | None,
    typer.Option(
        "--audit-log", metavar="FILE", show_default="beside the user's state", help="JSON lines."
    ),
]


def serve(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    name: Annotated[str, typer.Option(help="The model's name in requests.")] = "",
    host: Annotated[str, typer.Option(help="Any other address needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Also answer gRPC there; 0 takes a free port.")
    ] = None,
    ranks: RanksOption = 1,
    max_ranks: Annotated[
        int | None, typer.Option(help="Most ranks that `scale` may bring in; --ranks without it.")
    ] = None,
    devices: DevicesOption = 1,
    exchange: ExchangeOption = "grouped",
    dtype: AskedDtypeOption = None,
    precision: PrecisionOption = "model",
    deterministic: DeterministicOption = False,
    max_running: Annotated[int, typer.Option(help="Most sequences in one step.")] = 64,
    max_queued: Annotated[int, typer.Option(help="Most requests that wait.")] = 256,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the KV cache.")] = 2048,
    prefix_reuse: Annotated[
        bool, typer.Option(help="Read what requests with the same beginning left in the cache.")
    ] = True,
    threads: Annotated[int | None, typer.Option(help="Threads of one product.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hashed keys; see --add-key.")
    ] = None,
    add_key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Make a key in --token-file, print it once, and end."),
    ] = None,
    scope: ScopesOption = None,
    allow_network: NetworksOption = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM.")] = None,
    audit_log: AuditOption = None,
    per_minute: Annotated[int, typer.Option(help="Most calls of one key in a minute.")] = 6000,
    drain_s: Annotated[float, typer.Option(help="Longest wait for running requests.")] = 60.0,
    max_latency_s: Annotated[
        float, typer.Option(help="Mean time of a request that raises an alert.")
    ] = 10.0,
    expert_idle_minutes: Annotated[
        float, typer.Option(help="Minutes without tokens after which an expert raises an alert.")
    ] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Serve the model: OpenAI-compatible, on this machine alone unless told otherwise.

    Ctrl-C or SIGTERM drains: running requests end, new ones are refused, then the service ends.
    """
    from workbench.serving import make_key, require_packages, run

    require_packages()
    if add_key is not None:
        make_key(token_file, add_key, scope or ["infer"], as_json=as_json)
        return
    from engine.config import EngineConfig
    from engine.serve.config import Limits, ServeConfig

    dtype, precision = number_formats(dtype, precision)
    engine = EngineConfig(
        model=paths.model_folder(model),
        dtype=dtype,
        num_devices=devices,
        num_ranks=max(ranks, max_ranks or 0),
        exchange=exchange,
        deterministic=deterministic,
        precision=precision,
        max_running=max_running,
        num_blocks=num_blocks,
        prefix_reuse=prefix_reuse,
        num_threads=max(1, (os.cpu_count() or 2) // 2) if threads is None else threads,
        hash_logits=deterministic,
    )
    config = ServeConfig(
        engine=engine,
        first_ranks=ranks,
        name=name,
        host=host,
        port=port,
        grpc_port=grpc_port,
        token_file=token_file,
        allowed_networks=tuple(allow_network or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        audit_log=audit_log or default_audit_log(),
        drain_s=drain_s,
        max_latency_s=max_latency_s,
        expert_idle_minutes=expert_idle_minutes,
        limits=Limits(queued=max_queued, per_minute=per_minute),
    )
    raise typer.Exit(run(config, as_json=as_json))


def default_audit_log() -> Path:
    """Return the file under the user's state directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tokenrouter-workbench" / "audit.jsonl"
