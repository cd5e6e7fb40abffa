"""Plan where experts live from how busy they are: replicas for the busiest, ranks evenly loaded.

Three steps, layer by layer: groups of experts are packed onto nodes (the hierarchical policy; the
global policy takes all ranks as one node), the busiest experts of a node get further copies, and
the copies are packed onto the node's ranks. A rank never holds two copies of an expert.

Pure functions, called by operators' acts and by `engine.exchange.plan`.
Source: the algorithm that the README of DeepSeek's expert-parallel load balancer (EPLB) describes;
its worked example comes out exactly. EPLB may put two copies of an expert on one rank, ours moves
one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from engine.errors import RoutingError
from engine.routing.placement import even_shares, filled
from engine.routing.table import Int, RoutingTable

Load = npt.NDArray[np.int64] | npt.NDArray[np.float64]
Nodes = Sequence[Sequence[int]]

_Packs = list[list[list[int]]]
"""By node and rank, the expert each slot holds."""

HOT_SHARE = 0.2
"""Of the experts that get a further copy by default."""

IMBALANCE_FORMULA = (
    "sum over layers of the busiest rank's rows / sum over layers of the mean rows of the ranks "
    "that hold experts; an expert's copies share its rows evenly; 1 is perfect"
)


def balanced(
    load_LE: Load,
    num_ranks: int,
    *,
    version: int,
    num_slots: int | None = None,
    nodes: Nodes | None = None,
    num_groups: int = 1,
    now: RoutingTable | None = None,
) -> RoutingTable:
    """Place every expert, and copies of the busiest, so that ranks get about the same rows.

    Load ``[[6, 1, 1, 0]]`` on 2 ranks with 6 slots gives experts 0 and 1 a copy on each:
    ``phy2log = [[0, 2, 1, 0, 1, 3]]``. 30 experts in 30 slots on 8 ranks give shares 4, 4, 4, 4,
    4, 4, 3, 3.

    Args:
        load_LE: (L, E) rows of each expert, counted or averaged.
        num_ranks: G.
        version: of the new table.
        num_slots: P, copies of all experts together; None takes `default_slots`.
        nodes: the ranks of each node that take experts, a rank left out gets none; None puts all
            on one node.
        num_groups: of experts with consecutive ids that a group-limited gate chooses from. They
            stay together on a node where they divide evenly (`is_hierarchical`).
        now: the table in force; the plan then keeps as many copies where they are as its balance
            allows, for equal ranks of a node, and equal nodes, may stand in for each other.

    Raises:
        RoutingError: a load is negative or not a number, `nodes` name a rank that is not there or
            twice, or the slots are too few for one copy of each expert or too many for one on each
            rank.
    """
    used = _checked_nodes(nodes, num_ranks)
    num_experts = load_LE.shape[1]
    grouped = is_hierarchical(num_experts, num_groups, used)
    teams = used if grouped else [list(chain(*used))]
    reach = len(teams[0])  # the ranks on which an expert may have a copy
    slots = default_slots(num_experts, reach) if num_slots is None else num_slots
    _check_load(load_LE, slots, reach)
    rooms = [
        even_shares(share, len(team))
        for share, team in zip(even_shares(slots, len(teams)), teams, strict=True)
    ]
    held_LG = []
    for layer, load_E in enumerate(np.asarray(load_LE, dtype=np.float64)):
        packs = _packs(load_E, rooms, num_groups)
        if now is not None:
            packs = _kept(packs, rooms, _held(now, layer), teams)
        held_G: list[list[int]] = [[] for _ in range(num_ranks)]
        for rank, pack in zip(chain(*teams), chain(*packs), strict=True):
            held_G[rank] = pack
        held_LG.append(held_G)
    return filled(
        np.array([list(chain(*held_G)) for held_G in held_LG], dtype=np.int64).reshape(-1, slots),
        _rank_of_slot(rooms, teams),
        num_experts,
        num_ranks,
        version=version,
    )


def replicated(load_LE: Load, num_ranks: int, *, version: int, spare: int = 1) -> RoutingTable:
    """Give every rank room for its share of the experts and `spare` copies more, then balance.

    Raises:
        RoutingError: `spare` leaves more slots on a rank than there are experts.
    """
    num_experts = load_LE.shape[1]
    share = -(-num_experts // num_ranks)
    if not 0 <= spare <= num_experts - share:
        raise RoutingError(
            f"spare ({spare}) must lie between 0 and {num_experts - share}, because a rank holds "
            f"at most one copy of each of the {num_experts} experts."
        )
    slots = num_ranks * (share + spare)
    return balanced(load_LE, num_ranks, version=version, num_slots=slots)


def default_slots(num_experts: int, num_ranks: int) -> int:
    """Return the slots that leave a further copy for each of the hottest 20 % of the experts.

    Args:
        num_experts: E.
        num_ranks: on which an expert may have a copy.

    8 experts on 4 ranks take 10 slots; on one rank 8, for a second copy there serves nobody.
    """
    return min(num_experts + int(np.ceil(HOT_SHARE * num_experts)), num_experts * num_ranks)


def is_hierarchical(num_experts: int, num_groups: int, nodes: Nodes) -> bool:
    """Say whether groups of experts can be packed onto nodes: everything divides evenly."""
    if num_groups < 1 or num_experts % num_groups:
        raise RoutingError(
            f"num_groups ({num_groups}) must be a divisor of the {num_experts} experts."
        )
    return num_groups % len(nodes) == 0 and len({len(ranks) for ranks in nodes}) == 1


def rank_rows(load_LE: Load, table: RoutingTable) -> npt.NDArray[np.float64]:
    """Return (L, G) rows of each rank when an expert's copies share its rows evenly.

    Load ``[[6, 1, 1, 0]]`` on the table ``[[0, 2, 1, 0, 1, 3]]`` of 2 ranks: ``[[4.5, 3.5]]``.
    """
    rows_LG = np.zeros((table.num_layers, table.num_devices))
    each_LE = load_LE / table.num_replicas
    held = table.phy2log >= 0
    each_LP = np.take_along_axis(each_LE, np.where(held, table.phy2log, 0), axis=1) * held
    for layer in range(table.num_layers):
        np.add.at(rows_LG[layer], table.rank_of_phy, each_LP[layer])
    return rows_LG


def imbalance(load_LE: Load, table: RoutingTable) -> float:
    """Return how much longer the busiest ranks work than the mean; `IMBALANCE_FORMULA`.

    Layers run one after another and each waits for its busiest rank, hence the sums. 1.0 when
    there are no rows.
    """
    rows_LG = rank_rows(load_LE, table)[:, np.unique(table.rank_of_phy)]
    mean = float(rows_LG.mean(axis=1).sum())
    return float(rows_LG.max(axis=1).sum()) / mean if mean else 1.0


def _packs(load_E: npt.NDArray[np.float64], rooms: list[list[int]], num_groups: int) -> _Packs:
    """Return for one layer, node by node and rank by rank, the experts each slot holds."""
    groups = np.arange(len(load_E)).reshape(num_groups, -1)
    if len(rooms) == 1:
        experts_of_node = [groups.ravel()]
    else:
        share = [num_groups // len(rooms)] * len(rooms)
        packed = _packed(load_E[groups].sum(axis=1), np.arange(num_groups), share)
        experts_of_node = [groups[pack].ravel() for pack in packed]
    packs = []
    for experts, room in zip(experts_of_node, rooms, strict=True):
        copies = _copies(load_E[experts], sum(room), most=sum(size > 0 for size in room))
        rows = load_E[experts] / np.bincount(copies)
        packs.append(_packed(rows[copies], experts[copies], room))
    return packs


def _copies(load_E: npt.NDArray[np.float64], num_slots: int, *, most: int) -> Int:
    """Return (P,) which expert each copy is of: all once, then one more of the busiest by copy.

    Load ``[90, 30, 20]`` in 5 slots: expert 0 again (90), and again (45): ``[0, 1, 2, 0, 0]``.
    Among equals the one with fewer copies is first; no expert gets more than `most`.
    """
    copies = list(range(len(load_E)))
    count = np.ones(len(load_E), dtype=np.int64)
    while len(copies) < num_slots:
        each = np.where(count < most, load_E / count, -1.0)
        ties = np.flatnonzero(each == each.max())
        copies.append(int(ties[count[ties].argmin()]))
        count[copies[-1]] += 1
    return np.array(copies, dtype=np.int64)


def _packed(weights: npt.NDArray[np.float64], labels: Int, room: Sequence[int]) -> list[list[int]]:
    """Put items into packs, heaviest first, each into the lightest pack with room for it.

    A pack never holds a label twice. When every pack with room holds the item's label already, the
    item changes places with one of a full pack: there is always one that can move, as the room of
    any two packs that take items differs by at most one and no label has more items than packs.

    Weights 5, 5, 3, 2 of labels a, a, b, c in two packs of 2: a + b and a + c.
    """
    packs = [_Pack(size) for size in room]
    kinds, heavy = labels.tolist(), weights.tolist()
    for item in np.argsort(-weights, kind="stable").tolist():
        label, weight = kinds[item], heavy[item]
        with_room = [pack for pack in packs if len(pack.held) < pack.room]
        free = [pack for pack in with_room if label not in pack.held]
        if not free:
            free = [_make_way(label, weight, min(with_room, key=_total), packs)]
        min(free, key=_total).add(label, weight)
    return [list(pack.held) for pack in packs]


class _Pack:
    """Labels and their weights, in order of arrival."""

    def __init__(self, room: int) -> None:
        self.room, self.total, self.held = room, 0.0, dict[int, float]()

    def add(self, label: int, weight: float) -> None:
        self.held[label] = weight
        self.total += weight

    def give(self, label: int, other: _Pack) -> None:
        weight = self.held.pop(label)
        self.total -= weight
        other.add(label, weight)


def _total(pack: _Pack) -> float:
    return pack.total


def _make_way(label: int, weight: float, lightest: _Pack, packs: list[_Pack]) -> _Pack:
    """Move an item out of a full pack into the lightest, and return that pack: it takes `label`.

    Of all that can move, the one that leaves the heavier of the two packs lightest.
    """
    _, full, moved = min(
        (max(pack.total - other + weight, lightest.total + other), index, there)
        for index, pack in enumerate(packs)
        if label not in pack.held
        for there, other in pack.held.items()
        if there not in lightest.held
    )
    packs[full].give(moved, lightest)
    return packs[full]


def _kept(packs: _Packs, rooms: list[list[int]], held_G: list[list[int]], teams: Nodes) -> _Packs:
    """Deal nodes, ranks and slots anew so that most copies are where `held_G` has them already."""
    olds = [[held_G[rank] for rank in team] for team in teams]
    nodes = _dealt([list(chain(*node)) for node in packs], [list(chain(*old)) for old in olds])
    kept = []
    for node, old, room in zip(nodes, olds, rooms, strict=True):
        ranks = _dealt(packs[node], old, room)
        kept.append([_in_place(packs[node][r], there) for r, there in zip(ranks, old, strict=True)])
    return kept


def _dealt(
    packs: list[list[int]], olds: list[list[int]], room: Sequence[int] | None = None
) -> list[int]:
    """Return for each place which pack it gets: greedily, the most experts it holds already.

    A pack only goes where the room is the same as where it comes from.
    """
    sizes = np.array([len(pack) for pack in packs] if room is None else room)
    common = np.array([[len(set(pack) & set(old)) for old in olds] for pack in packs])
    common[sizes[:, None] != sizes] = -1
    pack_of = [0] * len(packs)
    for _ in packs:
        pack, place = divmod(int(common.argmax()), len(packs))
        pack_of[place] = pack
        common[pack, :] = common[:, place] = -2
    return pack_of


def _in_place(pack: list[int], old: list[int]) -> list[int]:
    """Order a rank's experts so that those it holds already keep their slots.

    ``[3, 7, 1]`` where ``[1, 2, 3]`` was: ``[1, 7, 3]``.
    """
    slot_of = {expert: slot for slot, expert in enumerate(old[: len(pack)]) if expert in pack}
    stays = {slot: expert for expert, slot in slot_of.items()}
    rest = iter([expert for expert in pack if expert not in slot_of])
    return [stays[slot] if slot in stays else next(rest) for slot in range(len(pack))]


def _held(table: RoutingTable, layer: int) -> list[list[int]]:
    """Return for each rank the experts in its slots, -1 for an empty one."""
    return [
        table.phy2log[layer, table.rank_of_phy == rank].tolist()
        for rank in range(table.num_devices)
    ]


def _rank_of_slot(rooms: list[list[int]], teams: Nodes) -> Int:
    sizes = dict(zip(chain(*teams), chain(*rooms), strict=True))
    return np.array([rank for rank in sorted(sizes) for _ in range(sizes[rank])], dtype=np.int64)


def _checked_nodes(nodes: Nodes | None, num_ranks: int) -> list[list[int]]:
    """Return the nodes that have a rank, as lists."""
    ranks = [sorted(node) for node in (nodes or [range(num_ranks)]) if len(node)]
    named = list(chain(*ranks))
    if not named or len(set(named)) < len(named) or min(named) < 0 or max(named) >= num_ranks:
        raise RoutingError(
            f"nodes ({nodes}) must name some of the ranks 0 to {num_ranks - 1}, each at most once."
        )
    return ranks


def _check_load(load_LE: Load, num_slots: int, reach: int) -> None:
    if not np.isfinite(load_LE).all() or (load_LE < 0).any():
        raise RoutingError("a load must be a number of rows of 0 or more for every expert.")
    num_experts = load_LE.shape[1]
    if not num_experts <= num_slots <= num_experts * reach:
        raise RoutingError(
            f"num_slots ({num_slots}) must lie between {num_experts}, one copy of each expert, and "
            f"{num_experts * reach}, one on each of the {reach} ranks it may be on."
        )
