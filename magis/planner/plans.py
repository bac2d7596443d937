"""A realized plan, and the scratch bytes that it was planned with.

A plan is only believed when the realized graph evaluates to no more bytes than the search was promised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from magis.cost.machines import machines
from magis.graph import Graph, verify
from magis.planner.subject import Subject
from magis.planner.traced_model import redo_graph, signatures
from magis.results import Memory, SearchOutcome
from magis.rewrite.realize import realize
from magis.search.budgeted_evaluator import NO_DEADLINE, Deadline, Objective, Over, Watch, never
from magis.search.driver import FROM_NOTHING, SearchResult, around_best, search
from magis.search.fission_pareto import FissionFront
from magis.search.latency_bound import latency_lower_bound, nest_latency_bound
from magis.search.loop_nest import LoopNest
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import evaluate, expand
from magis.simulate.peak_breakdown import repeats
from magis.simulate.problem import Int8s, Int32s, Problem, rows_of
from magis.simulate.timeline import elapsed_ns

ATTEMPTS = 3
"""Most searches. An operator that takes over its input's memory may have another workspace than its plain form."""
BOUNDED_NODES = 2_000
"""Most nodes of a step that is bounded while it is searched. With more that would take as long as the search."""
STRUCTURE = (
    "inputs", "outputs", "redo_ok", "copies", "at_once", "early", "reuses", "preads", "extras", "producer", "pinned",
    "last_write", "to_end", "block_inputs", "block_writes",
)  # fmt: skip
"""Arrays of a problem that hold neither bytes nor times."""
ENOUGH = 1.005
"""Latency, as a multiple of eager's or of a known bound, at which a search ends."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(SearchOutcome):
    """The best plan found, realized. ``planned`` is its memory with the workspaces that planning used."""

    graph: Graph
    planned: Memory
    latency_ns: int
    workspaces: Mapping[str, int]
    """Non-zero workspaces that planning relied on, by signature."""
    searched: Searched | None = None
    """Input of the latency bound, until that is known."""
    decisions: Decisions | None = None
    """Decisions that steps of other sizes or numbers can take over; None for a plan with loops."""

    @property
    def peak(self) -> int:
        """Peak in bytes, with the workspaces that planning used."""
        return self.planned.peak_bytes


@dataclass(frozen=True, eq=False)
class Decisions:
    """A search's order and flags without the step that they are of: steps with this structure can take them over."""

    structure: str
    order: Int32s
    flags: Int8s


@dataclass(frozen=True, eq=False)
class Searched:
    """Step that a search worked on, and the peak that it found there, in bytes."""

    step: LoopNest
    peak: int


