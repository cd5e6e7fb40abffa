"""One step's formats, layer by layer: predict, vote, check, run again what failed.

The order within a layer is that of `engine.model.moe`: `units` before the experts, `check` and
`repaired` after them, `observe` at the layer's end, where the next layer's prediction is made from
what this one showed. What is known of the tokens alone is predicted ahead, for all layers in one go
at the step's start, and with it which layers need no vote; `PrecisionRouter.ahead` switches that
off, and every layer's formats stay the same. Nothing runs beside the step on another thread: that
time is part of it, and its stage is `format`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.events import Int64, UInt8, UnitEvent
from engine.kernels.quant import INT8, NATIVE, SKIP
from engine.routing.precision.features import Float, margins_of, ranges_of, within
from engine.routing.precision.predictor import Ahead, Bool, Predictor
from engine.routing.precision.thresholds import Precision
from engine.routing.precision.units import (
    ORDERED,
    WHITELISTED,
    Units,
    expert_sizes,
    sequence_units,
    vote,
    vote_in_order,
)

if TYPE_CHECKING:
    from engine.routing.precision.router import PrecisionRouter

LARGEST = float(np.finfo(np.float32).max)
"""A range above it is not finite."""
Run = Callable[[Tensor], Tensor]
"""Runs the (R, D) rows of a layer, each in the format that an array (R,) names."""


class PrecisionStep:
    """What is known and decided about the formats of T rows while they pass through the layers."""

    def __init__(
        self,
        router: PrecisionRouter,
        precision: Precision,
        request_ids_T: Int64,
        positions_T: Int64,
        classes_T: UInt8,
    ) -> None:
        self._router, self._num_tokens = router, len(positions_T)
        self._request_ids_T, self._positions_T = request_ids_T, positions_T
        self._sequence_units: tuple[Int64, int] | None = None
        self._predictor: Predictor | None = None
        self.rerun_T = np.zeros(len(positions_T), np.int64)
        """How many of each token's expert rows were run again, over all layers so far."""
        self._done: list[tuple[int, Units, Bool]] = []
        self._token_N: Int64 | None = None
        self._ranges_T: Float | None = None
        self._ahead: Ahead | None = None
        if precision.mode == "auto":
            assert precision.thresholds is not None, "auto without thresholds"
            self._predictor = router.predictor(precision.thresholds)
            self._classes_T = classes_T
            self._ahead = self._predictor.ahead(classes_T, positions_T) if router.ahead else None
            self._suits_T = self._known(0)

    def units(self, layer: int, counts: Sequence[int], row_of_N: Tensor) -> Units:
        """Give each unit of a layer its format.

        Args:
            layer: index among the MoE layers.
            counts: (P,) rows of each physical expert.
            row_of_N: (T·K,) the row of each pair, R for a pair without an expert.
        """
        rows, num_rows = row_of_N.cpu().numpy(), sum(counts)
        token_R = self._tokens_of(rows, num_rows)
        if not self._chooses(layer):
            why = ORDERED if self._predictor is None else WHITELISTED
            chosen = INT8 if self._predictor is None else NATIVE
            formats_R = np.full(num_rows, chosen, np.int8)
            units = Units(
                formats_R[:1], formats_R, token_R, rows, self._num_tokens, formats_R.shape, why=why
            )
            if not num_rows:
                units.sizes_U = ()
        else:
            units = self._voted(layer, counts, token_R, rows)
        if (fault := self._router.faults.precision_vote) is not None:
            units.format_R = fault(units.format_R)
        return units

    def check(self, layer: int, units: Units, out_RD: Tensor, x_TD: Tensor, run: Run) -> Bool:
        """Return (U,) which units were predicted wrong.

        Args:
            layer: index among the MoE layers.
            units: of `units`; what was sampled is noted in it.
            out_RD: the experts' results in these formats.
            x_TD: (T, D) what the tokens went in with.
            run: runs the layer's rows again; rows marked `quant.SKIP` are not run.
        """
        failed_U = np.zeros(units.num_units, bool)
        if not self._chooses(layer):
            return failed_U
        self._ranges_T = None
        self._mark_out_of_range(layer, units, x_TD, failed_U)
        self._sample(layer, units, out_RD, run, failed_U)
        if (fault := self._router.faults.precision_check) is not None:
            failed_U = fault(failed_U)
        return failed_U

    def repaired(
        self, layer: int, units: Units, out_RD: Tensor, failed_U: Bool, run: Run
    ) -> Tensor:
        """Return the results with those of failed units made anew in the engine's own format.

        Nothing else is run again; what was is noted in `units`, counted, and `out_RD` is changed in
        place.
        """
        if failed_U.any():
            units.again_R = failed_U[units.unit_R]
            again = np.flatnonzero(units.again_R)
            index = torch.from_numpy(again).to(out_RD.device)
            out_RD[index] = run(_only(units.again_R, out_RD.device))[index]
            units.format_R = np.where(units.again_R, np.int8(NATIVE), units.format_R)
            self.rerun_T += np.bincount(units.token_R[again], minlength=len(self.rerun_T))
        self._done.append((layer, units, failed_U))
        return out_RD

    def observe(self, layer: int, logits_TE: Tensor, x_TD: Tensor, top_k: int) -> None:
        """Predict the next layer from how this one saw the tokens, by what its limits need."""
        predictor = self._predictor
        if predictor is None or not self._chooses(layer + 1):
            return
        margins_T = margins_of(logits_TE, top_k) if predictor.uses_margin[layer + 1] else None
        ranges_T = None
        if predictor.uses_range[layer + 1]:
            ranges_T = self._ranges_T if self._chooses(layer) else None
            ranges_T = ranges_of(x_TD) if ranges_T is None else ranges_T
        self._suits_T = predictor.predict(layer + 1, self._known(layer + 1), margins_T, ranges_T)

    @property
    def layers(self) -> tuple[UnitEvent, ...]:
        """What became of the units of each layer that is done."""
        return tuple(_event(*done) for done in self._done)

    def _voted(self, layer: int, counts: Sequence[int], token_R: Int64, rows: Int64) -> Units:
        """Let the members of each unit vote."""
        assert self._predictor is not None
        suits_T, all_one = self._suits_T, None
        if (fault := self._router.faults.precision_predict) is not None:
            suits_T = fault(suits_T)
        elif self._ahead is not None:
            all_one = self._ahead.format_L[layer]
        limits = self._predictor.thresholds
        if limits.unit == "expert":
            sizes_U = expert_sizes(counts, limits.unit_rows)
            if all_one is not None:
                formats_R = np.full(len(token_R), all_one, np.int8)
                formats_U = np.full(len(sizes_U), all_one, np.int8)
            else:
                formats_U = vote_in_order(sizes_U, suits_T[token_R])
                formats_R = formats_U.repeat(sizes_U)
            return Units(formats_U, formats_R, token_R, rows, self._num_tokens, sizes_U)
        if self._sequence_units is None:
            self._sequence_units = sequence_units(
                self._request_ids_T, self._positions_T, limits.unit_rows
            )
        unit_T, num_units = self._sequence_units
        unit_R = unit_T[token_R]
        if all_one is not None:
            formats_U = np.full(num_units, all_one, np.int8)
        else:
            formats_U = vote(unit_T, num_units, suits_T)
        return Units(
            formats_U, formats_U[unit_R], token_R, rows, self._num_tokens, own_unit_R=unit_R
        )

    def _known(self, layer: int) -> Bool:
        """Return (T,) whether a token suits a layer by what is known of it before the step."""
        assert self._predictor is not None
        if self._ahead is not None:
            suits_T: Bool = self._ahead.suits_LT[layer]
            return suits_T
        return self._predictor.known(layer, self._classes_T, self._positions_T)

    def _chooses(self, layer: int) -> bool:
        """Return whether the layer's formats are voted on, and hence checked."""
        whitelisted = self._predictor.whitelisted if self._predictor is not None else ()
        return layer < len(whitelisted) and not whitelisted[layer]

    def _mark_out_of_range(self, layer: int, units: Units, x_TD: Tensor, failed_U: Bool) -> None:
        """Mark the INT8 units that hold a row that went in too large, or not finite."""
        assert self._predictor is not None
        limit = min(self._predictor.thresholds.layers[layer].check.max_range, LARGEST)
        if within(x_TD, limit):  # nearly always, and said in fewer calls than row by row
            return
        self._ranges_T = ranges_of(x_TD)
        good_T = self._ranges_T <= limit
        bad_R = ~good_T[units.token_R] & (units.format_R == INT8)
        failed_U[units.unit_R[bad_R]] = True

    def _sample(self, layer: int, units: Units, out_RD: Tensor, run: Run, failed_U: Bool) -> None:
        """Run a row of some INT8 units in both formats; mark units whose row is too far off."""
        assert self._predictor is not None
        limits = self._predictor.thresholds
        picked = self._router.pick(int(np.count_nonzero(units.format_U)), limits.sample_units)
        if not picked:
            return
        int8_units = np.flatnonzero(units.format_U == INT8)[list(picked)]
        rows = [int((units.unit_R == unit).argmax()) for unit in int8_units]
        rows = [row for row in rows if units.format_R[row] == INT8]
        if not rows:
            return
        wanted_R = np.zeros(len(units.format_R), bool)
        wanted_R[rows] = True
        exact_SD = run(_only(wanted_R, out_RD.device))[rows].float()
        errors_S = (out_RD[rows].float() - exact_SD).norm(dim=1) / exact_SD.norm(dim=1).clamp_min(
            torch.finfo(torch.float32).tiny
        )
        errors = errors_S.cpu().numpy()
        far = ~(errors <= limits.layers[layer].check.max_error)
        failed_U[units.unit_R[np.array(rows)[far]]] = True
        units.num_sampled = len(rows)
        units.worst_error = float(errors.max())

    def _tokens_of(self, row_of_N: Int64, num_rows: int) -> Int64:
        """Return each row's token; ``[1, 0, 2, 3]`` of 2 tokens (R = 3) gives ``[0, 0, 1]``."""
        if self._token_N is None or len(self._token_N) != len(row_of_N):
            top_k = len(row_of_N) // max(1, self._num_tokens)
            self._token_N = np.arange(self._num_tokens).repeat(top_k)
        token_R = np.empty(num_rows + 1, np.int64)
        token_R[row_of_N] = self._token_N
        return token_R[:num_rows]


def _event(layer: int, units: Units, failed_U: Bool) -> UnitEvent:
    changes = units.format_R[1:] != units.format_R[:-1]
    return UnitEvent(
        layer=layer,
        units=units.num_units,
        int8_units=int((units.format_U == INT8).sum()),
        failed_units=int(failed_U.sum()),
        rows=len(units.format_R),
        int8_rows=int((units.format_R == INT8).sum()),
        rerun_rows=int(units.rerun_R.sum()),
        sampled_rows=units.num_sampled,
        switches=int(changes.sum()),
        worst_error=units.worst_error,
    )


def _only(wanted_R: Bool, device: torch.device) -> Tensor:
    """Return formats that run the wanted rows in the engine's own format and no others."""
    return torch.from_numpy(np.where(wanted_R, np.int8(NATIVE), np.int8(SKIP))).to(device)
