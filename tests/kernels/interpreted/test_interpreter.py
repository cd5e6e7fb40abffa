"""The process these tests run in interprets Triton's kernels instead of compiling them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < count, other=0.0)
    tl.store(out_ptr + index, x * 2, mask=index < count)


def test_a_kernel_runs_on_tensors_of_the_cpu_and_leaves_what_is_masked():
    x, out = torch.arange(5.0), torch.full((8,), -1.0)
    _double[(1,)](x, out, 5, BLOCK=8)
    assert out.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, -1.0, -1.0, -1.0]
