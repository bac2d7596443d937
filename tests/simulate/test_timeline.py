"""Time lines: they last as long as the simulator says, and peak where it says."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from magis.cases.run_case import run_case
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.cost.machines import machines
from magis.cost.profile_store import Profile
from magis.graph import Graph
from magis.graph.hazards import is_pure_view
from magis.results import Case, CaseResult
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import evaluate, expand
from magis.simulate.problem import SWAP
from magis.simulate.simulator import replay
from magis.simulate.timeline import UNTIMED, elapsed_ns, moments, timeline
from magis.units import MIB
from tests.graph.loop_graphs import sound
from tests.oracles import no_scratch
from tests.rewrite.cases import case_of
from tests.strategies import random_flags


@pytest.fixture(scope="module")
def swapped() -> CaseResult:
    case = Case("tests.api.nets:blocks", "magis", "sim:rtx3090", "small", memory_ratio=0.5, budget=500)
    return run_case(case, timelines=True)


def test_both_steps_last_and_peak_as_simulated(swapped: CaseResult) -> None:
    assert swapped.timelines is not None
    pairs = ((swapped.timelines.original, swapped.original), (swapped.timelines.optimized, swapped.optimized))
    for spans, step in pairs:
        computed = [span for span in spans if span.stream == "compute"]
        assert max(span.start_ms + span.ms for span in computed) == pytest.approx(step.simulated_ms, rel=1e-9)
        assert max(span.nbytes for span in spans) == step.simulated.peak_bytes
        assert step.at_peak is not None
        assert step.at_peak.tensor_bytes == step.simulated.tensor_bytes
        for span in spans:
            assert sum(span.kinds) == span.nbytes
            assert min(span.kinds) >= 0
        assert sum(row.nbytes for row in step.at_peak.held if row.kind == "parameter") == spans[0].kinds[0] > 0
        assert step.reserved_bytes is not None
        assert step.simulated.peak_bytes <= step.reserved_bytes < 2 * step.simulated.peak_bytes + 24 * MIB
        for stream in {span.stream for span in spans}:
            own = [span for span in spans if span.stream == stream]
            assert all(a.start_ms + a.ms <= b.start_ms + 1e-9 for a, b in pairwise(own))


class Microsecond:
    """Every call takes a microsecond, of a loop every call of every part."""

    link_bytes_per_s = 0.0
    copy_ns = 0

    def nanoseconds(self, op, values) -> int:  # type: ignore[no-untyped-def]
        if op.body is None:
            return 0 if op.target == "magis.part" else 1000
        inside = op.body.graph
        return int(op.body.parts * sum(self.nanoseconds(each, inside.values) for each in inside.ops))


def test_parts_of_a_loop_are_told_one_by_one() -> None:
    graph, times = sound(), Microsecond()
    profile = replay(graph, no_scratch)
    spans = timeline(graph, times, no_scratch, profile)
    assert [span.op for span in spans].count("aten.exp.default") == 2
    assert [span.op for span in spans].count("magis.reduce") == 2 * (3 + 1)
    assert max(span.nbytes for span in spans) == profile.peak_bytes
    assert all(sum(span.kinds) == span.nbytes and span.kinds[-1] == 0 for span in spans)
    last = spans[-1]
    assert last.start_ms + last.ms == pytest.approx(sum(times.nanoseconds(op, graph.values) for op in graph.ops) / 1e6)


class Uneven(Microsecond):
    """Calls of different lengths, and a link that is slow enough for copies to queue up."""

    link_bytes_per_s = 3e8
    copy_ns = 700

    def nanoseconds(self, op, values) -> int:  # type: ignore[no-untyped-def]
        return 100 + 37 * (op.id % 11)


@pytest.mark.parametrize("seed", [0, 2, 3])  # 1 makes nothing again
def test_calls_and_copies_start_when_what_they_wait_for_is_done(seed: int) -> None:
    found, rng = case_of("tiny-bert"), np.random.default_rng(seed)
    flags = random_flags(found.compiled.problem, rng)
    flags[rng.random(len(flags)) < 0.3] = SWAP
    graph, _ = found.check(found.program_order(), flags)
    times = Uneven()
    spans = timeline(graph, times, no_scratch, replay(graph, no_scratch))
    assert [(span.op, span.stream, span.start_ms, span.ms, span.again) for span in spans] == list(
        expected(graph, times)
    )
    assert {span.stream for span in spans} == {"compute", "to host", "from host"}
    assert any(span.again for span in spans)


def expected(graph: Graph, times: Uneven) -> Iterator[tuple[str, str, float, float, bool]]:
    """By the ends of all earlier calls of a stream, looked up one by one."""
    ends: dict[str, list[int]] = {"compute": [0], "to host": [0], "from host": [0]}
    there: dict[int, int] = {}
    for at, op in enumerate(graph.ops):
        storages = [graph.values[value].storage for value in op.inputs()]
        ends["compute"].append(max([ends["compute"][-1], *(there.get(storage, 0) for storage in storages)]))
        if op.target in UNTIMED or is_pure_view(graph.values, op):
            continue
        stream = {"magis.store": "to host", "magis.load": "from host"}.get(op.target, "compute")
        nbytes = graph.storages[storages[0]].nbytes if storages else 0
        ns = times.nanoseconds(op, graph.values) if stream == "compute" else 700 + math.ceil(nbytes * (1e9 / 3e8))
        start = max(ends["compute"][-1], ends[stream][-1])
        ends[stream].append(start + ns)
        if stream != "compute":
            there[graph.values[op.made()[0]].storage] = start + ns
        earlier = [each for each in graph.ops[:at] if each.origin == op.origin and not is_pure_view(graph.values, each)]
        again = stream == "compute" and op.origin is not None and bool(earlier)
        yield op.target, stream, start / 1e6, ns / 1e6, again


@functools.cache
def swapping(slack: float) -> tuple[Graph, int, RooflineCosts]:
    """A step on a GPU with all swapped that can be, the latency that its plan promises, and nominal costs."""
    costs = RooflineCosts(find_device("sim:rtx3090"), Profile({}, link=10**8), slack=slack)  # as small as the step
    compiled = compile_problem(case_of("tiny-bert").compiled.graph, costs)
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    flags = np.full(compiled.problem.n_storages, SWAP, dtype=np.int8)
    found = evaluate(compiled.problem, order, flags)
    assert found.swaps > 3
    return realize(compiled, expand(compiled.problem, order, flags)), found.latency_ns, costs.nominal


@pytest.mark.parametrize("number", range(4))
def test_a_plan_with_slack_waits_for_no_copy_on_any_of_the_machines(number: int) -> None:
    graph, promised, costs = swapping(0.2)
    machine = machines(costs, 0.2)[number]
    rounding = len(graph.ops)  # kernels take whole nanoseconds
    assert elapsed_ns(graph, machine) == pytest.approx(promised * machine.kernels, abs=rounding)


def test_a_plan_without_slack_waits_on_all_but_the_nominal_one() -> None:
    graph, promised, costs = swapping(0.0)
    nominal, *others = machines(costs, 0.2)
    assert [*moments(graph, nominal)][-1] == elapsed_ns(graph, nominal) == promised
    assert all(elapsed_ns(graph, machine) > promised * machine.kernels + len(graph.ops) for machine in others)
