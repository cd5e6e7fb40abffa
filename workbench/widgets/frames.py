"""What the live map is fed with: frames of one byte a cell, the words around them, and a feed.

A frame is little endian, 32 bytes of head and then R x C cells in C order:

    at  0  4s   b"TRM1"
    at  4  u32  seq: counts up from 1
    at  8  f64  time_s: seconds since the epoch
    at 16  u16  R rows         at 18  u16  C columns
    at 20  f32  low            at 24  f32  high
    at 28  u32  0
    at 32  u8   R x C cells

A cell of 0 .. 253 stands for `low + cell * (high - low) / 254`, 254 for `high` or more, 255 for
"no data" (NaN). For low 0 and high 4: 0.0 -> 0, 1.0 -> 64, 3.99 -> 253, 4.0 and inf -> 254. The
scale is part of the frame and does not move with the data, so an idle map does not look hot.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError

MAGIC = b"TRM1"
NO_DATA = 255
TOP = 254
"""The cell of everything at or above `high`."""
MAX_SIDE = 65_535
LOAD_TOP = 4.0
"""The top of the load scale, in multiples of the fair share; more is drawn the same."""
WINDOW = 3
"""Most frames under way to the browser."""
PATIENCE_S = 0.5
"""After this long without a word from the browser the next frame is sent anyway."""

_HEAD = struct.Struct("<4sIdHHffI")


class Frame(NamedTuple):
    """A frame, decoded."""

    seq: int
    time_s: float
    low: float
    high: float
    cells_RC: npt.NDArray[np.uint8]

    @property
    def values_RC(self) -> npt.NDArray[np.float64]:
        """(R, C) what the cells stand for; NaN is no data, `high` means that or more."""
        step = (self.high - self.low) / TOP
        values = self.low + self.cells_RC.astype(np.float64) * step
        return np.where(self.cells_RC == NO_DATA, np.nan, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class MapSpec:
    """The words and the scale around a map's frames."""

    title: str
    rows: tuple[str, ...] = ()
    """A name for each row, as `row_name` is followed by it; empty numbers them."""
    columns: tuple[str, ...] = ()
    row_name: str = "layer"
    column_name: str = "expert"
    low: float = 0.0
    high: float = LOAD_TOP
    unit: str = ""
    """Follows a value in the line below the map."""
    short_unit: str = ""
    """Follows a value inside a cell."""
    low_word: str | None = None
    """Stands in a cell at `low`; None writes the number."""
    marks: tuple[tuple[float, str], ...] = ()
    """Words on the colour bar, at values from `low` to `high`."""
    idle: str = "All values are at the bottom of the scale"
    """Said when no cell is above `low`."""
    height: int = 0
    """CSS pixels of the map without its colour bar; 0 chooses by the number of rows."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"the scale's high ({self.high}) must be above its low ({self.low}).")
        for value, word in self.marks:
            if not self.low <= value <= self.high:
                raise ConfigError(
                    f"the mark {word!r} at {value} must lie on the scale, "
                    f"{self.low} to {self.high}."
                )

    def to_json(self) -> str:
        """Return what the browser reads."""
        return json.dumps(asdict(self), allow_nan=False)


def load_spec(layers: Iterable[int], *, title: str = "Load by layer and expert") -> MapSpec:
    """Return the words for a map of `fair_shares`, one row for each of the model's MoE layers."""
    return MapSpec(
        title=title,
        rows=tuple(str(layer) for layer in layers),
        unit="× fair share",
        short_unit="×",
        low_word="idle",
        marks=((0.0, "idle"), (1.0, "fair share"), (2.0, "2×"), (LOAD_TOP, "4× or more")),
        idle="Every expert is idle",
    )


