"""One module for two hosts: what both need is there, and neither is imported before it is used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.widgets.examples import PartTokens, long_request
from workbench import theme as themes
from workbench.widgets import live_map, show_load, show_steps, show_tokens, token_stepper
from workbench.widgets.module import script, styles

WIDGETS = ("live_map", "token_stepper")


def test_importing_the_widgets_needs_neither_host():
    code = (
        "import sys, workbench.widgets;"
        "print([n for n in ('anywidget', 'panel', 'bokeh', 'torch', 'ipywidgets')"
        " if n in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("widget", WIDGETS)
def test_a_module_is_one_file_that_asks_for_nothing(widget):
    text = script(widget)
    assert text.count("export default") == 1 and text.rstrip().endswith(
        "export default { render };"
    )
    assert not re.search(r"^\s*import\b|\bimport\(|https?://|fetch\(|innerHTML|eval\(", text, re.M)
    assert not re.search(r"url\(|@import|https?://", styles(widget))


@pytest.mark.parametrize("module", [live_map, token_stepper])
def test_both_hosts_have_the_properties_the_module_reads(module):
    name = module.__name__.rsplit(".", 1)[1]
    read = set(re.findall(r'model\.get\("(\w+)"\)', script(name)))
    kept = set(re.findall(r"listen\.model\(\[([^\]]*)\]", script(name)))
    followed = {word for words in kept for word in re.findall(r"\w+", words)}
    properties = read | followed
    assert properties == set(module.PROPS)
    assert properties <= set(module.in_notebook().class_trait_names(sync=True))
    assert properties <= set(module.on_page().param)


def test_a_colour_means_the_same_as_on_the_dashboard():
    for widget in WIDGETS:
        light, dark = styles(widget).split('.trw[data-theme="dark"]', 1)
        for theme, css in (("light", light), ("dark", dark)):
            assert themes.css_variables(theme) in css
        named = set(re.findall(r"#[0-9a-fA-F]{3,6}\b", styles(widget)))
        assert named <= set(re.findall(r"#\w+", "".join(map(themes.css_variables, themes.THEMES))))


def test_one_call_from_a_trace_to_a_widget():
    trace = long_request()
    loads = show_load(trace)
    assert json.loads(loads.spec)["rows"] == ["0", "1", "2", "3"] and loads.feed.num_sent == 1
    tokens = show_tokens(trace, layer=1, tokenizer=PartTokens())
    assert json.loads(tokens.spec)["rows"][1] == "1 Der"
    stepper = show_steps(trace, tokenizer=PartTokens())
    assert stepper.token == 2, "it begins at the token that was recorded in full"
    assert json.loads(stepper.state)["tokens"][2]["text"] == "·R"


def test_loading_another_request_begins_at_its_full_record():
    stepper = show_steps(long_request())
    stepper.token, stepper.layer, stepper.stage = 9, 3, "combine"
    stepper.load(json.loads(show_steps(long_request(full=5)).state))
    assert (stepper.token, stepper.layer, stepper.stage) == (5, 0, "gate")


def test_the_modules_lie_beside_the_code():
    folder = Path(live_map.__file__).parent
    assert {path.name for path in folder.glob("*.js")} == {
        "host.js", "live_map.js", "token_stepper.js"
    }  # fmt: skip
