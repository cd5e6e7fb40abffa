"""Write what others need to watch a service: Prometheus's rules and a Grafana board.

`python -m engine.serve.deploy data/deploy` writes both; a test holds the files there against this.
The rules are those of `engine.serve.alerts`, the board's panels are `PANELS`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.serve.alerts import RULES, Rule

RULE_FILE, BOARD_FILE = "prometheus-rules.yml", "grafana-board.json"
COLUMNS, PANEL_HEIGHT, GRID_WIDTH = 2, 8, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture of the board."""

    title: str
    unit: str
    """Grafana's word for the unit."""
    queries: tuple[tuple[str, str], ...]
    """Expression and legend."""


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    bucket = f"sum by (le) (rate(tokenrouter_{name}_bucket[1m]))"
    return tuple(
        (f"histogram_quantile({q}, {bucket})", word) for q, word in ((0.5, "median"), (0.99, "P99"))
    )


PANELS = (
    Panel("Tokens per second", "short", (
        ("sum(rate(tokenrouter_generation_tokens_total[1m]))", "generated"),
        ("sum(rate(tokenrouter_prompt_tokens_total[1m]))", "prompt"),
    )),
    Panel("Requests", "short", (
        ("sum(tokenrouter_num_requests_running)", "running"),
        ("sum(tokenrouter_num_requests_waiting)", "waiting"),
    )),
    Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
    Panel("Time of a whole request", "s", _quantiles("e2e_request_latency_seconds")),
    Panel("Time per output token", "s", _quantiles("time_per_output_token_seconds")),
    Panel("How requests ended, per second", "short", (
        ("sum by (outcome) (rate(tokenrouter_requests_ended_total[1m]))", "{{outcome}}"),
    )),
    Panel("Routing overhead, share of the steps", "percentunit", (
        ("sum(rate(tokenrouter_routing_seconds_total[1m]))"
         " / sum(rate(tokenrouter_step_seconds_total[1m]))", "deciding"),
    )),
    Panel("Evenness of the load", "short", (
        ("tokenrouter_load_balance", "{{definition}}"),
    )),
    Panel("Rows by expert, per second, the busiest ten", "short", (
        ("topk(10, sum by (layer, expert) (rate(tokenrouter_expert_tokens_total[1m])))",
         "layer {{layer}} expert {{expert}}"),
    )),
    Panel("Experts without tokens: seconds since the last", "s", (
        ("topk(10, tokenrouter_expert_idle_seconds)", "layer {{layer}} expert {{expert}}"),
    )),
    Panel("Ranks at work, share of time", "percentunit", (
        ("tokenrouter_rank_utilization_ratio", "rank {{rank}}"),
    )),
    Panel("Memory", "bytes", (
        ("tokenrouter_rank_memory_bytes", "rank {{rank}}"),
        ("tokenrouter_gpu_memory_total_bytes - tokenrouter_gpu_memory_free_bytes", "GPU {{gpu}}"),
    )),
    Panel("KV cache, share of its blocks", "percentunit", (
        ("tokenrouter_kv_cache_usage_ratio", "in use"),
        ("tokenrouter_prefix_cache_kept_ratio", "kept for reuse"),
    )),
    Panel("Tokens found in the KV cache, share of those looked up", "percentunit", (
        ("sum(rate(tokenrouter_prefix_cache_hits_total[1m]))"
         " / sum(rate(tokenrouter_prefix_cache_queries_total[1m]))", "found"),
    )),
    Panel("Draft tokens accepted, share of those proposed", "percentunit", (
        ("sum(rate(tokenrouter_spec_decode_num_accepted_tokens_total[1m]))"
         " / sum(rate(tokenrouter_spec_decode_num_draft_tokens_total[1m]))", "accepted"),
    )),
    Panel("Units of rows in INT8, share; of them failed their check", "percentunit", (
        ('sum(rate(tokenrouter_precision_units_total{format="int8"}[1m]))'
         " / sum(rate(tokenrouter_precision_units_total[1m]))", "in INT8"),
        ("sum(rate(tokenrouter_precision_failed_units_total[1m]))"
         ' / sum(rate(tokenrouter_precision_units_total{format="int8"}[1m]))', "failed"),
    )),
    Panel("Routing table", "short", (
        ("tokenrouter_table_version", "version"),
        ("rate(tokenrouter_communication_errors_total[5m])", "communication errors per second"),
    )),
)  # fmt: skip


def rule_file(rules: tuple[Rule, ...] = RULES) -> str:
    """Return Prometheus's rule file; needs Prometheus 2.42 for `keep_firing_for`."""
    lines = [
        "# Written by `python -m engine.serve.deploy data/deploy`; needs Prometheus 2.42.",
        "groups:",
        "  - name: tokenrouter",
        "    interval: 5s",
        "    rules:",
    ]
    for rule in rules:
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {json.dumps(condition(rule))}",
            f"        for: {rule.for_s:g}s",
            *([f"        keep_firing_for: {rule.for_s:g}s"] if rule.for_s else []),
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {json.dumps(rule.summary)}",
        ]
    return "\n".join(lines) + "\n"


def condition(rule: Rule) -> str:
    """Return when an alert holds: above the upper value, or already raised and above the lower."""
    raised = f"({rule.expression}) > {rule.raise_above:g}"
    if rule.clear_below == rule.raise_above:
        return raised
    firing = f'ALERTS{{alertname="{rule.name}", alertstate="firing"}}'
    return (
        f"{raised} or (({rule.expression}) > {rule.clear_below:g} and on (job, instance) {firing})"
    )


def board() -> dict[str, Any]:
    """Return the Grafana board."""
    width = GRID_WIDTH // COLUMNS
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "title": panel.title,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {
                "x": width * (number % COLUMNS),
                "y": PANEL_HEIGHT * (number // COLUMNS),
                "w": width,
                "h": PANEL_HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
                for index, (expression, legend) in enumerate(panel.queries)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    variable = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
    return {
        "uid": "tokenrouter",
        "title": "TokenRouter",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }


def files() -> dict[str, str]:
    """Return the content of each file by its name."""
    return {RULE_FILE: rule_file(), BOARD_FILE: json.dumps(board(), indent=2) + "\n"}


def main(arguments: list[str] | None = None) -> int:
    """Write the files into the folder that is named; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1:
        print("python -m engine.serve.deploy FOLDER", file=sys.stderr)
        return 2
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
