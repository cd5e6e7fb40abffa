"""The same two modules in a real JupyterLab: pictures, keys that stay, themes, a busy kernel."""

from __future__ import annotations

import numpy as np
import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from tests.browser.lab import Notebook, jupyter_lab, without_its_own, write_notebook
from tests.widgets.examples import PartTokens, long_request
from tests.widgets.panel_page import brightness, pixel
from workbench.widgets import fair_shares, stepper_state

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

CELLS = (
    "# Widgets",
    "import numpy as np, threading, time\n"
    "from tests.widgets.examples import PartTokens, long_request\n"
    "from workbench.widgets import *\n"
    "values = fair_shares(np.random.default_rng(0).gamma(1.0, 1.0, (4, 8)))\n"
    "shown = map_widget(load_spec(range(4)))\n"
    "shown.draw(values)\n"
    "shown",
    "counts = map_widget(MapSpec(title='Rows', high=500_000.0, unit='rows'))\ncounts",
    "stepper = show_steps(long_request(), tokenizer=PartTokens())\nstepper",
    "# The end",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    with jupyter_lab(folder) as url:
        yield folder, url


@pytest.fixture
def notebook(visit, lab, request):
    folder, url = lab
    # A file for each test: a page must not take over the kernel that the test before still ends.
    name = f"{request.node.originalname}.ipynb"
    visit.page.set_viewport_size({"width": 1280, "height": 1900})
    visit.page.set_default_timeout(15_000)
    write_notebook(folder / name, CELLS)
    notebook = Notebook(visit.page, url, name)
    notebook.run_all()
    assert notebook.errors() == []
    visit.page.locator(".trw-stepper[data-token]").wait_for()
    visit.page.locator('.trw-map[data-seq="1"]').wait_for()
    yield notebook
    notebook.close()
    visit.complaints[:] = without_its_own(visit.complaints)
    visit.assert_clean()


def test_the_map_in_a_notebook(visit, notebook):
    page = visit.page
    canvas = page.locator("canvas").first
    values = fair_shares(np.random.default_rng(0).gamma(1.0, 1.0, (4, 8)))
    row, column = np.unravel_index(values.argmax(), values.shape)
    line = page.locator(".trw-value").first.inner_text()
    assert line.startswith(f"Highest: layer {row}, expert {column}: ")
    assert float(line.split(": ")[2].split("×")[0]) == pytest.approx(values.max(), abs=0.02)

    # 1. The keys move the cell cursor and nothing else: not the notebook's cell, not its commands.
    before = notebook.num_cells
    canvas.click(position={"x": 300, "y": 10})
    active = notebook.active_cell
    page.keyboard.press("Control+Home")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "b", "a", "ArrowDown"):
        page.keyboard.press(key)
    assert canvas.evaluate("canvas => document.activeElement === canvas")
    assert notebook.active_cell == active and notebook.num_cells == before
    said = page.locator(".trw-map .trw-said").first.inner_text()
    assert said.startswith("layer 3, expert 1: ")
    assert float(said.split(": ")[1].split(" ")[0]) == pytest.approx(values[3, 1], abs=0.02)
    page.wait_for_timeout(300)
    assert notebook.python("print(shown.row, shown.column, shown.ack)") == "3 1 1"

    # 2. A frame from the kernel changes the pixels.
    picture = canvas.screenshot()
    notebook.python("shown.draw(values[::-1])")
    page.locator('.trw-map[data-seq="2"]').wait_for()
    assert canvas.screenshot() != picture

    # 3. 200 updates: at most 200 messages, and what is drawn last is the last data.
    notebook.python(
        "for n in range(200): counts.draw(np.full((48, 64), 2_500.0 * n)); time.sleep(0.002)"
    )
    wait_for_frame(page, notebook, 200)
    page.wait_for_timeout(300)
    sent, skipped, ack = notebook.python(
        "print(counts.feed.num_sent, counts.feed.num_skipped, counts.ack)"
    ).split()
    assert int(sent) + int(skipped) == 200 and int(ack) == 200
    assert "497,500" in number_line(page) or "498,000" in number_line(page)

    # 4. Frames of a thread arrive while a cell is busy.
    notebook.python(
        "def play():\n"
        "    for n in range(40): counts.draw(np.full((48, 64), 5_000.0 * n)); time.sleep(0.05)\n"
        "thread = threading.Thread(target=play); thread.start(); time.sleep(2.5)"
    )
    wait_for_frame(page, notebook, 240)


