"""What a step reserves."""

from __future__ import annotations

import functools

import pytest

from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case
from magis.rewrite.functionalize import functionalize
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.loop_nest import realize_level
from magis.search.loop_places import divided_front
from magis.simulate.reserved_bytes import reserved
from magis.simulate.simulator import replay

MIB = 2**20
PROJECTED = "tests.api.nets:projected"


@functools.cache
def subject_of(model: str) -> Subject:
    return Bench().subject(Case(model, "magis", "sim:h200", "small"))


@pytest.mark.parametrize("model", [PROJECTED, "mlp", "seed-unet"])
def test_a_step_reserves_what_it_allocates_and_repeats_in_that(model: str) -> None:
    subject = subject_of(model)
    graph, workspace = subject.captured.graph, subject.roofline.workspace
    deaths = subject.captured.deaths
    profile = replay(graph, workspace, deaths=deaths, rounding=512)
    once, twice, often = (reserved(graph, workspace, deaths, steps=steps) for steps in (1, 2, 5))
    assert profile.peak_bytes <= once.allocated_bytes <= once.reserved_bytes
    assert once.reserved_bytes <= twice.reserved_bytes == often.reserved_bytes
    # A block may be larger than what was asked for by 1 MiB at most, and small ones are not.
    large = sum(storage.nbytes > MIB for storage in graph.storages.values())
    assert once.allocated_bytes <= profile.peak_bytes + large * MIB


def test_a_loop_reserves_less_than_the_whole() -> None:
    subject = subject_of(PROJECTED)
    graph, workspace = functionalize(subject.captured.graph), subject.roofline.workspace
    front = divided_front(subject.untangled, subject.roofline, PlanRequest(Objective(memory_limit=0), 0, 1), reuse=True)
    leanest = front.points[0]
    cut = realize_level(leanest.level, leanest.solution())
    assert any(op.body is not None for op in cut.ops)
    inner, whole = reserved(cut, workspace), reserved(graph, workspace)
    assert inner.allocated_bytes < whole.allocated_bytes
    peak = replay(cut, workspace, rounding=512).peak_bytes
    assert peak == inner.allocated_bytes or 0 < inner.allocated_bytes - peak < MIB
