"""Divided steps: plans keep their limits, and are what the realized graph needs, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magis.fission.candidates import numbers_of_parts, regions_in_parts
from magis.fission.loss_suffix import pieces
from magis.fission.lower_bound import lower_bound
from magis.fission.proof import verify_fission
from magis.graph import Graph, dump, verify
from magis.ops.splits import Halo, Split
from magis.planner.fission_plan import Divided, divide, improve_body, replan
from magis.runtime.swap_streams import HostMemory, Stored
from magis.search.budgeted_evaluator import JudgedPlan, Objective, PlanRequest
from magis.search.fission_pareto import DivisibleStep, least_ns_at, work_of
from magis.search.loop_nest import LoopNest, LoopNestPlan, realize_level, solution, with_body
from magis.search.loop_places import TriedPlaces, places_front, sketch
from magis.simulate.evaluator import evaluate
from magis.simulate.peak_breakdown import repeats
from magis.simulate.problem import KEEP, RECOMPUTE, SWAP
from magis.simulate.simulator import replay
from tests.api.nets import blocks
from tests.nets import as_built
from tests.oracles import graph_step
from tests.search.subjects import BUDGET, Step, front_of, step


def fastest_ns(level: LoopNest) -> int:
    """Nanoseconds of the level when nothing is recomputed."""
    problem = level.compiled.problem
    total = int(problem.node_ns.sum() + problem.blk_ns.sum())
    if level.inner is None:
        return total
    return total - int(problem.node_ns[level.loops[0][0]]) + level.inner.parts * fastest_ns(level.inner)


def divided(given: Step, goal: Objective, known: tuple[int, int] | None = None, seed: int = 0) -> Divided | None:
    wanted = PlanRequest(goal, seed, BUDGET)
    return divide(front_of(given), wanted, known=known)


def realized(given: Step, found: Divided) -> Graph:
    """The plan as a graph: sound, the same step, and as large as was said."""
    graph = realize_level(found.level, found.solution)
    verify(graph)
    verify_fission(graph)
    verify_fission(found.level.compiled.graph, given.graph)
    assert replay(graph, given.costs.workspace, rounding=given.costs.rounding).peak_bytes == found.solution.peak
    assert found.solution.latency_ns >= fastest_ns(found.level)
    parts = [op.body.parts for op in graph.ops if op.body is not None]
    assert parts == [cut.parts for cut in found.cuts] == [found.level.inner.parts]
    assert repeats(graph)[1] == 0
    return graph


@pytest.mark.parametrize(
    ("name", "ratio", "met"),
    [("blocks", 0.75, True), ("blocks", 0.5, True), ("seed-unet", 0.5, True), ("seed-unet", 0.1, False)],
)
def test_a_memory_limit_is_kept_by_what_the_plan_becomes(name: str, ratio: float, met: bool) -> None:
    given = step(name)
    limit = int(ratio * given.peak)
    found = divided(given, Objective(memory_limit=limit))
    assert found is not None
    assert found.states > 0
    graph = realized(given, found)
    floor = lower_bound(given.graph, given.costs.workspace, given.costs.rounding).nbytes
    assert floor <= found.solution.peak
    assert (found.solution.peak <= limit) == met
    assert dump(graph).count("magis.loop") == 1


def test_a_latency_limit_is_kept_and_the_step_leaner_than_a_whole_one() -> None:
    given = step("seed-unet")
    goal = Objective(latency_limit_ns=int(1.1 * given.latency_ns))
    whole = given.whole(goal)
    found = divided(given, goal, known=(whole.peak, whole.latency_ns))
    assert found is not None
    realized(given, found)
    assert goal.latency_limit_ns is not None
    assert found.solution.latency_ns <= goal.latency_limit_ns
    assert found.solution.peak < whole.peak
    second = replan(found, given.costs, PlanRequest(goal, 0, BUDGET), reuse=True)
    assert second.cuts == found.cuts
    realized(given, second)
    assert second.solution.latency_ns <= goal.latency_limit_ns


@pytest.mark.parametrize("left", [0.0, 0.02, 0.3])
def test_a_leaner_body_takes_what_is_left_of_the_time(left: float) -> None:
    """Around every plan of a front: never slower than the limit, and of exactly the bytes that are said."""
    given = step("seed-unet")
    wanted = PlanRequest(Objective(memory_limit=0), 0, BUDGET)
    leaner = 0
    for point in front_of(given).points[::8]:
        assert point.cut is not None
        start = point.solution()
        limit = int((1 + left) * start.latency_ns)
        found = improve_body(point.level, start, replace(wanted, goal=Objective(latency_limit_ns=limit)))
        assert found.latency_ns <= limit
        realized(given, Divided((point.cut,), point.level, found))
        leaner += found.peak < start.peak
    assert leaner or left < 0.3


def test_a_plan_that_is_too_slow_already_is_left_as_it_is() -> None:
    point = front_of(step("seed-unet")).points[0]
    start = point.solution()
    wanted = PlanRequest(Objective(latency_limit_ns=start.latency_ns - 1), 0, BUDGET)
    found = improve_body(point.level, start, wanted)
    assert (found.peak, found.latency_ns, found.states) == (start.peak, start.latency_ns, 0)


def test_a_sketch_is_one_place_with_little_effort() -> None:
    given = step("seed-unet")
    work = DivisibleStep(given.graph, given.costs, True, tuple(pieces(given.graph)))
    hasty, place = sketch(work), front_of(given)
    assert {point.cut.at for point in hasty.points if point.cut} == {work.places[0].at}
    assert 0 < 10 * hasty.states < place.states
    assert 0 < least_ns_at(work, 0) == min(fastest_ns(point.level) for point in hasty.points)
    for point in hasty.points:
        assert point.cut is not None
        realized(given, Divided((point.cut,), point.level, point.solution()))


def test_of_a_large_step_fewer_places_are_tried_each_in_one_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = step("seed-unet")
    usual = work_of(given.graph, given.costs, reuse=True)
    monkeypatch.setattr("magis.search.fission_pareto.MOST_OPERATORS", len(given.graph.ops) - 1)
    large = work_of(given.graph, given.costs, reuse=True)
    assert 0 < len(large.places) < len(usual.places)
    goal = Objective(memory_limit=0)
    front = places_front(large, PlanRequest(goal, 0, BUDGET))
    assert front.states < places_front(usual, PlanRequest(goal, 0, BUDGET)).states / 4
    parts: dict[int, set[int]] = {}
    for point in front.points:
        assert point.cut is not None
        parts.setdefault(point.cut.at, set()).add(point.cut.parts)
    assert all(len(each) == 1 for each in parts.values())


def test_no_place_is_tried_behind_one_that_costs_nothing() -> None:
    given = step("seed-unet")
    work = work_of(given.graph, given.costs, reuse=True)
    tried = TriedPlaces()
    everything = PlanRequest(Objective(memory_limit=given.peak), 0, BUDGET, eager_ns=1 << 62)
    first = places_front(work, everything, tried=tried)
    assert len(tried.fronts) == 1 < len(work.places)
    again = places_front(work, everything, tried=tried)
    assert [point.plan for point in again.points] == [point.plan for point in first.points], "not tried again"


def test_places_whose_loops_alone_last_longer_than_a_known_plan_are_not_tried() -> None:
    given = step("seed-unet")
    work = work_of(given.graph, given.costs, reuse=True)
    wanted = PlanRequest(Objective(memory_limit=given.peak * 3 // 4), 0, BUDGET)
    every, some = TriedPlaces(), TriedPlaces()
    front = places_front(work, wanted, tried=every)
    fastest = {number: min(each.latency_ns for each in found.points) for number, found in every.fronts.items()}
    known = (given.peak // 2, sorted(fastest.values())[len(fastest) // 2])  # faster than half of the places are
    better = [point.plan.key(wanted.goal) for point in front.points if wanted.key(point.peak, point.latency_ns) < known]
    found = places_front(work, wanted, tried=some, known=known)
    assert len(some.fronts) < len(every.fronts)
    assert set(better) <= {point.plan.key(wanted.goal) for point in found.points}
    assert places_front(work, wanted, tried=some).points, "those that were left out are tried when nothing is known"
    assert some.fronts.keys() == every.fronts.keys()


def test_the_same_request_gives_the_same_plan() -> None:
    given = step("seed-unet")
    goal = Objective(memory_limit=int(0.6 * given.peak))
    first, second = divided(given, goal), divided(given, goal)
    assert first is not None
    assert second is not None
    assert (first.cuts, first.states) == (second.cuts, second.states)
    assert dump(realized(given, first)) == dump(realized(given, second))


def test_nothing_is_returned_that_is_no_better_than_what_is_known() -> None:
    given = step("seed-unet")
    goal = Objective(memory_limit=int(0.6 * given.peak))
    assert divided(given, goal, known=(1, 1)) is None
    assert divided(given, Objective(latency_limit_ns=given.latency_ns), known=(1, 1)) is None
    found = divided(given, goal)
    assert found is not None
    reached = (found.solution.peak, found.solution.latency_ns)
    again = divided(given, goal, known=reached)
    if again is not None:  # what is known guides the search: it may find something better, never anything else
        assert goal.key(again.solution.peak, again.solution.latency_ns) < goal.key(*reached)


def test_a_step_whose_batch_cannot_be_cut_is_not_divided() -> None:
    given = step("one row")
    found = divided(given, Objective(memory_limit=given.peak // 2), known=(given.peak, given.latency_ns))
    assert found is None


def test_planned_again_for_another_limit() -> None:
    """The cut stays, the plan is another one."""
    given = step("seed-unet")
    first = divided(given, Objective(memory_limit=int(0.75 * given.peak)))
    assert first is not None
    tighter = Objective(memory_limit=first.solution.peak - 100_000)
    second = replan(first, given.costs, PlanRequest(tighter, 0, BUDGET), reuse=True)
    assert second.cuts == first.cuts
    realized(given, second)
    assert tighter.memory_limit is not None
    assert second.solution.peak <= tighter.memory_limit
    assert second.solution.latency_ns >= first.solution.latency_ns


@pytest.mark.parametrize(
    ("most", "tried"),
    [(32, [2, 4, 8, 16, 32]), (12, [2, 4]), (7, [7]), (15, [3, 5, 15]), (6, [2, 3, 6]), (1, []), (37, [])],
)
def test_numbers_of_parts_divide_every_size(most: int, tried: list[int]) -> None:
    assert numbers_of_parts(most) == tried


@pytest.mark.parametrize(
    ("most", "how", "tried"),
    [
        (8191, 0, [2, 4, 8, 16, 32]), (37, 0, [2, 4, 8]), (7, 0, [2]), (32, 0, [2, 4, 8, 16, 32]),
        (4095, 0, [3, 5, 7, 9, 13, 15, 21]), (12, 0, [2, 4, 6]), (2, 0, [2]), (37, "mean", []),
        (21, Halo(0, 1, 1), [3, 7, 21]),
    ],
)  # fmt: skip
def test_sizes_with_few_divisors_have_a_smaller_last_part(most: int, how: Any, tried: list[int]) -> None:
    cuts = {0: Split((how if isinstance(how, Halo) else 0,), (how if isinstance(how, str) else 0,), (), most)}
    regions = regions_in_parts(cuts)
    assert all(most % ceil(most / region.parts) != 1 for region in regions)  # one row may be a part of other calls
    assert [region.parts for region in regions] == [ceil(region.scale) for region in regions] == tried
    assert [region.uneven for region in regions] == [most % parts != 0 for parts in tried]


class Calls(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func is torch.ops.aten.empty_strided.default)
        return func(*args, **(kwargs or {}))


@dataclass
class CountingHost(HostMemory):
    """Counts copies, and the bytes that go to the host."""

    stores: int = 0
    loads: int = 0
    nbytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def store(self, tensor: Tensor) -> Stored:
        self.stores, self.nbytes = self.stores + 1, self.nbytes + tensor.untyped_storage().nbytes()
        return super().store(tensor)

    def load(self, stored: Stored) -> Tensor:
        self.loads += 1
        return super().load(stored)


@pytest.mark.parametrize("flag", [KEEP, SWAP, RECOMPUTE])
def test_figures_count_what_every_part_of_a_loop_moves_and_runs_again(
    flag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with what the runtime copies and calls: a body is run as often as it has parts."""
    point = next(
        point for point in front_of(step("blocks")).points if point.level.inner and point.level.inner.parts > 2
    )
    looped = linked(point.level)
    assert looped.inner is not None
    kept, found = (
        realize_level(looped, planned(looped, planned(looped.inner, None, each), each)) for each in (KEEP, flag)
    )
    ran = []
    for graph in (kept, found):
        verify(graph)
        host, calls = CountingHost(), Calls()
        monkeypatch.setattr("magis.runtime.steps.make_host", lambda *_, host=host: host)
        bound = graph_step(graph, as_built(blocks()))
        bound.prepare()
        with calls:
            bound.run()
        ran.append((calls.count, host.stores, host.loads, host.nbytes))
    recomputed, swapped = repeats(found)
    assert repeats(kept) == (0, 0) == ran[0][2:]
    assert ran[1][0] - ran[0][0] == recomputed
    assert ran[1][1] == ran[1][2]
    assert ran[1][3] == swapped
    inside = [op.body.graph for op in found.ops if op.body is not None]
    assert (recomputed > 0, swapped > 0) == (flag == RECOMPUTE, flag == SWAP)
    assert flag == KEEP or any(any(repeats(body)) for body in inside)


def linked(level: LoopNest) -> LoopNest:
    """The same, on a device with a quick link."""
    problem = replace(level.compiled.problem, xfer_ns_per_byte=1e-6)
    loops = tuple((node, linked(body)) for node, body in level.loops)
    return replace(level, compiled=replace(level.compiled, problem=problem), loops=loops)


def planned(level: LoopNest, inner: LoopNestPlan | None, flag: int) -> LoopNestPlan:
    """A plan with one decision for all tensors."""
    problem = level.compiled.problem if inner is None else with_body(level, inner)
    order, flags = np.arange(problem.n_nodes, dtype=np.int32), np.full(problem.n_storages, flag, dtype=np.int8)
    cost = evaluate(problem, order, flags)
    return solution(level, problem, JudgedPlan(order, flags, cost.peak, cost.latency_ns), inner)
