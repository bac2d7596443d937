"""Plan of the published search, realized, verified and simulated like every other plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from magis.errors import VerifyError
from magis.extensions.paper.coordinated_search import STATES, PaperSearch
from magis.extensions.paper.ftree import LEVELS
from magis.fission.proof import verify_fission
from magis.planner.fission_plan import describe_loop, name_loops
from magis.planner.plans import Plan, PlanScratch, Searched, approached
from magis.search.budgeted_evaluator import Deadline, Objective


def published_plan(scratch: PlanScratch, goal: Objective, budget: int | None, seconds: float | None) -> Plan:
    """Plan a step under a limit by Algorithm 3, starting from program order.

    `budget` counts simulated states (default 3000: the paper's three minutes at its own speed). If the proof of a split
    fails, the plan has no fission, and `unsplit` has the reason.
    """
    deadline, states = Deadline(seconds), STATES if budget is None else budget
    subject = scratch.subject
    step = subject.untangled
    costs = subject.costs(scratch.known_to_search(step))

    def attempt(levels: int, aim: Objective) -> Plan:
        search = PaperSearch(
            step, costs, aim, reuse=subject.source.reuse, states=states, levels=levels, over=deadline.over
        )
        found = search.run()
        if found.loops:
            verify_fission(found.frame.nest.compiled.graph, step)
        graph = found.realized()
        if found.loops:
            verify_fission(graph)
        loops = [describe_loop(op) for op in graph.ops if op.body is not None]
        return scratch.plan(
            graph,
            step,
            found.figures.latency_ns,
            states=found.states,
            stopped_by_seconds=found.stopped,
            feasible=aim.met(found.figures.peak, found.figures.latency_ns),
            fission=name_loops(loops) if loops else "",
            searched=Searched(found.frame.nest, found.figures.peak),
        )

    try:
        return approached(goal, partial(attempt, LEVELS))
    except VerifyError as error:
        return replace(approached(goal, partial(attempt, 0)), unsplit=f"a cut failed its proof: {error}")
