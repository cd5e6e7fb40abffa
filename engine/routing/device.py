"""Level 4: which replica of an expert runs a token, hence which device."""

from __future__ import annotations

from torch import Tensor

from engine.routing.table import RoutingTable


class Placer:
    """Looks up the physical expert of each (token, slot); decides nothing the table did not."""

    def place(
        self, topk_ids_TK: Tensor, homes_T: Tensor, table: RoutingTable, layer: int
    ) -> Tensor:
        """Return (T, K) physical experts: a replica on the token's device if there is one.

        Args:
            topk_ids_TK: (T, K) int64 logical experts, no -1.
            homes_T: (T,) int64 the device whose attention owns each token.
            table: read once per step.
            layer: index among the table's MoE layers.
        """
        if table.is_identity:
            return topk_ids_TK
        return table.choice_LGE[layer][homes_T.unsqueeze(1), topk_ids_TK]

    @staticmethod
    def reason(expert: int, physical: int, home: int, table: RoutingTable, layer: int) -> str:
        """Say in words why `physical` was taken for `expert` by a token on device `home`."""
        replicas, device = int(table.num_replicas[layer, expert]), int(table.rank_of_phy[physical])
        if replicas == 1:
            return f"the only copy, on device {device}"
        if device == home:
            return f"one of {replicas} copies, this one on the token's own device {device}"
        return f"none of {replicas} copies on device {home}; spread to device {device}"
