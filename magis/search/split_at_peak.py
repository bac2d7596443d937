"""Fission at the peak: loops around the operators at a plan's peak, one after another.

A loop is one node of the search, so plans with loops are found, evaluated and realized like any others; each new loop
is evaluated with the flags of the current plan. Adding loops and searching alternate: loops save memory, the search
trades it for time (or the other way round), and the peak moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import rustworkx as rx

from magis.errors import VerifyError
from magis.fission.candidates import region_in_parts, regions_around, regions_in_parts
from magis.fission.expand import expand
from magis.fission.loss_suffix import pieces
from magis.fission.part_sums import with_sums_apart
from magis.fission.region import Region
from magis.fission.wide_calls import joined
from magis.graph import Graph, Op
from magis.graph.hazards import dependency_graph
from magis.ops.splits import Split
from magis.rewrite.realize import realize
from magis.search.budgeted_evaluator import JudgedPlan, PlanRequest
from magis.search.driver import SearchResult, search
from magis.search.lagrangian_min_cut import levels_by_position
from magis.search.loop_nest import LoopNest, LoopNestPlan, level, with_body
from magis.simulate.compiled_problem import Compiled, Costs, compile_problem
from magis.simulate.evaluator import Evaluator
from magis.simulate.evaluator import expand as schedule
from magis.simulate.problem import DROP, Int8s, Int64s

CANDIDATES = 8
QUICK = 2000
MOST_PARTS = 8
LOOPS = 8
"""Most loops that are added between two searches."""
ROUNDS = 3
CLOSE = 50
"""Reciprocal of the share by which peaks differ that count as equal."""
RECURS = 100
"""Reciprocal of the share of a peak by which another one is lower that counts as the same."""
TOO_SLOW = 0.02
"""Largest increase of the step's latency by one loop, as a share."""


@dataclass(frozen=True, eq=False)
class Relieved:
    """A step with loops, and its best plan."""

    compiled: Compiled
    result: SearchResult
    states: int
    loops: tuple[str, ...]
    """Description of each loop."""

    @property
    def graph(self) -> Graph:
        return self.compiled.graph


@dataclass(frozen=True, eq=False)
class _PlannedStep:
    """A graph in the order of a plan, with the plan's flags by storage, and its costs."""

    graph: Graph
    compiled: Compiled
    flags: dict[int, int]
    peak: int
    latency_ns: int
    at: int
    """Index in the graph of the operator at the peak."""


def relieve(graph: Graph, costs: Costs, wanted: PlanRequest, *, reuse: bool) -> Relieved | None:
    """Find the best plan with loops around operators at the peak; None if no loop helps.

    ``graph`` must be functionalized, without needless ordering edges (``rewrite.untangle``). ``wanted.over`` ends the
    search with the best plan so far.
    """
    compiled = compile_problem(graph, costs, reuse=reuse)
    result = _search_plan(compiled, wanted, brief=False)
    known, states = wanted.key(result.peak, result.latency_ns), result.states
    best: Relieved | None = None
    loops: tuple[str, ...] = ()
    for _ in range(ROUNDS):
        if wanted.over():
            break
        flags = dict(zip(compiled.storages, result.flags.tolist(), strict=True))
        start = _state(in_order(compiled, result), costs, reuse, flags)
        tried: list[tuple[tuple[int, int], int, _PlannedStep, tuple[str, ...]]] = []
        for state, made in _chain(start, costs, reuse):
            if tried and wanted.over():
                break
            quick = _search_plan(state.compiled, replace(wanted, budget=QUICK), brief=True)
            states += quick.states
            tried.append((wanted.key(quick.peak, quick.latency_ns), len(made), state, made))
        if not tried:
            break
        _, _, state, made = min(tried, key=lambda each: each[:2])
        compiled = state.compiled
        result = _search_plan(compiled, wanted, brief=False)
        states += result.states
        key = wanted.key(result.peak, result.latency_ns)
        if key >= known:
            break
        known, loops = key, (*loops, *made)
        best = Relieved(compiled, result, states, loops)
    return best


def _search_plan(compiled: Compiled, wanted: PlanRequest, *, brief: bool) -> SearchResult:
    return search(compiled.problem, wanted.goal, budget=wanted.budget, seed=wanted.seed, brief=brief, over=wanted.over)


