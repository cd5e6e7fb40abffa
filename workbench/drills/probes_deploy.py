"""What an operator can read of a deployment: whether it runs and answers, its ranks and files."""

from __future__ import annotations

import hashlib

from engine.events import CAUSES
from workbench.drills.readings import ROWS, Readings, Unreadable, enough, probe


@probe("count", "1 while an engine runs, 0 while none does")
def engine_runs(readings: Readings) -> float:
    """Return whether an engine runs."""
    return float(bool(readings.facts["running"]))


@probe("share", "known questions answered at all / questions", live=False)
def questions_answered(readings: Readings) -> float:
    """Return the share of known questions that are answered, whatever the answer is."""
    try:
        given = readings.ask()
    except Unreadable:
        return 0.0
    return len(given) / max(1, len(readings.known))


@probe("share", "questions answered at the gateway / questions", live=False)
def gateway_answers(readings: Readings) -> float:
    """Return the share of questions that the gateway gets answered."""
    answered, of = readings.answered_of()
    return answered / max(1, of)


@probe("count", "instances taken for ready that cannot complete a request")
def ready_and_unable(readings: Readings) -> float:
    """Return how many instances the gateway sends requests to that cannot answer."""
    facts = readings.facts
    pairs = zip(facts["instances_ready"], facts["instances_running"], strict=True)
    return float(sum(ready and not able for ready, able in pairs))


@probe("count", "viewers connected to the stream of the screens")
def viewers(readings: Readings) -> float:
    """Return how many viewers watch the engine."""
    return float(readings.facts["looking"].get("viewers", 0))


@probe("count", "frames that present viewers were too slow to get")
def frames_dropped(readings: Readings) -> float:
    """Return how many frames were dropped for viewers that had not drawn the one before."""
    return float(readings.facts["looking"].get("frames_dropped", 0))


@probe("count", "ranks that were started and do not take part")
def missing_ranks(readings: Readings) -> float:
    """Return how many ranks are missing."""
    return float(sum(not there for there in readings.facts["ranks"].values()))


@probe("count", "failed starts and crashes in the log since the last start that went well")
def failed_starts(readings: Readings) -> float:
    """Return how often the engine failed to start, or ended by itself, since it last started."""
    count = 0
    for entry in reversed(readings.facts["starts"]):
        if entry["ok"]:
            break
        count += 1
    return float(count)


@probe(
    "count",
    "files whose SHA-256 is not the published one",
    live=False,
    remark="A file that the options in force do not use does no harm to what the checks look at.",
)
def strange_files(readings: Readings) -> float:
    """Return how many files of the model folder are not as they were published."""
    return float(len(strange_names(readings)))


@probe("count", "times that ranks were lost or failed together since the last change")
def recoveries(readings: Readings, rows: int = ROWS) -> float:
    """Return how often the ranks had to join anew."""
    enough(readings, rows)
    return float(_noted(readings, "recover"))


@probe("count", "new tables given up since the last change")
def tables_given_up(readings: Readings) -> float:
    """Return how many planned tables the ranks did not take up."""
    return float(_noted(readings, "give_up_table"))


@probe("count", "version of the newest plan - version of the table in force")
def plans_behind(readings: Readings) -> float:
    """Return how many planned tables are newer than the one in force."""
    return float(int(str(readings.planned["version"])) - readings.table.version)


@probe("share", "(rows of failed steps + rows of requests that moved) / rows")
def recovered_rows(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of rows that ran again because ranks were lost or failed together.

    A step that fails leaves no rows of its own in the record: what it had in it stands in the note
    of the recovery, and runs again. Requests of a lost rank also run again what they had.
    """
    trace = enough(readings, rows)
    failed = sum(
        int(note.detail["rows_again"]) for note in trace.controls if note.action == "recover"
    )
    moved = int((trace.columns["rows/causes"] == CAUSES.index("recovery")).sum())
    return (failed + moved) / trace.num_rows


@probe("count", "rows run since the table in force was published")
def rows_since_plan(readings: Readings, rows: int = ROWS) -> float:
    """Return how many rows have run under the table in force, whatever else was changed since."""
    enough(readings, rows)
    return float(readings.rows_of_table)


@probe("share", "largest difference of the canary's logits / largest logit, newest table")
def canary_error(readings: Readings) -> float:
    """Return what the canary found when the newest table was taken up; 0 before the first."""
    canary = readings.facts.get("canary")
    return float(canary["max_error"]) if canary else 0.0


@probe("count", "jobs beside the engine that do not run")
def stopped_jobs(readings: Readings) -> float:
    """Return how many of the jobs that belong beside the engine do not run."""
    return float(sum(not job["running"] for job in readings.facts["jobs"]))


def strange_names(readings: Readings) -> list[str]:
    """Return the names of those files; no probe, but what an operator looks at."""
    if readings.published is None or readings.folder is None:
        raise Unreadable("there is no model folder to look at.")
    published, folder = readings.published, readings.folder
    names = {path.name for where in (published, folder) for path in where.iterdir()}
    return [n for n in sorted(names) if _digest(published / n) != _digest(folder / n)]


def _noted(readings: Readings, action: str) -> int:
    return sum(note.action == action for note in readings.trace.controls)


def _digest(path: object) -> str:
    try:
        with open(str(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
