"""A drill in a notebook: a desk with buttons for people, the same as methods for cells.

    desk = lessons.drill("hot-expert")
    desk.start()
    desk.look()
    desk.act("rebalance", spare=1)
    desk.diagnose("hot-expert")
    desk.finish()

The drill's engine is a process of its own, which ends with the kernel, restored. Without a browser
the buttons are there and do nothing.
"""

from __future__ import annotations

import ast
import html
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from engine.errors import ConfigError, WorkbenchError
from workbench import drills
from workbench.drills import words
from workbench.drills.client import own_name
from workbench.lessons.note import Note

STATE_PREFIX = "workbench-lesson-"


class DrillDesk:
    """One drill, from its briefing to its proof."""

    def __init__(self, drill: str, seed: int | None = None) -> None:
        """Know the drill; nothing is started yet.

        Raises:
            ConfigError: there is no such drill.
        """
        self.scenario = drills.find(drill)
        self.result: dict[str, Any] = {}
        """What the drill ended with; empty before."""
        self._seed = seed
        self._drill: drills.Drill | None = None
        self._state = tempfile.TemporaryDirectory(prefix=STATE_PREFIX)
        self._said = ipywidgets.HTML()
        self._buttons: list[ipywidgets.Button] = []

    def start(self) -> Note:
        """Start the drill's engine, take the steady state, break it; say what people notice.

        Raises:
            MachineError: it could not start.
        """
        if self._drill is None:
            self._drill = drills.start(
                self.scenario.id, state=self._state.name, seed=self._seed, who=own_name()
            )
        briefing = self._running.briefing()
        options = "\n".join(f"- `{name}`: {text}" for name, text in briefing["options"].items())
        return Note(
            f"**{briefing['title']}**\n\n{briefing['description']}\n\n"
            f"*{briefing['question']}*\n\n{options}"
        )

    def look(self) -> None:
        """Print what an operator sees now: signals, load, table, policy, deployment."""
        print(words.observation_text(self._running.observe()))

    def act(self, act: str, /, **arguments: Any) -> None:
        """Change something, as an operator would, and print what was done."""
        print(self._running.act(act, **arguments)["said"])

    def hint(self) -> None:
        """Print the next clue."""
        print(words.clue_text(self._running.hint()))

    def diagnose(self, option: str) -> None:
        """Name the cause; the last one named counts."""
        print(f"noted: {self._running.diagnose(option)['text']}")

    def check(self) -> None:
        """Run the checks and print how each came out."""
        print(words.verdicts_text(self._running.check()["checks"].values()))

    def finish(self) -> None:
        """Hand in: print points, solution and the proof that all is as it was."""
        if not self.result:
            running = self._running
            self.result = dict(running.finish())
            running.close()
            self._drill = None
        print(words.result_text(self.result))

    def panel(self) -> ipywidgets.Widget:
        """Return the desk: a button for each thing to do, and what it said."""
        options = {text: name for name, text in self.scenario.options.items()}
        cause = ipywidgets.Dropdown(options=options, layout={"width": "60%"})
        act = ipywidgets.Dropdown(options=_offered(self.scenario.id))
        values, does = ipywidgets.Text(), ipywidgets.HTML()

        def explain(_: object = None) -> None:
            said, values.placeholder = usage(act.value)
            does.value = html.escape(said)

        act.observe(explain, "value")
        explain()
        row = ipywidgets.HBox
        return ipywidgets.VBox(
            [
                row([self._button("Look", self.look), self._button("Clue", self.hint)]),
                row([cause, self._button("Name it", lambda: self.diagnose(cause.value))]),
                row(
                    [
                        act,
                        values,
                        self._button(
                            "Do it", lambda: self.act(act.value, **arguments_of(values.value))
                        ),
                    ]
                ),
                does,
                row([self._button("Check", self.check), self._button("Finish", self.finish)]),
                self._said,
            ]
        )

    @property
    def _running(self) -> drills.Drill:
        if self._drill is None:
            word = "has ended" if self.result else "has not been started"
            raise ConfigError(f"the drill {word}; run the cell with desk.start() for a new one.")
        return self._drill

    def _button(self, label: str, work: Callable[[], None]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=label)
        self._buttons.append(button)

        def clicked(_: object) -> None:
            self._said.value = f"<pre>{label} …</pre>"
            self._busy(True)  # another click would only wait, and then act again
            try:
                self._say(work)
            finally:
                self._busy(False)

        button.on_click(clicked)
        return button

    def _busy(self, busy: bool) -> None:
        for button in self._buttons:
            button.disabled = busy

    def _say(self, work: Callable[[], None]) -> None:
        """Do something and show what it prints; a refusal is shown too."""
        import contextlib
        import io

        heard = io.StringIO()
        try:
            with contextlib.redirect_stdout(heard):
                work()
        except WorkbenchError as refused:
            heard.write(str(refused))
        self._said.value = f"<pre>{html.escape(heard.getvalue())}</pre>"


def drill(name: str, *, seed: int | None = None) -> DrillDesk:
    """Return the desk of a drill.

    Raises:
        ConfigError: there is no such drill.
    """
    return DrillDesk(name, seed)


def drill_reference(levels: Sequence[int] = (1, 2, 3)) -> Note:
    """Return the quick reference of all drills of these levels."""
    from workbench.drills.reference import table

    return Note(table(levels))


def arguments_of(text: str) -> Mapping[str, Any]:
    """Read ``bonus=1.2, experts=[0, 7]`` as arguments; what is no Python value is a text.

    Raises:
        ConfigError: it is not of that form.
    """
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError:
        raise ConfigError(f"arguments ({text!r}) must be like bonus=1.2, layer=0.") from None
    assert isinstance(call, ast.Call)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ConfigError(f"arguments ({text!r}) must each have a name, like bonus=1.2.")
    return {str(each.arg): _value(each.value) for each in call.keywords}


def usage(act: str) -> tuple[str, str]:
    """Return what an act does, and its arguments as one types them.

    `replicate` takes `layer=…, expert=…, spare=1`; what has a value may be left out.
    """
    from workbench.drills.acts import ACTS

    parameters = list(inspect.signature(ACTS[act]).parameters.values())[2:]
    wanted = [
        f"{each.name}={'…' if each.default is each.empty else each.default}" for each in parameters
    ]
    does = (inspect.getdoc(ACTS[act]) or "").partition("\n")[0]
    return does.replace("`", ""), ", ".join(wanted) or "takes nothing"


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _offered(name: str) -> list[str]:
    from workbench.drills.acts import offered

    return offered(drills.find(name))


__all__ = ["DrillDesk", "arguments_of", "drill", "drill_reference", "usage"]
