"""What an operator can measure of routing: choices, places, tables, answers.

The only things a check ever looks at are these, `probes_time`, `probes_deploy` and, of a service,
`probes_service`. A probe reads
the trace since the last change, the running table, the record of planned tables, the answers the
engine gives, and nothing else.
"""

from __future__ import annotations

import numpy as np

from engine.events import CAUSES
from workbench.drills import probes_deploy, probes_service, probes_time
from workbench.drills.readings import (
    MEANINGS,
    PROBES,
    ROWS,
    AnyReadings,
    Meaning,
    Readings,
    ServiceReadings,
    TooLittle,
    Unreadable,
    enough,
    probe,
)
from workbench.trace.schema import Array

__all__ = [
    "MEANINGS",
    "PROBES",
    "ROWS",
    "AnyReadings",
    "Meaning",
    "Readings",
    "ServiceReadings",
    "Unreadable",
    "device_rows",
    "probes_deploy",
    "probes_service",
    "probes_time",
]


@probe("share", "pairs of neighbouring tokens with other experts / pairs")
def jump_rate(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of neighbouring tokens whose sets of experts differ, over all layers."""
    from workbench import views

    table = views.jump_rate(enough(readings, rows))
    both = table[table["choice"] == "set"]
    return float(both["jumps"].sum() / max(1, both["pairs"].sum()))


@probe("share", "pairs of neighbouring tokens sent to other devices / pairs")
def route_change_rate(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of neighbouring tokens sent to different sets of devices, over all layers.

    What the exchange sees of jumps: experts on one device may change without it.
    """
    trace = enough(readings, rows)
    devices_NLK = np.sort(_devices(readings), axis=-1)
    requests, positions = trace.columns["rows/request_ids"], trace.columns["rows/positions"]
    order = np.lexsort((positions, requests))
    next_to = (np.diff(requests[order]) == 0) & (np.diff(positions[order]) == 1)
    used_NLG = (devices_NLK[..., None] == np.arange(readings.table.num_devices)).any(axis=2)[order]
    changed = (used_NLG[1:] != used_NLG[:-1]).any(axis=-1)[next_to]
    return float(changed.mean()) if changed.size else 0.0


@probe("ratio", "max(rows by device) / mean(rows by device), worst layer")
def busiest_device(readings: Readings, rows: int = ROWS) -> float:
    """Return max(n) / mean(n) of the rows n by device, in the layer where that is largest."""
    from workbench import views

    trace, table = enough(readings, rows), readings.table
    loads = views.device_load(trace, tables={table.version: table.rank_of_phy.tolist()})
    return float(loads["load"].max())


@probe(
    "share",
    "tokens that chose the expert / tokens, worst layer",
    remark="This is what the gate chooses, not where it runs: it may stay high after a repair "
    "that only changes where experts are held.",
)
def busiest_expert(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of tokens that chose the most chosen expert of any layer."""
    trace = enough(readings, rows)
    return float(trace.expert_counts().max() / trace.num_rows)


@probe("share", "tokens that chose the expert / tokens, least chosen expert of any layer")
def idlest_expert(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of tokens that chose the least chosen expert of any layer."""
    trace = enough(readings, rows)
    return float(trace.expert_counts().min() / trace.num_rows)


@probe("count", "experts, over all layers, that less than 1 % of the tokens chose")
def idle_experts(readings: Readings, rows: int = ROWS) -> float:
    """Return how many experts of all layers get next to nothing."""
    trace = enough(readings, rows)
    return float((trace.expert_counts() < 0.01 * trace.num_rows).sum())


@probe("count", "experts run / tokens, by layer")
def experts_a_token(readings: Readings, rows: int = ROWS) -> float:
    """Return how many experts run a token in each layer."""
    trace = enough(readings, rows)
    chosen = trace.columns["rows/topk_ids"] >= 0
    return float(chosen.sum(axis=2).mean())


@probe("count", "devices that a token's rows go to / tokens, by layer")
def devices_a_token(readings: Readings, rows: int = ROWS) -> float:
    """Return to how many devices a token is sent in each layer."""
    enough(readings, rows)
    devices_NLK = _devices(readings)
    grid = np.arange(readings.table.num_devices)
    return float((devices_NLK[..., None] == grid).any(axis=2).sum(axis=-1).mean())


@probe("share", "rows run where another expert is held / rows")
def misplaced_rows(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of the running table's rows that ran where it holds another expert."""
    trace, table = enough(readings, rows), readings.table
    mine_N = trace.columns["steps/table_version"][trace.row_steps] == table.version
    phy_NLK = trace.columns["rows/phy_ids"][mine_N].astype(np.int64)
    held_NLK = table.phy2log[np.arange(table.num_layers)[:, None], phy_NLK]
    wrong_NLK = (held_NLK != trace.columns["rows/topk_ids"][mine_N]) & (phy_NLK >= 0)
    return float(wrong_NLK.mean()) if wrong_NLK.size else 0.0


@probe("share", "(token, expert) pairs that found no room / pairs")
def dropped_share(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of chosen experts that a token never reached."""
    return float((enough(readings, rows).columns["rows/phy_ids"] < 0).mean())


@probe("count", "0: the running table is the planned one; 1: it is not")
def unplanned_table(readings: Readings) -> float:
    """Return 0 when the running table's hash is the one in the change record, else 1."""
    return float(readings.table.sha256() != readings.planned.get("sha256"))


@probe("count", "copies that the look-up claims - slots it can reach, over all layers")
def copies_missing(readings: Readings) -> float:
    """Return how many copies of experts the running table counts that are no slot of their own."""
    table = readings.table
    missing = 0
    for layer in range(table.num_layers):
        for expert in range(table.num_experts):
            claimed = int(table.num_replicas[layer, expert])
            missing += claimed - len(set(table.log2phy[layer, expert, :claimed].tolist()))
    return float(missing)


@probe("share", "known questions answered as before / questions", live=False)
def answers_kept(readings: Readings) -> float:
    """Return the share of known questions answered with the same token as before the drill."""
    if not readings.known:
        raise Unreadable("no answers were written down before the drill.")
    given = np.asarray(readings.ask())
    return float((given == np.asarray(readings.known)).mean())


@probe("share", "known questions that two instances answer alike / questions", live=False)
def instances_agree(readings: Readings, instance: int = 1) -> float:
    """Return the share of tokens that the first and another instance answer alike."""
    first, other = readings.ask(), readings.ask(instance)
    return float((np.asarray(first) == np.asarray(other)).mean())


@probe("share", "tokens that two instances draw alike for known questions / tokens", live=False)
def instances_draw_alike(readings: Readings, instance: int = 1) -> float:
    """Return the share of tokens that two instances draw alike, each by its own seed."""
    first, other = readings.ask(drawn=True), readings.ask(instance, drawn=True)
    return float((np.asarray(first) == np.asarray(other)).mean())


@probe("share", "known questions another instance answers as the first did / questions", live=False)
def other_answers_kept(readings: Readings, instance: int = 1) -> float:
    """Return the share of tokens another instance answers as the first did before the drill."""
    if not readings.known:
        raise Unreadable("no answers were written down before the drill.")
    return float((np.asarray(readings.ask(instance)) == np.asarray(readings.known)).mean())


@probe("share", "tokens of known questions that choose other experts than before", live=False)
def drift(readings: Readings, layer: int) -> float:
    """Return the share of tokens that choose other experts in a layer; -1 is the last one."""
    known_NLK = readings.choices_known
    if not known_NLK.size:
        raise Unreadable("no choices were written down before the drill.")
    readings.ask()
    now_NLK = readings.choices()
    if now_NLK.shape != known_NLK.shape:
        raise Unreadable("the questions have other numbers of experts than before.")
    return float((now_NLK[:, layer] != known_NLK[:, layer]).any(axis=-1).mean())


@probe("share", "known questions an instance answers alike twice / questions", live=False)
def instance_repeats(readings: Readings, instance: int = 1) -> float:
    """Return the share of tokens that an instance gives again when it is asked again."""
    first, again = readings.ask(instance), readings.ask(instance)
    return float((np.asarray(first) == np.asarray(again)).mean())


@probe("ratio", "rows of steps beyond their prompts / tokens that stand among them")
def rows_a_token(readings: Readings, rows: int = ROWS) -> float:
    """Return how many rows run for each token gained; a draft's rejected proposals are the rest."""
    trace = enough(readings, rows)
    columns = trace.columns
    decoded = trace.num_rows - int(columns["steps/num_prefill_rows"].sum())
    rejected = int((columns["rows/causes"] == CAUSES.index("rejected_draft")).sum())
    if decoded <= rejected:
        raise TooLittle("no token was gained; try again in a moment.")
    return decoded / (decoded - rejected)


@probe("share", "proposed tokens that stand / proposed tokens")
def acceptance(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of a draft's proposals that the target accepts."""
    columns = enough(readings, rows).columns
    drafted = columns["rows/drafted"] > 0
    if not drafted.any():
        raise Unreadable("no draft proposes anything.")
    return float((columns["rows/causes"][drafted] == CAUSES.index("accepted")).mean())


@probe("count", "rows with gate logits that are not finite")
def broken_rows(readings: Readings) -> float:
    """Return how many rows had gate logits that are not finite numbers."""
    return float(readings.trace.columns["steps/bad_rows"].sum())


@probe("share", "steps with rows that are not finite / steps")
def broken_steps(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of steps in which some row's gate logits were not finite."""
    return float((enough(readings, rows).columns["steps/bad_rows"] > 0).mean())


def device_rows(readings: Readings) -> list[list[int]]:
    """Return (L, G) rows by layer and device; no probe, but what an operator looks at."""
    if readings.table_now is None or not readings.trace.num_rows:
        return []
    grid = np.arange(readings.table.num_devices)
    rows: list[list[int]] = (_devices(readings)[..., None] == grid).sum(axis=(0, 2)).tolist()
    return rows


def _devices(readings: Readings) -> Array:
    """Return (N, L, K) the device each row ran on, -1 for one that was dropped."""
    phy_NLK = readings.trace.columns["rows/phy_ids"].astype(np.int64)
    return np.where(phy_NLK >= 0, readings.table.rank_of_phy[phy_NLK], -1)


OF_SERVICES = {name: PROBES[name] for name in PROBES if name.startswith("service_")}
"""The probes that read a service over HTTP."""
OF_ENGINES = {name: PROBES[name] for name in PROBES if name not in OF_SERVICES}
"""Those that read what a drill's own engine recorded."""
