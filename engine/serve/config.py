"""What can be set about a service, checked when made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig, at_least, within
from engine.errors import ConfigError

MAX_PORT = 65535
LOOPBACK = ("127.0.0.1", "::1", "localhost")

_HERE = ("127.0.0.0/8", "::1/128")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one caller, and all together, may ask for."""

    body_bytes: int = 1 << 20
    """Longest request body."""
    body_s: float = 30.0
    """Longest time a body may take to arrive."""
    queued: int = 256
    """Most requests that wait for a place in a step; further ones are refused."""
    outputs: int = 64
    """Most completions of one call: its prompts times `n`."""
    stops: int = 16
    """Most stop strings of one request."""
    stop_chars: int = 256
    """Longest stop string."""
    routed_ids: int = 1 << 22
    """Most expert ids one call may ask to be told: rows x MoE layers x top-k."""
    per_minute: int = 6000
    """Most calls of one key, or of one address without keys, in a minute."""
    connections: int = 1024
    """Most calls under way at once."""
    watchers: int = 16
    """Most telemetry connections."""

    def __post_init__(self) -> None:
        for name in ("body_bytes", "outputs", "stops", "stop_chars", "per_minute", "connections"):
            at_least(name, getattr(self, name), 1)
        for name in ("queued", "routed_ids", "watchers"):
            at_least(name, getattr(self, name), 0)
        if not 0 < self.body_s <= 3600:
            raise ConfigError(f"body_s ({self.body_s}) must be above 0 and at most 3600 seconds.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """How one service runs an engine and who may reach it."""

    engine: EngineConfig
    first_ranks: int | None = None
    """Ranks that take part at first; `scale` brings in the engine's others. None is all of them."""
    name: str = ""
    """The model's name in requests; empty takes its folder's name."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    grpc_port: int | None = None
    """None serves no gRPC; 0 takes a free port."""
    token_file: Path | None = None
    """Hashed keys; needed on any address but loopback."""
    allowed_networks: tuple[str, ...] = ()
    """Networks callers may come from; empty allows all that can reach the address."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    audit_log: Path | None = None
    """JSON lines, rotated; None keeps none."""
    drain_s: float = 60.0
    """How long running requests may go on after the service was asked to end."""
    max_latency_s: float = 10.0
    """Mean time of a request above which an alert is raised."""
    expert_idle_minutes: float = 5.0
    """An expert without tokens for so long, while others get some, raises an alert."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        within("port", self.port, 0, MAX_PORT)
        if self.grpc_port is not None:
            within("grpc_port", self.grpc_port, 0, MAX_PORT)
            if self.grpc_port and self.grpc_port == self.port:
                raise ConfigError(f"grpc_port ({self.grpc_port}) must differ from port.")
        if self.first_ranks is not None:
            within("first_ranks", self.first_ranks, 1, self.engine.num_ranks)
        if not self.is_loopback and self.token_file is None:
            raise ConfigError(
                f"host ({self.host}) lets other machines in, which needs keys: add --token-file "
                "FILE (make one with --add-key), or stay on 127.0.0.1."
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together; name both files or neither.")
        for name in ("drain_s", "max_latency_s", "expert_idle_minutes"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must be above 0 and at most 86400."
                )
        _ = self.networks

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        if self.host in LOOPBACK:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def networks(self) -> tuple[Network, ...]:
        """The allowed networks, parsed; this machine itself always belongs to them.

        Raises:
            ConfigError: one is no network.
        """
        try:
            named = [ipaddress.ip_network(text) for text in self.allowed_networks]
        except ValueError as wrong:
            raise ConfigError(
                f"allowed_networks ({', '.join(self.allowed_networks)}): {wrong}; write them like "
                "10.0.0.0/8."
            ) from None
        return (*named, *map(ipaddress.ip_network, _HERE)) if named else ()

    @property
    def model_name(self) -> str:
        """The name requests call the model by."""
        return self.name or Path(self.engine.model).resolve().name
