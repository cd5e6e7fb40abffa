"""The operators' acts: everything goes through `engine.runtime.control`, which records it.

One table of acts serves HTTP (`POST /v1/control/NAME`) and gRPC (`Control`). What the engine
refuses is told in its own sentence: every field is a number or one of a few words, so nothing a
caller wrote can come back in it. Layers go by the model's numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from engine.errors import FaultError, WorkbenchError
from engine.faults import POINTS, SAFE
from engine.routing.balance import balanced, imbalance
from engine.serve.audit import Entry
from engine.serve.drill import MOST_LEASE_S, RESTORE_S
from engine.serve.errors import ApiError, invalid
from engine.serve.guard import needs
from engine.serve.service import Service

SCALE_S = 60.0
"""Longest wait for ranks to come or go."""
LOOK_S = 0.1
ANSWER_S = 60.0
"""Longest wait for the engine to come to what it was asked between two steps."""
LEASE_S = 600.0
"""Longest lease of a fault that was set from outside."""

Layer = Annotated[int, Field(ge=0, lt=1 << 16)]
Expert = Annotated[int, Field(ge=0, lt=1 << 16)]


class Nothing(BaseModel):
    """An act that takes nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Ban(Nothing):
    """Never choose an expert."""

    expert: Expert
    layer: Layer | None = None


class Force(Nothing):
    """Always choose these experts."""

    experts: Annotated[list[Expert], Field(min_length=1, max_length=64)]
    layer: Layer | None = None


class Bias(Nothing):
    """Add to an expert's logit."""

    expert: Expert
    value: Annotated[float, Field(ge=-1e4, le=1e4)]
    layer: Layer | None = None


class Smoothing(Nothing):
    """Favour the experts that a sequence used lately."""

    bonus: Annotated[float, Field(ge=0, le=100)]
    window: Annotated[int, Field(ge=1, le=64)] = 1
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0


class Capacity(Nothing):
    """Drop what an expert is asked for beyond this factor of its even share; null drops nothing."""

    factor: Annotated[float, Field(ge=1, le=16)] | None


class Formats(Nothing):
    """Run the experts in the engine's own number format, in int8, or chosen by unit of rows."""

    mode: Literal["model", "int8", "auto"]


class Exchange(Nothing):
    """How ranks exchange rows."""

    mode: Literal["naive", "request", "grouped", "overlapped"]


class OneRank(Nothing):
    """A rank to take out or bring back."""

    rank: Annotated[int, Field(ge=0, lt=1 << 16)]


class Scale(Nothing):
    """How many ranks should take part."""

    ranks: Annotated[int, Field(ge=1, le=1 << 16)]


class Point(Nothing):
    """A fault point to heal."""

    point: Literal[tuple(POINTS)]  # type: ignore[valid-type]


class SafeFaultFor(Nothing):
    """Set a fault that delays and never falsifies; it heals by itself when its lease is over."""

    fault: Literal[tuple(SAFE)]  # type: ignore[valid-type]
    delay_ms: Annotated[float, Field(gt=0, le=max(fault.most_ms for fault in SAFE.values()))]
    lease_s: Annotated[float, Field(gt=0, le=LEASE_S)]
    rank: Annotated[int, Field(ge=0, lt=1 << 16)] | None = None


class BeginDrill(SafeFaultFor):
    """Hold this service for a drill with a safe fault; it is put back when its runner is silent."""

    drill: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64)]
    lease_s: Annotated[float, Field(gt=0, le=MOST_LEASE_S)]


Lease = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ExtendDrill(Nothing):
    """Let a drill go on without its runner for so long from now."""

    lease: Lease
    lease_s: Annotated[float, Field(gt=0, le=MOST_LEASE_S)]


class EndDrill(Nothing):
    """End a drill and wait until everything is as before; without a lease whatever drill it is."""

    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """One thing an operator can do."""

    body: type[Nothing]
    do: Callable[[Service, Any], Any]
    """Does it, or returns what to await; the answer is a dict, or None for the engine's state."""


