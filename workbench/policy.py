"""What `--force-experts`, `--ban-expert`, `--bias` and `--smoothing` ask of the gate, and how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ConfigError, RoutingError

if TYPE_CHECKING:
    from engine import Engine


MAX_DIGITS = 9
"""Of a layer's or an expert's number; there are never a thousand million."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Experts to force, ban or favour, and smoothing; a layer of None means every MoE layer."""

    force: tuple[int, ...] = ()
    ban: tuple[tuple[int | None, int], ...] = ()
    bias: tuple[tuple[int | None, int, float], ...] = ()
    smoothing: tuple[float, int, float] | None = None
    """Bonus, window and decay, see `engine.routing.smoothing`."""

    @classmethod
    def parse(
        cls,
        force: str | None,
        ban: Sequence[str],
        bias: Sequence[str],
        smoothing: str | None = None,
    ) -> Policy:
        """Read `1,3`, `[L:]E`, `[L:]E=V` and `BONUS[,WINDOW[,DECAY]]`.

        Example: `ban=["5", "2:0"]` bans expert 5 everywhere and expert 0 in layer 2.

        Raises:
            ConfigError: a value has another form.
        """
        favoured = []
        for text in bias:
            cell, equals, value = text.partition("=")
            number = _number(value) if equals else None
            if number is None:
                raise ConfigError(f"--bias ({text}) must read [LAYER:]EXPERT=VALUE, like 2:0=1.5.")
            favoured.append((*_cell("--bias", cell, text), number))
        return cls(
            force=tuple(_int("--force-experts", part, force) for part in force.split(","))
            if force is not None
            else (),
            ban=tuple(_cell("--ban-expert", text, text) for text in ban),
            bias=tuple(favoured),
            smoothing=None if smoothing is None else _smoothing(smoothing),
        )

    def apply(self, engine: Engine) -> None:
        """Set the policy through the engine's control.

        Raises:
            ConfigError: the model is dense, so that the policy would have no effect; an expert or a
                layer does not exist, a number is out of range, or too few experts are left.
        """
        if self != Policy() and not engine.model_config.is_moe:
            raise ConfigError(
                "--force-experts, --ban-expert, --bias and --smoothing need a model with experts; "
                "this one is dense, leave them out."
            )
        with as_usage():
            if self.force:
                engine.control.force_experts(self.force)
            for layer, expert in self.ban:
                engine.control.ban_expert(layer, expert)
            for layer, expert, value in self.bias:
                engine.control.set_bias(layer, expert, value)
            if self.smoothing is not None:
                engine.control.set_smoothing(*self.smoothing)


@contextmanager
def as_usage() -> Iterator[None]:
    """Let what an engine's control refuses of a command's options be bad usage.

    Raises:
        ConfigError: the control refused, in its words.
    """
    try:
        yield
    except RoutingError as refused:
        raise ConfigError(str(refused)) from None


def _smoothing(text: str) -> tuple[float, int, float]:
    bonus, window, decay = [*text.split(","), *("1", "1")[text.count(",") :]][:3]
    numbers = _number(bonus), _number(decay)
    digits = window.strip()
    whole = digits.isascii() and digits.isdigit()
    if None in numbers or not whole or text.count(",") > 2:
        raise ConfigError(
            f"--smoothing ({text}) must read BONUS[,WINDOW[,DECAY]], like 0.5,4,0.7: added to the "
            "logits of experts used in the last WINDOW tokens, times DECAY for each token since."
        )
    return float(bonus), int(digits[:18]), float(decay)


def _cell(option: str, text: str, whole: str) -> tuple[int | None, int]:
    layer, colon, expert = text.rpartition(":")
    return (_int(option, layer, whole) if colon else None), _int(option, expert, whole)


def _int(option: str, text: str, whole: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        form = "E,E,…" if option == "--force-experts" else "[LAYER:]EXPERT"
        raise ConfigError(f"{option} ({whole}) must read {form} with whole numbers from 0.")
    return int(digits)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
