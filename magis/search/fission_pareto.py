"""The Pareto front of a step with fission: every place to split, in every number of parts, planned inside and outside.

    for each place:  sweep the loop's body and the step around it once;
                     evaluate these plans for every number of parts, each plan of the body with each plan around it

Bodies with other numbers of parts differ in sizes and times only, so their plans can be exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from magis.errors import VerifyError
from magis.fission.candidates import region_in_parts, regions_in_parts
from magis.fission.expand import expand, reparted
from magis.fission.loss_suffix import FEW, PLACES, Piece, own_bytes, pieces
from magis.fission.part_sums import with_sums_apart
from magis.fission.recomputed_head import RecomputedHead, gradients_of_head, heads, recomputed_head
from magis.fission.region import most_parts, ways
from magis.graph import Graph, Loop, Op
from magis.ops.splits import Split
from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan, Objective, Over, PlanRequest, Watch, never
from magis.search.loop_nest import LoopNest, LoopNestPlan, PlanCosts, least_ns, level, other_parts, solution, with_body
from magis.search.pareto_sweep import BODY, BRIEF, FULL, Costed, Effort, Front, pareto, spread, sweep
from magis.search.split_at_peak import with_loop_inside, with_loops_in_place, within_body
from magis.simulate.compiled_problem import Costs, compile_problem
from magis.simulate.problem import Problem

MOST_OPERATORS = 3000
"""Most operators of a step whose places all get the full effort."""
INNER = (2, 4, 8, 16)
"""Numbers of parts of a second loop, inside of the first one."""
BODIES = 32
"""Plans of a loop body that are evaluated in the step around the loop."""
AROUND = 32
"""Plans of the step around a loop, per sweep, that are evaluated with other bodies."""
HASTY = Effort(
    levels=6, sets=1, link_prices=(0.1,), polished=0, mixed=0, approaches=(3,), states=2_000, stretches=(1.3,)
)
"""Effort for a first answer: a tenth of the time per place, with results between no fission and the final ones."""


@dataclass(frozen=True)
class Efforts:
    """Efforts for the body of a loop, for the step around the loop, and for a quick search of either."""

    body: Effort = BODY
    around: Effort = BRIEF
    hasty: Effort = HASTY
    middling: bool = False
    """True if a region is split into one medium number of parts only."""


USUAL = Efforts()


@dataclass(frozen=True)
class LoopPlace:
    """First operator of a region (index), its number of parts, and the index of the place."""

    at: int
    parts: int
    number: int = 0
    inner: int = 1
    """Number of parts of a second loop, around the peak of the first one's body; 1: none."""
    choice: int = 0
    """Index of the second loop's operators among the choices."""


@dataclass(frozen=True, eq=False)
class FissionPoint(PlanCosts):
    """A plan of the front; ``cut`` and ``body`` (of the loop) are None for a step without a loop."""

    level: LoopNest
    plan: JudgedPlan
    cut: LoopPlace | None = None
    body: LoopNestPlan | None = None

    def solution(self) -> LoopNestPlan:
        """Return the plan with that of its loop body, ready to be realized."""
        problem = self.level.compiled.problem if self.body is None else with_body(self.level, self.body)
        return solution(self.level, problem, self.plan, self.body)


FissionFront: TypeAlias = Front[FissionPoint]


def whole_front(graph: Graph, costs: Costs, *, reuse: bool, effort: Effort = FULL, over: Over = never) -> FissionFront:
    """Compute the Pareto front of a step without a loop."""
    here = LoopNest(compile_problem(graph, costs, reuse=reuse))
    found = sweep(here.compiled.problem, effort, over)
    points = tuple(FissionPoint(here, plan) for plan in found.points)
    return FissionFront(points, found.states, found.stopped_by_seconds)


@dataclass(frozen=True, eq=False)
class DivisibleStep:
    """A functionalized step without needless ordering edges, and the places where it may be split."""

    graph: Graph
    costs: Costs
    reuse: bool
    places: tuple[Piece, ...]
    efforts: Efforts = USUAL

    @cached_property
    def bytes_and_ns(self) -> tuple[int, int]:
        """Peak bytes of the temporary tensors in program order, and the least latency in ns."""
        (held,) = own_bytes(self.graph, dict.fromkeys(range(len(self.graph.ops)), 0), 1)
        return held, compile_problem(self.graph, self.costs, reuse=self.reuse).problem.least_ns


