"""What cells show: right numbers, both colourings, and nothing that waits for somebody to look."""

from __future__ import annotations

import inspect
import json
import re
import sys
import threading

import pytest

from engine.errors import RequestError
from engine.model.moe import MoE
from workbench import figures, lessons, paths, views
from workbench.lessons import exhibits
from workbench.lessons.four_levels import LEVELS
from workbench.lessons.note import code, table
from workbench.lessons.way import LINES

# --- figures --------------------------------------------------------------------------------------


def test_a_figure_comes_in_two_colourings_of_the_same_numbers(mixed, monkeypatch):
    shown: list[dict] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    frame = views.domain_load(mixed.trace)
    themed = lessons.figure(figures.domain_load, frame, layers=[0, 3])
    themed._ipython_display_()
    marks, drawn = shown[0::2], shown[1::2]
    assert ["trw-for-light" in m["text/html"].split(">")[0] for m in marks] == [True, False]
    assert "trw-for-dark" in marks[1]["text/html"].split(">")[0]
    light, dark = (json.dumps(bundle[exhibits.PLOTLY]["data"][0]["z"]) for bundle in drawn)
    assert light == dark
    papers = [themed.light, themed.dark]
    light, dark = (figure.layout.template.layout.paper_bgcolor for figure in papers)
    assert light != dark
    assert "http" not in "".join(mark["text/html"] for mark in marks)


def test_a_figure_has_a_line_of_plain_text(mixed):
    themed = lessons.figure(figures.domain_load, views.domain_load(mixed.trace))
    assert repr(themed).startswith("Load of each expert by domain") and "<" not in repr(themed)


# --- widgets --------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch) -> list:
    """Pretend that a Jupyter kernel runs this; return what is displayed."""
    shown: list = []
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", sys)
    monkeypatch.setattr("IPython.display.display", shown.append)
    return shown


def test_without_a_kernel_exhibits_are_one_line_of_text(run, mixed):
    assert exhibits.headless()
    shares = views.domain_load(mixed.trace)
    for shown in (lessons.stepper(run), lessons.load_map(mixed), lessons.domain_map(shares, 3)):
        assert isinstance(shown, lessons.Note) and "\n" not in repr(shown)


def test_the_stepper_starts_where_it_is_told(run, kernel):
    shown = lessons.stepper(run, token=3, layer=2)
    assert (shown.token, shown.layer) == (3, 2)
    state = json.loads(shown.state)
    assert [token["position"] for token in state["tokens"]][3] == 3
    with pytest.raises(RequestError, match=r"request \(1\) must lie between 0 and 0"):
        lessons.stepper(run, 1)


def test_the_map_of_a_layer_draws_the_table(mixed, kernel):
    from workbench.widgets import LOAD_TOP, decode_frame

    shares = views.domain_load(mixed.trace)
    shown = lessons.domain_map(shares, 3)
    spec, frame = json.loads(shown.spec), decode_frame(shown.frame)
    assert spec["rows"][0] == "German" and spec["row_name"] == "domain"
    own = shares[(shares["domain"] == "de") & (shares["layer"] == 3)].sort_values("expert")
    drawn = frame.values_RC[0]
    assert drawn == pytest.approx(own["load"].clip(upper=LOAD_TOP).to_numpy(), abs=LOAD_TOP / 254)
    with pytest.raises(RequestError, match=r"layer \(9\) must be one of the table's: 0, 1, 2, 3"):
        lessons.domain_map(shares, 9)


def test_a_live_map_ends_on_the_whole_run_and_leaves_no_thread(small, prompts, kernel):
    from workbench.widgets import decode_frame, fair_shares

    before = threading.active_count()
    run = lessons.live_map(small, prompts[:8], max_tokens=12)
    (shown,) = kernel
    assert threading.active_count() == before
    assert shown.feed.num_sent >= 1
    # Nobody acknowledges here: the newest frame goes out all the same, or waits in the feed.
    newest = decode_frame(shown.frame if shown.feed._waiting is None else shown.feed._waiting[1])
    assert newest.seq == shown.feed.seq
    wanted = fair_shares(run.trace.expert_counts())
    assert newest.values_RC == pytest.approx(wanted.clip(max=newest.high), abs=newest.high / 254)


def test_a_live_map_runs_the_same_without_a_kernel(small, prompts):
    run = lessons.live_map(small, prompts[:8], max_tokens=4)
    assert len(run.completions) == 8


def test_recent_counts_are_those_of_the_last_rows(mixed):
    last = exhibits.recent_counts(mixed.trace, rows=10)
    ids = mixed.trace.columns["rows/topk_ids"][-10:]
    assert last.sum() == 10 * 4 * 2
    assert last[3, 5] == (ids[:, 3] == 5).sum()


# --- texts ----------------------------------------------------------------------------------------


def test_the_seven_lines_are_those_of_the_layer():
    source = inspect.getsource(MoE.forward)
    places = [source.find(line) for _, line in LINES]
    assert -1 not in places, "moe.py has changed; bring LINES up to it"
    assert places == sorted(places) and len(LINES) == 7


def test_the_seven_lines_show_the_recorded_numbers(run):
    position, layer = 4, 2
    decision = run.decision(position, layer)
    shown = repr(lessons.seven_lines(run, position, layer))
    lines = [line for line in shown.splitlines() if re.match(r"\| \d ", line)]
    assert len(lines) == 7
    assert all(f"{logit:.2f}" in lines[0] for logit in decision.logits)
    first, second = decision.topk_ids
    assert f"expert **{first}** (weight {decision.topk_weights[0]:.3f})" in lines[1]
    assert f"expert {decision.runner_up} came next, {decision.margin:.3f} behind" in lines[1]
    assert all(f"on device {device}" in lines[2] for device in decision.devices)
    # All prompt rows ran in one step: two slots each.
    prompt = len(run.completions[0].prompt_token_ids)
    away = sum(int(device) != 0 for device in decision.devices)
    assert (
        f"2 of the step's {2 * prompt} slots ({prompt} rows × 2)" in lines[3]
        and f"{away} of them leave" in lines[3]
    )
    slots = [
        sum(int(e) in run.decision(at, layer).topk_ids.tolist() for at in range(prompt))
        for e in (first, second)
    ]
    assert f"expert {first} runs {slots[0]} slot" in lines[4]
    assert f"expert {second} runs {slots[1]} slot" in lines[4]
    assert f"{decision.topk_weights[1]:.3f} × output of expert {second}" in lines[5]


def test_the_levels_say_which_of_them_exist():
    for level in LEVELS:
        assert (paths.root() / level.source).is_file() == level.here, f"{level.name}: say so"
    shown = repr(lessons.levels())
    assert shown.count("✓ exists") == 4 and "does not exist yet" not in shown


def test_markdown_tables_and_code_survive_bars_ticks_and_spaces():
    assert table(("a",), [("x | y",)]) == "| a |\n| --- |\n| x \\| y |"
    assert code("a") == "`a`" and code(" ist") == "`  ist `" and code("`") == "`` ` ``"
    assert code("\n") == "`⏎`"
