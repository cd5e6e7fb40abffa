"""Proof that an engine was restored: hashes of what a drill may have changed, before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Engine
    from engine.routing.policy import RoutingPolicy
    from engine.routing.table import RoutingTable


def hashes(engine: Engine) -> dict[str, str]:
    """Return the SHA-256 of weights, table contents and policy as the next step will read them."""
    return {
        "weights": engine.weights_sha256(),
        "table": table_contents(engine.table),
        "policy": policy_contents(engine.control.policy),
    }


def compared(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    """Return `restored`, and by name both `hashes` and whether they are equal."""
    parts = {
        name: {"before": before[name], "after": digest, "equal": before[name] == digest}
        for name, digest in after.items()
    }
    return {"restored": all(part["equal"] for part in parts.values()), "hashes": parts}


def table_contents(table: RoutingTable) -> str:
    """Hash what a table says without its version, which only ever rises; a torn one differs."""
    digest = hashlib.sha256()
    for array in (table.phy2log, table.log2phy, table.num_replicas, table.rank_of_phy):
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def policy_contents(policy: RoutingPolicy) -> str:
    """Hash bans, forced experts, biases and smoothing."""
    contents = (
        sorted(policy.banned),
        sorted(policy.forced),
        sorted(policy.bias.items()),
        policy.smoothing,
    )
    return hashlib.sha256(repr(contents).encode()).hexdigest()
