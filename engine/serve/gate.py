"""Who is let in, whatever the protocol: networks, keys and rates, asked in this order."""

from __future__ import annotations

from collections.abc import Callable

from engine.serve import errors
from engine.serve.audit import Audit, Entry
from engine.serve.auth import ANYBODY_HERE, Caller, Keys, within_networks
from engine.serve.config import ServeConfig
from engine.serve.errors import ApiError
from engine.serve.rate import Rate


class Gate:
    """The same for every way in, so that two ways do not make two rates. One thread uses it."""

    def __init__(
        self,
        config: ServeConfig,
        keys: Keys | None,
        audit: Audit,
        refused: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """Stand before one service; `refused` is told the outcome of each call that failed."""
        self.config, self.keys, self.audit = config, keys, audit
        self._refused = refused
        self._networks = config.networks
        self._rate = Rate(config.limits.per_minute)
        self._failures = Rate(max(60, config.limits.per_minute // 10))
        """Calls with a bad key, by address."""

    def close_entry(self, entry: Entry, *, failed: bool) -> None:
        """Write down how a call ended."""
        if failed:
            self._refused(entry.outcome)
        self.audit.write(entry)

    def check_network(self, source: str) -> None:
        """Let through only the allowed networks.

        Raises:
            ApiError: the address lies in none of them.
        """
        if self._networks and not within_networks(source, self._networks):
            raise ApiError(403, "This network may not call here.", code="network_not_allowed")

    def caller(self, source: str, authorization: str | None) -> Caller:
        """Return who calls.

        Raises:
            ApiError: the key is not good, or too many were not.
        """
        if self.keys is None:
            return ANYBODY_HERE
        if self._failures.spent(source):
            raise errors.too_fast(self._failures.per_minute)
        caller = self.keys.caller(authorization)
        if caller is None:
            self._failures.allows(source)
            raise errors.unauthorized()
        return caller

    def check_rate(self, caller: Caller, source: str) -> None:
        """Count a call.

        Raises:
            ApiError: it is one too many.
        """
        if not self._rate.allows(source if self.keys is None else f"key {caller.key_id}"):
            raise errors.too_fast(self.config.limits.per_minute)
