"""All that belongs to the experts of one layer, in one place.

The weights are the truth. What a kernel wants beside them (matrices laid out for a library, int8
values with their scales) is made from them by `refresh`, so whoever changes, moves or swaps an
expert's weights calls that and nothing else. Made by `engine.model.moe`, read by the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from engine.kernels import checks
from engine.kernels.dense import Product


class Matrix(NamedTuple):
    """One expert's matrix as a kernel wants it."""

    product: Product | None
    """Multiplies rows by it; how it lies is the kernel's secret."""
    num_bytes: int = 0
    """Memory beside the weights; 0 for a view of them."""
    few: Product | None = None
    """What multiplies fewer rows than `limit`, where that is another."""
    limit: int = 0
    columns: Tensor | None = None
    """(I, O) by columns, a view, for a kernel that reads that and no product."""


Prepared = Sequence[tuple[Matrix, Matrix]]
"""For each expert its matrices `gate_up` and `down`."""
Prepare = Callable[[Tensor, Tensor], Prepared]


@dataclass(slots=True)
class ExpertWeights:
    """The one owner of E experts' weights and of everything made from them.

    Raises:
        KernelError: the two stacks do not fit each other. Values are looked at by `refresh`.
    """

    gate_up: Tensor
    """(E, 2F, D), gate rows before up rows; the parameter itself, not a copy."""
    down: Tensor
    """(E, D, F)."""
    prepare: Prepare | None = None
    """Makes what the chosen kernel wants; None where it reads the weights as they are."""
    prepared: Prepared | None = field(default=None, init=False)
    """What `prepare` made last; None before the first `refresh`."""

    def __post_init__(self) -> None:
        checks.experts(self.gate_up, self.down)

    def refresh(self) -> None:
        """Make everything again from the weights; call it whenever they have changed.

        Reads every weight once, which is the only time that its value is looked at: no kernel
        checks it again.

        Raises:
            KernelError: the two stacks do not fit each other, lie on meta, or hold a NaN or an
                infinity.
        """
        checks.experts(self.gate_up, self.down)
        for name, stack in (("gate_up", self.gate_up), ("down", self.down)):
            checks.has_values(name, stack)
            checks.finite(name, stack)
        self.prepared = None
        if self.prepare is not None:
            self.prepared = self.prepare(self.gate_up, self.down)

    def of(self, expert: int) -> tuple[Matrix, Matrix]:
        """Return what was made for one expert; makes it for all at the first call."""
        if self.prepared is None:
            self.refresh()
        assert self.prepared is not None, "this kernel reads the weights as they are"
        return self.prepared[expert]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and of what was made from them."""
        made = sum(matrix.num_bytes for pair in self.prepared or () for matrix in pair)
        own = sum(part.numel() * part.element_size() for part in (self.gate_up, self.down))
        return own + made
