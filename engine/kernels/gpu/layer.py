"""A whole MoE layer on one GPU, from the tokens to their sum, that can be captured in a CUDA graph.

Every array has a size that the host knows from T alone, no value is read back and no launch depends
on one, so the host never waits: a call is the same launches whatever the routing. Its memory is
allocated once for each T. Waits for nothing; overlaps nothing. Called by `workbench.bench.gpu` and,
on a GPU, through `engine.kernels.registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.gpu.combine import combine
from engine.kernels.gpu.experts import ExpertStack, Scratch, empty_scratch, tiles_for
from engine.kernels.gpu.grouped_gemm import grouped_mlp
from engine.kernels.gpu.permute import BlockedPermutation, empty_permutation, permute
from engine.kernels.gpu.tiles import TileChoice
from engine.kernels.gpu.topk import route
from engine.kernels.router import RouterConfig


class Workspace(NamedTuple):
    """All memory of one layer for exactly T tokens."""

    tiles: TileChoice
    ids_TK: Tensor
    """(T, K + S) int64; the last S columns hold the shared experts, for good."""
    weights_TK: Tensor
    """(T, K + S) fp32; 1 in the last S columns."""
    permutation: BlockedPermutation
    scratch: Scratch
    y_TD: Tensor
    """(T, D) the layer's result, overwritten by the next call."""
    bad_rows: Tensor
    """() int32 on the device: tokens of the last call with a logit that was not finite."""

    @property
    def bad_ids(self) -> Tensor:
        """() int32 on the device: ids of the last call that were no expert's; they are skipped."""
        return self.permutation.bad_ids

    def read_counters(self) -> dict[str, int]:
        """Return `bad_rows` and `bad_ids` of the last call; waits for the device.

        Both are 0 when all is well. Call it between steps, never while a graph is captured.
        """
        return {"bad_rows": int(self.bad_rows), "bad_ids": int(self.bad_ids)}


