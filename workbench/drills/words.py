"""What a drill says, as text for a terminal; everything comes from the drill's own answers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.output import count

MARKS = {"pass": "✓", "fail": "✗", "could not run": "?"}
"""Sign of each outcome, beside its word."""

MOST_TOLD = 8
"""Remarks and acts of others shown beside the signals."""

_WIDTH = 92
"""Where a long text is broken: JupyterLab breaks in the middle of a word."""

Answer = Mapping[str, Any]


def briefing_text(briefing: Answer) -> str:
    """Write what is known when a drill begins."""
    called = "" if briefing.get("surprise") else f"{briefing['id']}, "
    where = f"On {briefing['target']}, which puts all back.\n\n" if "target" in briefing else ""
    options = "\n".join(f"  {option:<18} {text}" for option, text in briefing["options"].items())
    return (
        f"{briefing['title']}  ({called}{briefing['minutes']:g} min)\n\n"
        f"{briefing['description']}\n\n{where}"
        f"Signals: {', '.join(briefing['signals'])}\n\n"
        f"{briefing['question']}\n{options}\n\n"
        "The cause named last counts; naming another before costs nothing. Clues cost no points;\n"
        "the report says how many were taken.\n\n"
        "workbench drill observe · hint · act … · check · diagnose OPTION · finish"
    )


def observation_text(seen: Answer) -> str:
    """Write what an operator sees now: signals, load, table, policy."""
    return "\n".join(
        (
            verdicts_text(seen["signals"]),
            "",
            _measured(seen),
            *_grid("rows by layer and device", seen["device_rows"]),
            *_grid("rows by layer and expert", seen["expert_counts"] if seen["rows"] else ()),
            *_table(seen["table"]),
            f"policy   {_policy(seen['policy'])}",
            *_deployment(seen.get("deployment"), _pace(seen)),
            *_files(seen.get("files")),
            *(f"change   {change}" for change in seen.get("changes", ())),
        )
    )


def _table(table: Answer | None) -> Iterable[str]:
    if table is None:
        return
    for name, one in (("table   ", table), ("planned ", table["planned"])):
        yield f"{name} version {one['version']}, hash with its version {one['sha256'][:12]}"


def _policy(policy: Answer) -> str:
    """Write what is set, by name: `smoothing 1.2, banned [[0, 3]]`."""
    set_now = [f"{name} {value}" for name, value in policy.items() if value]
    return ", ".join(set_now) or "nothing set"


def _measured(seen: Answer) -> str:
    if not seen["rows"]:
        return "no token row has run since the last act"
    most = f", the newest {seen['most_rows']:,} at most" if seen.get("most_rows") else ""
    return f"{seen['rows']:,} token rows measured since the last act{most}"


def _pace(seen: Answer) -> str:
    """Write how fast the engine is and what it has left, as far as that is known."""
    requests, engine = seen.get("requests") or {}, seen.get("engine") or {}
    again = requests.get("rerun_rows") or {}
    parts = {
        "tokens_a_second": "{:.0f} tokens/s",
        "step_ms": "{:.1f} ms a step",
        "again": "{:,} rows run again",
        "num_waiting": "{:,} requests wait",
        "num_free_blocks": "{:,} blocks free",
    }
    known = {**requests, **engine, "step_ms": seen.get("step_ms"), "again": sum(again.values())}
    return ", ".join(
        text.format(known[name]) for name, text in parts.items() if known.get(name) is not None
    )


def _files(files: Answer | None) -> Iterable[str]:
    """Write which files of the model folder are not as published, and the units of formats."""
    if files is None:
        return
    yield f"files    not as published: {', '.join(files['strange']) or 'none'}"
    if files["unit_rows"] is not None:
        yield f"files    precision.json: unit_rows {files['unit_rows']}"


def _deployment(facts: Answer | None, pace: str = "") -> Iterable[str]:
    """Write how the engine is deployed: whether it runs, its options, ranks, jobs and log."""
    if facts is None:
        return
    runs = f"runs: {pace}" if pace else "runs"
    yield f"engine   {runs if facts['running'] else 'does not run'}"
    for number, options in enumerate(facts["instances"]):
        name = "options " if len(facts["instances"]) == 1 else f"options of instance {number}"
        yield f"{name} {', '.join(f'{key} {value}' for key, value in options.items())}"
    for rank, there in facts["ranks"].items():
        yield f"rank {rank}   {'takes part' if there else 'is missing'}"
    for job in facts["jobs"]:
        ago = "" if job["last_run_s"] is None else f", last did so {job['last_run_s']:g} s ago"
        runs = "runs" if job["running"] else "does not run"
        yield f"job      {job['name']} ({job['does']}) {runs}{ago}"
    for entry in facts["starts"]:
        yield f"log      {entry['said']}"


def told_lines(state: Answer) -> Iterable[str]:
    """Write what others have done and said last, by whom and when."""
    told = sorted([*state["diary"], *state["remarks"]], key=lambda entry: entry["at_s"])
    for entry in told[-MOST_TOLD:]:
        who = f"{entry['who']}: " if entry["who"] else ""
        yield f"{entry['at_s']:6.0f} s  {who}{entry['said']}"


def verdicts_text(verdicts: Iterable[Answer]) -> str:
    """Write a line for each signal or check, and its message below it."""
    return "\n".join(line for verdict in verdicts for line in _verdict(verdict))


def signals_line(state: Answer) -> str:
    """Write the signals as last sampled, by name: `load of the busiest device 1.92 ×, …`."""
    called = state["called"]
    return ", ".join(
        f"{called[key]['name']} {number(value, called[key]['unit'])}"
        for key, value in state["signals"].items()
    )


def number(value: float, unit: str = "") -> str:
    """Write a value in its unit: a share of 0.479 is `47.9 %`, a count of 4093 is `4,093`."""
    if unit == "share":
        return f"{100 * value:.3g} %"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return digits + {"ratio": " ×", "ms": " ms", "s": " s"}.get(unit, "")


def result_text(result: Answer) -> str:
    """Write how a drill ended, its points, its solution and its proof."""
    lines = [
        f"{result['drill']}: {result['reason']} after {result['elapsed_s']:g} s, "
        f"{count(result['clues'], 'clue')}"
    ]
    if marks := result["grade"]:
        parts = marks["parts"] | {"together": {"earned": marks["points"], "possible": 100}}
        lines += [
            f"  {name:<20} {part['earned']:>3} of {part['possible']}"
            f"{' (' + part['remark'] + ')' if 'remark' in part else ''}"
            for name, part in parts.items()
        ]
        lines[-1] += f": {'passed' if marks['passed'] else 'not passed'}"
        lines += ["", *_named(result), *_checked(result)]
        lines += textwrap.wrap(result["solution"], _WIDTH)
    return "\n".join((*lines, "", proof_text(result["proof"])))


def _named(result: Answer) -> Iterable[str]:
    """Write which cause was named and which was right."""
    options, named, right = result.get("options", {}), result.get("diagnosis"), result.get("cause")
    if not options:
        return
    if named is None:
        yield "No cause was named."
    else:
        yield f"{MARKS['pass' if named == right else 'fail']} You named: {options[named]}"
    if named != right:
        yield f"  The cause:  {options[right]}"
    yield ""


def _checked(result: Answer) -> Iterable[str]:
    """Write how the last checks came out."""
    if checks := result.get("checks"):
        yield verdicts_text(checks.values())
        yield ""


def clue_text(clue: Answer) -> str:
    """Write a clue; one that was given before is the last."""
    if clue.get("again"):
        return f"There are no more clues than these {clue['of']}; the last was: {clue['clue']}"
    return f"{clue['number']} of {clue['of']}: {clue['clue']}"


def debrief_text(journal: Answer) -> str:
    """Write who did what when, and how long it took to name the cause and to repair it."""
    lines = [f"{journal['briefing']['title']}: who did what"]
    for at_s, who, what, said in debrief_lines(journal):
        lines.append(f"  {at_s:>7.1f} s  {f'{who}: ' if who else ''}{what} {said}".rstrip())
    lines += ["", *(f"  {name:<22} {when}" for name, when in debrief_moments(journal).items())]
    return "\n".join(lines)


def debrief_lines(journal: Answer) -> list[tuple[float, str, str, str]]:
    """Return when something was done, by whom ("" without a name), what, and how; oldest first."""
    lines = []
    for event in journal.get("events", []):
        if event["at_s"] < 0 or event["what"] in ("undo registered", "steady"):
            continue
        keys = ("said", "option", "reason", "number")
        said = next((str(event[key]) for key in keys if key in event), "")
        if event["what"] == "check":
            said = _outcomes(event["outcomes"])
        lines.append((event["at_s"], event.get("who", ""), event["what"], said))
    return lines


def debrief_moments(journal: Answer) -> dict[str, str]:
    """Return how long it took to name a cause, to change something, to pass; and who took part."""
    events = journal.get("events", [])
    names = sorted({event["who"] for event in events if event.get("who")})
    return {
        "first named a cause": _at(_first(events, "diagnosis")),
        "first change": _at(_first(events, "act")),
        "checks passed": _at(next((e["at_s"] for e in events if _all_pass(e)), None)),
        "took part": ", ".join(names) or "nobody by name",
    }


def _outcomes(outcomes: Mapping[str, str]) -> str:
    """Write how many checks passed and which did not.

    `{"load": "fail", "placed": "pass"}` becomes `1 of 2 pass (load: fail)`.
    """
    passed = sum(outcome == "pass" for outcome in outcomes.values())
    others = ", ".join(f"{name}: {how}" for name, how in outcomes.items() if how != "pass")
    return f"{passed} of {len(outcomes)} pass{' (' + others + ')' if others else ''}"


def _first(events: Iterable[Answer], what: str) -> float | None:
    return next((event["at_s"] for event in events if event["what"] == what), None)


def _all_pass(event: Answer) -> bool:
    return event["what"] == "check" and set(event["outcomes"].values()) == {"pass"}


def _at(when: float | None) -> str:
    return "never" if when is None else f"after {when:.0f} s"


def proof_text(proof: Answer) -> str:
    """Write whether the engine is as it was, with the hashes."""
    if why := proof.get("why"):
        return f"NOT proven to be restored: {why}"
    if not proof["hashes"]:
        return "Nothing was changed."
    word = "restored" if proof["restored"] else "NOT restored: this engine is thrown away"
    lines = (
        f"  {name:<8} before {part['before'][:16]} {'=' if part['equal'] else '≠'} "
        f"after {part['after'][:16]}{'  (without its version)' if name == 'table' else ''}"
        for name, part in proof["hashes"].items()
    )
    return "\n".join((f"The engine is {word}:", *lines))


def _grid(title: str, rows: Sequence[Iterable[int]]) -> Iterable[str]:
    """Write a title and a line for each layer; nothing where there is none."""
    if rows:
        yield title
    for layer, counts in enumerate(rows):
        yield f"  layer {layer}: {'  '.join(f'{number:>5}' for number in counts)}"


def _verdict(verdict: Answer) -> Iterable[str]:
    unit = verdict.get("unit", "")
    value = "" if verdict["value"] is None else number(verdict["value"], unit)
    before = "" if verdict["steady"] is None else f", before {number(verdict['steady'], unit)}"
    right = ""
    if verdict["low"] is not None:
        low, high = number(verdict["low"], unit), number(verdict["high"], unit)
        right = f" (right: {low if low == high else f'{low} to {high}'}{before})"
    outcome = verdict["outcome"]
    yield f"{MARKS[outcome]} {outcome:<13} {verdict['name']}: {value}{right}"
    if verdict["message"]:
        yield f"    {verdict['message']}"