def work_of(graph: Graph, costs: Costs, *, reuse: bool, efforts: Efforts = USUAL) -> DivisibleStep:
    """Find the places where a step may be split; fewer in a large step, with less effort."""
    most = PLACES
    if len(graph.ops) > MOST_OPERATORS:
        most, efforts = 1, replace(efforts, body=efforts.hasty, around=efforts.hasty, middling=True)
    step, heads = _with_heads_in_parts(DivisibleStep(graph, costs, reuse, (), efforts))
    return replace(step, places=(*heads, *pieces(step.graph, most)))


def _with_heads_in_parts(step: DivisibleStep) -> tuple[DivisibleStep, list[Piece]]:
    """Return a step whose loss heads must run twice with the first times as loops, and the second time of the last one
    as a place, of others as loops; other steps as they are, without a place."""
    whole, found = step, list[RecomputedHead]()
    for value, alone in heads(step.graph):
        if found and alone:
            break
        head = recomputed_head(step.graph, value)
        looped = None if head is None else _in_few_parts(replace(step, graph=head.graph, places=(head.first,)), whole)
        if head is not None and looped is not None:
            found.append(head)
            step = replace(step, graph=looped)
    place: list[Piece] = []
    for head in (head for head in reversed(found) if head.again):
        if place and (looped := _in_few_parts(replace(step, places=(*place,)), whole)) is not None:
            step = replace(step, graph=looped)
        piece = gradients_of_head(step.graph, head)
        place = place if piece is None else [piece]
    if any(head.in_few for head in found):  # both are worth a try
        return whole, [replace(piece, graph=step.graph) for piece in place]
    return step, place


def _in_few_parts(step: DivisibleStep, whole: DivisibleStep) -> Graph | None:
    """Return the step with the first place as a loop in so few parts that more would take more time for the bytes that
    they save than the ``whole`` step does for its own; None if no loop is legal."""
    held, ns = whole.bytes_and_ns
    tried: list[tuple[int, Graph]] = []
    for _, here in levels_at(step, 0):
        looped = with_loops_in_place(here.compiled.graph, step.costs) if step.reuse else here.compiled.graph
        problem = compile_problem(looped, step.costs, reuse=step.reuse).problem
        node = next(node for node, _ in here.loops)
        tried.append((problem.least_ns * held + int(problem.node_ws[node]) * ns, looped))
    return min(tried, key=lambda each: each[0])[1] if tried else None


def joined(*fronts: FissionFront) -> FissionFront:
    """Return the Pareto front of several fronts together."""
    points = (point for front in fronts for point in front.points)
    return FissionFront(tuple(pareto(points)), sum(front.states for front in fronts))


def any_enough(points: Sequence[Costed], wanted: PlanRequest) -> bool:
    """Return True if one of the points keeps the memory limit and takes no extra time."""
    return any(wanted.enough(point.peak, point.latency_ns) for point in points)


