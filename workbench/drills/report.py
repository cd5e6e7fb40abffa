"""A drill's journal as one HTML page: no script, no outside request, light and dark.

Everything from the journal is escaped. Colour is never the only sign: every outcome has its word
and its mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from workbench.drills.words import MARKS, number

_CLASSES = {"pass": "good", "fail": "bad", "could not run": "open"}
_WIDTH, _HEIGHT = 640, 120


def page(journal: Mapping[str, Any]) -> str:
    """Return the page of one journal, finished or broken off."""
    briefing, result = journal["briefing"], journal.get("result")
    parts = [
        f"<h1>{_text(briefing['title'])}</h1>",
        f"<p class=lead>{_text(briefing['description'])}</p>",
    ]
    if result is None:
        parts.append(f"<p class=note>{_text(journal.get('reason', 'no result'))}</p>")
    else:
        parts += [_grade(result), _facts(briefing, journal, result)]
    if journal.get("checks"):
        parts.append(_section("Checks", _checks(journal["checks"])))
    if journal.get("samples"):
        parts.append(_section("Signals", _signals(journal)))
    if journal.get("events"):
        parts.append(_section("What happened", _timeline(journal["events"])))
    if result is not None:
        parts.append(_section("The solution", f"<p>{_text(result['solution'])}</p>"))
        parts.append(_section("Restored", _proof(result["proof"])))
    title = _text(f"Drill: {briefing['title']}")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        "<meta name=color-scheme content='light dark'>"
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main>"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def _grade(result: Mapping[str, Any]) -> str:
    marks = result["grade"]
    if marks is None:
        return f"<p class=note>Not graded: {_text(result['reason'])}.</p>"
    word, kind = ("Passed", "good") if marks["passed"] else ("Not passed", "bad")
    bars = "".join(
        f"<div class=part><span>{_text(name)}</span>"
        f"<meter min=0 max={part['possible']} value={part['earned']}></meter>"
        f"<b>{part['earned']} of {part['possible']}</b></div>"
        for name, part in marks["parts"].items()
    )
    mark = MARKS["pass" if marks["passed"] else "fail"]
    return (
        f"<section class='card {kind}'><h2>{mark} {word}: {marks['points']} of "
        f"{marks['possible']}</h2>{bars}</section>"
    )


def _facts(
    briefing: Mapping[str, Any], journal: Mapping[str, Any], result: Mapping[str, Any]
) -> str:
    named = journal["state"]["diagnosis"]
    options = briefing["options"]
    rows = {
        "Time": f"{result['elapsed_s']:.0f} s of {briefing['minutes']:g} min",
        "Clues taken": f"{result['clues']} of {briefing['clues']}",
        "Cause named": options[named] if named else "none",
        "Cause": options[result["cause"]],
        "Seed": str(journal["state"]["seed"]),
    }
    cells = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in rows.items())
    return f"<dl>{cells}</dl>"


def _checks(checks: Mapping[str, Mapping[str, Any]]) -> str:
    lines = "".join(
        f"<tr class={_CLASSES[check['outcome']]}><td>{MARKS[check['outcome']]} "
        f"{_text(check['outcome'])}</td><td>{_text(check['name'])}<small>"
        f"{_text(check['message'])}</small></td>"
        f"<td class=n>{_number(check['value'], check['unit'])}</td><td class=n>"
        f"{_number(check['low'], check['unit'])} to {_number(check['high'], check['unit'])}</td>"
        f"<td class=n>{_number(check['steady'], check['unit'])}</td></tr>"
        for check in checks.values()
    )
    return (
        "<table><thead><tr><th>Outcome</th><th>Check</th><th class=n>Value</th>"
        f"<th class=n>Right</th><th class=n>Before</th></tr></thead><tbody>{lines}</tbody></table>"
    )


def _signals(journal: Mapping[str, Any]) -> str:
    return "".join(
        _chart(signal, journal["samples"], journal["events"]) for signal in journal["signals"]
    )


def _chart(
    signal: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
) -> str:
    """Draw one signal over time, with the range that is right and the learner's acts."""
    points: list[tuple[float, float]] = [
        (sample["at_s"], sample["values"][signal["key"]])
        for sample in samples
        if signal["key"] in sample["values"]
    ]
    if not points:
        return ""
    end, unit = max(points[-1][0], 1.0), signal["unit"]
    low, high = map(float, signal["limits"])
    top: float = max(high, max(value for _, value in points), 1e-9) * 1.08

    def x(at: float) -> float:
        return round(_WIDTH * max(0.0, at) / end, 1)

    def y(value: float) -> float:
        return round(_HEIGHT * (1 - min(value, top) / top), 1)

    acted = [e["at_s"] for e in events if e["what"] == "act"]
    lines = "".join(
        f"<polyline points='{' '.join(f'{x(at)},{y(value)}' for at, value in stretch)}' />"
        for stretch in _stretches(points, acted)
    )
    acts = "".join(
        f"<line class=act x1={x(e['at_s'])} x2={x(e['at_s'])} y1=0 y2={_HEIGHT}>"
        f"<title>{_text(e['said'])}</title></line>"
        for e in events
        if e["what"] == "act"
    )
    words = (
        f"{_text(signal['name'])}: last {_number(points[-1][1], unit)}, "
        f"right {_number(low, unit)} to {_number(high, unit)}"
    )
    return (
        f"<figure><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img preserveAspectRatio=none>"
        f"<title>{words}</title>"
        f"<rect class=right x=0 width={_WIDTH} y={y(high)} "
        f"height={max(1.0, round(y(low) - y(high), 1))} />{acts}"
        f"{lines}</svg><figcaption>{words} <small>"
        f"{_text(signal['formula'])}; measured, {_number(points[0][0])} to {_number(end)} s; "
        "shaded: right; dashed: an act</small></figcaption></figure>"
    )