def _chain(state: _PlannedStep, costs: Costs, reuse: bool) -> Iterator[tuple[_PlannedStep, tuple[str, ...]]]:
    """Yield steps with one, two, ... loops at the peak, as long as each loop lowers the peak at an acceptable price."""
    made: tuple[str, ...] = ()
    for _ in range(LOOPS):
        found = min(_children(state, costs, reuse), key=lambda child: _ns_per_byte(state, child[0]), default=None)
        if found is None:
            return
        state, made = found[0], (*made, found[1])
        yield state, made


def _ns_per_byte(before: _PlannedStep | _Beside, after: _PlannedStep | _Beside) -> float:
    """Return the ns that a loop costs per byte that it saves."""
    return max(1, after.latency_ns - before.latency_ns) / (before.peak - after.peak)


def _children(state: _PlannedStep, costs: Costs, reuse: bool) -> Iterator[tuple[_PlannedStep, str]]:
    """Yield steps with one more loop and a lower peak."""
    op = state.graph.ops[state.at]
    if op.body is not None or op.random:
        return
    for cuts in regions_around(state.graph, state.at, most=CANDIDATES):
        for region in regions_in_parts(cuts):
            if region.parts > MOST_PARTS:
                break
            try:
                graph = expand(state.graph, region, in_place=True)
            except VerifyError:
                break
            child = _state(graph, costs, reuse, state.flags)
            if child.peak >= state.peak:
                break
            if child.latency_ns - state.latency_ns > TOO_SLOW * state.latency_ns:
                break
            yield child, f"{op.module or op.target}: {len(cuts)} operators in {region.parts} parts"


def with_loops_beside(here: LoopNest, planned: LoopNestPlan, costs: Costs, *, reuse: bool) -> LoopNest | None:
    """Return a step with a planned loop, with more loops around the operators at its peak, as long as each lowers it;
    None if none does, or if the planned loop is at the peak."""
    ((node, _),) = here.loops
    if planned.inner is None:
        return None
    flags = dict(zip(here.compiled.storages, planned.plan.flags.tolist(), strict=True))
    judged = partial(_judged_beside, here.compiled.nodes[node][0].made(), planned.inner, costs, reuse, flags)
    first = now = judged(in_order(here.compiled, planned.plan))
    for _ in range(LOOPS):
        graph, compiled, at = now.graph, now.here.compiled, now.at
        op = compiled.nodes[at][0]
        found: list[_Beside] = []
        if op.body is None and not op.random:
            for cuts in regions_around(graph, graph.ops.index(op), most=CANDIDATES):
                if now.recurs_outside(cuts):
                    continue
                for region in regions_in_parts(cuts):
                    with contextlib.suppress(VerifyError):
                        found.append(judged(expand(graph, region, in_place=True)))
        found = [each for each in found if each.peak < now.peak]
        if not found:
            break
        now = min(found, key=partial(_ns_per_byte, now))
    return None if now is first else now.here


@dataclass(frozen=True, eq=False)
class _Beside:
    """A graph with a planned loop and others, compiled, and its costs with the flags of a plan."""

    graph: Graph
    here: LoopNest
    peak: int
    latency_ns: int
    at: int
    """Node at the peak."""
    levels: Int64s
    """[n] bytes of temporary tensors and scratch while a node runs."""

    def recurs_outside(self, cuts: Collection[int]) -> bool:
        """Return True if the peak recurs, about as high, in more other modules than loops are added: in the layers of a
        deep network."""
        inside = {self.graph.ops[position].id for position in cuts}
        high = np.flatnonzero(RECURS * self.levels >= (RECURS - 1) * self.levels.max())
        ops = [op for at in high.tolist() for op in self.here.compiled.nodes[at] if op.id not in inside]
        return len({op.module for op in ops}) > LOOPS


def _judged_beside(
    made: Sequence[int], inner: LoopNestPlan, costs: Costs, reuse: bool, flags: Mapping[int, int], graph: Graph
) -> _Beside:
    """Evaluate a graph in its own order; the loop that makes ``made`` has the plan ``inner``, others run in place."""
    own = [_in_place(op, costs) if reuse and op.made() != tuple(made) else op for op in graph.ops]
    graph = replace(graph, ops=tuple(own))
    others = frozenset(value for op in own if op.body is not None for value in op.made()) - set(made)
    here = level(graph, costs, reuse=reuse, planned=others)
    if len(here.loops) != 1:
        raise VerifyError("a loop without results cannot be told from the planned one")
    problem = with_body(here, inner)
    judge = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    chosen: Int8s = np.array([flags.get(storage, DROP) for storage in here.compiled.storages], dtype=np.int8)
    peak, latency_ns = judge.quick(chosen)
    levels = levels_by_position(judge)
    return _Beside(graph, here, peak, latency_ns, int(judge.runs[max(judge.peak_run, 0)]) >> 1, levels)


