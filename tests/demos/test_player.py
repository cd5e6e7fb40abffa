"""The player on a real engine: every expectation is measured, a wrong one is seen to fail."""

from __future__ import annotations

import pytest

from engine.errors import RequestError, RoutingError
from tests.demos.conftest import DEMO, Clock
from workbench.demos.player import HOLDS, LATE, WAITING, Player
from workbench.demos.playlist import find, parse

PLACES = {step.id: place for place, step in enumerate(find(DEMO).steps)}


def settle(player: Player) -> None:
    while not player.settled():
        player.run()


def measure_and_be_late(player: Player, clock: Clock) -> None:
    """Measure everything once, then let all time limits pass."""
    while any(check.value is None for check in player.checks):
        player.run()
    clock.ahead_s += 1000
    settle(player)


@pytest.fixture
def play(bench, player):
    """Put another playlist under the shared player, which knows the answers at the start."""
    shipped = bench.playlist

    def use(raw) -> Player:
        bench.playlist = parse(raw, "a.yaml")
        return bench

    yield use
    bench.playlist = shipped


def test_an_expectation_that_does_not_hold_is_late_with_its_value(play, raw, clock):
    """The ban is left out: German keeps its expert, and the step must say so."""
    step = raw["steps"][PLACES["broken"]]
    step["actions"] = [action for action in step["actions"] if action["do"] != "ban"]
    player = play(raw)
    player.go(PLACES["broken"])
    measure_and_be_late(player, clock)
    load, german, french = player.checks
    assert load.state == LATE and load.value > 0.5
    assert german.state == LATE and german.value == pytest.approx(1, abs=0.05)
    assert french.state == HOLDS


def test_a_repair_that_repairs_nothing_is_seen(play, raw, clock):
    step = raw["steps"][PLACES["repaired"]]
    step["actions"] = [{"do": "ban", "layer": 3, "expert": 0}, {"do": "traffic", "domain": "de"}]
    player = play(raw)
    player.go(PLACES["repaired"])
    measure_and_be_late(player, clock)
    assert [check.state for check in player.checks] == [LATE, LATE]


def test_what_cannot_be_measured_in_time_does_not_hold(play, raw):
    raw["steps"][0]["expect"] = [
        {"name": "never", "measure": "watched_tokens", "range": [0, 9], "within_s": 1}
    ]
    player = play(raw)
    player.go(0)
    settle(player)
    assert player.checks[0].state == LATE and player.checks[0].value is None


def test_entering_a_step_first_puts_the_engine_back(player):
    player.go(PLACES["broken"])
    assert (3, 0) in player.engine.control.policy.banned and player.traffic.domain == "de"
    player.go(PLACES["overhead"])
    assert player.engine.control.policy.is_empty and player.traffic.domain is None
    player.go(PLACES["broken"])
    assert (3, 0) in player.engine.control.policy.banned
    assert player.visit >= 3 and all(check.state == WAITING for check in player.checks)


def test_the_watched_text_becomes_the_exhibit(player):
    player.go(PLACES["one-token"])
    settle(player)
    while player.exhibit is None:
        player.run()
    view, tokens = player.step.view, player.exhibit["tokens"]
    text = "".join(token["text"] for token in tokens)
    assert text.removeprefix("<|bos|>").replace("·", " ").startswith(view["text"])
    assert tokens[view["token"]]["layers"][view["layer"]]["full"] is not None
    player.go(PLACES["domains"])
    assert player.exhibit is None


def test_a_step_that_does_not_exist_is_refused_and_nothing_changes(player):
    player.go(2)
    with pytest.raises(RequestError, match=r"step \(7\) must be 0 to 6"):
        player.go(7)
    assert player.at == 2


def test_an_action_the_model_cannot_take_leaves_the_engine_as_at_the_start(play, raw):
    raw["steps"][0]["actions"] = [{"do": "ban", "expert": 1}, {"do": "ban", "expert": 99}]
    player = play(raw)
    with pytest.raises(RoutingError, match="99"):
        player.go(0)
    assert player.restored


def test_restored_is_false_while_a_policy_is_set(player):
    player.engine.control.ban_expert(3, 0)
    assert not player.restored
