"""What the page Drills says of a drill's table, policy, deployment and remarks."""

from __future__ import annotations

from typing import Any

from dashboards import readings
from dashboards.drill_room import told


def table(seen: dict[str, Any] | None, stale: bool) -> dict[str, Any]:
    """Say which table runs, whether it is the planned one, and what policy is in force."""
    if seen is None:
        return {"table": "", "policy": "", "rows": "", "rows_class": "small muted", "stale": ""}
    table, policy = seen["table"], seen["policy"]
    facts = seen.get("deployment") or {}
    words = "■ no engine runs"
    if "service" in facts:  # which tells its table's version only
        words = f"v{facts['table_version']}"
    elif table is not None:
        same = table["sha256"] == table["planned"].get("sha256")
        planned = "as planned ✓" if same else f"■ planned was {table['planned'].get('sha256'):.12}"
        words = f"v{table['version']}, hash with its version {table['sha256'][:12]}, {planned}"
    set_now = [
        f"{name} {value}" for name, value in policy.items() if value not in ([], 0, 0.0, None)
    ]
    return {
        "table": words,
        "policy": "; ".join(set_now) or "nothing set",
        "rows": "▲ from before the last act"
        if stale
        else f"measured over {readings.number(seen['rows'])} rows"
        if seen["rows"]
        else "no row has run since the last act",
        "rows_class": "small tone-warn" if stale else "small muted",
        "stale": "stale" if stale else "",
    }


def remarks(state: dict[str, Any], num: int) -> list[str]:
    """Return the newest remarks, with when and by whom."""
    return [told(one) for one in state.get("remarks", [])[-num:]]


def unnamed(diagnosis: str | None, *, checked: bool, finishing: bool) -> dict[str, Any]:
    """Warn somebody who checks, or ends the drill, without having named a cause."""
    missing = "▲ No cause is named yet, which earns points of its own: choose one under 1 and "
    missing += "press Name it."
    return {
        "check_warning": missing if checked and diagnosis is None else "",
        "finish_warning": f"{missing} Or press once more to end the drill without."
        if finishing and diagnosis is None
        else "",
        "finish_word": "Finish without a cause"
        if finishing and diagnosis is None
        else "Finish and grade",
    }


def deployment(seen: dict[str, Any] | None) -> dict[str, Any]:
    """Say how the engine is deployed: whether it runs, its options, its ranks, what runs beside."""
    facts = (seen or {}).get("deployment")
    if not facts:
        return {"runs": "", "options": "", "others": ""}
    planned = "" if "service" in facts else "started as planned"
    newest = facts["starts"][-1]["said"] if facts["starts"] else planned
    runs = "✓ runs" if facts["running"] else "■ does not run"
    others = [
        f"rank {rank} {'✓' if there else '■ missing'}" for rank, there in facts["ranks"].items()
    ]
    others += [_job(job) for job in facts["jobs"]]
    return {
        "runs": f"{runs}; {newest}" if newest else runs,
        "options": _options(facts["instances"]),
        "others": "; ".join(others) or "nothing",
    }


def _options(instances: list[dict[str, str]]) -> str:
    """Write the options of each instance, by its number where there are several."""
    told = ["; ".join(f"{name} {value}" for name, value in each.items()) for each in instances]
    if len(told) == 1:
        return told[0]
    return " · ".join(f"instance {at}: {options}" for at, options in enumerate(told))


def _job(job: dict[str, Any]) -> str:
    word = "runs" if job["running"] else "■ does not run"
    ago = "" if job["last_run_s"] is None else f", last did so {job['last_run_s']:g} s ago"
    return f"job {job['name']} ({job['does']}) {word}{ago}"