def within_body(body: Graph, parts: int, costs: Costs, *, reuse: bool) -> list[Mapping[int, Split]]:
    """Return operators of a loop's body, with their splits, to run as a loop of so many parts inside: those that lower
    the body's peak most cheaply, and those that lower it most (of about equal ones the fastest); none if none does."""
    before = _state(body, costs, reuse, {})
    peak = body.ops[before.at]
    call = joined(body).get(peak.id, peak)
    body = with_sums_apart(body)  # products and sums are cut as calls of their own
    at = next(at for at, op in enumerate(body.ops) if op.id == call.id)
    found: list[tuple[_PlannedStep, Mapping[int, Split]]] = []
    for cuts in (*regions_around(body, at, most=CANDIDATES), *(piece.cuts for piece in pieces(body))):
        with contextlib.suppress(VerifyError):
            after = _state(with_loop_inside(body, region_in_parts(cuts, parts), costs, reuse=reuse), costs, reuse, {})
            found += [(after, cuts)] if after.peak < before.peak else []
    if not found:
        return []
    lowest = min(after.peak for after, _ in found)
    close = [each for each in found if each[0].peak * CLOSE <= lowest * (CLOSE + 1)]
    _, cheap = min(found, key=lambda each: _ns_per_byte(before, each[0]))
    _, low = min(close, key=lambda each: each[0].latency_ns)
    return [cheap] if low == cheap else [cheap, low]


def with_loop_inside(body: Graph, region: Region, costs: Costs, *, reuse: bool) -> Graph:
    """Return a loop's body with a region as a loop. That loop is not planned: with ``reuse``, its operators run in
    place wherever an input dies. Raises VerifyError if the region cannot be expanded."""
    graph = expand(body, region, in_place=True)
    return with_loops_in_place(graph, costs) if reuse else graph


def with_loops_in_place(graph: Graph, costs: Costs) -> Graph:
    """Return the graph with loops whose operators run in place wherever an input dies."""
    return replace(graph, ops=tuple(_in_place(op, costs) for op in graph.ops))


def _in_place(op: Op, costs: Costs) -> Op:
    """Return a loop whose operators write over inputs that they are the last to use; other operators unchanged."""
    if op.body is None:
        return op
    compiled = compile_problem(op.body.graph, costs)
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    events = schedule(compiled.problem, order, np.full(len(compiled.storages), DROP, dtype=np.int8))
    return replace(op, body=replace(op.body, graph=realize(compiled, events)))


def _state(graph: Graph, costs: Costs, reuse: bool, flags: dict[int, int]) -> _PlannedStep:
    """Evaluate a graph in its own order with the given flags."""
    compiled = compile_problem(graph, costs, reuse=reuse)
    problem = compiled.problem
    judge = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
    chosen: Int8s = np.array([flags.get(storage, DROP) for storage in compiled.storages], dtype=np.int8)
    peak, latency_ns = judge.quick(chosen)
    node = int(judge.runs[max(judge.peak_run, 0)]) >> 1
    first = compiled.nodes[node][0]
    return _PlannedStep(graph, compiled, flags, peak, latency_ns, graph.ops.index(first))


def in_order(compiled: Compiled, result: SearchResult | JudgedPlan) -> Graph:
    """Return a graph in the order of a plan, with views and weight updates as early as possible."""
    graph = compiled.graph
    rank = {}
    for place, node in enumerate(result.order.tolist()):
        for op in compiled.nodes[node]:
            rank[op.id] = place
    order = rx.lexicographical_topological_sort(
        dependency_graph(graph), key=lambda position: f"{rank.get(graph.ops[position].id, -1) + 1:09} {position:09}"
    )
    ops = [graph.ops[position] for position in order]
    return replace(graph, ops=tuple(replace(op, id=number) for number, op in enumerate(ops)))
