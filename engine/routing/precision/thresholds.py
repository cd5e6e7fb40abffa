"""The limits by which tokens are predicted to suit INT8: a file beside the model, for people too.

`workbench precision calibrate` writes it, the engine reads it at its start. It belongs to one set
of weights and says so; a file of another model is refused, and so is one with a key or a value that
is not known.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, nearest
from engine.routing.precision.features import CLASSES

FILE = "precision.json"
"""Its name in a model folder."""
FORMAT = 1
KINDS = ("sequence", "expert")
"""What a unit is: consecutive tokens of one sequence, or rows of one expert in their order."""
MODES = ("model", "int8", "auto")
"""Formats in force: the engine's own, INT8 everywhere, or chosen by unit."""
MAX_UNIT_ROWS = 256
MAX_POSITION = (1 << 31) - 1
MAX_BYTES = 1 << 20
"""Of a file: a layer takes some 300."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What the result of a unit that ran in INT8 must keep, or the unit is run again."""

    max_range: float = math.inf
    """Largest magnitude that a row may have had on its way in."""
    max_error: float = math.inf
    """Largest relative error of a row that is run in both formats, as a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerThresholds:
    """When a token suits INT8 in one MoE layer; all limits must hold."""

    whitelist: bool = False
    """A sensitive layer: always in full precision."""
    why: str = ""
    """In words, for people: why the layer is on the whitelist, or is not."""
    min_position: int = 0
    """Tokens before this position do not suit."""
    full_classes: tuple[str, ...] = ()
    """Tokens of these classes do not suit, see `features.CLASSES`."""
    min_margin: float = -math.inf
    """Tokens whose gate margin in the layer before was below it do not suit."""
    max_range: float = math.inf
    """Tokens whose largest magnitude in the layer before was above it do not suit."""
    check: Check = field(default_factory=Check)

    def __post_init__(self) -> None:
        for name in self.full_classes:
            if name not in CLASSES:
                raise ConfigError(
                    f"full_classes holds {name!r}{nearest(name, CLASSES)} known classes: "
                    f"{', '.join(CLASSES)}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """All that predicts formats in one model."""

    weights_sha256: str
    """Of the model they were measured on, see `engine.checkpoint.manifest.fingerprint`."""
    unit: str = "expert"
    """One of `KINDS`."""
    unit_rows: int = 16
    """Rows of a unit; the last one of a sequence or an expert may be short."""
    sample_units: int = 64
    """One row of every so many INT8 units is run in both formats; 0 samples none."""
    layers: tuple[LayerThresholds, ...] = ()
    """One per MoE layer."""

    def __post_init__(self) -> None:
        if self.unit not in KINDS:
            raise ConfigError(f"unit ({self.unit!r}) must be one of {', '.join(KINDS)}.")
        for name, low, high in (("unit_rows", 1, MAX_UNIT_ROWS), ("sample_units", 0, 1 << 20)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} ({value!r}) must be a whole number, {low} to {high}.")

    @staticmethod
    def check_place(path: str | Path) -> None:
        """Refuse at once a place to which `save` cannot write later.

        Raises:
            ConfigError: it is a folder or a device, or its folder is missing or read-only.
        """
        path = Path(path)
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a folder; name a file.")
        if not path.parent.is_dir():
            raise ConfigError(f"cannot write {path}: its folder does not exist; make it first.")
        if path.exists() and not path.is_file():
            raise ConfigError(f"cannot write {path}: it is no plain file; name another.")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"cannot write {path}: its folder is read-only.")
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(f"cannot write {path}: it is read-only.")

    def save(self, path: str | Path, measured: Mapping[str, Any] | None = None) -> None:
        """Write the file; `measured` is kept beside the limits for people and read by nobody.

        Whoever is interrupted or killed meanwhile leaves the old file, whole.

        Raises:
            ConfigError: it cannot be written there.
        """
        self.check_place(path)
        content = {"format": FORMAT, **asdict(self), "measured": dict(measured or {})}
        text = json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n"
        target = Path(path).resolve()
        aside = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        except OSError as failed:
            raise ConfigError(f"cannot write {path}: {failed.strerror or failed}.") from None
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, *, weights_sha256: str, num_layers: int) -> Thresholds:
        """Read the file of a model with these weights and so many MoE layers.

        Raises:
            ConfigError: it is missing, damaged, of another model, or holds a value out of range.
        """
        try:
            found = _from_json(json.loads(_content(Path(path))))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is missing: it says which tokens suit INT8. Run 'workbench precision "
                "calibrate', or take another --precision."
            ) from None
        except OSError as failed:
            raise ConfigError(f"cannot read {path}: {failed.strerror or failed}.") from None
        except ConfigError as wrong:
            raise ConfigError(f"{path} cannot be used: {wrong} {_AGAIN}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as wrong:
            raise ConfigError(f"{path} is damaged ({wrong}). {_AGAIN}") from None
        if found.weights_sha256 != weights_sha256 or len(found.layers) != num_layers:
            raise ConfigError(
                f"{path} was made for other weights ({found.weights_sha256[:12]}…, "
                f"{len(found.layers)} MoE layers) than this model's ({weights_sha256[:12]}…, "
                f"{num_layers}). {_AGAIN}"
            )
        return found

    @classmethod
    def open(cls, num_layers: int, **options: Any) -> Thresholds:
        """Return limits that let everything pass, to measure with."""
        layers = tuple(LayerThresholds() for _ in range(num_layers))
        values: dict[str, Any] = {"weights_sha256": "", "layers": layers, "sample_units": 0}
        return cls(**values | options)


@dataclass(frozen=True, slots=True)
class Precision:
    """What an operator has put in force; part of the routing policy."""

    mode: str = "model"
    """One of `MODES`."""
    thresholds: Thresholds | None = None
    """For `auto`; kept while another mode is in force."""

    def in_words(self) -> str:
        """Return the mode, for `auto` with its units: ``auto (units of 16 rows of an expert)``."""
        if self.mode != "auto" or self.thresholds is None:
            return self.mode
        return f"auto ({units_in_words(self.thresholds)})"


def units_in_words(thresholds: Thresholds) -> str:
    """Return what a unit is: ``units of 16 rows of an expert``."""
    whose = {"sequence": "tokens of a sequence", "expert": "rows of an expert"}
    return f"units of {thresholds.unit_rows} {whose[thresholds.unit]}"


_AGAIN = "Run 'workbench precision calibrate' again."


def _content(path: Path) -> str:
    """Return the text of a plain file of reasonable size, and nothing of a device or a pipe."""
    if path.exists() and not path.is_file():
        raise ConfigError("it is no plain file.")
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"it is longer than {MAX_BYTES} bytes.")
    return text.decode("utf-8")


def _from_json(content: Any) -> Thresholds:
    if not isinstance(content, dict):
        raise ConfigError("it is no JSON object.")
    content = dict(content)
    content.pop("measured", None)
    if (version := content.pop("format", None)) != FORMAT:
        raise ConfigError(f"its format is {version!r}, not {FORMAT}.")
    layers = content.pop("layers", None)
    if not isinstance(layers, list):
        raise ConfigError("'layers' must be a list.")
    if not isinstance(content.get("weights_sha256"), str):
        raise ConfigError("'weights_sha256' must be a text.")
    _known(Thresholds, content)
    return Thresholds(**content, layers=tuple(_layer(layer) for layer in layers))


def _layer(content: Any) -> LayerThresholds:
    if not isinstance(content, dict):
        raise ConfigError("a layer must be an object.")
    _known(LayerThresholds, content)
    check = content.get("check", {})
    if not isinstance(check, dict):
        raise ConfigError("'check' must be an object.")
    _known(Check, check)
    values = dict(content)
    values["check"] = Check(
        **{name: _number(name, value, math.inf) for name, value in check.items()}
    )
    values["full_classes"] = tuple(values.get("full_classes", ()))
    for name, without in (("min_margin", -math.inf), ("max_range", math.inf)):
        if name in values:
            values[name] = _number(name, values[name], without)
    for name, kind, words in (
        ("min_position", int, "a whole number"),
        ("whitelist", bool, "true or false"),
        ("why", str, "a text"),
    ):
        if name in values and type(values[name]) is not kind:
            raise ConfigError(f"{name} ({values[name]!r:.40}) must be {words}.")
    if not 0 <= (position := values.get("min_position", 0)) <= MAX_POSITION:
        raise ConfigError(f"min_position ({position!r:.40}) must lie between 0 and {MAX_POSITION}.")
    return LayerThresholds(**values)


def _number(name: str, value: Any, without: float) -> float:
    """Return a limit; null stands for none."""
    if value is None:
        return without
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{name} ({value!r:.40}) must be a finite number or null.")
    return number


def _known(kind: type, content: Mapping[str, Any]) -> None:
    names = [f.name for f in fields(kind)]
    for key in content:
        if key not in names:
            raise ConfigError(f"unknown key {key!r}{nearest(str(key), names)}")


def _plain(value: Any) -> Any:
    """Return JSON's own values; a limit that is infinite is none, null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
