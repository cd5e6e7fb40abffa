"""Frames: what one byte a cell keeps, what it refuses, and that no frame is sent for nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine.errors import ConfigError
from workbench.widgets import MapFeed, MapSpec, decode_frame, encode_frame, fair_shares, load_spec
from workbench.widgets.frames import NO_DATA, PATIENCE_S, TOP, WINDOW


def test_the_worked_example_of_the_layout():
    data = encode_frame([[0.0, 1.0, 3.99, 4.0, np.inf, np.nan]], seq=7, time_s=1.5, high=4.0)
    assert len(data) == 32 + 6 and data[:4] == b"TRM1"
    frame = decode_frame(data)
    assert (frame.seq, frame.time_s, frame.low, frame.high) == (7, 1.5, 0.0, 4.0)
    assert frame.cells_RC.tolist() == [[0, 64, 253, 254, 254, 255]]


@pytest.mark.parametrize("scale", [(0.0, 4.0), (0.0, 500_000.0), (-3.0, 1.0)])
def test_a_decoded_value_is_within_half_a_step_and_only_the_top_reads_as_the_top(scale):
    low, high = scale
    values = np.random.default_rng(0).uniform(low, high, (48, 64))
    values[3, 4] = np.nan
    values[5, 6] = high * 1.5
    frame = decode_frame(encode_frame(values, seq=1, time_s=0.0, low=low, high=high))
    step = (high - low) / TOP
    below = ~np.isnan(values) & (values < high - step)
    assert np.abs(frame.values_RC - values)[below].max() <= step / 2 * 1.0001
    assert np.isnan(frame.values_RC[3, 4]) and frame.cells_RC[3, 4] == NO_DATA
    assert frame.cells_RC[5, 6] == TOP
    assert ((frame.cells_RC == TOP) == (values >= high)).all()


def test_one_scale_for_busy_idle_and_empty_maps():
    scale = {"time_s": 0.0, "low": 0.0, "high": 500_000.0}
    busy = np.zeros((4, 8))
    busy[1, 2], busy[3, 3] = 25_000, 500_000
    quiet = np.zeros((4, 8))
    quiet[1, 2] = 25_000
    cells = [
        decode_frame(encode_frame(values, seq=1, **scale)).cells_RC
        for values in (busy, quiet, np.zeros((4, 8)), np.full((4, 8), np.nan))
    ]
    assert cells[0][1, 2] == cells[1][1, 2] == 13, "a value has one colour in every frame"
    assert cells[1].max() == 13 and cells[2].max() == 0, "a quiet map does not look hot"
    assert (cells[3] == NO_DATA).all()


@pytest.mark.parametrize(
    ("values", "scale", "words"),
    [
        (np.zeros(3), (0, 1), "shape (3,)"),
        (np.zeros((1, 70_000)), (0, 1), "at most 65535"),
        (np.zeros((1, 1)), (1, 1), "must be above its low"),
    ],
)
def test_what_is_no_map_is_refused(values, scale, words):
    with pytest.raises(ConfigError) as refusal:
        encode_frame(values, seq=1, time_s=0.0, low=scale[0], high=scale[1])
    assert words in str(refusal.value)


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"XXXX" + d[4:], lambda d: b""])
def test_damaged_bytes_are_refused(damage):
    with pytest.raises(ConfigError):
        decode_frame(damage(encode_frame(np.zeros((2, 2)), seq=1, time_s=0.0)))


def test_a_mark_off_the_scale_is_refused_and_the_spec_is_json():
    with pytest.raises(ConfigError, match="must lie on the scale"):
        MapSpec(title="x", high=1.0, marks=((2.0, "far"),))
    spec = json.loads(load_spec([1, 3]).to_json())
    assert spec["rows"] == ["1", "3"] and spec["marks"][1] == [1.0, "fair share"]


def test_fair_shares():
    assert fair_shares([[6, 2, 0, 0], [0, 0, 0, 0]]).tolist() == [[3, 1, 0, 0], [0, 0, 0, 0]]


class Viewer:
    """A browser that draws the newest frame it has, when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.got: list[int] = []
        self.feed = MapFeed(
            lambda frame: self.got.append(decode_frame(frame).seq), clock=lambda: self.now
        )

    def offer(self, value: float) -> None:
        self.feed.offer(np.full((48, 64), value), low=0.0, high=200.0, time_s=0.0)

    def draw(self) -> None:
        self.feed.on_ack(self.got[-1])


def test_200_updates_are_200_messages_for_a_quick_viewer():
    viewer = Viewer()
    for update in range(200):
        viewer.offer(update)
        viewer.draw()
    assert viewer.got == list(range(1, 201)) and viewer.feed.num_skipped == 0


def test_a_slow_viewer_skips_frames_and_ends_on_the_last():
    viewer = Viewer()
    for update in range(200):
        viewer.offer(update)
        if update % 10 == 0:
            viewer.draw()
    viewer.draw()
    assert len(viewer.got) < 70 and viewer.got[-1] == 200
    assert viewer.got == sorted(set(viewer.got))
    assert viewer.feed.num_skipped == 200 - len(viewer.got) > 0


def test_without_an_answer_frames_go_on_slowly():
    viewer = Viewer()
    for update in range(200):
        viewer.offer(update)
    assert viewer.got == list(range(1, WINDOW + 1))
    viewer.now += PATIENCE_S
    viewer.offer(200)
    assert viewer.got[-1] == 201 and viewer.feed.num_skipped == 197
