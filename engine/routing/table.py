"""The routing table: which physical experts exist, what they hold and where they live.

A table never changes. A new one is published by one reference swap between steps, so readers take
no lock and never see half of an update; whoever holds a handle of another version is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.config import MAX_EXPERTS
from engine.errors import RoutingError

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RoutingTable:
    """Logical and physical experts of L MoE layers on G devices.

    Laws: ``phy2log[l, p]`` is the logical expert that physical expert p holds; for r below
    ``num_replicas[l, e]``, ``phy2log[l, log2phy[l, e, r]] == e``; past the end log2phy is -1.

    With 4 experts on 2 devices: ``phy2log = [[0, 1, 2, 3]]``, ``log2phy = [[[0], [1], [2], [3]]]``,
    ``num_replicas = [[1, 1, 1, 1]]``, ``rank_of_phy = [0, 0, 1, 1]``.
    """

    version: int
    phy2log: Int
    """(L, P)"""
    log2phy: Int
    """(L, E, Rmax)"""
    num_replicas: Int
    """(L, E)"""
    rank_of_phy: Int
    """(P,)"""
    num_devices: int
    is_identity: bool = field(init=False)
    """Whether physical and logical ids are the same, so that placing has nothing to look up."""
    _experts_LP: list[list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("phy2log", "log2phy", "num_replicas", "rank_of_phy"):
            array = np.array(getattr(self, name), dtype=np.int64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        self._check()
        identity = np.arange(self.num_experts)
        same = self.num_physical == self.num_experts and bool((self.phy2log == identity).all())
        object.__setattr__(self, "is_identity", same)
        object.__setattr__(self, "_experts_LP", self.phy2log.tolist())

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.phy2log.shape[0])

    @property
    def num_physical(self) -> int:
        """P, physical experts of one layer."""
        return int(self.phy2log.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of one layer."""
        return int(self.log2phy.shape[1])

    def experts_of(self, layer: int) -> list[int]:
        """Return for each physical expert of `layer` the logical expert it holds."""
        return self._experts_LP[layer]

    def moved(self, rank_of_phy: npt.ArrayLike, version: int | None = None) -> RoutingTable:
        """Return the same physical experts on other devices; the next version unless one is given.

        Raises:
            RoutingError: a device is out of range.
        """
        return RoutingTable(
            version=self.version + 1 if version is None else version,
            phy2log=self.phy2log,
            log2phy=self.log2phy,
            num_replicas=self.num_replicas,
            rank_of_phy=np.asarray(rank_of_phy),
            num_devices=self.num_devices,
        )

    def sha256(self) -> str:
        """Hash version and contents, for proofs that a table was restored."""
        digest = hashlib.sha256(str(self.version).encode())
        for array in (self.phy2log, self.log2phy, self.num_replicas, self.rank_of_phy):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def _check(self) -> None:
        dims = (self.phy2log.ndim, self.log2phy.ndim, self.num_replicas.ndim, self.rank_of_phy.ndim)
        if dims != (2, 3, 2, 1) or not self.rank_of_phy.size:
            raise RoutingError(
                f"table version {self.version}: phy2log, log2phy, num_replicas, rank_of_phy have "
                f"{dims} axes and {self.rank_of_phy.size} physical experts; they need (2, 3, 2, 1) "
                "axes and at least one."
            )
        num_layers, num_experts, max_replicas = self.log2phy.shape
        if self.phy2log.shape[0] != num_layers or self.num_replicas.shape != self.log2phy.shape[:2]:
            raise RoutingError(
                f"table version {self.version}: phy2log {self.phy2log.shape}, log2phy "
                f"{self.log2phy.shape} and num_replicas {self.num_replicas.shape} must agree in "
                "layers and experts."
            )
        if self.rank_of_phy.shape != (self.num_physical,):
            raise RoutingError(
                f"table version {self.version}: rank_of_phy {self.rank_of_phy.shape} must have one "
                f"entry for each of the {self.num_physical} physical experts."
            )
        if self.rank_of_phy.min() < 0 or self.rank_of_phy.max() >= self.num_devices:
            raise RoutingError(
                f"table version {self.version}: a physical expert lies on device "
                f"{self.rank_of_phy.max()}, but there are devices 0 to {self.num_devices - 1}."
            )
        if self.num_physical > MAX_EXPERTS:
            raise RoutingError(
                f"table version {self.version}: {self.num_physical} physical experts are more than "
                f"{MAX_EXPERTS}, the most that 16-bit ids can tell apart."
            )
        if not num_layers:  # a dense model's table
            return
        if self.phy2log.min() < -1 or self.phy2log.max() >= num_experts:
            raise RoutingError(
                f"table version {self.version}: phy2log must hold logical experts 0 to "
                f"{num_experts - 1}, or -1 for an empty slot."
            )
        if self.num_replicas.min() < 1 or self.num_replicas.max() > max_replicas:
            raise RoutingError(
                f"table version {self.version}: every expert needs 1 to {max_replicas} replicas, "
                f"found {self.num_replicas.min()} to {self.num_replicas.max()}."
            )
        used = np.arange(max_replicas) < self.num_replicas[..., None]
        phys = np.where(used, self.log2phy, 0)
        if phys.min() < 0 or phys.max() >= self.num_physical or (self.log2phy[~used] != -1).any():
            raise RoutingError(
                f"table version {self.version}: log2phy must hold physical experts 0 to "
                f"{self.num_physical - 1}, and -1 past each expert's replicas."
            )
        held = np.take_along_axis(self.phy2log, phys.reshape(num_layers, -1), axis=1)
        wanted = np.arange(num_experts)[None, :, None]
        if (held.reshape(phys.shape) != wanted)[used].any():
            raise RoutingError(
                f"table version {self.version}: log2phy points at a physical expert that holds "
                "another logical expert."
            )
