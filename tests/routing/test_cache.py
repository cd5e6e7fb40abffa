"""Look-ups answer what was asked before, with what was answered then, and count honestly."""

from __future__ import annotations

import pytest
import torch

from engine.exchange.dispatch import Order
from engine.kernels.registry import Target, bind
from engine.routing.cache import MAX_ENTRIES, MAX_ROWS, REST, WINDOW, LookUps


def test_a_key_is_the_ids_and_nothing_else():
    table = LookUps()
    ids = torch.tensor([[3, 1]])
    assert table.key(ids) == ids.numpy().tobytes() == table.key(ids.clone())
    assert table.key(ids) != table.key(torch.tensor([[1, 3]])), "best first is another order"
    assert table.key(ids, torch.tensor([0])) != table.key(ids, torch.tensor([1]))
    wide = torch.zeros(4, 4, dtype=torch.int64)
    wide[0, :2] = ids
    assert table.key(wide[:1, :2]) == table.key(ids), "however it lies in memory"


def test_with_many_rows_or_switched_off_nothing_is_looked_up():
    table = LookUps()
    assert table.key(torch.zeros(MAX_ROWS, 2)) is not None
    assert table.key(torch.zeros(MAX_ROWS + 1, 2)) is None
    table.max_rows = 0
    assert table.key(torch.zeros(1, 2)) is None
    assert (table.hits, table.misses) == (0, 0)


def test_hits_and_misses_are_counted_and_the_table_stays_bounded():
    table = LookUps()
    assert table.get(b"a") is None
    table.keep(b"a", 7)
    assert table.get(b"a") == 7 and (table.hits, table.misses) == (1, 1)
    for number in range(MAX_ENTRIES):
        table.keep(str(number).encode(), number)
    assert len(table) <= MAX_ENTRIES and table.get(b"a") is None
    table.forget()
    assert len(table) == 0 and (table.hits, table.misses) == (1, 2)


def test_look_ups_that_find_nothing_rest_and_are_tried_again():
    table, ids = LookUps(), torch.zeros(1, 2)
    for number in range(WINDOW):
        assert table.key(ids) is not None
        table.get(str(number).encode())
    assert [table.key(ids) for _ in range(REST)] == [None] * REST
    table.keep(b"a", 1)
    for _ in range(2 * WINDOW):
        assert table.key(ids) is not None, "what finds something goes on"
        table.get(b"a")


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_order_that_was_looked_up_is_the_one_worked_out(deterministic):
    ops = bind(Target(device="cpu", dtype="float32", deterministic=deterministic))
    looked_up, plain = Order(ops), Order(ops)
    plain.look_ups.max_rows = 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows = int(torch.randint(0, MAX_ROWS + 2, (1,), generator=generator))
        ids = torch.randint(-1, 4, (rows, 2), generator=generator)
        for one, other in zip(looked_up.by_expert(ids, 4), plain.by_expert(ids, 4), strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert looked_up.look_ups.hits > 10 and plain.look_ups.hits == plain.look_ups.misses == 0
    wider = looked_up.by_expert(torch.tensor([[0, 1]]), 8)
    assert len(wider.counts) == 8, "another number of experts is another question"
