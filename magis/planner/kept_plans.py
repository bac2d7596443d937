"""Plans cached on disk across runs, and proven again when read.

The cache key covers all inputs of a search. An entry is one line of figures and the planned graph as text. A cached
plan is used only if its graph is proven to compute the step, and simulates to exactly the stored figures. Searches cut
short by a time limit are not cached. Reading runs no code. Source lines are the current ones: the entry stores which
operators of the step they come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NoReturn

from magis.cost.cost_model import RooflineCosts
from magis.errors import MagisError, VerifyError
from magis.graph import ARRIVED, HOST_COPIES, Graph, Op, digest, dump, every_op, parse, verify
from magis.graph.hazards import is_pure_view
from magis.ops.collectives import under_way
from magis.planner.plan_proof import prove
from magis.planner.plans import Plan, PlanScratch
from magis.planner.subject import Subject
from magis.planner.update_lists import forms_of
from magis.report.text_store import UNSOUND, Kept
from magis.results import Memory
from magis.runtime.measure import device_identity
from magis.search.budgeted_evaluator import Objective
from magis.simulate.compiled_problem import GENERATOR_NS

FORMAT = 1
MOST = 1 << 62
"""Upper bound of every figure: bytes and nanoseconds are int64."""
LINES = "lines"
_NOT_KEPT = ("graph", "seconds", "stopped_by_seconds", "searched", "decisions")
FIGURES = tuple(field.name for field in fields(Plan) if field.name not in _NOT_KEPT)


def verify_plan(graph: Graph, subject: Subject) -> None:
    """Raise VerifyError, naming the first operator or result that differs, unless a graph is a plan of the step."""
    verify(graph)
    largest = subject.original_with({}).peak_bytes
    for storages in (graph.storages, *(op.body.graph.storages for op, _ in every_op(graph) if op.body is not None)):
        if any(storage.nbytes > largest for storage in storages.values() if storage.kind != "host"):
            raise VerifyError("it needs more memory for one tensor than the original for all")
    errors: list[VerifyError] = []
    for form in forms_of(subject, in_loops=any(op.body is not None for op in graph.ops)):
        try:
            prove(graph, form(), drawn=subject.captured.drawn)
        except UNSOUND as error:  # including calls with impossible arguments
            errors.append(VerifyError(" ".join(str(error).split())[:300]))
        else:
            return
    raise errors[0]


class KeptPlans:
    """Cache folder for the plans of one subject."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    def key(
        self,
        subject: Subject,
        goal: Objective,
        search: str,
        budget: int | None,
        seed: int,
        stored: Mapping[str, int] | None,
    ) -> str:
        """Return the cache key of a search: a digest of step, limit, effort, prices and workspaces."""
        return self._kept.key(
            "plan",
            FORMAT,
            subject.digest,
            (subject.source.device, subject.kind, subject.source.reuse),
            (goal.memory_limit, goal.latency_limit_ns, search, budget, seed, subject.host_limit),
            (subject.roofline, subject.pricing.digest if subject.kind != "cpu" else ""),
            sorted((stored if stored is not None else subject.base_workspaces).items()),
            stored is not None,
            sorted(device_identity(subject.source.device).items()),
        )

    def load(self, key: str, scratch: PlanScratch, goal: Objective) -> Plan | None:
        """Return the cached plan of a key, with ``seconds`` 0; None if there is none or, with a warning, if it is
        invalid."""
        return self._kept.load(key, lambda text: _read_plan(text, scratch, goal))

    def save(self, key: str, plan: Plan, scratch: PlanScratch, goal: Objective) -> None:
        """Cache a plan, if it reads back unchanged."""
        if plan.stopped_by_seconds:
            return
        data = {**_figures(plan), LINES: _line_places(plan.graph, scratch.subject.captured.graph)}
        text = f"{json.dumps(data, sort_keys=True)}\n{dump(plan.graph)}"
        try:
            again = _read_plan(text, scratch, goal)
        except UNSOUND:
            return
        if digest(again.graph) == digest(plan.graph) and _figures(again) == _figures(plan):
            self._kept.save(key, text)


def _figures(plan: Plan) -> dict[str, Any]:
    found = {name: getattr(plan, name) for name in FIGURES}
    return found | {"planned": asdict(plan.planned), "workspaces": dict(plan.workspaces)}


def _line_places(graph: Graph, step: Graph) -> list[int]:
    """Return, for each operator of a plan, the index of the step's first operator on its source line, preferably with
    an equal name and module; -1 without a source line."""
    alike: dict[tuple[str, ...], int] = {}
    for place, op in enumerate(step.ops):
        for key in ((op.line,), (op.line, op.target, op.module)):
            alike.setdefault(key, place)
    return [
        alike.get((op.line, op.target, op.module), alike.get((op.line,), -1)) if op.line else -1
        for op, _ in every_op(graph)
    ]


