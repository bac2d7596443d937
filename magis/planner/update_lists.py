"""The update of a planned step on a GPU: in short lists, each as soon as its gradients exist, or over all weights at
once, as eager runs it. Every list takes kernel launches of its own, which small steps would notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from magis.graph import Graph
from magis.planner.subject import Subject
from magis.rewrite.rules.rule_table import aggregated
from magis.search.budgeted_evaluator import Objective
from magis.search.loop_places import TriedPlaces

NOTICED = 0.005
"""Share of eager's latency from which on the launches of short lists are worth planning with eager's update, too,
whatever the limit."""
_OF_GRAPH = ("normal", "untangled", "lean", "aggregated", "_work", "floor", "base_workspaces")
"""Cached members of a subject that depend on how its step updates weights."""


def with_eager_update(subject: Subject) -> Subject | None:
    """Return the subject with a step that updates all weights at once, as eager does; None where every planned step
    does so, where an optimizer runs behind the step, and for steps with collectives. Cached."""
    return subject.memo.get(("eager's update",), lambda: _with_eager_update(subject))


def _with_eager_update(subject: Subject) -> Subject | None:
    captured, listed = subject.captured, subject.captured.listed
    if listed is None or captured.behind is not None or captured.sends or captured.rule.kind == "own":
        return None
    name = subject.digest  # one identity: it is the same step of eager's
    found = of_graph(copy.copy(subject))
    found.captured = replace(captured, graph=listed.graph, deaths=listed.deaths, numbers=listed.numbers, listed=None)
    found.digest = name
    return found


def of_graph(copied: Subject) -> Subject:
    """Return a copied subject without what is cached of the graph that it plans."""
    return without_cached(copied, _OF_GRAPH)


def without_cached(copied: Subject, members: Iterable[str]) -> Subject:
    """Return a copied subject without these cached members, and without what earlier searches found."""
    for each in members:
        vars(copied).pop(each, None)
    copied.tried = TriedPlaces()
    copied.tried_briefly = TriedPlaces(least_ns=copied.tried.least_ns)
    copied.fronts = {}
    return copied


def worth_planning_with_eager_update(subject: Subject, goal: Objective | None = None) -> Subject | None:
    """Return the subject with eager's update where that may be better: if the launches of short lists are noticed, or
    if the ``goal`` leaves no room for them, or asks for no less memory than eager's step needs. None on a CPU, which
    launches nothing."""
    other = None if subject.kind == "cpu" else with_eager_update(subject)
    if other is None:
        return None
    short_ns, eager_ns = subject.latency_ns(subject.captured.graph), subject.latency_ns(other.captured.graph)
    if short_ns > (1 + NOTICED) * eager_ns:
        return other
    if goal is None or short_ns <= eager_ns:
        return None
    if goal.memory_limit is not None:
        return other if goal.memory_limit >= subject.original.peak_bytes else None
    return other if goal.latency_limit_ns is not None and goal.latency_limit_ns < short_ns else None


def forms_of(subject: Subject, *, in_loops: bool) -> Iterator[Callable[[], Graph]]:
    """Yield functions that return the graphs of which plans are made, with or without loops, the likeliest first."""
    for each in (subject, with_eager_update(subject)):
        if each is None:
            continue
        if in_loops:
            yield partial(getattr, each, "aggregated")
            yield lambda step=each: aggregated(step.lean)[0]  # type: ignore[misc]
        for name in ("lean", "untangled", "normal") if in_loops else ("normal", "untangled"):
            yield partial(getattr, each, name)
