"""One widget for two hosts: its properties stated once, its methods written once.

A widget is a table of properties, a browser module and a class of methods. `notebook_class` makes
an anywidget of it and `panel_class` a Panel component; in both, `listen` calls back on what the
browser has changed, and `put` changes several properties as one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workbench.widgets.module import script, styles


class Prop(NamedTuple):
    """One property that Python and the browser share."""

    default: bytes | str | int
    """Its kind goes by this."""
    doc: str
    options: tuple[str, ...] = ()
    """The values that are allowed; none allows all of the kind."""


class Hosted:
    """What a class of methods finds in either host."""

    def listen(self, name: str, call: Callable[[Any], object]) -> None:
        """Call with the new value whenever the property changes."""
        raise NotImplementedError

    def put(self, **values: Any) -> None:
        """Change several properties as one."""
        raise NotImplementedError


def notebook_class(methods: type, widget: str, props: Mapping[str, Prop]) -> Any:
    """Return an anywidget's class.

    Args:
        methods: a class over `Hosted`; its `__init__` passes the first values on.
        widget: name of the browser module.
        props: the properties by name.

    Raises:
        ImportError: anywidget is not installed.
    """
    import anywidget
    import traitlets

    kinds = {bytes: traitlets.Bytes, str: traitlets.Unicode, int: traitlets.Int}

    class Notebook(anywidget.AnyWidget, Hosted):
        def listen(self, name: str, call: Callable[[Any], object]) -> None:
            self.observe(lambda change: call(change["new"]), name)

        def put(self, **values: Any) -> None:
            with self.hold_sync():
                for name, value in values.items():
                    setattr(self, name, value)

    def trait(prop: Prop) -> Any:
        made = (
            traitlets.Enum(prop.options, prop.default, help=prop.doc)
            if prop.options
            else kinds[type(prop.default)](prop.default, help=prop.doc)
        )
        return made.tag(sync=True)

    traits = {name: trait(prop) for name, prop in props.items()}
    front = {"_esm": script(widget), "_css": styles(widget)}
    return _made(methods, Notebook, {**front, **traits})


def panel_class(methods: type, widget: str, props: Mapping[str, Prop]) -> Any:
    """Return a Panel component's class; takes what `notebook_class` takes.

    Raises:
        ImportError: panel is not installed.
    """
    import param
    from panel.custom import AnyWidgetComponent

    kinds = {bytes: param.Bytes, str: param.String, int: param.Integer}

    class Pane(AnyWidgetComponent, Hosted):
        _esm = "export default { render() {} };"

        def __init__(self, **params: Any) -> None:
            super().__init__(**{"sizing_mode": "stretch_width", "margin": 0, **params})  # type: ignore[no-untyped-call]

        def listen(self, name: str, call: Callable[[Any], object]) -> None:
            self.param.watch(lambda change: call(change.new), name)

        def put(self, **values: Any) -> None:
            self.param.update(**values)

    def parameter(prop: Prop) -> Any:
        if prop.options:
            return param.Selector(default=prop.default, objects=list(prop.options), doc=prop.doc)
        return kinds[type(prop.default)](default=prop.default, doc=prop.doc)

    params = {name: parameter(prop) for name, prop in props.items()}
    front = {"_esm": script(widget), "_stylesheets": [styles(widget)]}
    return _made(methods, Pane, {**front, **params})


def _made(methods: type, host: type, members: dict[str, Any]) -> Any:
    body = {"__module__": methods.__module__, "__doc__": methods.__doc__, **members}
    return types.new_class(
        methods.__name__, (methods, host), exec_body=lambda own: own.update(body)
    )
