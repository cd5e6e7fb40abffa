"""What holds for every figure: it shows numbers, says what they are, and asks for nothing."""

from __future__ import annotations

import json
import re

import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from engine.errors import ConfigError
from tests.views.handmade import DENSE, EMPTY, ONE_TOKEN
from workbench import figures, views
from workbench import theme as themes
from workbench.trace import Recorder, Trace, synthetic


def recorded(**shape: int) -> Trace:
    recorder = Recorder()
    for event in synthetic.run(synthetic.start_event(**shape), steps=6, rows=3, num_ranks=2):
        recorder.emit(event)
    return recorder.trace()


TRACE = recorded()
TRACES = {"synthetic": TRACE, "one token": ONE_TOKEN, "empty": EMPTY, "dense": DENSE}
NAMES = [name for name in figures.__all__ if name.islower()]


def drawn(name: str, trace: Trace = TRACE, *, theme: str = "light", **view_options) -> go.Figure:
    frame = getattr(views, name)(trace, **view_options)
    options = {"num_experts": trace.start.num_experts} if name == "token_experts" else {}
    return getattr(figures, name)(frame, theme=theme, **options)


def subtitle(figure: go.Figure) -> str:
    return figure.layout.title.subtitle.text


def test_every_view_with_a_table_of_lines_has_a_figure_of_its_name():
    tables = set(views.__all__) - {"measures", "overhead_marks", "overhead_state", "stage_kind"}
    assert {name for name in tables if name.islower()} == set(NAMES)


@pytest.mark.parametrize("theme", figures.THEMES)
@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_drawn_whatever_the_trace(name, kind, theme):
    figure = drawn(name, TRACES[kind], theme=theme)
    assert figure.layout.title.text
    assert figure.layout.template.layout.paper_bgcolor == themes.COLOURS[theme]["surface"]
    assert "nan" not in figure.layout.title.text.lower() + subtitle(figure).lower()


@pytest.mark.parametrize("name", NAMES)
def test_a_table_without_lines_gives_a_sheet_that_says_so(name):
    whole, empty = drawn(name), _figure(name, getattr(views, name)(TRACE).iloc[:0])
    notes = [note.text for note in empty.layout.annotations if note.name == "empty"]
    assert notes == ["Nothing to draw: the trace holds none of this."] and not empty.data
    assert whole.data and not [n for n in whole.layout.annotations if n.name == "empty"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", views.LABELS)
def test_the_label_of_the_numbers_is_shown_with_its_symbol(name, label):
    state = themes.STATES[label]
    below = subtitle(drawn(name, label=label)).split("<br>")[1]
    assert below.startswith(f"{state.symbol} {state.word}")


@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_table_says_that_it_is_mixed(name):
    view = getattr(views, name)
    frame = pd.concat([view(TRACE), view(TRACE, label="modelled")], ignore_index=True)
    if name in ("expert_load", "device_load", "domain_load", "load_balance", "device_traffic"):
        frame = view(TRACE)
        frame.loc[0, "label"] = "modelled"
    assert "▣ recorded + ◇ modelled" in subtitle(_figure(name, frame))


@pytest.mark.parametrize("name", NAMES)
def test_the_title_names_a_unit(name):
    units = r"multiples|per cent|milliseconds|[Ss]lots|bytes|weight|without unit|rows a step"
    assert re.search(units, drawn(name).layout.title.text.replace("<br>", " "))


@pytest.mark.parametrize("name", NAMES)
def test_pointing_at_a_mark_gives_numbers(name):
    spoken = [
        trace
        for trace in drawn(name).data
        if trace.hoverinfo != "skip" and trace.hovertemplate is not None
    ]
    assert spoken
    for trace in spoken:
        text = (
            str(trace.hovertemplate) + str(trace.customdata) + str(getattr(trace, "hovertext", ""))
        )
        assert re.search(r"\d", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_asks_for_nothing_outside_itself(name):
    written = drawn(name).to_json()
    assert not re.search(r"https?:|//[a-z]|url\(|@import|mapbox", written)


@pytest.mark.parametrize("name", NAMES)
def test_drawing_leaves_the_table_as_it_was_and_repeats_itself(name):
    frame = getattr(views, name)(TRACE)
    before = frame.copy(deep=True)
    first, again = _figure(name, frame), _figure(name, frame)
    pd.testing.assert_frame_equal(frame, before)
    assert json.loads(first.to_json()) == json.loads(again.to_json())


@pytest.mark.parametrize("name", NAMES)
def test_a_theme_there_is_none_of_is_refused(name):
    with pytest.raises(ConfigError, match=r"'sepia'.*light, dark"):
        drawn(name, theme="sepia")


def _figure(name: str, frame: pd.DataFrame) -> go.Figure:
    options = {"num_experts": TRACE.start.num_experts} if name == "token_experts" else {}
    return getattr(figures, name)(frame, **options)


@pytest.mark.parametrize("name", NAMES)
def test_no_line_of_the_head_runs_out_of_a_usual_width(name):
    figure = drawn(name)
    title, below = figure.layout.title.text, subtitle(figure).split("<br>")[1:]
    assert max(map(len, title.split("<br>"))) <= 66 and max(map(len, below)) <= 108


def test_the_page_of_a_trace_is_whole_and_asks_for_nothing():
    from workbench.figures.page import NAMES as PAGED
    from workbench.figures.page import page

    assert set(PAGED) == set(NAMES), "every figure has its place"
    text = page(TRACE, title="a <b> & c", theme="dark", text=lambda token: f"t{token}")
    head, body = text.split("</script></head>")
    assert "<h1>a &lt;b&gt; &amp; c</h1>" in body and themes.COLOURS["dark"]["ground"] in head
    assert not re.search(r"""(?:src|href)=["']?http""", text.replace(get_plotlyjs(), ""))
    shown = set(re.findall(r"<section id=(\w+)>", body))
    assert "expert_load" in shown and "look_ups" in shown
    for name in set(NAMES) - shown:
        assert name in body.rpartition("The trace holds nothing for: ")[2]
    (only,) = re.findall(r"<section id=(\w+)>", page(EMPTY, ["look_ups"], title="x"))
    assert only == "look_ups", "what was asked for is shown, empty or not"
    with pytest.raises(ConfigError, match="figure"):
        page(TRACE, ["nonsense"], title="x")
