"""One reader's visit to one page: what all pages do alike.

A page fills in `layout`, `parts`, `draw`, `values` and `on_action`; this looks for news, keeps
within what the browser can draw, asks the engine's process without blocking the page, and says how
that went. Everything here runs in the page's document.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import jinja2
import panel as pn

from dashboards import audience, readings
from dashboards.page import Page
from dashboards.source import ENDED, Snapshot, Source
from engine.errors import WorkbenchError
from workbench.theme import STATES, THEMES

FRAME_MS = 60
"""How often a session looks for a new frame for its plots: a little oftener than frames come."""
TICK_MS = 200
"""How often its numbers change. Those that change faster cannot be read."""
BEAT_S = 1.0
"""A page that has nothing new is told that it is alive this often."""

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "pages"), autoescape=True
)
T = TypeVar("T")


class Session:
    """One session of a page: its component, and what it showed last."""

    title = ""
    """The page's word in the list of pages."""
    template = ""

    def __init__(
        self, source: Source, theme: str, chosen: Mapping[str, str], frame_of: Mapping[str, Any]
    ) -> None:
        self.source = source
        self.theme = theme
        self.chosen = chosen
        self.notice = ""
        """How the last thing asked went, where that needs a sentence."""
        self._frame_of = frame_of
        self._drawn_news: tuple[Any, ...] | None = None
        self._ticked_at = 0.0
        self._shown: tuple[Any, ...] | None = None
        self._shown_at = 0.0
        self._layout: tuple[Any, ...] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._holds_back = False
        children = self.setup()
        self.page = Page(self.act, sizing_mode="stretch_width", **children)
        self.tick(anyway=True)
        self._holds_back = pn.state.curdoc is not None
        """Whether a browser is awaited; before it shows the page, what children get may be lost."""

    # ---- what a page fills in

    def setup(self) -> dict[str, Any]:
        """Read `chosen`, make what is made once; return the page's children."""
        return {}

    def layout(self, snapshot: Snapshot) -> Hashable:
        """Return what the skeleton depends on; it is made anew only when that changes."""

    def parts(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what the skeleton is made of."""
        return {}

    def news(self, snapshot: Snapshot) -> tuple[Any, ...]:
        """Return what a change of makes it worth drawing again."""
        return (snapshot.frame.seq if snapshot.frame else -1, snapshot.state, self.notice)

    def draw(self, snapshot: Snapshot) -> None:
        """Bring the children up to date."""

    def values(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return everything the skeleton asks for, beside the head."""
        return {}

    def on_action(self, name: str, value: Any) -> None:
        """Do what the reader asks for; what the page does not offer is ignored."""

    def on_height(self, name: str, height: int) -> None:
        """Take the height of a plot's place, in CSS pixels."""

    # ---- what all do

    def beat(self) -> None:
        """Bring the plots up to date, and when it is time for it everything else."""
        now = time.monotonic()
        if now - self._ticked_at >= TICK_MS / 1000:
            self._ticked_at = now
            self.tick()
        self._draw(self.source.snapshot())

    def tick(self, *, anyway: bool = False) -> None:
        """Show what is new, unless the browser is still busy with the last."""
        if not anyway and not self.page.ready:
            return
        snapshot = self.source.snapshot()
        news = self.news(snapshot)
        if not anyway and news == self._shown and time.monotonic() - self._shown_at < BEAT_S:
            return
        self._shown, self._shown_at = news, time.monotonic()
        self._draw(snapshot, anyway=anyway)
        self._fit(snapshot)
        self.page.fill({**head(snapshot, self.notice), **self.values(snapshot)})

    def _draw(self, snapshot: Snapshot, *, anyway: bool = False) -> None:
        """Draw each frame once; plots know by themselves what the browser can take."""
        if self._holds_back and not self.page.drawn:
            return
        news = self.news(snapshot)
        if anyway or news != self._drawn_news:
            self._drawn_news = news
            self.draw(snapshot)

    def act(self, name: str, value: Any) -> None:
        """Take what the reader did."""
        if name == "height":
            match value:
                case [str(place), int(height)] if 0 < height < 10_000:
                    self.on_height(place, height)
        elif name == "theme" and value in THEMES:
            self.theme = value
            for child in (self.page.figure, self.page.second):
                if child is not None:
                    child.theme = value
        elif name == "pause":
            self.ask("traffic", paused=value == "pause")
            return
        else:
            self.on_action(name, value)
        self.tick(anyway=True)

    def ask(self, action: str, **detail: Any) -> None:
        """Send a control message in the background; a refusal becomes the notice."""
        self.later(lambda: self.source.control(action, **detail), lambda answer: None)

    def later(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work` on another thread and `then` here; a refusal becomes the notice.

        `after` runs here in the end, however the work went.
        """

        async def run(result: Awaitable[T]) -> None:
            try:
                then(await result)
                self.notice = ""
            except WorkbenchError as refusal:
                self.notice = str(refusal)
            finally:
                after()

        task = asyncio.get_running_loop().create_task(run(asyncio.to_thread(work)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fit(self, snapshot: Snapshot) -> None:
        """Make the skeleton anew when what it depends on has changed."""
        layout = (self.layout(snapshot),)
        if layout != self._layout:
            self._layout = layout
            html = _TEMPLATES.get_template(self.template).render(
                **self._frame_of, title=self.title, **self.parts(snapshot)
            )
            self.page.put_up(html)


class Fetched(Generic[T]):
    """Something read from the source on another thread, every so often while a page is open."""

    def __init__(self, session: Session, read: Callable[[], T], every_s: float) -> None:
        self.value: T | None = None
        self.count = 0
        """How often it was read."""
        self.failure = ""
        """Why the last attempt gave nothing."""
        self._session, self._read, self._every_s = session, read, every_s
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None

    def refresh(self, *, now: bool = False) -> None:
        """Begin to read again if it is time; returns at once."""
        if self._task is not None or not (now or time.monotonic() >= self._due):
            return
        self._due = time.monotonic() + self._every_s
        try:
            self._task = asyncio.get_running_loop().create_task(self._run())
        except RuntimeError:  # no server around it, as in a test: read here
            self._take(self._read)

    async def _run(self) -> None:
        try:
            await asyncio.to_thread(self._take, self._read)
        finally:
            self._task = None
            self._due = time.monotonic() + self._every_s

    def _take(self, read: Callable[[], T]) -> None:
        try:
            self.value, self.failure = read(), ""
            self.count += 1
        except WorkbenchError as refusal:
            self.failure = str(refusal)


def builder(
    kind: type[Session],
) -> Callable[[Source, str, Mapping[str, str], Mapping[str, Any]], Page]:
    """Return what builds the page for one session and starts its tick."""

    def build(
        source: Source, theme: str, chosen: Mapping[str, str], frame_of: Mapping[str, Any]
    ) -> Page:
        session = kind(source, theme, chosen, frame_of)
        # Bokeh's own: Panel's tells every page twice a beat that it is busy, which costs more
        # than the beat.
        pn.state.curdoc.add_periodic_callback(session.beat, FRAME_MS)
        return session.page

    return build


def head(snapshot: Snapshot, notice: str) -> dict[str, Any]:
    """Return what the head of every page says."""
    look = STATES[snapshot.state]
    facts = snapshot.frame.meta["facts"] if snapshot.frame else {}
    looking = (snapshot.frame.meta["looking"] if snapshot.frame else None) or {}
    paused = bool(facts.get("paused"))
    return {
        "status": look.word,
        "status_symbol": look.symbol,
        "status_class": f"status tone-{look.tone}",
        "engine": readings.engine_line(snapshot.frame),
        "reason": notice or snapshot.reason,
        "pause": "resume" if paused else "pause",
        "pause_word": facts.get("resume_word", "Resume traffic")
        if paused
        else facts.get("pause_word", "Pause traffic"),
        "no_pause": "paused" not in facts or snapshot.state in ENDED,
        "cost": readings.percent(looking.get("thread_share")),
        "readers": looking.get("viewers", 0),
        "open_pages": audience.open_pages(),
        "lost_events": looking.get("events_dropped", 0),
    }
