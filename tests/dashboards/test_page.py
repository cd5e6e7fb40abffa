"""The component of every page: what is sent, sent again, and heard once."""

from __future__ import annotations

import pytest

from dashboards.page import Page


@pytest.fixture
def page(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr("dashboards.page.time.monotonic", lambda: clock[0])
    made = Page(lambda name, value: None)
    made.clock = clock
    return made


def test_a_skeleton_that_did_not_arrive_is_sent_again_until_it_stands(page):
    page.put_up("<p>old</p>")
    page.built = 1
    page.put_up("<p>new</p>")
    page.fill({})
    assert page.skeleton == "<!-- 2 --><p>new</p>", "the browser is given a moment"
    page.clock[0] += 1
    page.fill({})
    assert page.skeleton == "<!-- 3 --><p>new</p>", "a change the browser has not seen before"
    page.built = 3
    page.clock[0] += 1
    page.fill({})
    assert page.skeleton == "<!-- 3 --><p>new</p>"


def test_a_page_nobody_has_opened_is_not_sent_again(page):
    page.put_up("<p>first</p>")
    page.clock[0] += 60
    page.fill({})
    assert page.skeleton == "<!-- 1 --><p>first</p>"
