"""Both widgets on a Panel page: pictures, words, keys, colours, and frames faster than the eye."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from tests.widgets.examples import PartTokens, long_request
from tests.widgets.panel_page import SETTLED_MS, brightness, pixel, served
from workbench.widgets import (
    MapSpec,
    decode_frame,
    fair_shares,
    load_spec,
    map_pane,
    show_steps,
    stepper_pane,
    stepper_state,
)

pytestmark = pytest.mark.browser

COUNTS = MapSpec(title="Rows", high=500_000.0, unit="rows", low_word="none", marks=((0.0, "none"),))
SHAPE = (48, 64)


@pytest.fixture(scope="module")
def shown():
    def make():
        stepper = show_steps(long_request(), tokenizer=PartTokens(), make=stepper_pane)
        return [map_pane(load_spec(range(4))), map_pane(COUNTS), stepper]

    with served(make) as shown:
        yield shown


def opened(visit, shown, theme="light"):
    visit.page.goto(f"{shown.url}?theme={theme}")
    visit.page.locator(".trw-stepper[data-token]").wait_for()
    visit.page.locator(".trw-notice", has_text="Waiting").first.wait_for()
    visit.page.wait_for_timeout(SETTLED_MS)
    return visit.page


def test_pixels_change_and_the_line_says_the_data(visit, shown):
    page = opened(visit, shown)
    canvas = page.locator("canvas").first
    values = fair_shares(np.random.default_rng(0).gamma(1.0, 1.0, (4, 8)))
    shown.call(lambda: shown.widgets[0].draw(values))
    page.locator('.trw-map[data-seq="1"]').wait_for()
    before = canvas.screenshot()
    shown.call(lambda: shown.widgets[0].draw(values[::-1].copy()))
    page.locator('.trw-map[data-seq="2"]').wait_for()
    assert canvas.screenshot() != before

    # By mouse: the cell under the pointer; leaving goes back to the highest.
    left = float(page.locator(".trw-map").first.get_attribute("data-left"))
    box = canvas.bounding_box()
    width, height = box["width"] - left, box["height"] - 22
    canvas.hover(position={"x": left + width * 5.5 / 8, "y": height * 1.5 / 4})
    assert line_value(page, "layer 1, expert 5") == pytest.approx(values[2, 5], abs=0.02)
    page.mouse.move(2, 2)
    assert page.locator(".trw-value").first.inner_text().startswith("Highest:")

    # The browser's word came back, and the table says the same.
    page.wait_for_timeout(200)
    assert shown.widgets[0].ack == 2 and shown.widgets[0].feed.num_skipped == 0
    canvas.focus()
    page.keyboard.press("t")
    cells = page.locator(".trw-table").first.locator("td").all_inner_texts()
    for word, value in zip(cells, values[::-1].ravel(), strict=True):
        read = 0.0 if word == "idle" else float(word.strip("×≥"))
        assert read == pytest.approx(min(value, 4.0), abs=0.062)
    page.keyboard.press("t")
    assert canvas.evaluate("canvas => canvas.getRootNode().activeElement === canvas")
    visit.assert_clean()


def test_the_cell_cursor_by_keys(visit, shown):
    page = opened(visit, shown)
    values = np.arange(32.0).reshape(4, 8) / 10
    shown.call(lambda: shown.widgets[0].draw(values))
    page.locator('.trw-map[data-seq="1"]').wait_for()
    page.locator("canvas").first.focus()
    spoken = page.locator(".trw-map .trw-said").first
    steps = [("ArrowRight", (0, 0)), ("ArrowRight", (0, 1)), ("ArrowDown", (1, 1)), ("End", (1, 7)),
             ("ArrowRight", (1, 7)), ("Home", (1, 0)), ("Control+End", (3, 7))]  # fmt: skip
    for key, (row, column) in steps:
        page.keyboard.press(key)
        value = line_value(page, f"layer {row}, expert {column}")
        assert value == pytest.approx(values[row, column], abs=0.02)
        assert spoken.inner_text().startswith(f"layer {row}, expert {column}")
    assert spoken.get_attribute("aria-live") == "polite"
    page.wait_for_timeout(200)
    assert (shown.widgets[0].row, shown.widgets[0].column) == (3, 7)

    page.keyboard.press("?")
    assert page.locator(".trw-map .trw-help").first.is_visible()
    page.keyboard.press("Escape")
    assert not page.locator(".trw-map .trw-help").first.is_visible()
    assert line_value(page, "layer 3, expert 7") >= 3
    page.keyboard.press("Escape")
    assert page.locator(".trw-value").first.inner_text().startswith("Highest:")
    visit.assert_clean()


def test_200_updates_are_at_most_200_messages_and_end_on_the_last_data(visit, shown):
    messages = []
    visit.page.on(
        "websocket",
        lambda socket: socket.on(
            "framereceived",
            lambda data: messages.append(1) if isinstance(data, bytes) and b"TRM1" in data else 0,
        ),
    )
    page = opened(visit, shown)
    rng = np.random.default_rng(1)
    frames = [rng.uniform(0, 500_000, SHAPE) for _ in range(200)]

    def all_at_once():
        for values in frames:
            shown.widgets[1].draw(values)

    shown.call(all_at_once)
    page.locator('.trw-map[data-seq="200"]').wait_for()
    feed = shown.widgets[1].feed
    page.wait_for_timeout(300)
    assert 0 < len(messages) == feed.num_sent <= 200
    assert feed.num_skipped > 0 and shown.widgets[1].ack == 200
    check_cells(page, 1, shown.widgets[1], frames[-1])
    visit.assert_clean()


def test_every_update_is_drawn_for_a_viewer_that_keeps_up(visit, shown):
    page = opened(visit, shown)
    for update in range(1, 11):
        shown.call(lambda at=update: shown.widgets[1].draw(np.full(SHAPE, 1000.0 * at)))
        page.locator(f'.trw-map[data-seq="{update}"]').wait_for()
        while shown.widgets[1].ack < update:  # the browser's word is under way
            page.wait_for_timeout(20)
    assert shown.widgets[1].feed.num_sent == 10 and shown.widgets[1].feed.num_skipped == 0


def test_a_slow_browser_skips_frames_and_ends_on_the_last(visit, shown):
    visit.page.add_init_script(
        "window.requestAnimationFrame = call => setTimeout(() => call(performance.now()), 250)"
    )
    page = opened(visit, shown)
    values = [np.full(SHAPE, 2000.0 * at) for at in range(40)]
    for each in values:
        shown.call(lambda each=each: shown.widgets[1].draw(each))
        page.wait_for_timeout(25)
    page.locator('.trw-map[data-seq="40"]').wait_for()
    assert 0 < shown.widgets[1].feed.num_sent < 30
    check_cells(page, 1, shown.widgets[1], values[-1])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_colour_means_the_same_in_every_frame(visit, shown, theme):
    page = opened(visit, shown, theme)
    assert page.locator(".trw-map").nth(1).get_attribute("data-theme") == theme
    canvas = page.locator("canvas").nth(1)
    seen = []
    busy, quiet = np.zeros(SHAPE), np.zeros(SHAPE)
    busy[10, 20], busy[30, 40] = 25_000, 500_000
    quiet[10, 20] = 25_000
    nothing = np.full(SHAPE, math.nan)
    for seq, values in enumerate((busy, quiet, np.zeros(SHAPE), nothing), start=1):
        shown.call(lambda values=values: shown.widgets[1].draw(values))
        page.locator(f'.trw-map[data-seq="{seq}"]').wait_for()
        seen.append([pixel(canvas, *cell, SHAPE) for cell in ((10, 20), (30, 40), (0, 0))])
    assert seen[0][0] == seen[1][0], "25 000 has one colour whatever else is on the map"
    ground, hot = brightness(seen[0][2]), brightness(seen[0][1])
    assert abs(hot - ground) > 0.6
    assert seen[2] == [seen[0][2]] * 3, "an idle map has the colour of idle everywhere"
    assert abs(brightness(seen[1][0]) - ground) < 0.15, "a quiet map does not look hot"
    assert page.locator(".trw-notice").nth(1).inner_text() == "No data"
    assert page.locator(".trw-value").nth(1).inner_text() == "No cell has data"
    visit.assert_clean()


def test_sharp_on_a_fine_screen_and_fitted_to_its_width(browser, shown):
    context = browser.new_context(viewport={"width": 1100, "height": 800}, device_scale_factor=2)
    page = context.new_page()
    page.goto(shown.url)
    shown_map = page.locator("canvas").nth(1)
    shown_map.wait_for()
    page.wait_for_timeout(SETTLED_MS)
    shown.call(lambda: shown.widgets[1].draw(np.zeros(SHAPE)))
    page.locator('.trw-map[data-seq="1"]').wait_for()
    size = shown_map.evaluate("c => [c.width, c.clientWidth, c.height, c.clientHeight]")
    assert size[0] == 2 * size[1] and size[2] == 2 * size[3]
    shown.call(lambda: setattr(shown.widgets[1], "width", 500))
    shown.call(lambda: setattr(shown.widgets[1], "sizing_mode", None))
    page.wait_for_timeout(600)
    after = shown_map.evaluate("c => [c.width, c.clientWidth]")
    assert after[1] < size[1] and after[0] == 2 * after[1]
    context.close()


def test_a_hidden_tab_still_takes_frames(visit, shown):
    visit.page.add_init_script(
        "Object.defineProperty(document, 'hidden', {get: () => true});"
        "window.requestAnimationFrame = () => 0;"
    )
    page = visit.page
    page.goto(shown.url)
    page.locator(".trw-stepper[data-token]").wait_for(state="attached")
    page.wait_for_timeout(SETTLED_MS)
    shown.call(lambda: shown.widgets[1].draw(np.ones(SHAPE)))
    page.locator('.trw-map[data-seq="1"]').wait_for(state="attached")
    page.wait_for_timeout(200)
    assert shown.widgets[1].ack == 1


def test_the_stepper_shows_the_recorded_numbers_stage_by_stage(visit, shown):
    page = opened(visit, shown)
    state = stepper_state(long_request(), tokenizer=PartTokens())
    full = state["tokens"][2]["layers"][0]
    stepper = page.locator(".trw-stepper")
    bars = stepper.locator(".trw-column")
    assert [float(v) for v in values_of(bars)] == full["full"]["logits"]
    assert "routing/gate.py:10" in stepper.locator(".trw-source").inner_text()

    page.locator(".trw-body").focus()
    page.keyboard.press("Space")
    assert [float(v) for v in values_of(bars)] == full["full"]["scores"]
    said = stepper.locator(".trw-said")
    assert said.inner_text().startswith("·R in layer 0: the 2 best scores win")
    assert f"margin {full['margin']:.3f}" in stepper.locator(".trw-margin").inner_text()
    chosen = [
        column.get_attribute("data-expert") for column in stepper.locator(".trw-chosen").all()
    ]
    assert {int(expert) for expert in chosen} == set(full["topk_ids"])

    page.keyboard.press("Space")
    places = stepper.locator(".trw-place").all_inner_texts()
    for text, physical, device in zip(places, full["physical"], full["devices"], strict=True):
        assert f"physical {physical}" in text and f"device {device}" in text
        assert "only copy" in text
    page.keyboard.press("Space")
    assert "model/moe.py:14" in stepper.locator(".trw-source").inner_text()
    page.keyboard.press("Space")
    weights = [float(v) for v in values_of(stepper.locator(".trw-weight"))]
    assert weights == full["topk_weights"]
    page.keyboard.press("Space")
    assert (stepper.get_attribute("data-layer"), stepper.get_attribute("data-stage")) == (
        "1",
        "gate",
    )
    page.wait_for_timeout(200)
    assert (shown.widgets[2].layer, shown.widgets[2].stage) == (1, "gate")
    page.keyboard.press("Shift+Space")
    assert (stepper.get_attribute("data-layer"), stepper.get_attribute("data-stage")) == (
        "0",
        "combine",
    )
    visit.assert_clean()


def test_text_and_picture_move_together_by_keys_mouse_and_program(visit, shown):
    page = opened(visit, shown)
    stepper = page.locator(".trw-stepper")
    selected = stepper.locator('.trw-chip[aria-selected="true"] .trw-token')
    page.locator(".trw-body").focus()
    page.keyboard.press("End")
    assert selected.inner_text() == "." and "Token 11" in stepper.locator(".trw-facts").inner_text()
    page.keyboard.press("ArrowRight")
    assert stepper.get_attribute("data-token") == "11", "the end stays the end"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowUp")
    assert (stepper.get_attribute("data-token"), stepper.get_attribute("data-layer")) == ("0", "0")
    assert "none before it to compare" in stepper.locator(".trw-neighbour").inner_text()

    # A click on a token and on a layer; the keys work from there.
    stepper.locator(".trw-chip").nth(5).click()
    stepper.locator(".trw-lane").nth(2).click()
    assert selected.inner_text() == "F0 9F"
    assert "bytes 1-2 of 4 of 🦊" in stepper.locator(".trw-facts").inner_text()
    page.keyboard.press("ArrowLeft")
    assert stepper.get_attribute("data-token") == "4" and selected.inner_text() == "·"

    # A program sets what a reader would.
    shown.call(lambda: shown.widgets[2].param.update(token=9, layer=3, stage="place"))
    page.locator('.trw-stepper[data-token="9"][data-layer="3"][data-stage="place"]').wait_for()
    assert selected.inner_text() == "·so"
    visit.assert_clean()


def test_a_compact_record_says_so_and_the_neighbour_is_compared(visit, shown):
    page = opened(visit, shown)
    state = stepper_state(long_request(), tokenizer=PartTokens())
    stepper = page.locator(".trw-stepper")
    page.locator(".trw-body").focus()
    page.keyboard.press("ArrowRight")
    assert "logits were not kept" in stepper.locator(".trw-said").inner_text()
    assert "compact record" in stepper.locator(".trw-source").inner_text()
    record = state["tokens"][3]["layers"][0]
    assert [float(v) for v in values_of(stepper.locator(".trw-weight"))] == record["topk_weights"]
    key_arrives(page, shown.widgets[2], token=3)
    for at in range(1, 12):
        shown.call(lambda at=at: shown.widgets[2].param.update(token=at, layer=0))
        page.locator(f'.trw-stepper[data-token="{at}"]').wait_for()
        word = {0: "jumped", 2: "same experts kept"}
        kept = state["tokens"][at]["layers"][0]["kept"]
        assert word.get(kept, "changed") in stepper.locator(".trw-neighbour").inner_text()
        bold = stepper.locator('.trw-chip[aria-selected="true"] .trw-ids b')
        assert bold.count() == kept
    visit.assert_clean()


def test_the_steppers_table_has_every_expert(visit, shown):
    page = opened(visit, shown)
    page.locator(".trw-body").focus()
    page.keyboard.press("t")
    rows = page.locator(".trw-figure tbody tr").all_inner_texts()
    full = stepper_state(long_request())["tokens"][2]["layers"][0]["full"]
    assert len(rows) == 8
    assert [row.split("\t")[1] for row in rows] == [f"{value:.4f}" for value in full["logits"]]
    assert rows[full["runner_up"]].split("\t")[3] == "runner-up"
    page.keyboard.press("ArrowRight")
    assert len(page.locator(".trw-figure tbody tr").all()) == 2, "of a compact record, those chosen"


def test_the_system_decides_where_the_page_says_nothing(browser, shown):
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(shown.url)
        page.locator(".trw-stepper[data-token]").wait_for()
        # Without the page's ground there is no colour behind the widgets at all.
        page.locator(".trw-map").first.evaluate(
            """root => { for (let n = root.parentNode; n; n = n.parentNode ?? n.host)
                 if (n.style) n.style.setProperty("background", "transparent", "important");
               document.body.classList.add("changed"); }"""
        )
        page.locator(f'.trw-map[data-theme="{scheme}"]').first.wait_for()
        context.close()


def test_a_page_that_goes_live_from_light_to_dark_takes_the_widgets_along(visit, shown):
    page = opened(visit, shown)
    shown.call(lambda: [setattr(widget, "theme", "dark") for widget in shown.widgets])
    page.locator('.trw-map[data-theme="dark"]').first.wait_for()
    page.locator('.trw-stepper[data-theme="dark"]').wait_for()
    visit.assert_clean()


def key_arrives(page, widget, *, token: int) -> None:
    """Wait until a key's new token is the program's too, which a busy machine may take as news."""
    ends = time.monotonic() + 30
    while widget.token != token:
        assert time.monotonic() < ends, f"the program still has token {widget.token}"
        page.wait_for_timeout(20)


def line_value(page, cell: str) -> float:
    """Return the number in the line below the first map, which must be about `cell`."""
    text = page.locator(".trw-value").first.inner_text()
    name, _, rest = text.partition(": ")
    assert name.lower() == cell.lower(), text
    return float(rest.split(" ")[0].replace(",", ""))


def check_cells(page, at: int, widget, values) -> None:
    """Hold the map's table against the data, within what one byte keeps."""
    frame = decode_frame(widget.frame)
    assert np.abs(frame.values_RC - values).max() <= 500_000 / 254 * 1.001
    page.locator("canvas").nth(at).focus()
    page.keyboard.press("t")
    cells = page.locator(".trw-table").nth(at).locator("td").all_inner_texts()
    read = [0.0 if word == "none" else float(word.strip("≥").replace(",", "")) for word in cells]
    assert np.abs(np.array(read).reshape(SHAPE) - values).max() <= 2000
    page.keyboard.press("t")


def values_of(locator) -> list[str]:
    return [found.get_attribute("data-value") for found in locator.all()]
