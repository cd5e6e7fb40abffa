"""The notebooks of drills in a real JupyterLab: each runs, and its desk shows what is wrong."""

from __future__ import annotations

import re

import pytest

from tests.browser.test_lessons import CURRENT, lab, leave, ready, show  # noqa: F401  the fixture
from tests.notebooks.books import read
from tests.notebooks.test_drill_books import BOOKS, drill_of
from workbench.drills.files import find

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

ALL_HAVE_RUN = f"""() => {{
  const {{ context, sessionContext }} = {CURRENT};
  const cells = [...context.model.cells].filter((cell) => cell.type === "code");
  const idle = sessionContext.session.kernel.status === "idle";
  return idle && cells.every((cell) => cell.executionCount);
}}"""


@pytest.mark.parametrize("name", BOOKS[1:])  # the first is walked through in test_lessons
def test_a_book_runs_from_top_to_bottom_and_its_desk_shows_the_signals(visit, lab, name):  # noqa: F811
    scenario, page = find(drill_of(name)), visit.page
    notebook = ready(visit, lab, name)
    # Not `notebook.run_all()`: its promise would be waited for without end, and say nothing.
    page.evaluate(
        "() => void window.jupyterapp.commands.execute('notebook:run-all-cells').catch(() => {})"
    )
    page.wait_for_function(ALL_HAVE_RUN, timeout=180_000)
    assert notebook.errors() == []
    show(page, "desk", name)
    desk = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Name it"))
    desk.wait_for()
    does = desk.get_by_text("Start the engine again with the options it has")
    assert does.evaluate("text => text.scrollWidth <= text.clientWidth"), "it is clipped"
    desk.get_by_role("button", name="Look", exact=True).click()
    shown = desk.locator("pre", has_text="policy   nothing set")
    shown.wait_for()
    failed = [line for line in shown.inner_text().splitlines() if line.startswith("✗ fail")]
    for signal in scenario.signals:
        assert any(signal.call.name in line for line in failed), signal.call.name
    for theme in ("Dark", "Light"):
        notebook.theme(theme)
        colours = shown.evaluate(
            "pre => [getComputedStyle(pre).color,"
            " getComputedStyle(pre.closest('.jp-NotebookPanel-notebook')).backgroundColor]"
        )
        ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert abs(ink - paper) > 300, f"{colours} cannot be read in {theme}"
    assert "hand_in = False" in read(name).cells[-2].source
    leave(visit, notebook)
    visit.assert_clean()