def levels_at(work: DivisibleStep, number: int, over: Over = never) -> Iterator[tuple[LoopPlace, LoopNest]]:
    """Yield the step with a place's region as a loop in every number of parts; only the first once ``over`` is True."""
    place = work.places[number]
    graph = place.graph or work.graph
    found: list[tuple[LoopPlace, LoopNest]] = []
    regions = regions_in_parts(place.cuts)
    regions = regions[len(regions) // 2 :][:1] if work.efforts.middling else regions
    for region in regions:
        if found and over():
            return
        try:
            if not found:
                planned = frozenset(value for op in graph.ops if op.body is not None for value in op.made())
                whole = expand(graph, region, in_place=True)
                here = level(whole, work.costs, reuse=work.reuse, planned=planned)
            else:
                loop = reparted(graph, region, in_place=True)
                here = other_parts(found[0][1], loop, work.costs, reuse=work.reuse)
        except VerifyError:
            return  # no legal region (``fission.blocked`` says why), or a kernel refuses the size of a part
        found.append((LoopPlace(place.at, region.parts, number), here))
        yield found[-1]
    # A second loop needs bodies of one size
    even = [each for each, region in zip(found, regions, strict=True) if not region.uneven]
    if even and (place.closed or most_parts(place.cuts) < FEW) and not over():
        yield from _with_loops_inside(work, even)


def _with_loops_inside(
    work: DivisibleStep, levels: Sequence[tuple[LoopPlace, LoopNest]]
) -> Iterator[tuple[LoopPlace, LoopNest]]:
    """Yield the levels with a second loop around the peak of the first one's body, of equal operators in each."""
    loops = (here.compiled.nodes[node][0].body for _, here in levels for node, _ in here.loops)
    bodies = [body for body in loops if body is not None]
    choices = within_body(bodies[len(bodies) // 2].graph, INNER[0], work.costs, reuse=work.reuse)
    aparts = [with_sums_apart(loop.graph) for loop in bodies]
    most = max(cut.parts for cut, _ in levels)
    for choice, inner in itertools.product(range(len(choices)), INNER):
        chosen = choices[choice]
        for (cut, here), loop, apart in zip(levels, bodies, aparts, strict=True):
            # a few sequences are cut into many parts by the second loop alone
            few = cut.parts == most < FEW // 2
            if not (FEW // 2 <= cut.parts * inner <= 2 * FEW if few else cut.parts >= 4 and inner <= 4):
                continue
            try:
                cuts = {at: _alike(apart, apart.ops[at], split) for at, split in chosen.items()}
                body = with_loop_inside(apart, region_in_parts(cuts, inner), work.costs, reuse=work.reuse)
                within = Loop(loop.parts, body)
                yield replace(cut, inner=inner, choice=choice), other_parts(here, within, work.costs, reuse=work.reuse)
            except VerifyError:
                continue  # the parts of this body are too small


def _alike(graph: Graph, op: Op, known: Split) -> Split:
    """Return the split of a call that cuts it as an equal call of another size is cut. Raises VerifyError if there is
    none."""
    for split in ways(op, graph.values):
        if (split.inputs, split.outputs) == (known.inputs, known.outputs):
            return split
    raise VerifyError(f"{op.target} cannot be split here")


def least_ns_at(work: DivisibleStep, number: int) -> int:
    """Return the latency in ns of a step with a place's loop in the fewest parts, without recomputation; 0 if
    illegal."""
    first = next(levels_at(work, number), None)
    return 0 if first is None else least_ns(first[1])


def place_front(
    levels: Sequence[tuple[LoopPlace, LoopNest]], efforts: Efforts = USUAL, over: Over = never
) -> FissionFront:
    """Compute the Pareto front of one region over the numbers of parts in ``levels``.

    The step around the loop is swept for the first and the last number, with the body's lowest peak. If ``over`` ends
    that, the front has at least one plan for the first number.
    """
    model: LoopNest | None = None
    inside: Sequence[JudgedPlan] = ()
    around: list[JudgedPlan] = []
    points: list[FissionPoint] = []
    states = 0
    for number, (cut, here) in enumerate(levels):
        if points and over():
            break
        inner = here.inner
        if inner is None:
            raise VerifyError("a front of loops needs a loop")
        if model is None or not _same_structure(model, here):
            swept = sweep(inner.compiled.problem, efforts.body, over)
            model, inside, around, states = here, swept.points, [], states + swept.states
        bodies = _judge_plans(inner.compiled.problem, inside)
        states += bodies.states
        for rank, plan in enumerate(spread(bodies.points, BODIES)):
            if points and over():
                break
            body = solution(inner, inner.compiled.problem, plan, None)
            outside = with_body(here, body)
            if rank == 0 and (not around or number == len(levels) - 1):
                swept = sweep(outside, efforts.around, over)
                around, states = [*around, *spread(swept.points, AROUND)], states + swept.states
            found = _judge_plans(outside, around, efforts.around.watch)
            states += found.states
            points += [FissionPoint(here, plan, cut, body) for plan in found.points]
        points = pareto(points)
    return FissionFront(tuple(points), states)


def _same_structure(one: LoopNest, other: LoopNest) -> bool:
    """Return True if plans of one step with a loop fit the other: equal nodes read and write equal storages."""
    these, those = _problems(one), _problems(other)
    if len(these) != len(those):
        return False
    for first, second in zip(these, those, strict=True):
        for name in ("inputs", "outputs", "extras", "reuses"):
            if not all(map(np.array_equal, getattr(first, name), getattr(second, name))):
                return False
    return True


def _problems(level: LoopNest) -> list[Problem]:
    inner = [] if level.inner is None else _problems(level.inner)
    return [level.compiled.problem, *inner]


def _judge_plans(problem: Problem, plans: Sequence[JudgedPlan], watch: Watch | None = None) -> Front[JudgedPlan]:
    """Evaluate plans made for a problem of equal structure, and return their front."""
    judge = BudgetedEvaluator(problem, Objective(memory_limit=0), len(plans), watch=watch)
    for plan in plans:
        judge.use(plan.order)
        judge.plan(plan.flags)
    return Front(tuple(judge.front()), judge.states)
