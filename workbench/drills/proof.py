"""Proof that a deployment was restored: hashes, before and after, of what a drill may change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.routing.policy import RoutingPolicy
    from engine.routing.table import RoutingTable
    from workbench.drills.deployment import Deployment


def hashes(deployment: Deployment) -> dict[str, str]:
    """Return the SHA-256 of each of what the next step will stand on.

    `weights` as they lie in memory, the contents of the routing `table`, the `policy`, the list of
    `ranks`, the `options` the engine was started with, and the `files` of its model folder where
    the drill has a copy of its own.
    """
    engine = deployment.require()
    found = {
        "weights": engine.weights_sha256(),
        "table": table_contents(engine.table),
        "policy": policy_contents(engine.control.policy),
        "ranks": _of(sorted(engine.ranks)),
        "options": _of([sorted(options.items()) for options in deployment.all_options]),
    }
    if deployment.has_files:
        found["files"] = _of(
            [(path.name, path.read_bytes()) for path in sorted(deployment.folder.iterdir())]
        )
    return found


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
    return _of(
        (
            sorted(policy.banned),
            sorted(policy.forced),
            sorted(policy.bias.items()),
            policy.smoothing,
        )
    )


def _of(contents: object) -> str:
    return hashlib.sha256(repr(contents).encode()).hexdigest()
