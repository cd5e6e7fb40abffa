"""From a config to a service that has proven itself by a completion, and back to nothing.

    with started(config, say) as server:
        print(server.url)

Stages: configuration, process group, weights, listening, health check; see `engine.serve.stages`.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.load import check_fit, read_config
from engine.checkpoint.manifest import NAME as MANIFEST
from engine.checkpoint.manifest import read_manifest
from engine.config import ModelConfig
from engine.errors import MachineError
from engine.events import Filtered, Sink, Tee
from engine.exchange.group import Group, host_store
from engine.runtime.draft.load import check_draft
from engine.runtime.engine import Engine
from engine.runtime.start import tokenizer_of
from engine.runtime.telemetry import Telemetry
from engine.serve.app import application
from engine.serve.audit import Audit
from engine.serve.auth import Keys
from engine.serve.chat import ChatFormat
from engine.serve.config import ServeConfig
from engine.serve.gate import Gate
from engine.serve.health import Health
from engine.serve.journal import Journal
from engine.serve.listener import Listener
from engine.serve.loop import EngineLoop
from engine.serve.metrics import Metrics
from engine.serve.monitor import Monitor
from engine.serve.placement import placement_lines
from engine.serve.routing import RoutingCollector
from engine.serve.rpc import Rpc
from engine.serve.service import Service
from engine.serve.stages import Say, Stages
from engine.serve.tally import ServeTally
from engine.serve.watch import without_texts

CHECK_S = 60.0


@dataclass(slots=True)
class Server:
    """A service that runs."""

    service: Service
    listener: Listener
    rpc: Rpc | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        scheme = "https" if self.listener.tls else "http"
        return f"{scheme}://{self._host}:{self.listener.port}"

    @property
    def grpc_address(self) -> str | None:
        """Where it answers gRPC; None if it does not."""
        return f"{self._host}:{self.rpc.port}" if self.rpc else None

    @property
    def _host(self) -> str:
        host = self.service.config.host
        return f"[{host}]" if ":" in host else host

    def drain(self) -> bool:
        """Refuse new requests and wait for those under way; False if some did not end in time."""
        self.service.health.drain()
        self.service.loop.drain()
        return self.service.loop.wait_idle(self.service.config.drain_s)


@contextmanager
def started(config: ServeConfig, say: Say = lambda words: None) -> Iterator[Server]:
    """Start a service in five stages; leaving ends it, with what is still under way.

    Args:
        config: what to serve and to whom.
        say: takes one line for each stage's beginning and end.

    Raises:
        StartError: a stage failed; what was started before it has ended.
    """
    health = Health(config.engine.num_ranks)
    stages = Stages(say, health)
    with ExitStack() as stack:
        journal = stack.enter_context(Journal())
        with stages.stage("configuration") as found:
            keys = Keys.read(config.token_file) if config.token_file else None
            audit = stack.enter_context(closing(Audit(config.audit_log)))
            model = read_config(config.engine.model)
            chat = ChatFormat(config.engine.model)
            found(f"model {config.model_name}, {_shape(model)}{_drafted(config, model)}")
            found("keys from a file" if keys else "no keys: this machine may infer and observe")
        with stages.stage("process group") as found:
            found(_tried_out(config))
        with stages.stage("weights") as found:
            found(_checked(config, model))
            telemetry = stack.enter_context(closing(Telemetry()))
            loop, monitor = _loaded(config, model, health, Filtered(telemetry, without_texts))
            stack.callback(loop.close)
            _hold_back(config, loop.engine)
            for line in placement_lines(model, loop.engine.table, ranks=bool(loop.engine.ranks)):
                say(f"  {line}")
            found(f"all parameters in place, {config.engine.scheme}")
        with stages.stage("listening") as found:
            service = Service(config, loop, monitor, chat, telemetry, journal)
            loop.start()
            gate = Gate(config, keys, audit, monitor.metrics.refuse)
            rpc = Rpc(service, gate) if config.grpc_port is not None else None
            listener = Listener(application(service, gate), config, rpc)
            stack.callback(listener.close)
            server = Server(service, listener, rpc)
            found(f"{server.url}{f', gRPC at {server.grpc_address}' if rpc else ''}")
        with stages.stage("health check") as found:
            found(_proven(server, keys))
        yield server


def _loaded(
    config: ServeConfig, model: ModelConfig, health: Health, watched: Sink
) -> tuple[EngineLoop, Monitor]:
    """Load the engine and put everybody who listens to it in place."""
    collector = RoutingCollector(model)
    tally = ServeTally(model, max(config.engine.num_devices, config.engine.num_ranks))
    monitor = Monitor(config, Metrics(model, tally), health)
    loop = EngineLoop(
        Engine(config.engine, sink=Tee((collector, health, tally, watched))),
        collector,
        queued=config.limits.queued,
        observe=monitor.metrics.observe,
        look=monitor.look,
    )
    monitor.metrics.watch(loop, health, monitor.alerts)
    return loop, monitor


def _hold_back(config: ServeConfig, engine: Engine) -> None:
    """Take out again the ranks that are not wanted yet: a place exists once it was started."""
    places = config.engine.num_ranks
    for rank in range(config.first_ranks or places, places):
        engine.control.drain(rank)
        engine.step()


def _shape(model: ModelConfig) -> str:
    if not model.is_moe:
        return f"{model.num_layers} dense layers"
    return f"{model.num_layers} layers of {model.num_experts} experts, top-{model.top_k}"


def _drafted(config: ServeConfig, model: ModelConfig) -> str:
    """Hold the draft against the model; returns what to say of it, nothing without one."""
    if (folder := config.engine.draft) is None:
        return ""
    draft = check_draft(config.engine, model, tokenizer_of(config.engine, model))
    engine = config.engine
    silenced = ", but is silent under a capacity factor"
    return (
        f"; {Path(folder).resolve().name} of {draft.num_layers} dense layers proposes "
        f"{'up to ' if engine.draft_length == 'adaptive' else ''}{engine.draft_tokens} tokens"
        f"{silenced if engine.capacity_factor is not None else ''}"
    )


def _tried_out(config: ServeConfig) -> str:
    """Prove that processes here can find each other and exchange, before any weight is read."""
    ranks = config.engine.num_ranks
    if ranks == 1:
        return f"one process, {config.engine.num_devices} logical devices"
    began = time.perf_counter()
    group = Group(host_store(), 0, [0], 0, config.engine.exchange_timeout_s, name="trial")
    group.close()
    return (
        f"{ranks} ranks over loopback, exchange {config.engine.exchange!r}, time-out "
        f"{config.engine.exchange_timeout_s:g} s; a trial group stood in "
        f"{(time.perf_counter() - began) * 1e3:.0f} ms"
    )


def _checked(config: ServeConfig, model: ModelConfig) -> str:
    """Hold the files against the config; their hashes are taken as the engine reads them."""
    folder = Path(config.engine.model)
    check_fit(folder, model)
    if not (folder / MANIFEST).exists():
        return "every tensor name matched one to one; no manifest, so bytes are taken on trust"
    manifest = read_manifest(folder)
    return (
        f"every tensor name matched one to one; {len(manifest.files)} files, "
        f"{manifest.total_bytes:,} bytes, SHA-256 as in the manifest"
    )


def _proven(server: Server, keys: Keys | None) -> str:
    """Ask for a completion as any caller would, and hold the answer against what it must be.

    Raises:
        MachineError: no answer came, or not the right one.
    """
    headers = {"Content-Type": "application/json"}
    body = {"model": server.service.config.model_name, "prompt": "你好", "max_tokens": 4,
            "temperature": 0, "routing": True}  # fmt: skip
    began = time.perf_counter()
    with ExitStack() as stack:
        if keys is not None:
            headers["Authorization"] = f"Bearer {stack.enter_context(keys.lent(('infer',)))}"
        try:
            connection = stack.enter_context(closing(_connection(server)))
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, ValueError, http.client.HTTPException) as wrong:
            raise MachineError(f"the service did not answer itself: {wrong}.") from None
    if response.status != 200:
        code = (answer.get("error") or {}).get("code")
        raise MachineError(f"the service answered itself with {response.status} ({code}).")
    usage, choice = answer["usage"], answer["choices"][0]
    rows = choice["routing"]["summary"]["rows"] if "routing" in choice else 0
    wanted = usage["prompt_tokens"] + max(0, usage["completion_tokens"] - 1)
    if not choice["finish_reason"] or rows != wanted:
        raise MachineError(f"the first completion reports {rows} routed rows instead of {wanted}.")
    return (
        f"{usage['completion_tokens']} tokens and {rows} routed rows in "
        f"{(time.perf_counter() - began) * 1e3:.0f} ms"
    )


def _connection(server: Server) -> http.client.HTTPConnection:
    host = server.service.config.host
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if not server.listener.tls:
        return http.client.HTTPConnection(address, server.listener.port, timeout=CHECK_S)
    # It is our own address, and the certificate may name the machine otherwise.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(
        address, server.listener.port, timeout=CHECK_S, context=context
    )
