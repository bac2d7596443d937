"""From a limit to a verified graph: search, realize, and check with the exact simulator.

A plan is only believed when the realized graph evaluates to no more bytes than the search was promised.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from magis.api.subject import Subject, redo_graph, signatures
from magis.ir import Graph, verify
from magis.results import Memory
from magis.rewrite.realize import realize
from magis.search.driver import DEFAULT_BUDGET, SearchResult, search
from magis.simulate.compile import Compiled, compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.events import REDO, STORE
from magis.simulate.replay import replay

ATTEMPTS = 3
"""Searches at most: an operator that takes over its input's memory may have another workspace than its plain form."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The best plan found, realized. ``planned`` is its memory with the workspaces that planning used."""

    graph: Graph
    result: SearchResult
    planned: Memory
    latency_ns: int
    states: int
    seconds: float
    stopped_by_seconds: bool
    feasible: bool
    recomputed_ops: int
    swapped_bytes: int
    workspaces: Mapping[str, int]
    """Non-zero workspaces that planning relied on, by signature."""


def planning_workspaces(
    subject: Subject, stored: Mapping[str, int] | None, expected_graph: str | None
) -> Mapping[str, int] | None:
    """Workspaces to plan with: the baseline's where it is about this very graph, else None (this machine's own).

    Planning with the baseline's makes the plan, and so its tensor bytes, the same on every machine (SPEC section 6).
    """
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
    known = _known(subject, stored)
    compiled = compile_problem(subject.normal, subject.costs(known), reuse=subject.source.reuse)
    started = time.perf_counter()

    def attempt(target: int | None) -> Plan:
        result = search(
            compiled.problem,
            memory_limit=target,
            latency_limit_ns=latency_limit_ns,
            budget=DEFAULT_BUDGET if budget is None else budget,
            seconds=None if seconds is None else max(seconds - (time.perf_counter() - started), seconds / 10),
            allow_swap=compiled.problem.xfer_ns_per_byte > 0,
            seed=seed,
        )
        found = _realized(subject, compiled, result, stored)
        return found if memory_limit is None else replace(found, feasible=found.planned.peak_bytes <= memory_limit)

    target = memory_limit
    tried = [attempt(target)]
    for _ in range(ATTEMPTS - 1):
        found = tried[-1]
        if memory_limit is None or target is None or found.feasible or not found.result.feasible:
            break
        target -= found.planned.peak_bytes - memory_limit
        tried.append(attempt(target))
    best = min(tried, key=lambda each: (not each.feasible, each.planned.peak_bytes))
    return replace(
        best,
        states=sum(each.states for each in tried),
        seconds=time.perf_counter() - started,
        stopped_by_seconds=any(each.stopped_by_seconds for each in tried),
        # Of every attempt: replanning from a baseline must meet the same scratch again on its way.
        workspaces={key: nbytes for each in tried for key, nbytes in each.workspaces.items()},
    )


def _known(subject: Subject, stored: Mapping[str, int] | None) -> Mapping[str, int]:
    """Workspaces of every signature that the search may ask for; a stored table leaves out zeros."""
    if stored is None:
        return subject.base_workspaces if subject.kind == "cpu" else {}
    asked = [
        key
        for graph in (subject.captured.graph, subject.normal, redo_graph(subject.normal))
        for key in signatures(graph)
    ]
    return {**dict.fromkeys(asked, 0), **stored}


def _realized(subject: Subject, compiled: Compiled, result: SearchResult, stored: Mapping[str, int] | None) -> Plan:
    events = expand(compiled.problem, result.order, result.flags)
    graph = realize(compiled, events)
    verify(graph)
    if stored is None:
        table = dict(subject.workspaces(graph))
    else:
        table = {**dict.fromkeys(signatures(graph), 0), **_known(subject, stored)}
    costs = subject.costs(table)
    profile = replay(graph, costs.workspace, rounding=costs.rounding)
    problem = compiled.problem
    return Plan(
        graph=graph,
        result=result,
        planned=Memory(profile.tensor_bytes, profile.peak_bytes),
        latency_ns=result.latency_ns,
        states=result.states,
        seconds=0.0,
        stopped_by_seconds=result.stopped_by_seconds,
        feasible=result.feasible,
        recomputed_ops=int(np.count_nonzero(events.kind == REDO)),
        swapped_bytes=int(problem.nbytes[events.arg[events.kind == STORE]].sum()),
        workspaces=_used(subject, graph, table),
    )


def _used(subject: Subject, graph: Graph, table: Mapping[str, int]) -> dict[str, int]:
    if subject.kind != "cpu":
        return {}
    graphs = (subject.captured.graph, subject.normal, redo_graph(subject.normal), graph)
    keys = sorted({key for each in graphs for key in signatures(each)})
    return {key: table[key] for key in keys if table.get(key, 0) > 0}
