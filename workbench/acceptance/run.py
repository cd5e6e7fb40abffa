"""Run the checks one after the other and report on each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.errors import MachineError, WorkbenchError
from workbench.acceptance.expectations import Expectations, NotAcceptedError, ensure
from workbench.acceptance.format import check_completion, check_routing, check_stream
from workbench.remote import Remote, refusal

PROMPT = "你好"
PROMPTS = (
    "It is a truth universally",
    "Der Server ist",
    "Le serveur de messagerie",
    "Y dijo el rey",
    "您可以使用此命令",
    "def read_file(self, path):\n    ",
    "The sum of two real numbers",
    "12 * 7 = ",
)
"""Mixed, so that many experts are asked for."""
LOGPROB_TOLERANCE = 1e-3
COMPLETIONS, CHAT, STATUS = "/v1/completions", "/v1/chat/completions", "/v1/status"


@dataclass(slots=True)
class Visit:
    """One run of the checks."""

    remote: Remote
    expected: Expectations
    model: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)
    """The service's state before the load; empty for other services."""

    def complete(self, prompt: str, **options: Any) -> Any:
        """Return a completion's answer.

        Raises:
            NotAcceptedError: the status is not 200.
        """
        return self.post(COMPLETIONS, {"prompt": prompt, **options})

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return an answer's content.

        Raises:
            NotAcceptedError: the status is not 200.
        """
        status, content = self.remote.post(path, {"model": self.model, "temperature": 0, **body})
        ensure(status == 200, f"{path} answered {refusal(status, content)}")
        return content

    def status(self) -> Mapping[str, Any]:
        """Return the service's state.

        Raises:
            NotAcceptedError: there is none.
        """
        status, content = self.remote.get(STATUS)
        good = status == 200 and isinstance(content, dict)
        ensure(good, f"{STATUS} answered {refusal(status, content)}")
        return dict(content)


def accept(remote: Remote, expected: Expectations, model: str = "") -> dict[str, Any]:
    """Run all checks and return the report.

    Raises:
        MachineError: the service does not answer at all.
    """
    visit = Visit(remote, expected, model)
    checks = [_checked(name, check, visit) for name, check in CHECKS]
    failed = [check for check in checks if check["status"] == "failed"]
    return {"url": remote.url, "model": visit.model, "passed": not failed, "checks": checks}


def report_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report for people."""
    for check in report["checks"]:
        yield f"{check['status']:<8} {check['name']:<20} {check['found']}"
    yield ""
    yield "Accepted." if report["passed"] else "Not accepted; mend what says failed."


def _checked(name: str, check: Callable[[Visit], dict[str, Any]], visit: Visit) -> dict[str, Any]:
    if visit.expected.openai_only and check in (_expert_load, _log):
        return {"name": name, "status": "skipped", "found": "not part of OpenAI's interface"}
    try:
        measured = check(visit)
    except NotAcceptedError as finding:
        return {"name": name, "status": "failed", "found": f"{finding}."}
    except (WorkbenchError, KeyError, TypeError, ValueError, AttributeError) as wrong:
        reason = wrong if isinstance(wrong, MachineError) else f"an answer is malformed ({wrong!r})"
        return {"name": name, "status": "failed", "found": str(reason)}
    return {"name": name, "status": "passed", "found": measured.pop("found"), **measured}


def _connectivity(visit: Visit) -> dict[str, Any]:
    """1: the smallest request is answered with 200 and a text."""
    status, content = visit.remote.get("/v1/models")
    ensure(status == 200, f"/v1/models answered {refusal(status, content)}")
    names = [one["id"] for one in content["data"]]
    visit.model = visit.model or names[0]
    ensure(visit.model in names, f"the service lists no model {visit.model!r}")
    if not visit.expected.openai_only:
        visit.before = visit.status()
    began = time.perf_counter()
    choice = check_completion(visit.complete(PROMPT, max_tokens=4))
    seconds = time.perf_counter() - began
    ensure(isinstance(choice["text"], str), "the answer has no text")
    return {"found": f"200 in {seconds * 1e3:.0f} ms", "seconds": seconds}


def _format(visit: Visit) -> dict[str, Any]:
    """2: text and the summary of the tokens' routing are there and agree."""
    options: dict[str, Any] = {"max_tokens": visit.expected.max_tokens}
    extra = {} if visit.expected.openai_only else {"routing": {"encodings": True}}
    answer = visit.complete(PROMPTS[1], **options, **extra)
    choice = check_completion(answer)
    body = {"model": visit.model, "prompt": PROMPTS[1], "temperature": 0, "stream": True}
    chunks = check_stream(visit.remote.lines(COMPLETIONS, {**body, **options}), choice["text"])
    messages = [{"role": "user", "content": PROMPTS[1]}]
    check_completion(visit.post(CHAT, {"messages": messages, **options}), chat=True)
    found = f"completion, chat and a stream of {chunks} chunks"
    if visit.expected.openai_only:
        return {"found": found}
    told = check_routing(choice.get("routing"), answer["usage"], visit.before["model_shape"])
    return {
        "found": f"{found}; {told['rows']} routed rows x {told['layers']} layers x "
        f"top-{told['top_k']}, the same in three encodings",
        "routing": told,
    }