def rounded_bound(bound_ns: int, eager_ns: int) -> int:
    """Round a latency bound down to a thousandth of eager's latency. Such a bound decides how a search goes on;
    rounded, the last digits of a solver, which may differ from machine to machine, decide next to nothing."""
    step = max(1, eager_ns // 1000)
    return bound_ns // step * step


def with_latency_bound(plan: Plan, memory_limit: int | None) -> Plan:
    """Return the plan with the lower bound of its latency."""
    found, limit = plan.searched, memory_limit
    if found is None or not plan.feasible:
        return replace(plan, searched=None)
    limit = max(found.peak, plan.peak) if limit is None else max(found.peak, limit)
    return replace(plan, searched=None, latency_bound_ns=nest_latency_bound(found.step, limit))


@dataclass(frozen=True)
class PlanScratch:
    """Scratch bytes of a plan's operators: measured here or, with ``stored``, all from a baseline. Planning with the
    baseline's makes the plan, and so its tensor bytes, the same on every machine."""

    subject: Subject
    stored: Mapping[str, int] | None
    watch: Watch | None = None
    """Called with every plan of the whole step that a search judges."""
    torn: bool = False
    """True if weights may be updated before operators that may raise."""

    def enough(self, goal: Objective, peak: int, latency_ns: int, least_ns: int = 0) -> bool:
        """Return True if searching on has next to nothing to win. The plan is within a memory limit, and about as
        fast as eager, or as the ``least_ns`` that this limit allows."""
        if goal.memory_limit is None or not goal.met(peak, latency_ns):
            return False
        return latency_ns <= ENOUGH * max(least_ns, self.subject.original_ns)

    def known(self, graphs: Iterable[Graph]) -> Mapping[str, int]:
        """Return the workspaces of every operator of the graphs; a stored table leaves out zeros."""
        subject = self.subject
        if self.stored is not None:
            return {**dict.fromkeys((key for graph in graphs for key in signatures(graph)), 0), **self.stored}
        if subject.kind != "cpu":
            return {}
        return {key: nbytes for graph in graphs for key, nbytes in subject.workspaces(graph).items()}

    def known_to_search(self, step: Graph) -> Mapping[str, int]:
        """Return the workspaces of the original and of a searched step, its operators in their recomputed form, too."""
        return self.known((self.subject.captured.original.graph, step, redo_graph(step)))

    def plan(self, graph: Graph, step: Graph | None, latency_ns: int, **figures: Any) -> Plan:
        """Verify a realized graph and return it as a plan, with its memory. Its workspaces are the non-zero ones
        that it and the search relied on, which worked on ``step``."""
        verify(graph)
        searched = () if step is None else (step, redo_graph(step))
        graphs = (self.subject.captured.original.graph, *searched, graph)
        table = self.known(graphs)
        profile = self.subject.replayed(graph, self.subject.costs(table))
        keys = sorted({key for each in graphs for key in signatures(each)}) if self.subject.kind == "cpu" else []
        planned = Memory(profile.tensor_bytes, profile.peak_bytes)
        needed = {key: table[key] for key in keys if table.get(key, 0) > 0}
        recomputed, swapped = repeats(graph)
        return Plan(
            graph=graph,
            planned=planned,
            latency_ns=latency_ns,
            workspaces=needed,
            recomputed_ops=recomputed,
            swapped_bytes=swapped,
            **figures,
        )


@dataclass(frozen=True, eq=False)
class SearchesFromNothing:
    """Results of one step's searches from nothing, by goal, and the latencies in ns that no plan avoids there."""

    deadline: Deadline = NO_DEADLINE
    share: float = 1.0
    """Share of the deadline that is theirs."""
    results: dict[Objective, SearchResult] = field(default_factory=dict)
    least_ns: dict[Objective, int] = field(default_factory=dict)

    def result(self, goal: Objective, begin: Callable[[], SearchResult]) -> tuple[SearchResult, int]:
        """Return the search from nothing, and the states that it took now: `begin` runs it once."""
        states = 0
        if goal not in self.results:
            self.results[goal] = begin()
            states = self.results[goal].states
        return self.results[goal], states

    def enough(self, scratch: PlanScratch, goal: Objective, peak: int, latency_ns: int) -> bool:
        """Return True if searching on has next to nothing to win, by that latency as well as by eager's."""
        if scratch.enough(goal, peak, latency_ns):
            return True
        if goal.memory_limit is None or goal not in self.results or not goal.met(peak, latency_ns):
            return False
        problem = self.results[goal].judge.problem
        if problem.n_nodes > BOUNDED_NODES:  # finding a bound would take as long as the search
            return False
        if goal not in self.least_ns:
            found = latency_lower_bound(problem, goal.memory_limit)
            self.least_ns[goal] = rounded_bound(found, scratch.subject.original_ns)
        return scratch.enough(goal, peak, latency_ns, self.least_ns[goal])


def attempts(
    scratch: PlanScratch,
    graph: Graph,
    *,
    budget: int,
    seed: int,
    over: Over = never,
    brief: bool = False,
    front: Callable[[], FissionFront] | None = None,
    begun: SearchesFromNothing | None = None,
) -> Callable[[Objective], Plan]:
    """Return a function that plans a graph for one goal after another.

    Loops in the graph stay as they are, each a node of the search. ``over`` ends one; a ``brief`` one makes few
    proposals. Where there is a ``front`` of the same step, whose parts run whole, a search that is not `enough` goes on
    from it. What ``begun`` knows is not searched for again.
    """
    subject = scratch.subject
    costs = subject.costs(scratch.known_to_search(graph))
    compiled = compile_problem(graph, costs, reuse=subject.source.reuse)
    loose = compiled.problem
    if scratch.torn:
        loose = replace(loose, block_waits=rows_of(() for _ in range(loose.n_blocks)))
    # a bound must let bodies be planned anew, and knows of no plans that are torn
    unbounded = scratch.torn or any(op.body is not None for op in graph.ops)

    def attempt(aim: Objective) -> Plan:
        problem = replace(loose, ceiling=aim.memory_limit or 0)
        results, states = whole_search(scratch, problem, aim, budget, seed, front, over=over, brief=brief, begun=begun)
        result = results[0]
        events = expand(problem, result.order, result.flags)
        return scratch.plan(
            realize(compiled, events),
            graph,
            result.latency_ns,
            states=states,
            stopped_by_seconds=any(each.stopped_by_seconds for each in results),
            feasible=result.feasible,
            searched=None if unbounded else Searched(LoopNest(compiled), result.peak),
            decisions=None if unbounded else Decisions(structure_of(compiled), result.order, result.flags),
        )

    return attempt


def structure_of(compiled: Compiled) -> str:
    """Return a digest of operators, and who reads and writes what: all of a step that decisions rest on but sizes and
    costs."""
    problem, found = compiled.problem, hashlib.sha256()
    for op in compiled.graph.ops:
        found.update(f"{op.target} {op.phase} {op.random};".encode())
    for name in STRUCTURE:
        part = getattr(problem, name)
        for numbers in part if isinstance(part, tuple) else (part,):
            found.update(numbers.tobytes())
    return found.hexdigest()


def reuse_decisions(scratch: PlanScratch, goal: Objective, known: Iterable[Decisions]) -> Plan | None:
    """Return the best plan that decisions for steps of other sizes or numbers give, realized and verified. None
    where no step among them has this one's structure, or where what they give does not keep the limit."""
    subject = scratch.subject
    costs = subject.costs(scratch.known_to_search(subject.normal))
    compiled = compile_problem(subject.normal, costs, reuse=subject.source.reuse)
    problem, structure = replace(compiled.problem, ceiling=goal.memory_limit or 0), structure_of(compiled)
    judged = [(evaluate(problem, each.order, each.flags), each) for each in known if each.structure == structure]
    judged = [(found, each) for found, each in judged if goal.met(found.peak, found.latency_ns)]
    if not judged:
        return None
    found, decisions = min(judged, key=lambda pair: goal.key(pair[0].peak, pair[0].latency_ns))
    graph = realize(compiled, expand(problem, decisions.order, decisions.flags))
    figures: dict[str, Any] = {"states": len(judged), "stopped_by_seconds": False, "feasible": True}
    plan = scratch.plan(graph, subject.normal, found.latency_ns, decisions=decisions, **figures)
    return plan if goal.memory_limit is None or plan.peak <= goal.memory_limit else None


def whole_search(
    scratch: PlanScratch,
    problem: Problem,
    goal: Objective,
    budget: int,
    seed: int,
    front: Callable[[], FissionFront] | None,
    *,
    over: Over = never,
    brief: bool = False,
    begun: SearchesFromNothing | None = None,
) -> tuple[list[SearchResult], int]:
    """Search a step none of whose parts is a loop; return the results, best first, and the states of all.

    One search is from nothing, and where that is not `enough` another one goes on from a front. Together they evaluate
    ``budget`` states besides the front's. One that a cap on seconds cut off, or kept from the front or a whole one,
    says so.
    """
    watch, begun = scratch.watch, SearchesFromNothing() if begun is None else begun
    first = min(budget, FROM_NOTHING) if front is not None else budget
    end = begun.deadline.begin(begun.share)
    either = over if end is never else lambda: over() or end()
    begin = partial(search, problem, goal, budget=first, seed=seed, brief=brief, over=either, watch=watch)
    found, states = begun.result(goal, begin)
    if front is None or first == budget or scratch.enough(goal, found.peak, found.latency_ns):
        return [found], states
    if over():
        return [replace(found, stopped_by_seconds=True)], states
    if begun.enough(scratch, goal, found.peak, found.latency_ns):
        return [found], states
    known = front()
    starts = [found, *(point.plan for point in around_best(known.points, goal))]
    last = search(problem, goal, budget=budget - first, seed=seed, over=over, watch=watch, starts=starts)
    last = replace(last, stopped_by_seconds=last.stopped_by_seconds or known.stopped_by_seconds)
    return sorted((found, last), key=lambda each: each.key(goal)), states + known.states + last.states


def approached(goal: Objective, attempt: Callable[[Objective], Plan], hopeless: bool = False) -> Plan:
    """Return the best of a few attempts to keep a limit. Where a realized plan exceeds the memory limit, the next
    one gets a lower limit; not where that is ``hopeless``."""
    aim = goal
    tried: list[Plan] = []
    for _ in range(ATTEMPTS):
        found = attempt(aim)
        limit = goal.memory_limit
        if limit is None or aim.memory_limit is None:
            return found
        met = replace(found, feasible=found.planned.peak_bytes <= limit)
        tried.append(met)
        if hopeless or met.feasible or not found.feasible:
            break
        aim = Objective(memory_limit=aim.memory_limit - (found.planned.peak_bytes - limit))
    best = min(tried, key=lambda each: (not each.feasible, each.planned.peak_bytes))
    return replace(
        best,
        states=sum(each.states for each in tried),
        stopped_by_seconds=any(each.stopped_by_seconds for each in tried),
        # Of every attempt: replanning from a baseline must meet the same scratch again on its way.
        workspaces={key: nbytes for each in tried for key, nbytes in each.workspaces.items()},
    )


def latency_ratios(subject: Subject, graph: Graph, slack: float) -> tuple[float, ...]:
    """Return a graph's latency to the original's on each of the machines of a slack. What it waits for copies is
    included."""
    eager = subject.original_ns + subject.behind_ns
    every = machines(subject.roofline.nominal, slack)
    return tuple((elapsed_ns(graph, each) / each.kernels + subject.behind_ns) / eager for each in every)


def worst_latency_ratio(subject: Subject, graph: Graph) -> float | None:
    """Return the worst ratio for the slack that the subject is planned with; None on a device that swaps nothing."""
    return max(latency_ratios(subject, graph, subject.slack)) if subject.roofline.link_bytes_per_s else None
