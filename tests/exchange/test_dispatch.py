"""Dispatch and combine in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import RoutingError
from engine.exchange.dispatch import LocalDispatcher, traffic
from engine.faults import Faults
from engine.kernels.registry import Target, bind
from engine.routing.placement import contiguous
from tests.routing.test_table import replicated


def dispatcher(faults=None):
    ops = bind(Target(device="cpu", dtype="float32", deterministic=False))
    return LocalDispatcher(ops, faults or Faults())


def rows_of(x, ids, table, faults=None):
    (flight,) = dispatcher(faults).dispatch(x, ids, table, 0, lambda stage: None)
    return flight.arrive()


def test_rows_come_home_weighted_to_the_token_they_left():
    table, x = contiguous(1, 4, 2), torch.arange(6.0).view(3, 2)
    ids, weights = torch.tensor([[3, 0], [1, 2], [0, 3]]), torch.rand(3, 2)
    rows, handle = rows_of(x, ids, table)
    assert handle.counts == [2, 1, 1, 2]
    y = dispatcher().combine(rows, weights, handle, table).arrive()
    assert torch.allclose(y, x * weights.sum(1, keepdim=True))


def test_each_pair_runs_once_also_when_an_expert_has_replicas():
    table = replicated()
    ids = torch.tensor([[1, 3], [1, 3], [1, 5]])
    rows, handle = rows_of(torch.ones(3, 2), ids, table)
    assert sum(handle.counts) == 6 and handle.experts == [0, 1, 2, 1, 3, 0]
    y = dispatcher().combine(rows, torch.full((3, 2), 0.5), handle, table).arrive()
    assert torch.equal(y, torch.ones(3, 2))


def test_a_handle_of_another_table_version_is_refused():
    table = contiguous(1, 4, 2)
    rows, handle = rows_of(torch.ones(1, 2), torch.tensor([[0, 1]]), table)
    with pytest.raises(RoutingError, match="version 0 but combine sees version 1"):
        dispatcher().combine(rows, torch.ones(1, 2), handle, contiguous(1, 4, 2, version=1))


def test_no_tokens_make_no_rows_and_the_right_shape_back():
    table = contiguous(1, 4, 2)
    none = torch.empty(0, 2, dtype=torch.int64)
    rows, handle = rows_of(torch.empty(0, 8), none, table)
    assert rows.shape == (0, 8) and handle.counts == [0] * 4
    assert dispatcher().combine(rows, torch.empty(0, 2), handle, table).arrive().shape == (0, 8)


def test_traffic_of_a_small_batch_is_that_of_the_docstring():
    counts = traffic(np.array([0, 1]), np.array([[0, 3], [2, -1]]), contiguous(1, 4, 2))
    assert counts.tolist() == [[1, 1], [0, 1]]


def test_a_send_fault_touches_the_rows_and_only_while_it_is_set():
    faults, table = Faults(), contiguous(1, 4, 2)
    ids = torch.tensor([[0, 1]])
    faults.set("dispatch.send", lambda rows: rows * 0)
    assert (rows_of(torch.ones(1, 2), ids, table, faults)[0] == 0).all()
    faults.clear("dispatch.send")
    assert (rows_of(torch.ones(1, 2), ids, table, faults)[0] == 1).all()
