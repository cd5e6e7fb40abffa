"""The page Experts: every number on it is the views' or the frame's."""

from __future__ import annotations

import asyncio
import math
import re

import numpy as np
import pytest

from dashboards.app import frame_of
from dashboards.digest import digest
from dashboards.pages.experts import MEASURES, Experts
from dashboards.readings import expert_load
from engine.errors import RequestError
from workbench import views
from workbench.widgets import decode_frame, encode_frame


def open_page(source, **chosen: str) -> Experts:
    return Experts(source, "light", chosen, frame_of(chosen, "light"))


def cells(values_RC: np.ndarray, high: float = 4.0) -> np.ndarray:
    return decode_frame(encode_frame(values_RC, seq=1, time_s=0.0, high=high)).cells_RC


def test_the_digest_counts_what_a_plain_loop_counts(source):
    source.step(40)
    trace = source.window()
    past = digest(trace)
    columns, ranks = trace.columns, trace.start.rank_of_phy
    flow = np.zeros((4, 2, 2))
    pairs = jumps = 0
    seen: dict[int, list[set[int]]] = {}
    for row in range(trace.num_rows):
        home = int(columns["rows/homes"][row])
        for layer in range(4):
            for phy in columns["rows/phy_ids"][row, layer].tolist():
                flow[layer, home, ranks[phy]] += 1
        sets = [set(ids) for ids in columns["rows/topk_ids"][row].tolist()]
        before = seen.get(int(columns["rows/request_ids"][row]))
        if before is not None:
            pairs += 1
            jumps += sets[1] != before[1]
        seen[int(columns["rows/request_ids"][row])] = sets
    np.testing.assert_array_equal(past.flow_LDD, flow)
    assert past.jumps["set"][0][1] == pytest.approx(jumps / pairs)
    assert past.rows == trace.num_rows == 240 and past.unplaced == 0
    at_home = flow.trace(axis1=1, axis2=2).sum()
    assert past.crossing == pytest.approx(1 - at_home / flow.sum())
    counts_E = trace.expert_counts()[2]
    assert past.balance["max_over_mean"][0][2] == pytest.approx(counts_E.max() / counts_E.mean())


def test_the_page_says_what_the_views_say(source):
    source.step(40)
    page = open_page(source, measure="gini")
    trace, values = source.window(), page.page.values
    balance = views.load_balance(trace)
    gini = balance[balance["measure"] == "gini"]["value"].tolist()
    jumps = views.jump_rate(trace)
    rate = jumps[jumps["choice"] == "set"]
    for at in range(4):
        assert values[f"be{at}"] == f"{gini[at]:.2f}"
        assert values[f"jr{at}"] == f"{100 * rate['rate'].tolist()[at]:.1f} %"
        assert values[f"ju{at}"] == f"{100 * rate['expected'].tolist()[at]:.1f} %"
    assert values["formula"] == views.BALANCE_FORMULAS["gini"]
    assert values["past"].startswith("last 240 rows, read in 2.5 ms"), "looking has a price tag"
    assert set(MEASURES) == set(views.BALANCE_FORMULAS)


def test_the_flow_map_is_the_views_traffic_of_the_chosen_layer(source):
    source.step(40)
    page = open_page(source)
    traffic = views.device_traffic(source.window())
    for chosen, wanted in (("all", traffic), ("2", traffic[traffic["layer"] == 2])):
        page.page.actions = [*page.page.actions, [len(page.page.actions) + 1, "layer", chosen]]
        flow = np.zeros((2, 2))
        for line in wanted.itertuples():
            flow[line.home, line.device] += line.rows
        with np.errstate(invalid="ignore"):
            share = 100 * flow / flow.sum(axis=1, keepdims=True)
        shown = decode_frame(page.flow.pane.frame)
        np.testing.assert_array_equal(shown.cells_RC, cells(share, 100.0))
    assert (shown.low, shown.high) == (0.0, 100.0)


def test_rows_are_layers_of_one_domain_or_domains_in_one_layer(source):
    frame = source.step(40)
    page = open_page(source, domain="de")
    shown = decode_frame(page.map.pane.frame).cells_RC
    np.testing.assert_array_equal(shown, cells(expert_load(frame, "de").share_LE))
    page.page.actions = [[1, "rows", "domains"], [2, "layer", "3"]]
    lines = np.array([expert_load(frame, d).share_LE[3] for d in sorted(frame.meta["domains"])])
    np.testing.assert_array_equal(decode_frame(page.map.pane.frame).cells_RC, cells(lines))
    assert page.map.spec.row_name == "domain" and page.map.spec.rows[1] == "German"
    assert 'data-send="domain"' not in page.page.skeleton


def test_every_place_has_its_value_and_every_value_its_place(source):
    source.step(40)
    page = open_page(source)
    wanted = set(re.findall(r'data-bind(?:-[a-z-]+)?="([^"]+)"', page.page.skeleton))
    assert wanted == set(page.page.values) - {"beat"}


def test_without_a_past_the_page_says_why_and_shows_no_number(source):
    source.step(40)
    source.refusal = RequestError("window was not sent: the engine is not connected.")
    values = open_page(source).page.values
    assert values["past"] == str(source.refusal) and "be0" not in values


def test_an_engine_that_has_routed_nothing_has_dashes_and_no_bar(source):
    source.wait(0.1)
    page = open_page(source)
    assert page.page.values["be0"] == "–" and page.page.values["jr0"] == "– %"
    assert page.page.values["jw0"] == "width: 0%"
    assert math.isnan(page.recent.value.crossing)


def test_nonsense_from_the_address_or_the_page_changes_nothing(source):
    source.step(5)
    page = open_page(source, rows="fish", measure="luck", layer="99")
    page.page.actions = [[1, "rows", 3], [2, "measure", ["gini"]], [3, "view", "x"]]
    assert (page.rows, page.measure) == ("layers", "max_over_mean")
    assert decode_frame(page.flow.pane.frame).cells_RC.shape == (2, 2)


def test_bans_are_asked_for_told_and_taken_back(source):
    source.step(2)
    assert 'data-form="ban"' not in open_page(source).page.skeleton, "nobody there takes bans"
    source.facts = {"banned": [[n, 3] for n in range(4)] + [[2, 5]]}
    source.step(2)

    async def act() -> Experts:
        page = open_page(source)
        for name, value in [
            ("ban", {"expert": "5", "layer": "2"}),
            ("ban", {"expert": "3", "layer": "all"}),
            ("allow", "2:5"),
            ("allow", "3"),
            ("allow", ""),
        ]:
            page.on_action(name, value)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return page

    page = asyncio.run(act())
    assert sorted(source.controls, key=str) == sorted(
        [
            ("ban", {"layer": 2, "expert": 5}),
            ("ban", {"expert": 3}),
            ("allow", {"layer": 2, "expert": 5}),
            ("allow", {"expert": 3}),
            ("allow", {}),
        ],
        key=str,
    )
    page.tick(anyway=True)
    values = page.page.values
    assert 'data-form="ban"' in page.page.skeleton
    assert (values["bv0"], values["bw0"]) == ("3", "expert 3, all layers ✕")
    assert (values["bv1"], values["bw1"], values["bh2"]) == ("2:5", "expert 5, layer 2 ✕", True)
    assert not values["no_bans"] and values["more_bans"] == ""
    source.facts = {"banned": [[0, e] for e in range(8)]}
    source.step(2)
    assert open_page(source).page.values["more_bans"] == "and 2 more"