def _stretches(
    points: Sequence[tuple[float, float]], acted: Sequence[float]
) -> list[list[tuple[float, float]]]:
    """Cut the points wherever somebody acted in between: each act begins new evidence."""
    stretches: list[list[tuple[float, float]]] = []
    for at, value in points:
        last = stretches[-1][-1][0] if stretches else -1.0
        if not stretches or any(last < when <= at for when in acted):
            stretches.append([])
        stretches[-1].append((at, value))
    return stretches


def _timeline(events: Sequence[Mapping[str, Any]]) -> str:
    lines = "".join(
        f"<li><time>{round(event['at_s'], 1) + 0.0:.1f} s</time> "
        f"{_who(event)}<b>{_text(event['what'])}</b> "
        f"{_text(_detail(event))}</li>"
        for event in events
    )
    return f"<ol>{lines}</ol>"


def _who(event: Mapping[str, Any]) -> str:
    return f"<i>{_text(event['who'])}</i> " if event.get("who") else ""


def _detail(event: Mapping[str, Any]) -> str:
    what = event["what"]
    if what == "check":
        return ", ".join(f"{name}: {outcome}" for name, outcome in event["outcomes"].items())
    if what == "undo registered":
        return "; ".join(event["actions"])
    for name in ("said", "option", "reason", "number"):
        if name in event:
            return str(event[name])
    return f"for {event['lease_s'] / 60:g} min at most" if "lease_s" in event else ""


def _proof(proof: Mapping[str, Any]) -> str:
    lines = "".join(
        f"<tr class={'good' if part['equal'] else 'bad'}><td>{_text(name)}"
        f"{', without its version' if name == 'table' else ''}</td>"
        f"<td><code>{_text(part['before'])}</code></td>"
        f"<td>{'= equal' if part['equal'] else '≠ differs'}</td>"
        f"<td><code>{_text(part['after'])}</code></td></tr>"
        for name, part in proof["hashes"].items()
    )
    return (
        "<table class=proof><thead><tr><th>SHA-256 of</th><th>before</th><th></th><th>after</th>"
        f"</tr></thead><tbody>{lines}</tbody></table>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>"


def _number(value: float | None, unit: str = "") -> str:
    return "–" if value is None else number(value, unit)


def _text(value: object) -> str:
    return escape(str(value))


_STYLE = """
:root { --ink: #1d2733; --soft: #5b6875; --paper: #fbfcfd; --card: #fff; --line: #dde3e9;
  --good: #13744a; --bad: #b3261e; --open: #7a5b00; --accent: #2f6fb2; --right: #13744a22 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa7b4; --paper: #12171d;
  --card: #1a2129; --line: #303a45; --good: #5fd19b; --bad: #ff8f86; --open: #e6c15a;
  --accent: #7fb6f0; --right: #5fd19b26 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif }
main { max-width: 54rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .6rem }
h2 { font-size: 1.15rem; margin: 0 0 .8rem }
section { margin-top: 2.2rem }
.lead { color: var(--soft); margin: 0; max-width: 42rem }
.note, .card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: 1.1rem 1.3rem; margin-top: 1.6rem }
.card { border-left: .35rem solid var(--accent) }
.card.good { border-left-color: var(--good) } .card.bad { border-left-color: var(--bad) }
.part { display: grid; grid-template-columns: 11rem 1fr 6rem; gap: 1rem; align-items: center }
.part b { text-align: right; font-variant-numeric: tabular-nums }
meter { width: 100% }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .3rem 1rem; margin: 1.4rem 0 0 }
dt { color: var(--soft) } dd { margin: 0 }
table { width: 100%; border-collapse: collapse; font-size: .94rem }
th { text-align: left; color: var(--soft); font-weight: 600 }
th, td { padding: .45rem .6rem .45rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
small { display: block; color: var(--soft); font-size: .86rem }
tr.good td:first-child { color: var(--good) } tr.bad td:first-child { color: var(--bad) }
tr.open td:first-child { color: var(--open) }
td:first-child, .proof td:nth-child(3) { white-space: nowrap }
figure { margin: 0 0 1.4rem } figcaption { font-size: .94rem }
svg { width: 100%; height: 7.5rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .4rem }
.right { fill: var(--right) }
polyline { fill: none; stroke: var(--accent); stroke-width: 2; vector-effect: non-scaling-stroke }
.act { stroke: var(--soft); stroke-dasharray: 4 4; vector-effect: non-scaling-stroke }
ol { list-style: none; padding: 0; margin: 0 }
li { padding: .25rem 0; border-bottom: 1px solid var(--line) }
time { display: inline-block; width: 4.6rem; color: var(--soft);
  font-variant-numeric: tabular-nums }
code { font-size: .78rem; overflow-wrap: anywhere }
@media (max-width: 40rem) { .part, dl { grid-template-columns: 1fr } .part b { text-align: left } }
"""
