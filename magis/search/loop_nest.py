"""A step with a loop, planned from the inside out: a loop body is a step of its own, at the size of one part.

In the step around it, a planned loop is one node: its time is the body's times the number of parts, its workspace the
body's peak. The structure is compiled once; another plan of the body changes these figures only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from magis.errors import VerifyError
from magis.graph import Graph, Loop, Op
from magis.rewrite.realize import realize
from magis.search.budgeted_evaluator import JudgedPlan, Objective, PlanRequest
from magis.search.driver import search
from magis.simulate.compiled_problem import Compiled, Costs, compile_problem
from magis.simulate.evaluator import Evaluator, expand, lower_bound
from magis.simulate.problem import Problem

UNLIMITED = 1 << 62
SQUEEZES = 4


@dataclass(frozen=True, eq=False)
class LoopNest:
    """A compiled graph, with the compiled bodies of its loops by node; as a loop body it runs ``parts`` times."""

    compiled: Compiled
    loops: tuple[tuple[int, LoopNest], ...] = ()
    parts: int = 1
    planned: frozenset[int] = frozenset()
    """Values that loops make whose bodies are planned already; these are plain nodes, not among ``loops``."""

    @property
    def inner(self) -> LoopNest | None:
        """Body of the only loop; None without a loop."""
        return self.loops[0][1] if self.loops else None


class PlanCosts:
    """Mixin: the peak and latency of ``plan``."""

    plan: JudgedPlan

    @property
    def peak(self) -> int:
        return self.plan.peak

    @property
    def latency_ns(self) -> int:
        return self.plan.latency_ns


@dataclass(frozen=True, eq=False)
class LoopNestPlan(PlanCosts):
    """A plan of a graph and of the loop bodies inside it, with their costs (bytes, ns)."""

    problem: Problem
    plan: JudgedPlan
    tensor_peak: int
    around: int
    """Bytes in memory during the loop, without those of its body; 0 without a loop."""
    copies: bool
    """True if anything is swapped, inside or outside the loop."""
    states: int
    inner: LoopNestPlan | None = None


def level(
    graph: Graph, costs: Costs, *, reuse: bool, parts: int = 1, planned: frozenset[int] = frozenset()
) -> LoopNest:
    """Compile a graph and the bodies of its loops, but of those that make ``planned`` values."""
    compiled = compile_problem(graph, costs, reuse=reuse)
    nodes = ((node, group[0]) for node, group in enumerate(compiled.nodes))
    bodies = [(node, op.body) for node, op in nodes if planned.isdisjoint(op.made())]
    loops = ((node, level(body.graph, costs, reuse=reuse, parts=body.parts)) for node, body in bodies if body)
    return LoopNest(compiled, tuple(loops), parts, planned)


def other_parts(known: LoopNest, loop: Loop, costs: Costs, *, reuse: bool) -> LoopNest:
    """Return the compiled graph with its only loop split into another number of parts."""
    ((node, _),) = known.loops
    inner = level(loop.graph, costs, reuse=reuse, parts=loop.parts)
    return replace(known, compiled=with_loops(known.compiled, {node: loop}), loops=((node, inner),))


def with_loops(compiled: Compiled, loops: Mapping[int, Loop]) -> Compiled:
    """Return the compiled graph with the bodies of its loops replaced, by node."""
    changed = {compiled.nodes[node][0].id: loop for node, loop in loops.items()}

    def changed_op(op: Op) -> Op:
        return replace(op, body=changed[op.id]) if op.id in changed else op

    graph = replace(compiled.graph, ops=tuple(map(changed_op, compiled.graph.ops)))
    return replace(compiled, graph=graph, nodes=tuple(tuple(map(changed_op, group)) for group in compiled.nodes))


def nest_lower_bound(level: LoopNest) -> int:
    """Return a lower bound in bytes of the peak of all plans of a graph with loops."""
    figures = {node: LoopFigures(0, nest_lower_bound(inner), 0) for node, inner in level.loops}
    return lower_bound(with_figures(level.compiled.problem, figures))


def least_ns(level: LoopNest) -> int:
    """Return the latency in ns of a graph without recomputation, inside its loops or outside."""
    figures = {node: LoopFigures(inner.parts * least_ns(inner), 0, 0) for node, inner in level.loops}
    return with_figures(level.compiled.problem, figures).least_ns


def with_body(level: LoopNest, inner: LoopNestPlan) -> Problem:
    """Return the problem of a graph with the costs of its only loop set from a plan of the body."""
    ((node, body),) = level.loops
    figures = LoopFigures(body.parts * inner.latency_ns, inner.peak, inner.tensor_peak, inner.copies)
    return with_figures(level.compiled.problem, {node: figures})


class LoopFigures(NamedTuple):
    """Costs of a planned loop as a node: ns, peak and peak of tensors in bytes; ``copies``: its parts swap."""

    ns: int
    ws: int
    tensor: int
    copies: bool = False


def with_figures(problem: Problem, loops: Mapping[int, LoopFigures]) -> Problem:
    """Return the problem with the given costs of loops, by node."""
    names = ("node_ns", "node_ws", "node_tensor", "copies", "redo_ns", "redo_ws", "redo_tensor")
    arrays: dict[str, Any] = {name: getattr(problem, name).copy() for name in names}
    for node, figures in loops.items():
        for name, figure in zip(names, (*figures, *figures[:3]), strict=True):
            arrays[name][node] = figure
    return replace(problem, **arrays)


def solve(level: LoopNest, wanted: PlanRequest, *, brief: bool = False, swap_inside: bool = True) -> LoopNestPlan:
    """Find the best plan for a graph with or without a loop; each search may evaluate ``wanted.budget`` states.

    The body is planned within the memory that the step around it leaves, which depends on the body, so a few rounds
    alternate. The body swaps only with ``swap_inside``, since swaps inside exclude swaps outside the loop.
    """
    if level.inner is None:
        return _search_level(level, level.compiled.problem, wanted, None, brief=brief, swap=swap_inside)
    floor = nest_lower_bound(level.inner)
    best: LoopNestPlan | None = None
    body = partial(solve, level.inner, brief=brief, swap_inside=swap_inside)
    inner = body(replace(wanted, goal=Objective(memory_limit=UNLIMITED)))
    states = 0
    for _ in range(SQUEEZES):
        found = _search_level(level, with_body(level, inner), wanted, inner, brief=brief)
        states += found.states
        if best is None or wanted.key(found.peak, found.latency_ns) < wanted.key(best.peak, best.latency_ns):
            best = found
        target = wanted.goal.memory_limit
        if target is None or found.peak <= target or wanted.over():
            break
        limit = target - found.around
        if not floor < limit < inner.peak:
            limit = inner.peak - (found.peak - target)
        if limit <= floor:
            break
        inner = body(replace(wanted, goal=Objective(memory_limit=limit)))
    if best is None:
        raise VerifyError("a level was planned in no round")
    return replace(best, states=states)


def _search_level(
    level: LoopNest,
    problem: Problem,
    wanted: PlanRequest,
    inner: LoopNestPlan | None,
    *,
    brief: bool,
    swap: bool = True,
) -> LoopNestPlan:
    found = search(
        problem,
        wanted.goal,
        budget=wanted.budget,
        allow_swap=swap,
        seed=wanted.seed,
        brief=brief,
        over=wanted.over,
    )
    return solution(level, problem, found, inner, found.states)


def solution(
    level: LoopNest, problem: Problem, plan: JudgedPlan, inner: LoopNestPlan | None, states: int = 0
) -> LoopNestPlan:
    """Evaluate a plan of a graph whose loop body is planned by ``inner``; ``states`` were evaluated to find it."""
    judge = Evaluator(problem, plan.order)
    found = judge.evaluate(plan.flags)
    copies = found.swaps > 0 or bool(problem.copies.any())
    around = 0
    if inner is not None:
        ((node, _),) = level.loops
        run = judge.runs.tolist().index(2 * node)
        around = int(judge.levels[run]) - inner.peak
    spent = states + (inner.states if inner else 0)
    return LoopNestPlan(problem, plan, found.tensor_peak, around, copies, spent, inner)


def realize_level(level: LoopNest, solution: LoopNestPlan) -> Graph:
    """Return the graph of a plan, including its loop bodies."""
    within = solution.inner
    bodies = {node: Loop(body.parts, realize_level(body, within)) for node, body in level.loops if within is not None}
    events = expand(solution.problem, solution.plan.order, solution.plan.flags)
    return realize(with_loops(level.compiled, bodies), events)