def _with_lines(graph: Graph, places: Iterator[int], step: Sequence[Op]) -> Graph:
    """Return a graph with the source lines of the step's operators at the given indices."""
    found = []
    for op in graph.ops:
        place = next(places)
        body = None if op.body is None else replace(op.body, graph=_with_lines(op.body.graph, places, step))
        found.append(replace(op, line=step[place].line if place >= 0 else "", body=body))
    return replace(graph, ops=tuple(found))


def _read_plan(text: str, scratch: PlanScratch, goal: Objective) -> Plan:
    """Read a plan from text. Raises one of ``UNSOUND`` if the plan is not sound, or belongs to another step or goal."""
    head, _, body = text.partition("\n")
    given = json.loads(head, parse_constant=_refuse_number, parse_float=_refuse_number)
    if not isinstance(given, dict) or given.keys() != {*FIGURES, LINES}:
        raise MagisError("it has other figures than a plan")
    graph = parse(body)
    verify_plan(graph, scratch.subject)
    places, step = given.pop(LINES), scratch.subject.captured.graph.ops
    if len(places) != sum(1 for _ in every_op(graph)) or any(
        type(place) is not int or not -1 <= place < len(step) for place in places
    ):
        raise MagisError("its lines are not those of its operators")
    graph = _with_lines(graph, iter(places), step)
    figures = _check_types(given)
    found = Plan(graph=graph, seconds=0.0, stopped_by_seconds=False, **figures)
    _check_figures(found, scratch, goal)
    return found


def _refuse_number(text: str) -> NoReturn:
    raise MagisError(f"a figure is {text[:20]}, which is not whole")


def _check_types(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a plan from JSON, with their types and ranges checked."""
    planned, workspaces = given["planned"], given["workspaces"]
    whole = [given[name] for name in ("latency_ns", "states", "recomputed_ops", "swapped_bytes")]
    whole += [planned["tensor_bytes"], planned["peak_bytes"], *workspaces.values()]
    whole += [bound for bound in (given["latency_bound_ns"],) if bound is not None]
    if any(type(number) is not int or not 0 <= number < MOST for number in whole):
        raise MagisError("a figure is no whole number that can be one")
    if type(given["feasible"]) is not bool or any(type(given[name]) is not str for name in ("fission", "unsplit")):
        raise MagisError("a figure is of another kind")
    return {**given, "planned": Memory(planned["tensor_bytes"], planned["peak_bytes"]), "workspaces": dict(workspaces)}


def _check_figures(plan: Plan, scratch: PlanScratch, goal: Objective) -> None:
    """Raise MagisError unless the graph simulates to its stored figures. Latency is exact without swaps and loops. A
    swap may add up to its copy time, and a loop is planned with or without the views in its body."""
    memory = scratch.plan(plan.graph, None, plan.latency_ns).planned
    if memory != plan.planned:
        raise MagisError(f"its peak is {memory.peak_bytes:,} bytes, not {plan.planned.peak_bytes:,}")
    costs = scratch.subject.costs(scratch.known((plan.graph,)))
    least, most = _least_ns(plan.graph, costs), _most_ns(plan.graph, costs)
    if not least <= plan.latency_ns <= most:
        raise MagisError(f"its latency is {least:,} ns or more, up to {most:,}, not {plan.latency_ns:,}")
    if plan.latency_bound_ns is not None and plan.latency_bound_ns > plan.latency_ns:
        raise MagisError("it is faster than its bound")
    if plan.feasible != goal.met(plan.peak, plan.latency_ns):
        raise MagisError("it keeps its limit, or not, otherwise than it says")


def _least_ns(graph: Graph, costs: RooflineCosts) -> int:
    """Return the latency in ns with all host copies and collectives overlapped, and without time for views."""
    beside = under_way(graph.ops)
    total = GENERATOR_NS * sum(op.target == "magis.rng_enter" for op in graph.ops)
    for op in _timed_operators(graph):
        inside = op.body
        if not beside.isdisjoint(op.made()):
            continue
        total += (
            costs.nanoseconds(op, graph.values) if inside is None else inside.parts * _least_ns(inside.graph, costs)
        )
    return total


def _most_ns(graph: Graph, costs: RooflineCosts) -> int:
    """Return the latency in ns with no host copy or collective overlapped."""
    total = GENERATOR_NS * sum(op.target == "magis.rng_enter" for op in graph.ops)
    total += sum(costs.nanoseconds(op, graph.values) for op in _timed_operators(graph))
    copied = [value for op in graph.ops if op.target in HOST_COPIES for value in op.made()]
    return total + sum(costs.transfer_ns(graph.storages[graph.values[value].storage].nbytes) for value in copied)


def _timed_operators(graph: Graph) -> Iterator[Op]:
    """Yield the operators that take compute time: not views, host copies, waits or generator states."""
    for op in graph.ops:
        if not (
            op.target in (*HOST_COPIES, ARRIVED) or op.target.startswith("magis.rng_") or is_pure_view(graph.values, op)
        ):
            yield op
