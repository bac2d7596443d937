"""From a limit to a verified graph: search, realize, and check with the exact simulator; without and with fission."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from magis.api.dividing import divided, worth_dividing
from magis.api.plans import Plan, Scratch, approached, searched
from magis.api.subject import Subject
from magis.rewrite.realize import realize
from magis.search.driver import DEFAULT_BUDGET, search
from magis.search.judge import Goal
from magis.simulate.compile import compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.events import REDO, STORE

__all__ = ["Plan", "plan", "planning_workspaces"]


def planning_workspaces(
    subject: Subject, stored: Mapping[str, int] | None, expected_graph: str | None
) -> Mapping[str, int] | None:
    """Workspaces to plan with: the baseline's where it is about this very graph, else None (this machine's own)."""
    if stored is None or expected_graph != subject.digest:
        return None
    return stored


def plan(
    subject: Subject,
    *,
    memory_limit: int | None,
    latency_limit_ns: int | None,
    budget: int | None,
    seconds: float | None,
    seed: int,
    stored: Mapping[str, int] | None,
) -> Plan:
    """Search under exactly one of the limits and realize the winner; ``stored`` as from ``planning_workspaces``."""
    started = time.perf_counter()
    goal = Goal(memory_limit, latency_limit_ns)
    scratch = Scratch(subject, stored)
    budget = DEFAULT_BUDGET if budget is None else budget

    def left() -> float | None:
        return None if seconds is None else max(seconds - (time.perf_counter() - started), seconds / 10)

    best = _whole(subject, scratch, goal, budget=budget, seed=seed, left=left)
    if worth_dividing(subject, goal, best):
        if seconds is not None and time.perf_counter() - started >= seconds:
            best = replace(best, stopped_by_seconds=True)
        else:
            best = divided(subject, scratch, goal, best, budget=budget, seed=seed)
    return replace(best, seconds=time.perf_counter() - started)


def _whole(
    subject: Subject, scratch: Scratch, goal: Goal, *, budget: int, seed: int, left: Callable[[], float | None]
) -> Plan:
    """The best plan without fission."""
    around = searched(subject.normal)
    known = scratch.known((subject.captured.graph, *around))
    compiled = compile_problem(subject.normal, subject.costs(known), reuse=subject.source.reuse)
    problem = compiled.problem

    def attempt(aim: Goal) -> Plan:
        result = search(
            problem,
            memory_limit=aim.memory_limit,
            latency_limit_ns=aim.latency_limit_ns,
            budget=budget,
            seconds=left(),
            allow_swap=problem.xfer_ns_per_byte > 0,
            seed=seed,
        )
        events = expand(problem, result.order, result.flags)
        graph = realize(compiled, events)
        memory, relied = scratch.judged(graph, around)
        return Plan(
            graph=graph,
            planned=memory,
            latency_ns=result.latency_ns,
            states=result.states,
            seconds=0.0,
            stopped_by_seconds=result.stopped_by_seconds,
            feasible=result.feasible,
            recomputed_ops=int(np.count_nonzero(events.kind == REDO)),
            swapped_bytes=int(problem.nbytes[events.arg[events.kind == STORE]].sum()),
            workspaces=relied,
        )

    return approached(goal, attempt)
