"""A plan made by the paper's own method: its coordinated search, realized, proved and simulated as every plan is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from magis.api.dividing import described, listed
from magis.api.plans import Plan, Scratch, approached, searched
from magis.errors import VerifyError
from magis.fission.proof import verify_fission
from magis.ir import Graph
from magis.paper.ftree import LEVELS
from magis.paper.search import STATES, Published, published
from magis.search.judge import Goal
from magis.simulate.tables import changes

__all__ = ["paper_plan"]


def paper_plan(scratch: Scratch, goal: Goal, *, budget: int | None, over: Callable[[], bool]) -> Plan:
    """The plan that Algorithm 3 finds under a limit, from the step in program order.

    `budget` counts simulated states (default 3000: the paper's three minutes at its own speed); `over` ends the search.
    Without fission where the proof of a cut fails: the plan says so.
    """
    states = STATES if budget is None else budget
    try:
        return approached(goal, _attempts(scratch, states, LEVELS, over))
    except VerifyError as error:
        plain = approached(goal, _attempts(scratch, states, 0, over))
        return replace(plain, unsplit=f"a cut failed its proof: {error}")


def _attempts(scratch: Scratch, states: int, levels: int, over: Callable[[], bool]) -> Callable[[Goal], Plan]:
    subject = scratch.subject
    step = subject.untangled
    around = searched(step)
    costs = subject.costs(scratch.known((subject.captured.original.graph, *around)))

    def attempt(aim: Goal) -> Plan:
        found = published(step, costs, aim, reuse=subject.source.reuse, states=states, levels=levels, over=over)
        if found.loops:
            verify_fission(found.frame.compiled.graph, step)
        return _realized(scratch, found, aim, around)

    return attempt


def _realized(scratch: Scratch, found: Published, aim: Goal, around: tuple[Graph, ...]) -> Plan:
    graph = found.realized()
    if found.loops:
        verify_fission(graph)
    memory, relied = scratch.judged(graph, around)
    done = changes(graph)
    loops = [described(op) for op in graph.ops if op.body is not None]
    return Plan(
        graph=graph,
        planned=memory,
        latency_ns=found.figures.latency_ns,
        states=found.states,
        seconds=0.0,
        stopped_by_seconds=found.stopped,
        feasible=aim.met(found.figures.peak, found.figures.latency_ns),
        recomputed_ops=sum(row.count for row in done if row.kind == "recomputed"),
        swapped_bytes=sum(row.nbytes for row in done if row.kind == "swapped"),
        workspaces=relied,
        fission=listed(loops) if loops else "",
    )