def _pressure(visit: Visit) -> dict[str, Any]:
    """3: many requests at once, by mean and P99."""
    expected = visit.expected

    def one(index: int) -> float:
        began = time.perf_counter()
        answer = visit.complete(
            f"{PROMPTS[index % len(PROMPTS)]} {index}", max_tokens=expected.max_tokens
        )
        check_completion(answer)
        return time.perf_counter() - began

    began = time.perf_counter()
    with ThreadPoolExecutor(expected.num_requests) as pool:
        seconds = sorted(pool.map(one, range(expected.num_requests)))
    whole = time.perf_counter() - began
    mean, p99 = statistics.fmean(seconds), seconds[math.ceil(0.99 * len(seconds)) - 1]
    found = (
        f"{len(seconds)} at once in {whole:.2f} s: "
        f"mean {mean:.2f} s (at most {expected.mean_s:g}), "
        f"P99 {p99:.2f} s (at most {expected.p99_s:g})"
    )
    ensure(mean <= expected.mean_s and p99 <= expected.p99_s, f"too slow: {found}")
    return {"found": found, "mean_s": mean, "p99_s": p99, "requests": len(seconds)}


def _expert_load(visit: Visit) -> dict[str, Any]:
    """4: what each expert got of that load, against an even share and against capacity."""
    before, now = (
        np.array(state["totals"]["expert_counts"], dtype=float)
        for state in (visit.before, visit.status())
    )
    counts_LE = now - before
    ensure(counts_LE.size > 0 and bool(counts_LE.any()), "no expert has had a row")
    even_L1 = counts_LE.mean(axis=1, keepdims=True)
    ensure(bool(even_L1.all()), "a layer has had no row")
    shares_LE = counts_LE / even_L1
    skew, least = float(shares_LE.max()), float(shares_LE.min())
    found = f"against an even share: {least:.2f} to {skew:.2f} times"
    factor = visit.expected.capacity_factor
    over = int((shares_LE > factor).sum()) if factor is not None else None
    if factor is None:
        found += "; no capacity factor is set and no token is ever dropped"
    else:
        found += (
            f"; against capacity factor {factor:g}: the fullest at {skew / factor:.0%}, {over} of "
            f"{shares_LE.size} over it"
        )
    idle = int((counts_LE == 0).sum())
    ensure(not idle, f"{idle} experts had no row ({found})")
    ensure(skew <= visit.expected.max_skew, f"too uneven: {found}")
    ensure(not over, f"over capacity: {found}")
    return {"found": found, "max_over_even": skew, "min_over_even": least, "over_capacity": over}


def _log(visit: Visit) -> dict[str, Any]:
    """5: no traceback and no failure of routing since the start."""
    state = visit.status()
    log, totals = state["log"], state["totals"]
    figures = {
        "tracebacks": log["tracebacks"],
        "errors": sum(log["levels"].get(level, 0) for level in ("ERROR", "CRITICAL")),
        "rows with broken router logits": totals["bad_rows"],
        "failed requests": state["requests"]["failed"],
        "communication errors": state["communication_errors"],
    }
    wrong = [f"{number} {name}" for name, number in figures.items() if number]
    ensure(not wrong, f"since the start: {', '.join(wrong)}")
    requests = state["requests"]
    ended = requests["finished"] + requests["aborted"] + requests["failed"]
    ensure(requests["started"] == ended + requests["running"], "the requests do not add up")
    return {"found": f"nothing wrong in {totals['steps']} steps since the start", **figures}


def _repeats(visit: Visit) -> dict[str, Any]:
    """6: the same input gives the same output, to the logits where their hash is told."""
    options = {"max_tokens": visit.expected.max_tokens, "logprobs": 1, "seed": 1}
    answers = [visit.complete(PROMPTS[2], **options) for _ in range(visit.expected.num_repeats)]
    choices = [check_completion(answer) for answer in answers]
    texts = {choice["text"] for choice in choices}
    ensure(len(texts) == 1, f"{len(texts)} different texts in {len(choices)} repeats")
    hashes = {choice.get("logits_sha256") for choice in choices}
    if None not in hashes:
        ensure(len(hashes) == 1, f"equal texts, but {len(hashes)} different logit hashes")
        return {"found": f"{len(choices)} repeats, one logit hash", "logits_sha256": hashes.pop()}
    values = np.array([choice["logprobs"]["token_logprobs"] for choice in choices], dtype=float)
    spread = float(np.ptp(values, axis=0).max()) if values.size else 0.0
    ensure(spread <= LOGPROB_TOLERANCE, f"log-probabilities differ by {spread:.2g}")
    return {
        "found": f"{len(choices)} repeats, equal texts, log-probabilities within {spread:.1g}; "
        "hashes are told in deterministic mode",
        "logprob_spread": spread,
    }


CHECKS: tuple[tuple[str, Callable[[Visit], dict[str, Any]]], ...] = (
    ("connectivity", _connectivity),
    ("output format", _format),
    ("concurrent requests", _pressure),
    ("expert load", _expert_load),
    ("log", _log),
    ("identical repeats", _repeats),
)