def fair_shares(rows_LE: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return (L, E) each expert's rows as a multiple of its fair share of its layer's rows.

    1 is the fair share, 0 in a layer without rows. `[[6, 2, 0, 0]]` gives `[[3, 1, 0, 0]]`.
    """
    rows = np.asarray(rows_LE, np.float64)
    total_L1 = rows.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = np.zeros_like(rows)
    np.divide(rows * rows.shape[1], total_L1, out=shares, where=total_L1 > 0)
    return shares


def encode_frame(
    values_RC: npt.ArrayLike, *, seq: int, time_s: float, low: float = 0.0, high: float = LOAD_TOP
) -> bytes:
    """Turn values into a frame.

    Args:
        values_RC: (R, C) numbers; NaN is "no data", below `low` is drawn as `low`.
        seq: from 1, one higher than the frame before.
        time_s: seconds since the epoch.
        low: what the lowest colour stands for.
        high: what the highest colour stands for, and everything above.

    Raises:
        ConfigError: not a table of numbers, too long a side, or an empty scale.
    """
    values = np.asarray(values_RC, np.float64)
    if values.ndim != 2 or max(values.shape) > MAX_SIDE:
        raise ConfigError(
            f"a map's values have shape {values.shape}; rows x columns, "
            f"each at most {MAX_SIDE}, is allowed."
        )
    if not low < high:
        raise ConfigError(f"the scale's high ({high}) must be above its low ({low}).")
    nothing = np.isnan(values)
    steps = np.clip((np.where(nothing, low, values) - low) * (TOP / (high - low)), 0, TOP)
    # Only what reaches the top is drawn as the top: 3.999 of 4 must not read "4 or more".
    cells = np.where(steps < TOP, np.minimum(np.rint(steps), TOP - 1), TOP)
    cells = np.where(nothing, NO_DATA, cells).astype(np.uint8)
    return _HEAD.pack(MAGIC, seq, time_s, *values.shape, low, high, 0) + cells.tobytes()


def decode_frame(data: bytes) -> Frame:
    """Turn a frame back into its numbers.

    Raises:
        ConfigError: these bytes are not a frame.
    """
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        raise ConfigError(f"{len(data)} bytes that begin with {data[:4]!r} are not a map's frame.")
    _, seq, time_s, rows, columns, low, high, _ = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + rows * columns:
        raise ConfigError(f"a frame of {rows} x {columns} cells does not have {len(data)} bytes.")
    cells = np.frombuffer(data, np.uint8, offset=_HEAD.size).reshape(rows, columns)
    return Frame(seq, time_s, low, high, cells)


class MapFeed:
    """Sends frames no faster than the browser draws them; the newest always gets through.

    Each `offer` makes one frame and sends at most one message. While `WINDOW` frames are under way
    the newest waits, in place of an older one; it leaves with the next acknowledgement. Any thread.
    """

    def __init__(
        self, send: Callable[[bytes], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seq = 0
        """Frames offered so far: the seq of the newest."""
        self.num_sent = 0
        self._send, self._clock = send, clock
        self._lock = threading.RLock()
        self._under_way: list[int] = []
        self._waiting: tuple[int, bytes] | None = None
        self._sent_at = 0.0

    @property
    def num_skipped(self) -> int:
        """Frames that a newer one replaced before they were sent."""
        return self.seq - self.num_sent - (self._waiting is not None)

    def offer(
        self, values_RC: npt.ArrayLike, *, low: float, high: float, time_s: float | None = None
    ) -> None:
        """Make the next frame; send it now, or as soon as the browser has drawn another."""
        now_s = time.time() if time_s is None else time_s
        with self._lock:
            frame = encode_frame(values_RC, seq=self.seq + 1, time_s=now_s, low=low, high=high)
            self.seq += 1
            self._waiting = self.seq, frame
            if len(self._under_way) < WINDOW or self._clock() - self._sent_at >= PATIENCE_S:
                self._pump()

    def on_ack(self, seq: int) -> None:
        """Take the browser's word that it has drawn everything up to `seq`."""
        with self._lock:
            self._under_way = [sent for sent in self._under_way if sent > seq]
            if len(self._under_way) < WINDOW:
                self._pump()

    def _pump(self) -> None:
        if self._waiting is None:
            return
        (seq, frame), self._waiting = self._waiting, None
        self._under_way = [*self._under_way, seq][-WINDOW:]
        self._sent_at = self._clock()
        self.num_sent += 1
        self._send(frame)
