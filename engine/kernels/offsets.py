"""Find the products in a compiled kernel's addresses that could overflow 32 bits.

131,073 tokens of 16,384 elements are one row too many for a 32-bit offset, so row numbers, expert
ids and strides are widened before they are multiplied. This reads Triton's first stage (TTIR), goes
back from every address to the products it is made of, and names the narrow ones. A product with a
constant of at most 1024 counts rows or blocks and may stay narrow.

Limits: it follows `scf.for` and `scf.if`, not `scf.while`; a kernel that uses block pointers or
tensor descriptors is refused. Called by the tests' compile matrix and `workbench kernels show`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

LARGEST_BLOCK = 1024

_OPERATION = re.compile(
    r'(?:(?P<results>%[\w#:, %]+) = )?"?(?P<name>[a-z_]+\.[\w.]+)"?(?P<rest>.*)'
)
_VALUE = re.compile(r"%[A-Za-z0-9_]+(?:#\d+)?")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)$")
_PASSES = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "arith.extsi", "arith.extui")
_OPAQUE = ("tt.make_tensor_ptr", "tt.make_tensor_descriptor")


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    operands: tuple[str, ...]
    rest: str


def narrow_products(ttir: str) -> list[str]:
    """Return the 32-bit products in `ttir` that an address depends on and that could overflow.

    ``%o = arith.muli %row, %stride : i32`` before ``tt.addptr %p, %o`` is one; with `%row` and
    `%stride` as i64 it is none, and neither is ``arith.muli %pid, %c64_i32``.

    Raises:
        ValueError: the kernel addresses memory in a way that cannot be followed.
    """
    defined = _definitions(ttir)
    operations = [one for several in defined.values() for one in several]
    for one in operations:
        if one.name in _OPAQUE:
            raise ValueError(f"{one.name} cannot be followed; use plain pointers.")
    roots = [one.operands[1] for one in operations if one.name == "tt.addptr"]
    found = {
        f"{one.name} {one.rest}": None
        for one in _behind(roots, defined)
        if one.name == "arith.muli" and _is_narrow(one) and _may_overflow(one, defined)
    }
    return list(found)


def _is_narrow(one: _Operation) -> bool:
    return re.search(r"\bi32$|xi32>$", one.rest) is not None


def _may_overflow(one: _Operation, defined: dict[str, list[_Operation]]) -> bool:
    bounds = [_bound(operand, defined) for operand in one.operands]
    if None not in bounds:
        return bounds[0] * bounds[1] >= 2**31  # type: ignore[operator]
    return not any(bound is not None and bound <= LARGEST_BLOCK for bound in bounds)


def _bound(value: str, defined: dict[str, list[_Operation]]) -> int | None:
    """Return the largest magnitude of a constant or a range, None for what is known later."""
    several = defined.get(value, [])
    if len(several) != 1:
        return None
    (one,) = several
    if one.name in _PASSES:
        return _bound(one.operands[0], defined)
    if one.name == "tt.make_range":
        return max(int(number) for number in re.findall(r"(?:end|start) = (\d+)", one.rest))
    if one.name == "arith.constant":
        numbers = re.findall(r"^(?:dense<)?(-?\d+)>? :", one.rest)
        return abs(int(numbers[0])) if numbers else None
    return None


def _behind(roots: list[str], defined: dict[str, list[_Operation]]) -> Iterator[_Operation]:
    """Yield every operation that the roots are computed from; what memory holds ends the search."""
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for one in defined.get(value, []):
            yield one
            if one.name != "tt.load":
                waiting += one.operands


def _definitions(ttir: str) -> dict[str, list[_Operation]]:
    """Return value -> the operations it may come from; a loop's values come from its yields too."""
    defined: dict[str, list[_Operation]] = defaultdict(list)
    regions: list[list[tuple[str, ...]]] = []  # per open region: who receives the n-th yield
    for line in ttir.splitlines():
        text = _LOCATION.sub("", line.strip())
        if text.startswith("}") and regions:
            receivers = regions.pop()
            if text.endswith("{"):  # } else {
                regions.append(receivers)
            continue
        match = _OPERATION.match(text)
        if not match:
            if text.endswith("{"):
                regions.append([])
            continue
        name, rest = match["name"], match["rest"].strip()
        results = _results(match["results"] or "")
        if name == "scf.yield" and regions:
            for receivers_of_one, value in zip(regions[-1], _VALUE.findall(rest), strict=False):
                for receiver in receivers_of_one:
                    defined[receiver].append(_Operation(name, (value,), rest))
        elif name == "scf.for":
            carried = re.findall(r"(%\w+) = (%[\w#]+)", rest.partition("iter_args")[2])
            for argument, start in carried:
                defined[argument].append(_Operation(name, (start,), rest))
            pairs = zip(results, carried, strict=True)
            regions.append([(result, argument) for result, (argument, _) in pairs])
        elif name != "scf.if":
            one = _Operation(name, tuple(_VALUE.findall(rest)), rest)
            for result in results:
                defined[result].append(one)
        if text.endswith("{") and name != "scf.for":
            regions.append([(result,) for result in results if name == "scf.if"])
    return defined


def _results(text: str) -> list[str]:
    """Return the names behind ``%a, %b`` or ``%c:2``, which are %c#0 and %c#1."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = part.partition(":")
        names += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return names
