"""The host's copies of experts: whole or not there, shared, and gone with their users."""

from __future__ import annotations

import os

import pytest
import torch

from engine import EngineConfig
from engine.checkpoint.load import read_config
from engine.cluster import host_copies
from engine.cluster.host_copies import HostCopies, Room, Shape, available_bytes, room_for
from tests.cluster.conftest import MODEL

SHAPE = Shape(num_layers=2, num_experts=3, width=4, depth=8, dtype=torch.bfloat16)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has such files")


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(8, 8).bfloat16(), torch.randn(8, 4).bfloat16()


@pytest.fixture
def room():
    made = Room(SHAPE.num_bytes)
    yield made
    made.close()


def test_what_one_rank_puts_in_another_takes_out(room: Room) -> None:
    one, other = (HostCopies(room.path, SHAPE) for _ in range(2))
    for number in range(6):
        assert other.get(*divmod(number, 3)) is None
        one.put(*divmod(number, 3), pair(number))
    for number in range(6):
        found = other.get(*divmod(number, 3))
        assert found is not None
        assert all(torch.equal(a, b) for a, b in zip(found, pair(number), strict=True))


def test_the_first_copy_stays(room: Room) -> None:
    copies = HostCopies(room.path, SHAPE)
    copies.put(0, 1, pair(1))
    copies.put(0, 1, pair(2))
    found = copies.get(0, 1)
    assert found is not None and torch.equal(found[0], pair(1)[0])


def test_half_an_expert_is_never_taken_for_a_whole_one(room: Room) -> None:
    copies = HostCopies(room.path, SHAPE)
    with pytest.raises(RuntimeError):
        copies.put(1, 2, (pair(1)[0], torch.zeros(3, 3)))
    assert copies.get(1, 2) is None


def test_the_file_has_no_name_and_goes_with_its_users() -> None:
    room = Room(SHAPE.num_bytes)
    path = room.path
    assert "memfd:" in os.readlink(path)
    room.close()
    room.close()
    assert not os.path.exists(path)


def test_there_are_none_where_they_are_not_wanted_or_have_no_room(monkeypatch) -> None:
    config, model = EngineConfig(model=MODEL), read_config(MODEL)
    size = Shape.of(config, model).num_bytes
    assert size >= 2 * 4 * 8 * 3 * model.moe_intermediate_size * model.hidden_size
    room = room_for(config, model)
    assert room is not None
    room.close()
    assert room_for(EngineConfig(model=MODEL, host_copies=False), model) is None
    monkeypatch.setattr(host_copies, "available_bytes", lambda: 2 * size - 1)
    assert room_for(config, model) is None
    draft = "data/models/polyglot-draft"
    assert room_for(EngineConfig(model=draft), read_config(draft)) is None


def test_linux_says_what_is_available() -> None:
    assert available_bytes() > 1 << 24