class DeviceMoE:
    """One MoE layer with its weights; a shared expert rides in the same launches as the routed.

    Layers of one model may share a workspace, since it holds nothing from one call to the next but
    the result and the counters (`Workspace.read_counters`) of what was wrong in the last call.
    """

    def __init__(
        self,
        gate_weight_ED: Tensor,
        router: RouterConfig,
        experts: ExpertStack,
        *,
        num_shared: int = 0,
        logit_bias_E: Tensor | None = None,
        selection_bias_E: Tensor | None = None,
        format_rows: int = 16,
    ) -> None:
        """Bind the layer's weights.

        Args:
            gate_weight_ED: (E, D), E routed experts.
            router: how they are scored and chosen.
            experts: the weights of the E routed experts, then of the S shared ones.
            num_shared: S, experts that every token takes with weight 1.
            logit_bias_E: (E,) fp32 added to the logits.
            selection_bias_E: (E,) fp32 that decides who is chosen, not how much.
            format_rows: rows of one expert that share a number format, for `mixed_*` schemes.

        Raises:
            KernelError: an argument does not fit the others.
        """
        checks.at_least("num_shared", num_shared, 0)
        checks.rank("gate_weight_ED", gate_weight_ED, "E, D")
        num_routed = experts.num_experts - num_shared
        because = f"{num_routed} routed experts of width {experts.width}"
        checks.shape("gate_weight_ED", gate_weight_ED, (num_routed, experts.width), because)
        checks.top_k(router.top_k, num_routed)
        self.gate_weight_ED, self.router, self.experts = gate_weight_ED, router, experts
        self.num_shared, self.format_rows = num_shared, format_rows
        self.logit_bias_E, self.selection_bias_E = logit_bias_E, selection_bias_E

    def workspace(self, num_tokens: int, dtype: torch.dtype) -> Workspace:
        """Allocate what a call with exactly T tokens of this format needs.

        Raises:
            KernelError: `num_tokens` is negative, or the sizes or the format are not supported.
        """
        checks.at_least("num_tokens", num_tokens, 0)
        device, num_experts = self.gate_weight_ED.device, self.experts.num_experts
        routed, slots = self.router.top_k, self.router.top_k + self.num_shared
        num_pairs = num_tokens * slots
        tiles = tiles_for(self.experts, dtype, num_pairs, num_experts, device)
        ids_TK = torch.empty(num_tokens, slots, dtype=torch.int64, device=device)
        weights_TK = torch.ones(num_tokens, slots, dtype=torch.float32, device=device)
        first_shared = num_experts - self.num_shared
        ids_TK[:, routed:] = torch.arange(first_shared, num_experts, device=device)
        return Workspace(
            tiles=tiles,
            ids_TK=ids_TK,
            weights_TK=weights_TK,
            permutation=empty_permutation(
                num_pairs, num_experts, tiles.down.tokens, device, format_rows=self.format_rows
            ),
            scratch=empty_scratch(num_tokens, num_pairs, self.experts, dtype, device),
            y_TD=torch.empty(num_tokens, self.experts.width, dtype=dtype, device=device),
            bad_rows=torch.zeros((), dtype=torch.int32, device=device),
        )

    def __call__(
        self, x_TD: Tensor, workspace: Workspace, *, formats_U: Tensor | None = None
    ) -> Tensor:
        """Send each token to its experts and add up what they return.

        Args:
            x_TD: (T, D) tokens; T may be 0, then nothing is launched.
            workspace: of `workspace(T, x_TD.dtype)`.
            formats_U: for `mixed_*` schemes, see `grouped_mlp`.

        Returns:
            (T, D): `workspace.y_TD`.

        Raises:
            KernelError: an argument does not fit the others.
        """
        checks.rank("x_TD", x_TD, "T, D")
        because = f"the workspace {checks.describe(workspace.y_TD)}"
        checks.shape("x_TD", x_TD, tuple(workspace.y_TD.shape), because)
        checks.one_of("x_TD", x_TD, (workspace.y_TD.dtype,))
        tiles, ids_TK, weights_TK, permutation, scratch, y_TD, bad_rows = workspace
        size = (x_TD.shape[0], self.router.top_k + self.num_shared)
        because = f"top-{self.router.top_k} and {self.num_shared} shared experts"
        checks.shape("workspace.ids_TK", ids_TK, size, because)
        if x_TD.shape[0] == 0:
            return y_TD
        chosen = route(
            gate_logits(x_TD, self.gate_weight_ED),
            self.router,
            logit_bias_E=self.logit_bias_E,
            selection_bias_E=self.selection_bias_E,
            explain=False,
            bad_rows=bad_rows,
        )
        ids_TK[:, : self.router.top_k] = chosen.topk_ids_TK
        weights_TK[:, : self.router.top_k] = chosen.topk_weights_TK
        permutation = permute(
            ids_TK,
            self.experts.num_experts,
            permutation.block_rows,
            format_rows=self.format_rows,
            out=permutation,
        )
        out_ND = grouped_mlp(
            x_TD, permutation, self.experts, tiles=tiles, formats_U=formats_U, scratch=scratch
        )
        rows = permutation.row_of_N
        return combine(out_ND, weights_TK, rows, num_rows=permutation.num_rows, out=y_TD)


def gate_logits(x_TD: Tensor, gate_weight_ED: Tensor) -> Tensor:
    """Return (T, E) fp32 logits, added up in fp32 whatever the format of the rows."""
    half = x_TD.dtype != torch.float32 and x_TD.dtype == gate_weight_ED.dtype
    if half and x_TD.is_cuda:
        return torch.mm(x_TD, gate_weight_ED.t(), out_dtype=torch.float32)
    return torch.mm(x_TD.float(), gate_weight_ED.float().t())


def capture(
    layer: DeviceMoE,
    num_tokens: int,
    dtype: torch.dtype,
    *,
    formats_U: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Callable[[Tensor], Tensor]:
    """Record a layer for T tokens in a CUDA graph and return what replays it.

    Pass a `workspace` of `layer.workspace(num_tokens, dtype)` to read its counters after a replay.

    Returns:
        a function of (T, D) tokens to (T, D); the result is overwritten by the next call.

    Raises:
        KernelError: the layer is not on a GPU.
    """
    device = layer.gate_weight_ED.device
    if device.type != "cuda":
        raise KernelError(f"only a layer on a GPU can be captured, and this one is on {device}.")
    if workspace is None:
        workspace = layer.workspace(num_tokens, dtype)
    x_TD = torch.zeros(num_tokens, layer.experts.width, dtype=dtype, device=device)
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):  # compiles every kernel, which a capture may not
        layer(x_TD, workspace, formats_U=formats_U)
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TD = layer(x_TD, workspace, formats_U=formats_U)

    def replay(tokens_TD: Tensor) -> Tensor:
        x_TD.copy_(tokens_TD)
        graph.replay()
        return y_TD

    return replay
