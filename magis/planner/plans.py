"""Realized plans, and the workspaces with which they are planned. A plan counts as feasible only if its realized graph,
simulated exactly, keeps the memory limit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from magis.cost.machines import HALF, Machine, machines
from magis.graph import Graph, verify
from magis.planner.subject import Subject
from magis.planner.traced_model import redo_graph, signatures
from magis.results import Memory, SearchOutcome
from magis.rewrite.copies_ahead import with_copies_ahead
from magis.rewrite.realize import realize
from magis.search.budgeted_evaluator import NO_DEADLINE, Deadline, Objective, Over, Watch, never
from magis.search.driver import FROM_NOTHING, SearchResult, search
from magis.search.fission_pareto import FissionFront
from magis.search.latency_bound import latency_lower_bound, nest_latency_bound
from magis.search.loop_nest import LoopNest
from magis.search.pareto_sweep import around_best
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import evaluate, expand
from magis.simulate.peak_breakdown import repeats
from magis.simulate.problem import Int8s, Int32s, Problem, rows_of
from magis.simulate.timeline import elapsed_ns

ATTEMPTS = 3
"""Most searches for one limit. A realized in-place operator may have another workspace than its functional form."""
BOUNDED_NODES = 2_000
"""Most nodes for a latency bound during the search: beyond, the bound would take as long as the search."""
STRUCTURE = (
    "inputs", "outputs", "redo_ok", "copies", "at_once", "early", "reuses", "preads", "extras", "producer", "pinned",
    "last_write", "to_end", "block_inputs", "block_writes",
)  # fmt: skip
"""Arrays of a problem that hold neither bytes nor times."""
ENOUGH = 1.005
"""Latency, as a multiple of eager's or of a known lower bound, at which a search ends."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(SearchOutcome):
    """The best plan found, as a graph. ``planned`` is its memory with the workspaces that planning used."""

    graph: Graph
    planned: Memory
    latency_ns: int
    workspaces: Mapping[str, int]
    """Non-zero workspace bytes that planning used, by operator signature."""
    searched: Searched | None = None
    """Input for the latency bound; None once the bound is computed, or where there is none."""
    decisions: Decisions | None = None
    """Decisions that steps with other sizes or scalars can reuse; None for a plan with loops."""

    @property
    def peak(self) -> int:
        """Peak in bytes, with the workspaces that planning used."""
        return self.planned.peak_bytes


@dataclass(frozen=True, eq=False)
class Decisions:
    """Order and flags of a plan without its step. Every step with an equal structure digest can reuse them."""

    structure: str
    order: Int32s
    flags: Int8s


@dataclass(frozen=True, eq=False)
class Searched:
    """Step that was searched, and the best peak found there, in bytes."""

    step: LoopNest
    peak: int


