"""Plans with fission: parts of the step in loops, where that is worth sums in another order than eager's."""

from __future__ import annotations

from dataclasses import replace

from magis.api.plans import Plan, Scratch, approached, searched
from magis.api.subject import Subject
from magis.fission.proof import verify_fission
from magis.ir import Graph
from magis.search.divided import Divided, divide, replan
from magis.search.judge import Goal
from magis.search.levels import realize_level, repeats

FREE = 1.01
"""Latency, as a multiple of the original's, up to which a plan without fission is good enough."""
GAIN = 0.01
"""Share of the original's latency (or of the peak, under a latency limit) that fission must win to be chosen."""


def worth_dividing(subject: Subject, goal: Goal, plain: Plan) -> bool:
    """Whether fission has anything to win over a plan without it."""
    if goal.memory_limit is None or not plain.feasible:
        return True
    return plain.latency_ns > FREE * subject.latency_ns(subject.captured.graph)


def divided(subject: Subject, scratch: Scratch, goal: Goal, plain: Plan, *, budget: int, seed: int) -> Plan:
    """The best plan with fission, or the one without if that is as good.

    Where the step is cut is decided by estimated workspaces, which are the same everywhere; the decision is then
    planned with those that are known.
    """
    reuse = subject.source.reuse
    known = (plain.planned.peak_bytes, plain.latency_ns)
    graph = subject.untangled
    found = divide(graph, subject.roofline, goal, reuse=reuse, seed=seed, budget=budget, known=known)
    if found is None:
        return plain
    around = searched(found.level.compiled.graph)
    costs = subject.costs(scratch.known((subject.captured.graph, *around)))

    def attempt(aim: Goal) -> Plan:
        again = replan(found, costs, aim, reuse=reuse, seed=seed, budget=budget)
        looped = realize_level(again.level, again.solution)
        memory, relied = scratch.judged(looped, around)
        recomputed, swapped = repeats(again.solution)
        return Plan(
            graph=looped,
            planned=memory,
            latency_ns=again.solution.latency_ns,
            states=again.states,
            seconds=0.0,
            stopped_by_seconds=False,
            feasible=aim.met(again.solution.peak, again.solution.latency_ns),
            recomputed_ops=recomputed,
            swapped_bytes=swapped,
            workspaces=relied,
            fission=described(graph, again),
        )

    best = approached(goal, attempt)
    verify_fission(best.graph)
    chosen = best if _better(goal, best, plain, subject.latency_ns(subject.captured.graph)) else plain
    return replace(
        chosen,
        states=plain.states + found.states + best.states,
        workspaces={**plain.workspaces, **best.workspaces},
        stopped_by_seconds=plain.stopped_by_seconds,
    )


def _better(goal: Goal, ours: Plan, plain: Plan, original_ns: int) -> bool:
    if ours.feasible != plain.feasible:
        return ours.feasible
    if goal.memory_limit is None or not ours.feasible:
        return ours.planned.peak_bytes < (1 - GAIN) * plain.planned.peak_bytes
    return ours.latency_ns < plain.latency_ns - GAIN * original_ns


def described(graph: Graph, found: Divided) -> str:
    """What runs in parts, in words."""
    cut = found.cuts[0]
    place = graph.ops[cut.at].module or "its beginning"
    return f"from {place} to the loss and back in {cut.parts} parts"
