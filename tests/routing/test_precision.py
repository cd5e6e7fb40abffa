"""Number formats by unit: the file that is refused, the vote, the prediction, what runs again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.faults import Faults
from engine.kernels.permute import permute
from engine.kernels.quant import INT8, NATIVE, SKIP
from engine.routing.precision import (
    CLASSES,
    Check,
    LayerThresholds,
    Precision,
    PrecisionRouter,
    Thresholds,
    classes_of,
    read_code,
)
from engine.routing.precision.features import margins_of, ranges_of
from engine.routing.precision.predictor import Predictor
from engine.routing.precision.units import (
    expert_sizes,
    sequence_units,
    vote,
    vote_in_order,
)

SHA = "a" * 64


def thresholds(*layers, **options):
    return Thresholds(weights_sha256=SHA, layers=layers, **options)


def load(path, num_layers=1):
    return Thresholds.load(path, weights_sha256=SHA, num_layers=num_layers)


def test_the_file_comes_back_as_it_was_stored(tmp_path):
    wanted = thresholds(
        LayerThresholds(whitelist=True, why="far off"),
        LayerThresholds(min_position=2, full_classes=("digits",), min_margin=0.25, max_range=3.5,
                        check=Check(max_range=9.0, max_error=0.1)),
        unit="sequence", unit_rows=8, sample_units=3,
    )  # fmt: skip
    wanted.save(tmp_path / "p.json", {"tokens": 5})
    assert load(tmp_path / "p.json", 2) == wanted


GOOD = {"format": 1, "weights_sha256": SHA, "unit": "expert", "unit_rows": 16, "layers": [{}]}
BAD = {
    "no json": ("{", "damaged"),
    "no object": ("[1]", "no JSON object"),
    "another format": ({"format": 9}, "its format is 9"),
    "an unknown key": ({"unit_row": 4}, "unknown key 'unit_row'; did you mean 'unit_rows'"),
    "an unknown key in a layer": ({"layers": [{"max_rang": 1}]}, "did you mean 'max_range'"),
    "an unknown kind": ({"unit": "token"}, "unit \\('token'\\) must be one of sequence, expert"),
    "units of no rows": ({"unit_rows": 0}, "unit_rows \\(0\\) must be a whole number"),
    "units of half rows": ({"unit_rows": 8.5}, "unit_rows \\(8.5\\)"),
    "units of too many rows": ({"unit_rows": 257}, "1 to 256"),
    "a yes for a number": ({"sample_units": True}, "sample_units \\(True\\)"),
    "a limit that is none": ({"layers": [{"max_range": "5"}]}, "max_range \\('5'\\)"),
    "a limit that is no number": ('{"format": 1, "weights_sha256": "", "layers": '
                                  '[{"min_margin": NaN}]}', "min_margin \\(nan\\)"),
    "an unknown class": ({"layers": [{"full_classes": ["digit"]}]}, "did you mean 'digits'"),
    "a limit beyond all numbers": ({"layers": [{"max_range": 10**400}]}, "max_range \\(1000"),
    "a position before all": ({"layers": [{"min_position": -1}]}, "min_position \\(-1\\) must lie"),
    "a position beyond all": ({"layers": [{"min_position": 1 << 31}]}, "position \\(2147483648"),
    "a file without end": (" " * (1 << 20) + "{}", "longer than 1048576 bytes"),
    "a word for a position": ({"layers": [{"min_position": "0"}]}, "min_position"),
    "a number for yes": ({"layers": [{"whitelist": 1}]}, "whitelist \\(1\\) must be true or false"),
    "a number for a reason": ({"layers": [{"why": 5}]}, "why \\(5\\) must be a text"),
    "layers that are no list": ({"layers": 3}, "'layers' must be a list"),
    "a check that is none": ({"layers": [{"check": 3}]}, "'check' must be an object"),
    "another model": ({"weights_sha256": "b" * 64}, "made for other weights"),
    "other layers": ({"layers": [{}, {}]}, "2 MoE layers"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_not_right_is_refused_in_one_sentence(tmp_path, what):
    content, words = BAD[what]
    text = content if isinstance(content, str) else json.dumps(GOOD | content)
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load(tmp_path / "p.json")
    assert "precision calibrate" in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_missing_says_how_to_make_it(tmp_path):
    with pytest.raises(ConfigError, match=r"is missing.*precision calibrate"):
        load(tmp_path / "none.json")


def test_what_is_no_plain_file_is_neither_read_nor_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="it is no plain file"):
            load(place)
    for place in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ConfigError, match="cannot write .*no plain file"):
            thresholds(LayerThresholds()).save(place)


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_whoever_is_interrupted_while_storing_leaves_the_old_file(tmp_path, monkeypatch, moment):
    file = tmp_path / "p.json"
    thresholds(LayerThresholds()).save(file)
    before = file.read_bytes()

    def interrupted(*_):
        assert file.read_bytes() == before
        raise KeyboardInterrupt

    target, name = {"write": (os, "fsync"), "replace": (Path, "replace")}[moment]
    monkeypatch.setattr(target, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        thresholds(LayerThresholds(why="other")).save(file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_features_are_those_of_the_docstrings():
    texts = [b"", b"  ", b"),", b"12", b"ing", b" the", b"\xe4"]
    assert classes_of(texts).tolist() == list(range(len(CLASSES)))
    assert margins_of(torch.tensor([[3.0, 1, 2, 0]]), 2).tolist() == [1]
    assert margins_of(torch.zeros(2, 2), 2).tolist() == [np.inf, np.inf]
    assert np.isnan(margins_of(torch.tensor([[torch.nan, 1, 2, 0]]), 2)).all()
    assert ranges_of(torch.tensor([[1.0, -3.0], [0, 0]])).tolist() == [3, 0]
    assert len(ranges_of(torch.zeros(0, 4))) == 0


def test_units_are_cut_as_the_docstrings_say():
    requests, positions = np.array([7, 7, 7, 9]), np.array([2, 3, 4, 0])
    unit_T, number = sequence_units(requests, positions, 4)
    assert (unit_T.tolist(), number) == ([0, 0, 1, 2], 3)
    assert expert_sizes([5, 0, 2], 4) == [4, 1, 2] and expert_sizes([0, 0], 4) == []
    suits = np.array([1, 1, 0, 1, 0], bool)
    assert vote(np.array([0, 0, 0, 1, 1]), 2, suits).tolist() == [INT8, NATIVE], "half is not most"
    assert vote_in_order([3, 2], suits).tolist() == [INT8, NATIVE]
    assert not len(vote_in_order([], suits[:0]))
    none, number = sequence_units(requests[:0], positions[:0], 4)
    assert len(none) == number == 0


@pytest.mark.parametrize("size", [1, 3, 8, 16, 300])
def test_both_ways_to_vote_agree(size):
    rng = np.random.default_rng(size)
    counts = [7, 0, 16, 1, 200, 33]
    sizes, suits = expert_sizes(counts, size), rng.random(sum(counts)) < 0.5
    units = np.arange(len(sizes)).repeat(sizes)
    assert vote_in_order(sizes, suits).tolist() == vote(units, len(sizes), suits).tolist()


@pytest.mark.parametrize("size", [1, 8, 16])
def test_a_sequence_is_cut_at_the_same_places_however_it_is_prefilled(size):
    whole, _ = sequence_units(np.zeros(50, np.int64), np.arange(50), size)
    for cut in (7, 16, 33):
        parts = [
            sequence_units(np.zeros(len(at), np.int64), at, size)[0]
            for at in (np.arange(cut), np.arange(cut, 50))
        ]
        edges = [np.flatnonzero(np.diff(part)) + 1 for part in parts]
        found = {*edges[0].tolist(), *(cut + edges[1]).tolist()}
        assert found | {cut} == {*(np.flatnonzero(np.diff(whole)) + 1).tolist(), cut}


def test_each_limit_alone_shuts_a_token_out_and_nan_suits_nothing():
    classes, positions = np.array([3, 4, 4, 4, 4, 4]), np.array([9, 0, 9, 9, 9, 9])
    margins = np.array([1, 1, 0.1, 1, np.nan, 1], np.float32)
    ranges = np.array([1, 1, 1, 9, 1, 1], np.float32)
    limits = LayerThresholds(
        min_position=1, full_classes=("digits",), min_margin=0.5, max_range=5.0
    )
    predictor = Predictor(thresholds(limits, LayerThresholds()))
    known = predictor.ahead(classes.astype(np.uint8), positions).suits_LT
    suits = predictor.predict(0, known[0], margins, ranges)
    assert suits.tolist() == [False] * 5 + [True]
    assert predictor.predict(1, known[1], None, None).all(), "no limit looks at nothing"


def test_one_in_so_many_units_is_sampled_however_they_come():
    router = PrecisionRouter(np.zeros(8, np.uint8), Faults())
    picked = [len(router.pick(n, 4)) for n in (1, 1, 1, 1, 2, 3, 0, 11)]
    assert sum(picked) == 20 // 4 and picked[:4] == [0, 0, 0, 1]
    assert not router.pick(9, 0)


class Layer:
    """A layer of four experts whose results in INT8 are off by what the test wants."""

    def __init__(self, num_tokens=24, seed=0):
        ids_TK = torch.rand(num_tokens, 4, generator=torch.Generator().manual_seed(seed)).topk(2)[1]
        self.source_R, self.row_of_N, self.counts = permute(ids_TK, 4)
        self.x_TD = torch.ones(num_tokens, 3)
        self.off_R = torch.zeros(len(self.source_R))
        self.ran = []

    def run(self, formats_R):
        """Rows are 1 in their own format, 1 + off in INT8, and never written when not run."""
        self.ran.append(formats_R.clone())
        values_R = torch.where(formats_R == INT8, 1 + self.off_R, 1.0)
        return torch.where(formats_R == SKIP, torch.nan, values_R)[:, None].expand(-1, 3).clone()


def run_step(layer, limits, faults=None, mode="auto", **options):
    router = PrecisionRouter(np.zeros(8, np.uint8), faults or Faults())
    tokens = len(layer.x_TD)
    precision = Precision(mode, thresholds(limits, **{"unit_rows": 4, "sample_units": 0} | options))
    zeros = np.zeros(tokens, np.int64)
    step = router.begin(precision, zeros, np.arange(tokens), zeros)
    units = step.units(0, layer.counts, layer.row_of_N)
    out = layer.run(units.formats)
    failed = step.check(0, units, out, layer.x_TD, layer.run)
    return step, units, step.repaired(0, units, out, failed, layer.run)


@pytest.mark.parametrize("unit", ["expert", "sequence"])
def test_a_unit_predicted_wrong_is_run_again_and_nothing_else(unit):
    layer = Layer()
    layer.x_TD[5] = 50.0
    layer.off_R += 0.25
    step, units, out = run_step(layer, LayerThresholds(check=Check(max_range=9.0)), unit=unit)
    wanted = np.isin(units.unit_R, units.unit_R[layer.source_R.numpy() == 5])
    assert 0 < wanted.sum() < len(wanted)
    assert units.rerun_R.tolist() == wanted.tolist()
    assert (layer.ran[1] == NATIVE).tolist() == wanted.tolist()
    assert len(layer.ran) == 2 and set(layer.ran[1].tolist()) == {NATIVE, SKIP}
    assert out[:, 0].tolist() == np.where(wanted, 1, 1.25).tolist()
    (event,) = step.layers
    assert event.rerun_rows == wanted.sum() == step.rerun_T.sum()
    assert event.failed_units == len(np.unique(units.unit_R[wanted]))
    again_T = np.bincount(layer.source_R.numpy()[wanted], minlength=24)
    assert step.rerun_T.tolist() == again_T.tolist()
    codes = [read_code(code) for code in units.codes(2).ravel().tolist()]
    assert sum("run again" in reason for _, reason in codes) == wanted.sum()
    assert sum(is_int8 for is_int8, _ in codes) == event.int8_rows == (~wanted).sum()


def test_a_sampled_row_that_is_too_far_off_fails_its_unit_alone():
    layer = Layer()
    layer.off_R += 0.01
    sizes = expert_sizes(layer.counts, 4)
    units_R = np.arange(len(sizes)).repeat(sizes)
    first = int((units_R == 2).argmax())
    layer.off_R[first] = 0.5
    limits = LayerThresholds(check=Check(max_error=0.1))
    step, units, out = run_step(layer, limits, sample_units=1)
    (event,) = step.layers
    assert event.sampled_rows == event.units and event.failed_units == 1
    assert event.worst_error == pytest.approx(0.5)
    assert units.rerun_R.tolist() == (units_R == 2).tolist()
    assert torch.isfinite(out).all() and out[first, 0] == 1
    calm, _, _ = run_step(layer, LayerThresholds(check=Check(max_error=0.6)), sample_units=1)
    assert calm.layers[0].failed_units == 0, "a bound above the error lets all pass"


def test_a_row_that_is_not_finite_is_never_left_in_int8():
    layer = Layer()
    layer.x_TD[3, 1] = torch.nan
    layer.x_TD[4, 1] = torch.inf
    _, units, _ = run_step(layer, LayerThresholds())
    broken = np.isin(layer.source_R.numpy(), (3, 4))
    assert units.rerun_R[broken].all() and not units.rerun_R.all()


def test_the_whitelist_and_an_order_leave_nothing_to_vote():
    layer = Layer()
    step, units, _ = run_step(layer, LayerThresholds(whitelist=True))
    assert set(units.format_R.tolist()) == {NATIVE} and step.layers[0].int8_rows == 0
    assert units.told(0, "bfloat16") == (0, "bfloat16", "the layer is on the whitelist")
    _, units, _ = run_step(layer, LayerThresholds(whitelist=True), mode="int8")
    assert units.told(0, "bfloat16").format == "int8", "an order overrules it"
    assert PrecisionRouter(np.zeros(8, np.uint8), Faults()).begin(Precision(), *[None] * 3) is None


def test_faults_flip_formats_row_by_row_and_run_the_whole_batch_again():
    faults, layer = Faults(), Layer()
    faults.set("precision.vote", lambda formats: np.resize(np.array([0, 1], np.int8), len(formats)))
    step, _, _ = run_step(layer, LayerThresholds(), faults)
    assert step.layers[0].switches == len(layer.source_R) - 1
    faults.clear("precision.vote")
    faults.set("precision.check", lambda failed: np.ones_like(failed))
    step, units, _ = run_step(layer, LayerThresholds(), faults)
    assert units.rerun_R.all() and step.layers[0].rerun_rows == len(layer.source_R)
    faults.clear("precision.check")
    faults.set("precision.predict", lambda suits: ~suits)
    step, _, _ = run_step(layer, LayerThresholds(), faults)
    assert step.layers[0].int8_units == 0


def test_no_tokens_have_no_units():
    layer = Layer(num_tokens=0)
    for mode in ("auto", "int8"):
        step, units, out = run_step(layer, LayerThresholds(), mode=mode)
        assert units.num_units == 0 and out.shape == (0, 3) and step.layers[0].rows == 0