def rounded_bound(bound_ns: int, eager_ns: int) -> int:
    """Round a latency bound down to a thousandth of eager's latency, so that the last digits of a solver, which differ
    among machines, do not steer the search."""
    step = max(1, eager_ns // 1000)
    return bound_ns // step * step


def with_latency_bound(plan: Plan, memory_limit: int | None) -> Plan:
    """Return a plan with a lower bound of its latency in ns, if one can be computed."""
    found, limit = plan.searched, memory_limit
    if found is None or not plan.feasible:
        return replace(plan, searched=None)
    limit = max(found.peak, plan.peak) if limit is None else max(found.peak, limit)
    return replace(plan, searched=None, latency_bound_ns=nest_latency_bound(found.step, limit))


@dataclass(frozen=True)
class PlanScratch:
    """Workspaces of a plan's operators: measured here, or all from a baseline (``stored``). With the baseline's, plans
    and their tensor bytes are equal on every machine."""

    subject: Subject
    stored: Mapping[str, int] | None
    watch: Watch | None = None
    """Callback for every plan without loops that a search evaluates."""
    torn: bool = False
    """True if weight updates may run before operators that may raise."""
    ahead: int | None = None
    """Bytes within which copies of moved state run ahead of their updates; None: no state is moved."""

    def enough(self, goal: Objective, peak: int, latency_ns: int, least_ns: int = 0) -> bool:
        """Return True if more search can hardly improve a plan: its peak keeps the memory limit, and its latency is
        close to eager's, or to the lower bound ``least_ns``."""
        if goal.memory_limit is None or not goal.met(peak, latency_ns):
            return False
        return latency_ns <= ENOUGH * max(least_ns, self.subject.original_ns)

    def known(self, graphs: Iterable[Graph]) -> Mapping[str, int]:
        """Return the workspace bytes of every operator of the graphs. Operators missing in ``stored`` have 0."""
        subject = self.subject
        if self.stored is not None:
            return {**dict.fromkeys((key for graph in graphs for key in signatures(graph)), 0), **self.stored}
        if subject.kind != "cpu":
            return {}
        return {key: nbytes for graph in graphs for key, nbytes in subject.workspaces(graph).items()}

    def known_to_search(self, step: Graph) -> Mapping[str, int]:
        """Return the workspaces of the original step, and of a searched step with its operators' recompute forms."""
        return self.known((self.subject.captured.original.graph, step, redo_graph(step)))

    def plan(self, graph: Graph, step: Graph | None, latency_ns: int, **figures: Any) -> Plan:
        """Verify a realized graph and return it as a plan, with its simulated memory. The plan keeps the non-zero
        workspaces of this graph and of the searched ``step``."""
        searched = () if step is None else (step, redo_graph(step))
        graphs = (self.subject.captured.original.graph, *searched, graph)
        table = self.known(graphs)
        costs = self.subject.costs(table)
        if self.ahead is not None and costs.link_bytes_per_s:
            own = replace(costs, hurry=1.0)
            graph = with_copies_ahead(graph, own, costs.workspace, costs.rounding, self.ahead)
            latency_ns = elapsed_ns(graph, costs.nominal)
        verify(graph)
        profile = self.subject.replayed(graph, costs)
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
    """Cached searches of one step without a starting plan, by goal, with lower bounds of the latency in ns."""

    deadline: Deadline = NO_DEADLINE
    share: float = 1.0
    """Fraction of the deadline that these searches may use."""
    results: dict[Objective, SearchResult] = field(default_factory=dict)
    least_ns: dict[Objective, int] = field(default_factory=dict)

    def result(self, goal: Objective, begin: Callable[[], SearchResult]) -> tuple[SearchResult, int]:
        """Return the search result for a goal, and the states evaluated by this call. `begin` runs once per goal."""
        states = 0
        if goal not in self.results:
            self.results[goal] = begin()
            states = self.results[goal].states
        return self.results[goal], states

    def enough(self, scratch: PlanScratch, goal: Objective, peak: int, latency_ns: int) -> bool:
        """Return True if more search can hardly improve a plan, compared with eager's latency or with a lower bound."""
        if scratch.enough(goal, peak, latency_ns):
            return True
        if goal.memory_limit is None or goal not in self.results or not goal.met(peak, latency_ns):
            return False
        problem = self.results[goal].judge.problem
        if problem.n_nodes > BOUNDED_NODES:  # computing the bound would take as long as the search
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
    """Return a function that plans a graph for one goal per call.

    Loops in the graph stay: each is one node of the search. ``over`` ends a search; ``brief`` makes few proposals. A
    search that is not `enough` continues from the plans of ``front``. Searches cached in ``begun`` are not repeated.
    """
    subject = scratch.subject
    costs = subject.costs(scratch.known_to_search(graph))
    compiled = compile_problem(graph, costs, reuse=subject.source.reuse)
    loose = compiled.problem
    if scratch.torn:
        loose = replace(loose, block_waits=rows_of(() for _ in range(loose.n_blocks)))
    # latency bounds assume replannable loop bodies, and no torn plans
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
    """Return a digest of a step's operators and data dependences: all that decisions depend on but sizes and costs."""
    problem, found = compiled.problem, hashlib.sha256()
    for op in compiled.graph.ops:
        found.update(f"{op.target} {op.phase} {op.random};".encode())
    for name in STRUCTURE:
        part = getattr(problem, name)
        for numbers in part if isinstance(part, tuple) else (part,):
            found.update(numbers.tobytes())
    return found.hexdigest()


def reuse_decisions(scratch: PlanScratch, goal: Objective, known: Iterable[Decisions]) -> Plan | None:
    """Return the best plan that known decisions give for this step, realized and verified. None if none has this step's
    structure digest, or if the plan misses the limit."""
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
    """Search a step without loops; return the results, best first, and the number of states of all of them.

    The first search has no starting plan; if its result is not `enough`, a second one continues from a front. Both
    together evaluate ``budget`` states besides the front's. ``stopped_by_seconds`` is set where a time limit cut them
    short.
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
    """Return the best of up to ATTEMPTS plans for a limit. While the realized plan exceeds the memory limit, the next
    attempt gets a lower limit, unless ``hopeless``."""
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
        # From all attempts: replanning with a baseline must repeat them with equal workspaces.
        workspaces={key: nbytes for each in tried for key, nbytes in each.workspaces.items()},
    )


def latency_ratios(subject: Subject, graph: Graph, slack: float) -> tuple[float, ...]:
    """Return a graph's latency, with waits for host copies, relative to eager's on each machine of a slack."""
    return tuple(_latency_ratio(subject, graph, each) for each in machines(subject.roofline.nominal, slack))


def _latency_ratio(subject: Subject, graph: Graph, machine: Machine) -> float:
    eager_ns = subject.original_ns + subject.behind_ns
    return (elapsed_ns(graph, machine) / machine.kernels + subject.behind_ns) / eager_ns


def worst_latency_ratios(subject: Subject, graph: Graph) -> tuple[float, float] | tuple[None, None]:
    """Return the worst latency ratio over the machines of the subject's slack, and that with a host link half as fast;
    None on a device without swaps."""
    if not subject.roofline.link_bytes_per_s:
        return None, None
    halved = Machine(subject.roofline.nominal, link=HALF)
    return max(latency_ratios(subject, graph, subject.slack)), _latency_ratio(subject, graph, halved)
