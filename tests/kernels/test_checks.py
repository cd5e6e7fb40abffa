"""Every refusal is one sentence that names the argument, what it is, and what it has to fit."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import checks

IDS = torch.tensor([[0, 3], [-1, 1]])
GATE_UP, DOWN = torch.zeros(4, 12, 8), torch.zeros(4, 8, 6)


def test_what_fits_passes():
    checks.experts(GATE_UP, DOWN)
    checks.rows("x_TD", torch.zeros(0, 8), GATE_UP)
    checks.ids_matrix("ids", IDS)
    checks.ids_in_range("ids", IDS, 4)
    checks.routing(IDS, torch.zeros(2, 2), 2)
    checks.finite("w", torch.zeros(3))
    checks.finite("w", torch.full((3,), 3e38))
    checks.tensor("w", torch.zeros(3))
    checks.groups(torch.zeros(3, 8), [0, 3], [3, 3], GATE_UP)
    checks.groups(torch.zeros(0, 8), [], [], GATE_UP)
    checks.top_k(4, 4)
    checks.block_sizes(64, 8)
    checks.same_device(a=IDS, b=None)
    checks.contiguous_rows("x", torch.zeros(4, 9)[:, 2:5])


REFUSED = [
    (lambda: checks.experts(GATE_UP, DOWN[:3]), "down is (3, 8, 6) float32 but must be (4, 8, 6)"),
    (lambda: checks.experts(GATE_UP[:, :11], DOWN), "gate_up is (4, 11, 8) float32 but its second"),
    (lambda: checks.experts(GATE_UP[0], DOWN), "gate_up is (12, 8) float32 but must have the axes"),
    (lambda: checks.experts(GATE_UP, DOWN.half()), "down is (4, 8, 6) float16 but must have the"),
    (
        lambda: checks.rows("x_TD", torch.zeros(5, 7), GATE_UP),
        "x_TD is (5, 7) float32 but gate_up (4, 12, 8) float32 takes rows of width 8.",
    ),
    (lambda: checks.rows("x_TD", IDS, GATE_UP), "x_TD is (2, 2) int64 but must be one of float32"),
    (
        lambda: checks.ids_in_range("topk_ids_TK", IDS, 3),
        "topk_ids_TK (2, 2) int64 holds the id 3 but 3 experts allow 0 to 2, and -1 for none.",
    ),
    (lambda: checks.ids_in_range("ids", IDS - 1, 4), "holds the id -2 but 4 experts allow 0 to 3"),
    (
        lambda: checks.routing(IDS, torch.zeros(2, 3), 2),
        "topk_weights_TK is (2, 3) float32 but must be (2, 2) to fit topk_ids_TK (2, 2) int64.",
    ),
    (
        lambda: checks.routing(IDS, torch.zeros(2, 2), 5),
        "topk_ids_TK is (2, 2) int64 but x_TD holds 5 tokens; pass one row of ids for each.",
    ),
    (lambda: checks.ids_matrix("ids", IDS[:, :0]), "ids is (2, 0) int64 but K must be at least 1."),
    (lambda: checks.top_k(5, 4), "k (5) must be 1 to 4, the number of experts."),
    (lambda: checks.top_k(0, 4), "k (0) must be 1 to 4"),
    (
        lambda: checks.contiguous("down", DOWN.transpose(1, 2)),
        "down (4, 6, 8) float32 has strides (48, 1, 6) but must be contiguous",
    ),
    (
        lambda: checks.same_device(x=IDS, weights=torch.zeros(1, device="meta")),
        "all arguments must lie on one device, but here: x on cpu, weights on meta.",
    ),
    (lambda: checks.tensor("x", [1.0]), "x is of type list but must be a torch tensor."),
    (
        lambda: checks.tensor("x", torch.eye(2).to_sparse()),
        "x (2, 2) float32 has the layout torch.sparse_coo but must be dense; call .to_dense()",
    ),
    (
        lambda: checks.has_values("x", torch.zeros(1, device="meta")),
        "x (1,) float32 lies on meta, where nothing has values; move it to a device first.",
    ),
    (lambda: checks.experts(GATE_UP.long(), DOWN), "gate_up is (4, 12, 8) int64 but must be one"),
    (
        lambda: checks.groups(torch.zeros(3, 8), [1, 1], [0, 1], GATE_UP),
        "counts sum to 2, the least is 1, but must be at least 0 and sum to the rows of rows_RD "
        "(3, 8) float32.",
    ),
    (lambda: checks.finite("down", DOWN / 0), "down (4, 8, 6) float32 holds 192 values that are"),
]


@pytest.mark.parametrize(("check", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_sentence(check, words):
    with pytest.raises(KernelError) as caught:
        check()
    message = str(caught.value)
    assert words in message
    assert message.endswith(".") and "\n" not in message
