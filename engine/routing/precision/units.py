"""Units: rows that share a number format, and the vote that gives them one.

Two kinds. A unit of a *sequence* is a piece of its consecutive tokens, wherever their experts are:
a token's rows in all its experts have one format. A unit of an *expert* is a piece of its rows
after the order by expert, which is what a kernel likes; a token may run in INT8 in one of its
experts and not in the other. The last unit of either may be short and has a format of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.quant import INT8, NATIVE

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Int8 = npt.NDArray[np.int8]
UInt8 = npt.NDArray[np.uint8]

REASONS = (
    "the engine's own format",
    "most of its unit suit INT8",
    "most of its unit do not suit INT8",
    "the layer is on the whitelist",
    "an operator's order",
    "run again: its unit failed the check",
)
OWN, VOTED, OUTVOTED, WHITELISTED, ORDERED, RERUN = range(len(REASONS))
_REASON_SHIFT = 4


def code_of(formats: Int8, reasons: UInt8) -> UInt8:
    """Return format and reason in one byte: ``format + 16 * reason``."""
    codes: UInt8 = formats.view(np.uint8) | (reasons << np.uint8(_REASON_SHIFT))
    return codes


def read_code(code: int) -> tuple[bool, str]:
    """Return whether a code says INT8, and its reason in words."""
    return code & 0xF == INT8, REASONS[code >> _REASON_SHIFT]


class Told(NamedTuple):
    """One token's formats in one layer, in words."""

    unit: int
    """Of its best expert's row; -1 without an expert."""
    format: str
    """One for all its experts, or one each, best expert first: ``int8, bfloat16``."""
    reason: str


@dataclass(slots=True)
class Units:
    """The formats of one layer's R rows in U units, and why."""

    format_U: Int8
    """`quant.NATIVE` or `INT8`, as voted."""
    format_R: Int8
    """Of each row; that of its unit, unless a fault says otherwise or it was run again."""
    token_R: Int
    """The token each row belongs to."""
    row_of_N: Int
    """(T·K,) the row of each pair, R for a pair without an expert."""
    num_tokens: int
    """T."""
    sizes_U: Sequence[int] = ()
    """Rows of each unit, where they follow each other."""
    own_unit_R: Int | None = None
    """The unit of each row, where they do not."""
    why: int | None = None
    """Index into `REASONS` for all units; None where they were voted on."""
    again_R: Bool | None = None
    """Rows that were run again; None for none."""
    num_sampled: int = 0
    """Rows that were run in both formats."""
    worst_error: float = 0.0
    """The largest relative error among them."""

    @property
    def formats(self) -> Tensor:
        """(R,) int8, as the kernel takes them."""
        return torch.from_numpy(self.format_R)

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.format_U)

    @property
    def unit_R(self) -> Int:
        """(R,) the unit of each row, 0 to U - 1."""
        if self.own_unit_R is None:
            self.own_unit_R = np.arange(self.num_units).repeat(self.sizes_U)
        return self.own_unit_R

    @property
    def reason_U(self) -> UInt8:
        """(U,) index into `REASONS`."""
        if self.why is not None:
            return np.full(self.num_units, self.why, np.uint8)
        return np.where(self.format_U == INT8, np.uint8(VOTED), np.uint8(OUTVOTED))

    @property
    def rerun_R(self) -> Bool:
        """(R,) which rows were run again."""
        return np.zeros(len(self.format_R), bool) if self.again_R is None else self.again_R

    def of(self, token: int, slot: int) -> tuple[int, bool, str]:
        """Return one pair's unit, whether it ran in INT8, and why; unit -1 without an expert."""
        top_k = len(self.row_of_N) // max(1, self.num_tokens)
        row = int(self.row_of_N[token * top_k + slot])
        if row >= len(self.format_R):
            return -1, False, REASONS[OWN]
        unit = int(self.unit_R[row])
        reason = RERUN if self.rerun_R[row] else int(self.reason_U[unit])
        return unit, bool(self.format_R[row] == INT8), REASONS[reason]

    def told(self, token: int, own: str) -> Told:
        """Return what a decision record says of one token, whose engine's own format is `own`."""
        top_k = len(self.row_of_N) // max(1, self.num_tokens)
        slots = [self.of(token, slot) for slot in range(top_k)]
        formats = ["int8" if is_int8 else own for _, is_int8, _ in slots]
        return Told(
            slots[0][0],
            formats[0] if len(set(formats)) == 1 else ", ".join(formats),
            "; ".join(dict.fromkeys(reason for _, _, reason in slots)),
        )

    def codes(self, top_k: int) -> UInt8:
        """Return (T, K) format and reason of each pair, as `code_of` writes them; 0 without one."""
        reasons_R = np.where(self.rerun_R, np.uint8(RERUN), self.reason_U[self.unit_R])
        codes_R = np.append(code_of(self.format_R, reasons_R), np.uint8(0))
        codes_TK: UInt8 = codes_R[self.row_of_N].reshape(-1, top_k)
        return codes_TK


def sequence_units(request_ids_T: Int, positions_T: Int, size: int) -> tuple[Int, int]:
    """Cut each sequence into pieces of `size` positions; returns (T,) units and their number.

    Cut at multiples of `size`, so that it does not matter in which steps a prompt runs. Requests
    ``[7, 7, 7, 9]`` at positions ``[2, 3, 4, 0]`` with size 4 give units ``[0, 0, 1, 2]``.
    """
    if not len(positions_T):
        return np.zeros(0, np.int64), 0
    begins_T = positions_T % size == 0
    begins_T[1:] |= request_ids_T[1:] != request_ids_T[:-1]
    begins_T[0] = True
    unit_T: Int = begins_T.cumsum() - 1
    return unit_T, int(unit_T[-1]) + 1


def expert_sizes(counts: Sequence[int], size: int) -> list[int]:
    """Cut each expert's rows into pieces of `size`; returns the rows of each, in their order.

    Counts ``[5, 0, 2]`` with size 4 give ``[4, 1, 2]``.
    """
    sizes: list[int] = []
    for count in counts:  # a few dozen at most: faster than arrays
        whole, rest = divmod(count, size)
        sizes += [size] * whole
        if rest:
            sizes.append(rest)
    return sizes


def vote(unit_X: Int, num_units: int, suits_X: Bool) -> Int8:
    """Give each unit INT8 when more than half of its members suit; (U,) formats.

    Units ``[0, 0, 0, 1, 1]`` of members ``[1, 1, 0, 1, 0]`` give ``[INT8, NATIVE]``.
    """
    sizes_U = np.bincount(unit_X, minlength=num_units)
    for_U = np.bincount(unit_X, weights=suits_X, minlength=num_units)
    return np.where(2 * for_U > sizes_U, np.int8(INT8), np.int8(NATIVE))


def vote_in_order(sizes_U: Sequence[int], suits_R: Bool) -> Int8:
    """Do the same for units whose rows follow each other, faster; none is empty.

    Sizes ``[3, 2]`` of members ``[1, 1, 0, 1, 0]`` give ``[INT8, NATIVE]``.
    """
    if not len(sizes_U):
        return np.zeros(0, np.int8)
    sizes = np.array(sizes_U)
    first_U = sizes.cumsum() - sizes
    for_U = np.add.reduceat(suits_R.view(np.int8), first_U, dtype=np.int64)
    formats_U: Int8 = (2 * for_U > sizes).view(np.int8)
    return formats_U


assert (NATIVE, INT8) == (0, 1), "a vote's truth is written as a format"
