"""The component every page is made of: a skeleton of HTML and the values that fill it.

The skeleton is ours and is drawn once. Values come many times a second and are set as text and
attributes of the elements that name them, never as HTML: what a model writes stays text. Elements
keep their identity, so focus, selection, scrolling and tooltips survive an update.

    <b data-bind="tokens"></b>                  text of values["tokens"]
    <path data-bind-d="spark"></path>           attribute d of values["spark"]; null removes it
    <select data-send="domain"></select>        on change: act(name, value); inputs likewise
    <button data-send="pause"></button>         on click: act(name, its value)
    <form data-form="write"></form>             on submit: act(name, its fields)
    <button data-key="t"></button>              that key presses it
    <a data-swap="theme" href="?theme=dark">    on click: the other theme, and act("theme", name)
    <div data-keys data-child="figure"></div>   its application gets the keys nobody else takes
    <div data-child="figure"></div>             where the Panel child `figure` or `second` goes
    <div data-top="ended"></div>                changed: the page scrolls to its top
    <div class="scroll"></div>                  says so when there is more below
    <div data-size="figure"></div>              act("height", [name, CSS pixels]) when that changes
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import param
from panel.custom import AnyWidgetComponent, Child

PATIENCE_S = 0.5
"""A browser that has not drawn the last values is sent new ones after this long anyway."""
_HERE = Path(__file__).parent


class Page(AnyWidgetComponent):
    """A skeleton, its values, up to two children, and what the reader did.

    An anywidget like the maps and steppers on it: Panel runs all kinds of component of one page
    through whichever kind's loader came first.
    """

    skeleton = param.String(default="", doc="HTML, written by us and trusted.")
    values = param.Dict(default={}, doc="Name -> text, number, bool or None.")
    figure = Child(doc="The plot that goes where the skeleton says; the same as long as it lives.")
    second = Child(doc="Another one, likewise.")
    actions = param.List(default=[], doc="What the reader did last: [count, name, value] each.")
    drawn = param.Integer(default=0, doc="The highest beat the browser has drawn.")

    built = param.Integer(default=0, doc="The number of the skeleton that stands in the browser.")

    _esm = (_HERE / "page.js").read_text(encoding="utf-8")
    _stylesheets = [(_HERE / "page.css").read_text(encoding="utf-8")]

    def __init__(self, act: Callable[[str, Any], None], **params: Any) -> None:
        """Make an empty page; `act` is called with name and value of what the reader does."""
        super().__init__(**params)
        self._act = act
        self._acted = 0
        self._beat = 0
        self._sent_at = 0.0
        self._html = ""
        self._number = 0
        self._put_up_beat = 0
        self.param.watch(self._on_actions, "actions")

    @property
    def ready(self) -> bool:
        """Whether the browser has drawn the last values, or has had long enough."""
        return self.drawn >= self._beat or time.monotonic() - self._sent_at > PATIENCE_S

    def put_up(self, html: str) -> None:
        """Send another skeleton, with a number by which the browser says that it stands."""
        self._html, self._number = html, self._number + 1
        self._put_up_beat = self._beat
        self.skeleton = f"<!-- {self._number} -->{html}"

    def _on_actions(self, change: Any) -> None:
        """Pass on each action once; the list repeats some, so that none is lost in a hurry."""
        for action in change.new:
            match action:
                case [int(count), str(name), value] if count > self._acted:
                    self._acted = count
                    self._act(name, value)

    def fill(self, values: dict[str, Any]) -> None:
        """Send the next values, and the skeleton again if it did not arrive.

        A change can be lost in the moment in which a browser first shows the page. It is lost when
        the browser has drawn values that were sent after it, on an older skeleton; a browser that
        is only slow must not be made to build the page anew, under the reader's hands.
        """
        if 0 < self.built < self._number and self.drawn > self._put_up_beat:
            self.put_up(self._html)
        self._beat += 1
        self._sent_at = time.monotonic()
        self.values = {**values, "beat": self._beat}
