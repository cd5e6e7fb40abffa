"""The lessons in a real JupyterLab, opened as `workbench lab` opens them."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from tests.browser.lab import Notebook, wait_for_kernel, without_its_own
from tests.notebooks.books import read
from workbench import paths
from workbench.lab import running_lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CURRENT = "window.jupyterapp.shell.currentWidget"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    more = {"LabApp": {"expose_app_in_browser": True}}
    settings, first = tmp_path_factory.mktemp("lab"), "notebooks/00_start_here.ipynb"
    with running_lab(paths.root(), notebook=first, port=9300, settings=settings, more=more) as (
        _,
        url,
    ):
        yield url


def opened(visit, url: str, name: str) -> Notebook:
    notebook = ready(visit, url, name)
    notebook.run_all()
    return notebook


def ready(visit, url: str, name: str) -> Notebook:
    """Open a notebook and run nothing of it yet."""
    visit.page.set_default_timeout(120_000)
    visit.page.set_viewport_size({"width": 1360, "height": 1000})
    visit.page.goto(url)  # with the token, once: then the page has its cookie
    return Notebook(visit.page, url.split("lab/tree")[0], f"notebooks/{name}.ipynb")


def leave(visit, notebook: Notebook) -> None:
    """Throw away what was run, so that the files stay as they are; end the kernel."""
    visit.page.evaluate(f"() => {CURRENT}.context.revert().then(() => null)")
    visit.page.evaluate(f"() => {CURRENT}.sessionContext.shutdown().then(() => null)")
    visit.complaints[:] = without_its_own(visit.complaints)


def show(page, cell_id: str, name: str) -> None:
    """Scroll a cell into view; JupyterLab draws the others when they are needed."""
    place = [cell.id for cell in read(name).cells].index(cell_id)
    page.evaluate(f"place => {CURRENT}.content.scrollToItem(place, 'smart')", place)


def test_the_address_opens_the_first_lesson_and_nothing_pops_up(visit, lab):
    page = visit.page
    page.set_default_timeout(120_000)
    page.goto(lab)
    page.locator("h1", has_text="Start here").wait_for()
    wait_for_kernel(page, "notebooks/00_start_here.ipynb")
    page.wait_for_timeout(2_000)
    assert page.locator(".jp-Dialog").count() == 0
    assert page.locator(".Toastify__toast").count() == 0
    page.evaluate(f"() => {CURRENT}.sessionContext.shutdown().then(() => null)")
    visit.complaints[:] = without_its_own(visit.complaints)
    visit.assert_clean()


def test_a_token_is_stepped_with_the_arrow_keys_and_the_notebook_stays(visit, lab):
    name = "01_what_is_routed"
    notebook = opened(visit, lab, name)
    page = visit.page
    assert notebook.errors() == []
    show(page, "stepper", name)
    stepper = page.locator(".trw-stepper[data-token]")
    stepper.wait_for()
    assert stepper.get_attribute("data-token") == "4"
    stepper.locator(".trw-chip").nth(2).click()
    active, cells = notebook.active_cell, notebook.num_cells
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Space", "b", "a", "x"):
        page.keyboard.press(key)
    focus = [stepper.get_attribute(f"data-{part}") for part in ("token", "layer", "stage")]
    assert focus == ["4", "3", "select"]
    assert (notebook.active_cell, notebook.num_cells) == (active, cells)
    leave(visit, notebook)
    visit.assert_clean()


@pytest.mark.parametrize(("theme", "bright"), [("Light", True), ("Dark", False)])
def test_the_first_lesson_shows_each_figure_once_in_the_colours_of_the_page(
    visit, lab, theme, bright
):
    name = "00_start_here"
    notebook = opened(visit, lab, name)
    page = visit.page
    assert notebook.errors() == []
    notebook.theme(theme)
    show(page, "domains-figure", name)
    shown = page.locator(".js-plotly-plot:visible")
    shown.first.wait_for()
    page.wait_for_timeout(1_000)
    seen = [box for plot in shown.all() if (box := plot.bounding_box()) and box["height"] > 300]
    visible = page.evaluate(
        """() => [...document.querySelectorAll(".js-plotly-plot")]
          .filter(plot => getComputedStyle(plot).visibility === "visible")
          .map(plot => getComputedStyle(plot.querySelector(".main-svg")).backgroundColor)"""
    )
    assert len(visible) == 1 and len(seen) == 1
    red = int(re.findall(r"\d+", visible[0])[0])
    assert (red > 200) == bright
    width = page.evaluate(f"() => {CURRENT}.content.node.clientWidth")
    assert seen[0]["width"] > 0.7 * width
    leave(visit, notebook)
    visit.assert_clean()


@pytest.mark.timeout(600)
def test_a_drill_is_found_repaired_and_handed_in_at_the_desk_of_a_notebook(visit, lab):
    name = "D01_one_device_works"
    cells = [cell.source for cell in read(name).cells]
    panel = cells.index("desk.panel()")
    notebook = ready(visit, lab, name)
    page = visit.page
    for _ in range(panel + 1):
        notebook.command("notebook:run-cell-and-select-next")
    desk = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Name it"))
    desk.wait_for(timeout=180_000)
    assert notebook.errors() == []

    def click(label, wanted):
        desk.get_by_role("button", name=label, exact=True).click()
        desk.locator("pre", has_text=wanted).wait_for()

    cause, act = desk.locator("select").all()
    click("Look", "rows by layer and expert")
    assert "✗ fail" in desk.locator("pre").inner_text()
    click("Check", "✗ fail")
    cause.select_option(
        "One expert of one layer draws most tokens, and lives on that device alone."
    )
    click("Name it", "noted: One expert of one layer draws most tokens")
    act.select_option("replicate")
    values = desk.locator("input[type=text]")
    desk.locator('input[placeholder="layer=…, expert=…, spare=1"]').wait_for()
    assert desk.get_by_text("Publish a table with a copy of one expert").count() == 1
    values.fill("layer=0, expert=99")
    click("Do it", "expert (99) must lie between")
    act.select_option("rebalance")
    values.fill("spare=1")
    click("Do it", "published table version")
    click("Check", "The devices share the work")
    for theme in ("Dark", "Light"):
        notebook.theme(theme)
        shown = desk.locator("pre").evaluate(
            "pre => [getComputedStyle(pre).color,"
            " getComputedStyle(pre.closest('.jp-NotebookPanel-notebook')).backgroundColor]"
        )
        ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in shown)
        assert abs(ink - paper) > 300, f"{shown} cannot be read in {theme}"
    process = int(notebook.python("print(desk._drill.store.current()['process'].split(':')[0])"))
    click("Finish", "together             100 of 100: passed")
    assert "The engine is restored" in desk.locator("pre").inner_text()
    assert page.get_by_role("button", name="Finish", exact=True).is_enabled()
    until(lambda: not psutil.pid_exists(process))
    leave(visit, notebook)
    visit.assert_clean()


def test_a_drill_of_a_notebook_ends_with_its_kernel(visit, lab):
    name = "D01_one_device_works"
    notebook = ready(visit, lab, name)
    started = [cell.source for cell in read(name).cells if "desk.start()" in cell.source][0]
    notebook.python(f"from workbench import lessons; drill, seed = 'hot-expert', None\n{started}")
    process = int(notebook.python("print(desk._drill.store.current()['process'].split(':')[0])"))
    assert psutil.pid_exists(process)
    leave(visit, notebook)
    until(lambda: not psutil.pid_exists(process))


def until(holds, seconds=60.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
