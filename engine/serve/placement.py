"""Where the parameters lie, in words, as stage three prints it."""

from __future__ import annotations

import numpy as np

from engine.config import ModelConfig
from engine.routing.table import RoutingTable


def placement_lines(model: ModelConfig, table: RoutingTable, *, ranks: bool) -> list[str]:
    """Return one line for each device: its experts, their parameters, its share of all of them.

    8 experts of 196,608 parameters in 4 layers on 2 ranks: `rank 0: experts 0-3 in each of 4 MoE
    layers, 3,145,728 parameters (50.0%)`.
    """
    if not model.is_moe:
        return ["a dense model: every device would hold all of it"]
    each = 3 * model.hidden_size * model.moe_intermediate_size
    word = "rank" if ranks else "device"
    slots_G = np.bincount(table.rank_of_phy, minlength=table.num_devices)
    lines = []
    for device, slots in enumerate(slots_G.tolist()):
        held = [
            sorted({int(e) for e in row[table.rank_of_phy == device] if e >= 0})
            for row in table.phy2log
        ]
        same = all(experts == held[0] for experts in held)
        which = _spans(held[0]) if same else f"{slots} slots"
        number = each * sum(map(len, held))
        total = each * int((table.phy2log >= 0).sum())
        lines.append(
            f"{word} {device}: experts {which or 'none'} in each of {table.num_layers} MoE layers, "
            f"{number:,} parameters ({number / total:.1%})"
        )
    return lines


def _spans(ids: list[int]) -> str:
    """Return `0-3, 6` for 0, 1, 2, 3, 6."""
    spans: list[list[int]] = []
    for one in ids:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
