"""Formats by unit in a running engine: what may change, and that nothing else does, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.manifest import fingerprint
from engine.errors import ConfigError, RoutingError
from engine.events import ControlEvent, StepEvent
from engine.faults import POINTS
from engine.kernels.quant import INT8
from engine.routing.precision import CLASSES, Check, LayerThresholds, Thresholds, read_code
from tests.runtime.conftest import DRAFT, MODEL, Listener
from workbench.tally import Tally

TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. def read(self, path): return 12 * 7 + 3"
)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
MIXED = LayerThresholds(full_classes=("letters", "punctuation"))
WHITE = LayerThresholds(whitelist=True)


def limits(*layers, **options):
    options = {"unit_rows": 8, "sample_units": 0} | options
    return Thresholds(weights_sha256=fingerprint(MODEL), layers=layers, **options)


@cache
def stored(folder):
    path = folder / "precision.json"
    limits(*[LayerThresholds()] * 4).save(path)
    return path


@pytest.fixture(scope="module")
def listener():
    return Listener()


@pytest.fixture(scope="module")
def engine(tmp_path_factory, listener):
    """One engine that holds both formats; each test says what is in force."""
    config = EngineConfig(
        model=MODEL, dtype="bfloat16", precision="auto", num_blocks=64, num_threads=1,
        measure_kernels=False,  # or engines may differ in what multiplies
        precision_file=stored(tmp_path_factory.mktemp("limits")),
    )  # fmt: skip
    return Engine(config, sink=listener)


@pytest.fixture(scope="module")
def alike():
    """Engines that hold one format each."""
    return {
        name: Engine(
            EngineConfig(
                model=MODEL,
                dtype="bfloat16",
                precision=name,
                num_blocks=64,
                num_threads=1,
                measure_kernels=False,
            )
        )
        for name in ("model", "int8")
    }


def steps_of(engine, listener, *, text=TEXT, params=PARAMS, watch=()):
    listener.events.clear()
    (done,) = engine.finish([engine.add(text, params, watch=watch)])
    return done, listener.of(StepEvent)


class Seen:
    """What goes into the experts of each layer and comes out of the layer, by hooks."""

    def __init__(self, engine):
        self.engine, self.out, self.rows, self.layers = engine, [], [], []

    def __enter__(self):
        self.hooks = []
        for layer in self.engine.transformer.layers:
            self.hooks.append(
                layer.moe.experts.register_forward_hook(
                    lambda m, args, out: (
                        self.rows.append(args[0].clone()), self.out.append(out.clone())
                    )[:0] or None
                )
            )  # fmt: skip
            self.hooks.append(
                layer.register_forward_hook(
                    lambda m, args, out: self.layers.append(out.clone()) and None
                )
            )
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def test_with_one_format_in_force_logits_are_those_of_an_engine_that_has_no_other(engine, alike):
    wanted = {name: other.logits(TEXT) for name, other in alike.items()}
    assert not np.array_equal(wanted["model"], wanted["int8"])
    for mode in ("model", "int8"):
        engine.control.set_precision(mode)
        assert np.array_equal(engine.logits(TEXT), wanted[mode]), mode
    engine.control.set_precision("auto", limits(*[WHITE] * 4))
    assert np.array_equal(engine.logits(TEXT), wanted["model"]), "all on the whitelist"
    engine.control.set_precision("auto", limits(*[LayerThresholds()] * 4))
    assert np.array_equal(engine.logits(TEXT), wanted["int8"]), "everything suits"
    engine.control.set_precision("auto", limits(*[MIXED] * 4))
    mixed = engine.logits(TEXT)
    assert not any(np.array_equal(mixed, one) for one in wanted.values())


APART = [LayerThresholds(full_classes=(name,)) for name in CLASSES[2:6]]
LATER = LayerThresholds(min_margin=0.3, max_range=6.0, min_position=9)


@pytest.mark.parametrize("unit", ["expert", "sequence"])
@pytest.mark.parametrize("layers", [APART, [LayerThresholds(), LATER, WHITE, LATER]])
def test_predicting_ahead_decides_the_same_bit_for_bit(engine, listener, unit, layers):
    layers = [replace(one, check=Check(max_range=7.0)) for one in layers]
    found = {}
    for ahead in (True, False, True):
        engine.predict_ahead(ahead)
        engine.control.set_precision("auto", limits(*layers, unit=unit))
        done, steps = steps_of(engine, listener)
        formats = [step.formats for step in steps]
        units = [[replace(event) for event in step.units] for step in steps]
        found.setdefault(ahead, []).append((done.token_ids, formats, units, engine.logits(TEXT)))
    both = {int(code) & 15 for code in np.unique(found[True][0][1][0])}
    assert both == {0, 1}, "both formats"
    for other in (found[False][0], found[True][1]):
        assert found[True][0][0] == other[0] and found[True][0][2] == other[2]
        assert all(map(np.array_equal, found[True][0][1], other[1]))
        assert np.array_equal(found[True][0][3], other[3])


@pytest.mark.parametrize("unit", ["expert", "sequence"])
@pytest.mark.parametrize("mixed_at", [1, 3])
def test_only_int8_units_of_layers_off_the_whitelist_change(engine, unit, mixed_at):
    """What may change: rows of INT8 units in the mixed layer, and what is computed from them."""
    engine.control.set_precision("model")
    with Seen(engine) as full:
        engine.logits(TEXT)
    layers = [MIXED if at == mixed_at else WHITE for at in range(4)]
    engine.control.set_precision("auto", limits(*layers, unit=unit))
    formats = []
    moe = engine.transformer.layers[mixed_at].moe
    hook = moe.experts.register_forward_pre_hook(lambda m, args: formats.append(args[2]))
    with Seen(engine) as mixed:
        engine.logits(TEXT)
    hook.remove()
    for at in range(mixed_at):
        assert torch.equal(full.layers[at], mixed.layers[at])
    assert torch.equal(full.rows[mixed_at], mixed.rows[mixed_at])
    (formats_R,) = formats
    is_int8 = formats_R == INT8
    assert 0.1 < is_int8.float().mean() < 0.95
    differs = (full.out[mixed_at] != mixed.out[mixed_at]).any(dim=1)
    assert not differs[~is_int8].any(), "rows in the engine's own format are equal bit for bit"
    assert differs[is_int8].float().mean() > 0.9, "and those in INT8 are not, so it would be seen"
    assert not torch.equal(full.layers[mixed_at], mixed.layers[mixed_at])


def test_a_wrong_prediction_runs_its_unit_again_and_only_that(engine, listener):
    """The last layer alone is mixed, so that what goes into it is the same in all three runs."""
    layers = [WHITE] * 3
    engine.control.set_precision("auto", limits(*layers, LayerThresholds()))
    with Seen(engine) as calm:
        _, steps = steps_of(engine, listener, params=SamplingParams(max_tokens=0))
    engine.control.set_precision("model")
    with Seen(engine) as full:
        engine.logits(TEXT)
    rows = full.rows[3]
    ranges = rows.float().abs().amax(1)
    bound = float(ranges.quantile(0.97))
    strict = LayerThresholds(check=Check(max_range=bound))
    engine.control.set_precision("auto", limits(*layers, strict))
    ran = []
    experts = engine.transformer.layers[3].moe.experts
    hook = experts.register_forward_pre_hook(lambda m, args: ran.append(args[2].clone()))
    tally = Tally()
    with Seen(engine) as checked:
        done, steps = steps_of(engine, listener, params=SamplingParams(max_tokens=0))
    hook.remove()
    (step,) = steps
    last = step.units[3]
    first, again = ran
    rerun = again == 0
    assert 0 < int(rerun.sum()) == last.rerun_rows < last.rows
    assert set(again.tolist()) == {0, -1} and (first == INT8).all()
    assert bool(rerun[ranges > bound].all()), "every row beyond the bound is in a unit run again"
    assert last.failed_units < last.units and last.int8_rows == last.rows - last.rerun_rows
    assert torch.equal(checked.out[3][~rerun], calm.out[3][~rerun]), "the others are as they were"
    repaired = checked.out[4]
    assert torch.equal(repaired[rerun], full.out[3][rerun]), "and these as in full precision"
    tally.emit(step)
    assert tally.extra_rows == done.extra_rows == {"precision": last.rerun_rows}
    assert done.rows == len(done.prompt_token_ids), "accepted rows count once"


def test_running_everything_again_gives_full_precision_and_is_counted(engine, alike, listener):
    engine.control.set_precision("auto", limits(*[LayerThresholds()] * 4))
    engine.control.inject("precision.check", lambda failed: np.ones_like(failed), lease_s=60)
    try:
        assert np.array_equal(engine.logits(TEXT), alike["model"].logits(TEXT))
        done, steps = steps_of(engine, listener)
    finally:
        engine.control.clear("precision.check")
    assert done.extra_rows["precision"] == sum(step.num_rows for step in steps) * 4 * 2
    calm, _ = steps_of(engine, listener)
    assert not calm.extra_rows


def test_a_stale_prediction_and_flapping_show_in_the_steps_counts(engine, listener):
    engine.control.set_precision("auto", limits(*[MIXED] * 4))
    _, calm = steps_of(engine, listener)
    engine.control.inject(
        "precision.vote", lambda f: np.resize(np.array([0, 1], np.int8), len(f)), lease_s=60
    )
    _, flapping = steps_of(engine, listener)
    engine.control.clear("precision.vote")
    engine.control.inject("precision.predict", lambda suits: ~suits, lease_s=60)
    _, stale = steps_of(engine, listener)
    engine.control.clear("precision.predict")
    first = [steps[0].units[2] for steps in (calm, flapping, stale)]
    assert first[1].switches > 3 * first[0].switches
    assert first[1].switches == first[1].rows - 1
    assert first[2].int8_units != first[0].int8_units
    assert {point for point in POINTS if point.startswith("precision.")} == {
        *("precision.predict", "precision.vote", "precision.check")
    }


def test_each_row_says_its_format_and_why(engine, listener):
    engine.control.set_precision("auto", limits(WHITE, MIXED, MIXED, MIXED, unit="sequence"))
    _, steps = steps_of(engine, listener, watch=[3, 20])
    step = steps[0]
    assert step.formats.shape == step.topk_ids.shape
    told = {read_code(code) for code in step.formats[:, 0].ravel().tolist()}
    assert told == {(False, "the layer is on the whitelist")}
    for layer, unit in enumerate(step.units):
        codes = [read_code(code) for code in step.formats[:, layer].ravel().tolist()]
        assert sum(is_int8 for is_int8, _ in codes) == unit.int8_rows
    decisions = step.decisions
    assert {d.position for d in decisions} == {3, 20} and len(decisions) == 8
    for decision in decisions:
        is_int8, reason = read_code(int(step.formats[decision.position, decision.layer, 0]))
        assert decision.format == ("int8" if is_int8 else "bfloat16")
        assert decision.format_reason == reason
        assert decision.unit == (decision.position // 8 if decision.layer else 0)
    assert sum(step.stage_ms["format"] for step in steps) > 0
    engine.control.set_precision("model")
    _, steps = steps_of(engine, listener)
    assert all(step.formats.size == 0 and step.units == () for step in steps)
    assert all(step.stage_ms["format"] == 0 for step in steps)


def test_an_operator_switches_between_steps_and_it_is_an_event(engine, listener):
    engine.control.set_precision("auto", limits(*[MIXED] * 4))
    listener.events.clear()
    request = engine.add(TEXT, PARAMS)
    engine.step()
    engine.control.set_precision("int8")
    engine.step()
    engine.control.set_precision("model")
    engine.finish([request])
    said = [event for event in listener.of(ControlEvent) if event.action == "set_precision"]
    assert [event.detail["mode"] for event in said] == ["int8", "model"]
    shares = [
        [unit.int8_rows / unit.rows for unit in step.units] for step in listener.of(StepEvent)
    ]
    assert 0 < min(shares[0]) and max(shares[0]) < 1
    assert shares[1] == [1.0] * 4 and not any(shares[2:])
    assert engine.control.state()["precision"] == "model"
    engine.control.set_precision("auto")
    assert "units of 8 rows of an expert" in engine.control.state()["precision"]
    engine.control.ban_expert(None, 3)
    engine.control.clear_policy()
    assert engine.control.policy.precision.mode == "auto", "bans end, formats stay"


def test_what_cannot_be_is_refused_in_one_sentence(engine, alike, tmp_path):
    with pytest.raises(ConfigError, match="must be one of model, int8, auto"):
        engine.control.set_precision("int4")
    with pytest.raises(RoutingError, match="4 MoE layers"):
        engine.control.set_precision("auto", limits(MIXED))
    with pytest.raises(RoutingError, match="open it with precision auto"):
        alike["model"].control.set_precision("int8")
    common = {"model": MODEL, "precision": "auto"}
    for options, words in (
        ({"deterministic": True}, "a unit's vote depends on the rows beside it"),
        ({"num_ranks": 2}, "formats do not yet travel"),
        ({"precision": "model", "precision_file": "x"}, "has no effect"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            EngineConfig(**common | options)
        assert str(refused.value).count(".") <= 2 and "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="is missing"):
        Engine(EngineConfig(**common, precision_file=tmp_path / "none.json", num_blocks=8))
    other = replace(limits(*[MIXED] * 4), weights_sha256="0" * 64)
    other.save(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="made for other weights"):
        Engine(EngineConfig(**common, precision_file=tmp_path / "other.json", num_blocks=8))
    with pytest.raises(ConfigError, match="has no experts"):
        Engine(EngineConfig(model=DRAFT, precision="auto", num_blocks=8))


def test_the_gate_stays_in_fp32_whatever_is_chosen(engine):
    for layer in engine.transformer.layers:
        assert layer.moe.gate.weight.dtype == torch.float32
        assert layer.moe.gate.logits(torch.ones(2, 256, dtype=torch.bfloat16)).dtype == (
            torch.float32
        )
