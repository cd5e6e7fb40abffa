"""The map: one scale for all frames, words in its cells, built once."""

from __future__ import annotations

import numpy as np
import pytest
from bokeh.models import LinearColorMapper

from dashboards import theme as themes
from dashboards.heatmap import Heatmap
from dashboards.readings import Load

LAYERS = ["layer 0", "layer 1"]


def load_of(share: float) -> Load:
    return Load(np.full((2, 4), share, np.float32), 10.0, share == 0)


@pytest.mark.parametrize("theme", themes.THEMES)
def test_one_fixed_scale_whatever_the_frame(theme):
    heatmap = Heatmap(LAYERS, 4, theme)
    (mapper,) = heatmap.figure.select(LinearColorMapper)
    before = (mapper.low, mapper.high, tuple(mapper.palette))
    for share in (4.0, 1.0, 0.0, 500_000.0):
        heatmap.show(load_of(share))
        assert heatmap.cells.data["image"][0].max() == share
        assert (mapper.low, mapper.high, tuple(mapper.palette)) == before
    heatmap.show(None)
    assert heatmap.cells.data["image"][0].max() == 0.0
    assert before[:2] == (0.0, themes.LOAD_TOP)


def test_cells_say_their_load_in_words_at_their_place():
    heatmap = Heatmap(LAYERS, 4, "light")
    share_LE = np.arange(8, dtype=np.float32).reshape(2, 4) / 2
    heatmap.show(Load(share_LE, 10.0, False))
    words = heatmap.words.data
    at = {(y, x): text for x, y, text in zip(words["x"], words["y"], words["text"], strict=True)}
    assert at[0, 0] == "idle" and at[0, 3] == "1.5×" and at[1, 0] == "2.0×"


def test_a_load_beyond_the_scale_is_drawn_as_its_top():
    heatmap = Heatmap(LAYERS, 4, "dark")
    heatmap.show(load_of(99.0))
    assert set(heatmap.words.data["ink"]) == {themes.ink_on(themes.load_palette("dark")[-1])}


def test_large_maps_have_no_words_and_no_gaps():
    heatmap = Heatmap([f"layer {n}" for n in range(61)], 256, "light")
    share_LE = np.ones((61, 256), np.float32)
    heatmap.show(Load(share_LE, 10.0, False))
    assert heatmap.words.data["text"] == ["idle"] * (61 * 256), "not written for a large map"
    assert len(heatmap.figure.xaxis.ticker.ticks) <= 17


def test_layer_0_is_on_top():
    heatmap = Heatmap(LAYERS, 4, "light")
    assert heatmap.figure.y_range.start > heatmap.figure.y_range.end