def _at(service: Service, layer: int | None) -> int | None:
    """Return the index among the MoE layers of a layer's number."""
    layers = service.engine.model_config.moe_layers
    if layer is None:
        return None
    if layer not in layers:
        raise invalid(f"layer must be a MoE layer of this model, which has {len(layers)}.", "layer")
    return layers.index(layer)


def _rebalance(service: Service, _: Nothing) -> None:
    """Publish a table that spreads the load measured so far, if it does so better."""
    control = service.engine.control
    table, load_LE = control.table, service.monitor.tally.counts_LE.copy()
    living = service.health.living_ranks & service.health.expected_ranks
    ranks = sorted(living or range(table.num_devices))
    planned = balanced(
        load_LE, table.num_devices, version=table.version + 1, nodes=[ranks], now=table
    )
    if imbalance(load_LE, planned) < imbalance(load_LE, table):
        control.publish_table(planned)


def _inject(service: Service, body: SafeFaultFor) -> None:
    service.monitor.drill.check_free()
    fault = SAFE[body.fault]
    service.engine.control.inject(
        fault.point, fault.of(body.delay_ms), body.lease_s, rank=body.rank
    )


def _begin_drill(service: Service, body: BeginDrill) -> Any:
    if (why := service.reason()) is not None:
        raise FaultError(f"this service is not ready: {why}.")
    hold, fault = service.monitor.drill, SAFE[body.fault]
    return service.loop.ask(
        lambda engine: hold.begin(engine, body.drill, fault, body.delay_ms, body.lease_s, body.rank)
    ).result(ANSWER_S)


def _extend_drill(service: Service, body: ExtendDrill) -> Any:
    hold = service.monitor.drill
    return service.loop.ask(lambda engine: hold.extend(body.lease, body.lease_s)).result(ANSWER_S)


async def _end_drill(service: Service, body: EndDrill) -> dict[str, Any]:
    """End a drill and wait until it is put back."""
    hold, until = service.monitor.drill, time.monotonic() + RESTORE_S + ANSWER_S
    asked = service.loop.ask(lambda engine: hold.end(engine, body.lease))
    await asyncio.wait_for(asyncio.wrap_future(asked), ANSWER_S)
    while (done := hold.how_it_ended(body.lease)) is None:
        if service.loop.error is not None or time.monotonic() > until:
            raise ApiError(503, "The drill could not be ended in time.", code="drill_not_ended")
        await asyncio.sleep(LOOK_S)
    return done


def _scaled(service: Service, body: Scale) -> Awaitable[dict[str, Any]]:
    return scaled(service, body.ranks)


ACTS: dict[str, Act] = {
    "ban_expert": Act(Ban, lambda s, b: s.engine.control.ban_expert(_at(s, b.layer), b.expert)),
    "force_experts": Act(
        Force, lambda s, b: s.engine.control.force_experts(b.experts, _at(s, b.layer))
    ),
    "set_bias": Act(
        Bias, lambda s, b: s.engine.control.set_bias(_at(s, b.layer), b.expert, b.value)
    ),
    "set_smoothing": Act(
        Smoothing, lambda s, b: s.engine.control.set_smoothing(b.bonus, b.window, b.decay)
    ),
    "set_capacity": Act(Capacity, lambda s, b: s.engine.control.set_capacity(b.factor)),
    "set_precision": Act(Formats, lambda s, b: s.engine.control.set_precision(b.mode)),
    "clear_policy": Act(Nothing, lambda s, _: s.engine.control.clear_policy()),
    "inject_fault": Act(SafeFaultFor, _inject),
    "begin_drill": Act(BeginDrill, _begin_drill),
    "extend_drill": Act(ExtendDrill, _extend_drill),
    "end_drill": Act(EndDrill, _end_drill),
    "clear_fault": Act(Point, lambda s, b: s.engine.control.clear(b.point)),
    "set_exchange": Act(Exchange, lambda s, b: s.engine.control.set_exchange(b.mode)),
    "drain_rank": Act(OneRank, lambda s, b: s.engine.control.drain(b.rank)),
    "add_rank": Act(OneRank, lambda s, b: s.engine.control.add_rank(b.rank)),
    "rebalance": Act(Nothing, _rebalance),
    "scale": Act(Scale, _scaled),
}
"""Every act by the last part of its address."""