def wait_for_frame(page, notebook, seq):
    """Wait until `counts` shows frame `seq`; if it never does, say what each side knows."""
    try:
        page.locator(f'.trw-map[data-seq="{seq}"]').wait_for()
    except PlaywrightTimeoutError as error:
        maps = page.locator(".trw-map").evaluate_all(
            "maps => maps.map(map => [map.dataset.seq, map.isConnected, map.clientWidth])"
        )
        feed = notebook.python("print(vars(counts.feed) | {'_waiting': 0}, counts.ack)")
        raise AssertionError(f"frame {seq} is not shown; maps {maps}; feed {feed}") from error


def test_the_stepper_in_a_notebook(visit, notebook):
    page = visit.page
    stepper = page.locator(".trw-stepper")
    body = page.locator(".trw-body")
    state = stepper_state(long_request(), tokenizer=PartTokens())
    before = notebook.num_cells
    stepper.locator(".trw-chip").nth(2).click()
    active = notebook.active_cell
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Space", "b", "a"):
        page.keyboard.press(key)
    assert body.evaluate("body => document.activeElement === body")
    assert notebook.active_cell == active and notebook.num_cells == before
    focus = [stepper.get_attribute(f"data-{name}") for name in ("token", "layer", "stage")]
    assert focus == ["4", "1", "select"]
    page.wait_for_timeout(300)
    assert notebook.python("print(stepper.token, stepper.layer, stepper.stage)") == "4 1 select"

    notebook.python("stepper.token, stepper.layer, stepper.stage = 2, 3, 'gate'")
    page.locator('.trw-stepper[data-token="2"][data-layer="3"][data-stage="gate"]').wait_for()
    shown = [c.get_attribute("data-value") for c in stepper.locator(".trw-column").all()]
    assert [float(v) for v in shown] == state["tokens"][2]["layers"][3]["full"]["logits"]
    page.keyboard.press("t")
    assert stepper.locator("tbody tr").count() == 8
    page.keyboard.press("?")
    assert stepper.locator(".trw-help").is_visible()
    page.keyboard.press("Escape")
    assert not stepper.locator(".trw-help").is_visible()

    # Without the mark that keeps JupyterLab off, the same key is a command: the test can fail.
    body.evaluate("body => body.removeAttribute('data-lm-suppress-shortcuts')")
    page.keyboard.press("b")
    page.wait_for_timeout(300)
    assert notebook.num_cells == before + 1


def test_the_theme_follows_jupyterlab_and_two_views_share_one_model(visit, notebook):
    page = visit.page
    notebook.python("counts.draw(np.zeros((48, 64)))")
    page.locator(".trw-map[data-seq]").nth(1).wait_for()
    canvas = page.locator("canvas").nth(1)
    assert brightness(pixel(canvas, 5, 5, (48, 64))) > 0.85
    notebook.theme("Dark")
    page.locator('.trw-map[data-theme="dark"]').nth(1).wait_for()
    page.locator('.trw-stepper[data-theme="dark"]').wait_for()
    page.wait_for_timeout(300)
    assert brightness(pixel(canvas, 5, 5, (48, 64))) < 0.2
    notebook.theme("Light")
    page.locator('.trw-map[data-theme="light"]').nth(1).wait_for()
    notebook.theme("Dark")
    page.locator('.trw-map[data-theme="dark"]').nth(1).wait_for()
    page.wait_for_timeout(600)
    sizes = page.locator("canvas").evaluate_all("all => all.map(c => [c.width, c.clientWidth])")
    assert all(drawn == seen > 300 for drawn, seen in sizes), "drawn while there was no layout"

    # A second view of the same model draws the newest frame at once, and both follow.
    page.evaluate(
        """() => { const { content } = window.jupyterapp.shell.currentWidget;
          content.activeCellIndex = 4; content.activeCell.editor?.focus(); }"""
    )
    notebook.command("notebook:insert-cell-above")
    page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel
          .setSource("counts")"""
    )
    notebook.command("notebook:run-cell")
    page.wait_for_function("() => document.querySelectorAll('.trw-map[data-seq]').length === 3")
    notebook.python("counts.draw(np.full((48, 64), 9e9))")
    page.wait_for_function(
        "() => document.querySelectorAll('.trw-map[data-seq=\"2\"]').length === 2"
    )
    page.wait_for_timeout(300)
    assert notebook.python("print(counts.ack)") == "2"


def number_line(page) -> str:
    return page.locator(".trw-value").nth(1).inner_text()
