"""The component of every page: what is sent, sent again, and heard once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dashboards import audience
from dashboards.page import Page


@pytest.fixture
def page(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr("dashboards.page.time.monotonic", lambda: clock[0])
    made = Page(lambda name, value: None)
    made.clock = clock
    return made


def draws(page: Page, built: int) -> None:
    """Let the browser say that it has drawn the newest values on this skeleton."""
    page.drawn, page.built = page.values["beat"], built


def test_a_skeleton_that_did_not_arrive_is_sent_again_until_it_stands(page):
    page.put_up("<p>old</p>")
    page.fill({})
    draws(page, 1)
    page.put_up("<p>new</p>")
    page.fill({})
    assert page.skeleton == "<!-- 2 --><p>new</p>"
    draws(page, 1)  # the values came, the skeleton did not
    page.fill({})
    assert page.skeleton == "<!-- 3 --><p>new</p>", "a change the browser has not seen before"
    draws(page, 3)
    page.fill({})
    assert page.skeleton == "<!-- 3 --><p>new</p>"


def test_a_slow_browser_is_not_made_to_build_the_page_anew(page):
    page.put_up("<p>old</p>")
    page.fill({})
    draws(page, 1)
    page.put_up("<p>new</p>")
    for _ in range(20):
        page.clock[0] += 3
        page.fill({})
    assert page.skeleton == "<!-- 2 --><p>new</p>"


def test_a_page_nobody_has_opened_is_not_sent_again(page):
    page.put_up("<p>first</p>")
    page.clock[0] += 60
    page.fill({})
    assert page.skeleton == "<!-- 1 --><p>first</p>"


def test_open_pages_are_those_a_browser_is_connected_to():
    class Server:
        def __init__(self, *connections: int) -> None:
            self.sessions = [SimpleNamespace(connection_count=count) for count in connections]

        def get_sessions(self) -> list[SimpleNamespace]:
            return self.sessions

    before, first, second = audience.open_pages(), Server(1, 0, 2), Server(1)
    audience.serve(first)
    audience.serve(second)
    assert audience.open_pages() - before == 3, "one that lost its browser is not open"
    del first
    assert audience.open_pages() - before == 1