async def perform(service: Service, name: str, body: Nothing, entry: Entry) -> dict[str, Any]:
    """Do an act on another thread, because it may have to wait, and return the answer.

    The audit log is told with what values: they are numbers and words of ours.

    Raises:
        ApiError: the engine refused.
    """
    given = body.model_dump(exclude_none=True, exclude={"lease"})
    entry.detail = " ".join(f"{field}={value}" for field, value in given.items())
    try:
        done = await asyncio.to_thread(ACTS[name].do, service, body)
        answer = await done if asyncio.iscoroutine(done) else done
    except TimeoutError:
        raise ApiError(503, "The engine did not answer in time.", code="engine_busy") from None
    except WorkbenchError as refused:
        raise ApiError(409, str(refused), code="refused_by_engine") from None
    return answer or await _state(service)


async def _state(service: Service) -> dict[str, Any]:
    state = await asyncio.to_thread(service.engine.control.state)
    return {"state": state | {"drill": service.monitor.drill.facts()}}


def routes(service: Service) -> APIRouter:
    """Return the routes of one service."""
    router = APIRouter(prefix="/v1/control", dependencies=[needs("operate")])

    @router.get("/state")
    async def state() -> dict[str, Any]:
        """Return table, policy, fault points and load."""
        return await _state(service)

    for name, act in ACTS.items():
        router.post(f"/{name}", description=act.body.__doc__)(_route(service, name, act))
    return router


def _route(service: Service, name: str, act: Act) -> Callable[..., Awaitable[dict[str, Any]]]:
    async def route(request: Request, body: Any = None) -> dict[str, Any]:
        given = act.body() if body is None else body
        return await perform(service, name, given, request.state.audit)

    # An act that takes nothing may come without a body.
    route.__annotations__["body"] = act.body | None if act.body is Nothing else act.body
    if act.body is not Nothing:
        route.__defaults__ = None
    route.__name__ = name
    return route


async def scaled(service: Service, ranks: int) -> dict[str, Any]:
    """Order ranks in or out and wait until that is done; requests go on meanwhile.

    Raises:
        ApiError: this service has no such number of places, or ranks did not come in time.
    """
    places, health = service.engine.config.num_ranks, service.health
    if places == 1:
        raise ApiError(
            409, "This service runs in one process; start it with --ranks.", code="no_ranks"
        )
    if ranks > places:
        raise invalid(f"This service has places for {places} ranks.", "ranks")
    before, began = sorted(health.living_ranks), time.monotonic()
    expected = health.expected_ranks
    for act, rank in scale_orders(expected, health.living_ranks & expected, ranks, places):
        order = service.engine.control.drain if act == "drain" else service.engine.control.add_rank
        await asyncio.to_thread(order, rank)
    while health.living_ranks != health.expected_ranks:
        if service.loop.error is not None or time.monotonic() - began > SCALE_S:
            raise ApiError(503, "The ranks did not come in time.", code="scale_incomplete")
        await asyncio.sleep(LOOK_S)
    return {
        "before": before,
        "ranks": sorted(health.living_ranks),
        "table_version": service.engine.control.table.version,
        "seconds": round(time.monotonic() - began, 3),
    }


def scale_orders(
    expected: frozenset[int], living: frozenset[int], ranks: int, places: int
) -> list[tuple[str, int]]:
    """Return what to do so that `ranks` take part: lost ones go first and come back first.

    Of 0, 1, 2 with 1 lost, 2 wanted: drain 1. Of 0, 2 living in 4 places, 3 wanted: add 1.
    """
    lost = sorted(expected - living)
    if ranks <= len(living):
        leaving = [*lost, *sorted(living, reverse=True)[: len(living) - ranks]]
        return [("drain", rank) for rank in leaving]
    free = [*lost, *(rank for rank in range(places) if rank not in expected)]
    coming = free[: ranks - len(living)]
    return [("add", rank) for rank in coming] + [("drain", r) for r in lost if r not in coming]
