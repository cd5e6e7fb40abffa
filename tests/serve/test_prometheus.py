"""The shipped rules against a real Prometheus (`make service`; Debian's package `prometheus`)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from engine.serve.alerts import MEAN_LATENCY, RULES, Rule, with_thresholds
from engine.serve.auth import add_key
from engine.serve.deploy import RULE_FILE, rule_file
from tests.serve.conftest import MODEL, NAME, slowly, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
DEPLOY = MODEL.parents[1] / "deploy"
SLOW_S = 0.3
"""A request that is slow here takes twice as long, any other a tenth."""


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing: apt-get install prometheus"
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid_and_the_metrics_well_named(client, complete):
    assert f"{len(RULES)} rules found" in run(
        tool("promtool"), "check", "rules", str(DEPLOY / RULE_FILE)
    )
    complete()
    text = client.get("/metrics").content
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True)
    said = done.stdout + done.stderr
    assert not [line for line in said.decode().splitlines() if line.startswith("tokenrouter")], said


def series(rule: Rule, values: list[tuple[float, int]]) -> list[dict[str, str]]:
    """Return input series that make the rule's reading go through (value, samples of 5 s)."""

    def flat(name: str, labels: str = "") -> dict[str, str]:
        text = " ".join(f"{value:g}x{number - 1}" for value, number in values)
        return {"series": f'tokenrouter_{name}{{job="j",instance="i"{labels}}}', "values": text}

    def rising(name: str, per_sample: list[tuple[float, int]]) -> dict[str, str]:
        total, points = 0.0, []
        for step, number in per_sample:
            for _ in range(number):
                total += step
                points.append(f"{total:g}")
        return {"series": f'tokenrouter_{name}{{job="j",instance="i"}}', "values": " ".join(points)}

    ones = [(1.0, number) for _, number in values]
    if rule.reading == "mean_latency_s":
        return [rising("e2e_request_latency_seconds_sum", values),
                rising("e2e_request_latency_seconds_count", ones)]  # fmt: skip
    if rule.reading == "overhead_share":
        return [rising("routing_seconds_total", values), rising("step_seconds_total", ones)]
    if rule.reading == "ranks_silent":
        up = [(0.0 if value > 0 else 1.0, number) for value, number in values]
        text = " ".join(f"{value:g}x{number - 1}" for value, number in up)
        return [{"series": 'tokenrouter_rank_up{job="j",instance="i",rank="1"}', "values": text}]
    names = {
        "expert_idle_s": ("expert_idle_seconds", ',layer="0",expert="1"'),
        "rank_excess_s": ("rank_excess_seconds", ',rank="1"'),
        "rank_table_lag": ("rank_table_lag", ',rank="1"'),
        "num_waiting": ("num_requests_waiting", ""),
    }
    return [flat(*names[rule.reading])]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_raised_kept_between_and_cleared(rule, tmp_path):
    """promtool's own clock: 5 minutes high, 5 between the thresholds, 10 low."""
    high = rule.raise_above * 1.2 + 0.01
    between = (rule.raise_above + rule.clear_below) / 2
    values = [(high, 60), (between, 60), (rule.clear_below * 0.5, 120)]
    label = {"severity": rule.severity, "job": "j", "instance": "i"}

    def at(minute: float, *, raised: bool) -> dict[str, object]:
        expected = [{"exp_labels": label, "exp_annotations": {"summary": rule.summary}}]
        return {"eval_time": f"{60 * minute:.0f}s", "alertname": rule.name,
                "exp_alerts": expected if raised else []}  # fmt: skip

    kept = rule.raise_above > rule.clear_below
    tests = [at(4.9, raised=True), at(9.9, raised=kept), at(19, raised=False)]
    (tmp_path / RULE_FILE).write_text(rule_file((rule,)))
    case = {"rule_files": [RULE_FILE], "evaluation_interval": "5s",
            "tests": [{"interval": "5s", "input_series": series(rule, values),
                       "alert_rule_test": tests}]}  # fmt: skip
    (tmp_path / "test.yml").write_text(json.dumps(case))
    run(tool("promtool"), "test", "rules", str(tmp_path / "test.yml"))


def test_between_the_thresholds_nothing_is_raised_that_was_not(tmp_path):
    for rule in RULES:
        if rule.raise_above == rule.clear_below:
            continue
        values = [((rule.raise_above + rule.clear_below) / 2, 120)]
        (tmp_path / RULE_FILE).write_text(rule_file((rule,)))
        quiet = {"eval_time": "9m", "alertname": rule.name, "exp_alerts": []}
        case = {"rule_files": [RULE_FILE], "evaluation_interval": "5s",
                "tests": [{"interval": "5s", "input_series": series(rule, values),
                           "alert_rule_test": [quiet]}]}  # fmt: skip
        (tmp_path / "test.yml").write_text(json.dumps(case))
        run(tool("promtool"), "test", "rules", str(tmp_path / "test.yml"))


@pytest.fixture
def watched(make_server, tmp_path) -> Iterator[tuple[object, str, str]]:
    """A service and a Prometheus that scrapes it with a key, as data/deploy/README.md says."""
    keys = tmp_path / "keys.json"
    key = add_key(keys, "all", ["infer", "observe", "operate"])
    (tmp_path / "observe.key").write_text(add_key(keys, "watch", ["observe"]))
    server = make_server(token_file=keys, max_latency_s=10)
    target = server.url.removeprefix("http://")
    fast = "".join(
        f"{line.split(':')[0]}: 1s\n" if line.strip().startswith(("for:", "keep_", "interval:"))
        else f"{line}\n" for line in rule_file(with_thresholds(SLOW_S, 5)).splitlines()
    )  # fmt: skip
    (tmp_path / RULE_FILE).write_text(fast.replace("[1m]", "[5s]"))
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n"
        f"rule_files: [{RULE_FILE}]\n"
        "scrape_configs:\n"
        "  - job_name: tokenrouter\n"
        "    authorization: {credentials_file: observe.key}\n"
        f'    static_configs: [{{targets: ["{target}"]}}]\n'
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        tool("prometheus"),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield server, key, f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(20)


def test_a_real_prometheus_scrapes_and_raises_an_alert(watched):
    server, key, prometheus = watched

    def query(expression: str) -> list[float]:
        try:
            answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
        except httpx.HTTPError:
            return []
        return [float(one["value"][1]) for one in answer["data"]["result"]]

    def firing() -> set[str]:
        answer = httpx.get(f"{prometheus}/api/v1/alerts").json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in answer if one["state"] == "firing"}

    assert until(lambda: query('up{job="tokenrouter"}') == [1.0], 30)
    body = {"model": NAME, "prompt": "Der Server", "max_tokens": 3, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}

    def ask() -> None:
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)

    end = time.monotonic() + 8
    while time.monotonic() < end:
        ask()
    assert query("tokenrouter_generation_tokens_total")[0] > 0
    assert len(query("tokenrouter_expert_tokens_total")) == 32
    groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    assert all(rule["health"] == "ok" for group in groups for rule in group["rules"])
    assert MEAN_LATENCY not in firing()
    with slowly(server):
        assert until(lambda: (ask(), MEAN_LATENCY in firing())[1], 60)
    assert until(lambda: (ask(), MEAN_LATENCY not in firing())[1], 60)
