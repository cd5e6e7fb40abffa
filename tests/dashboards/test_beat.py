"""Maps follow every frame; numbers change no faster than they can be read."""

from __future__ import annotations

import time

import pytest
from bokeh.document import Document
from panel.io.state import set_curdoc

from dashboards import session
from dashboards.app import frame_of
from dashboards.pages.now import Now


@pytest.fixture
def now(source, monkeypatch):
    """The page, a browser that draws at once, and a clock that a test moves."""
    source.step(3)
    page = Now(source, "light", {}, frame_of({}, "light"))
    clock = [time.monotonic()]
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])

    def beat(after_s: float) -> tuple[int, int]:
        """Let time pass and beat once; return frames and sets of values sent so far."""
        clock[0] += after_s
        page.page.drawn = 10**6
        page.map.pane.ack = page.map.pane.feed.seq
        page.beat()
        return page.map.pane.feed.seq, page.page.values["beat"]

    return beat


def test_every_frame_is_drawn_once_and_numbers_wait_for_their_time(now, source):
    frames, values = now(1.0)
    for at in range(1, 4):  # 60 ms each: within one period of the numbers
        source.step()
        assert now(0.06) == (frames + at, values)
    assert now(0.001) == (frames + 3, values), "the same frame is not drawn again"
    source.step()
    assert now(0.06) == (frames + 4, values + 1), "after 200 ms the numbers follow"


def test_without_news_nothing_is_drawn_and_the_page_is_told_it_is_alive(now, source):
    frames, values = now(1.0)
    assert now(0.3) == (frames, values)
    assert now(session.BEAT_S) == (frames, values + 1)


def test_children_are_told_nothing_between_the_page_s_making_and_its_first_showing(source):
    """What changes while a browser fetches the page may be lost: a stepper then stayed empty."""
    source.step(3)
    with set_curdoc(Document()):
        page = Now(source, "light", {}, frame_of({}, "light"))
    assert (made := page.map.pane.feed.seq) > 0, "what it is made with goes with it"
    source.step()
    page.beat()
    assert page.map.pane.feed.seq == made
    page.page.drawn = 1
    page.map.pane.ack = made
    page.beat()
    assert page.map.pane.feed.seq == made + 1
