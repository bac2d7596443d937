"""The whole front of a model: how much memory for how much time, in seconds rather than one search per limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from magis.api.bench import Bench, default_device
from magis.api.dividing import described
from magis.api.plans import Scratch, searched
from magis.api.subject import Subject
from magis.ir import Graph
from magis.results import Case, FrontPoint, ParetoFront
from magis.search.front import pareto as undominated
from magis.search.front import spread
from magis.search.fronts import Point, divided_front, whole_front
from magis.search.judge import DEFAULT_BUDGET, Goal, Wanted
from magis.search.levels import realize_level, repeats

__all__ = ["POINTS", "RealizedPoint", "front_of", "pareto", "realized_front"]

POINTS = 32
"""Points of a front at most: each of them is realized and judged."""


@dataclass(frozen=True, eq=False)
class RealizedPoint:
    """A point of a front and the step that it stands for, verified."""

    graph: Graph
    figures: FrontPoint

    @property
    def peak(self) -> int:
        return self.figures.peak_bytes

    @property
    def latency_ns(self) -> int:
        return round(self.figures.latency_ms * 1e6)


def pareto(
    model: str,
    *,
    device: str | None = None,
    preset: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    budget: int | None = None,
    points: int = POINTS,
    cache: Bench | None = None,
) -> ParetoFront:
    """Peak memory against latency of a training step, simulated: a registered model or "package.module:factory".

    ``device`` is the default one unless given, ``preset`` "small" on a CPU and "paper" elsewhere. ``budget`` bounds
    the work of cutting the step into parts (states, as for cases). At most ``points`` plans are realized, evenly spread
    over the peaks. Deterministic but for ``seconds``. Raises MagisError for what cannot be captured or asked for.
    """
    device = default_device() if device is None else device
    preset = preset or ("small" if device == "cpu" else "paper")
    case = Case(model, "magis", device, preset, dtype, seed=seed, budget=budget)
    return front_of(case, (Bench() if cache is None else cache).subject(case), points)


def front_of(case: Case, subject: Subject, points: int = POINTS) -> ParetoFront:
    """The front of a subject; of the case only names, seed and budget count."""
    original = subject.captured.graph
    eager_ms = subject.latency_ns(original) / 1e6
    started = time.perf_counter()
    found, states = realized_front(subject, budget=case.budget, seed=case.seed, points=points)
    return ParetoFront(
        model=case.model,
        device=case.device,
        preset=case.preset,
        dtype=subject.source.dtype,
        seed=case.seed,
        original=FrontPoint(subject.original.peak_bytes, eager_ms, 0, 0, ""),
        lower_bound_bytes=subject.lower_bound,
        points=tuple(point.figures for point in found),
        states=states,
        seconds=time.perf_counter() - started,
    )


def realized_front(
    subject: Subject, *, budget: int | None = None, seed: int = 0, points: int = POINTS
) -> tuple[list[RealizedPoint], int]:
    """The front with the graph of every point, and the states that were judged."""
    scratch = Scratch(subject, None)
    reuse = subject.source.reuse
    known = scratch.known((subject.captured.graph, *searched(subject.normal)))
    whole = whole_front(subject.normal, subject.costs(known), reuse=reuse)
    wanted = Wanted(Goal(memory_limit=0), seed, DEFAULT_BUDGET if budget is None else budget)
    divided = divided_front(subject.untangled, subject.roofline, wanted, reuse=reuse)
    chosen = spread(undominated([*whole.points, *_worth_their_parts(subject, divided.points, whole.points)]), points)
    return undominated(_realized(scratch, chosen)), whole.states + divided.states


def _worth_their_parts(subject: Subject, divided: tuple[Point, ...], whole: tuple[Point, ...]) -> Iterator[Point]:
    """On a CPU only what needs less memory than any whole step (docs/notes/fission.md), elsewhere everything."""
    leanest = min((point.peak for point in whole), default=0)
    return (point for point in divided if subject.source.device != "cpu" or point.peak < leanest)


def _realized(scratch: Scratch, points: list[Point]) -> Iterator[RealizedPoint]:
    for point in points:
        solution = point.solution()
        graph = realize_level(point.level, solution)
        memory, _ = scratch.judged(graph, searched(point.level.compiled.graph))
        recomputed, swapped = repeats(solution)
        loop = next((op for op in graph.ops if op.body is not None), None)
        parts = "" if loop is None else described(loop)
        figures = FrontPoint(memory.peak_bytes, point.latency_ns / 1e6, recomputed, swapped, parts)
        yield RealizedPoint(graph, figures)
