"""Cases with fission: what their results say of it is what was run."""

from __future__ import annotations

import pytest

from magis.cases.run_case import CaseRun, run_case
from magis.fission.lower_bound import lower_bound
from magis.fission.proof import verify_fission
from magis.graph import Graph, verify
from magis.graph.loop_rules import rows_around
from magis.planner.bench import Bench
from magis.results import Case, CaseResult
from magis.runtime.measure import collector_spared

BLOCKS = "tests.api.nets:few_blocks"
NORM = "tests.api.nets:normed"


def case(model: str = BLOCKS, **limits: float) -> Case:
    return Case(model, "magis", "cpu", "small", budget=300, timing_rounds=1, **limits)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def ran(bench: Bench, asked: Case) -> tuple[CaseResult, Graph]:
    """The result of a case, and the graph that was run."""
    run = CaseRun(asked, bench.subject(asked))
    with collector_spared():
        result = run.result(None, None)
    assert run.graph is not None
    return result, run.graph


@pytest.fixture(scope="module")
def tight(bench: Bench) -> tuple[CaseResult, Graph]:
    return ran(bench, case(memory_ratio=0.4))


def test_a_result_says_whether_anything_ran_in_parts(bench: Bench, tight: tuple[CaseResult, Graph]) -> None:
    result, graph = tight
    verify(graph)
    verify_fission(graph)
    loops = [op.body.parts for op in graph.ops if op.body is not None]
    assert bool(loops) == bool(result.search.fission)
    assert not (result.search.fission and result.search.unsplit)
    assert result.numbers == ("within tolerance" if loops else "bit-identical")
    assert result.original.measured == result.original.simulated
    assert result.optimized.measured == result.optimized.simulated
    assert result.lower_bound_bytes <= result.memory.peak_bytes
    subject = bench.subject(result.case)
    workspace = subject.costs(subject.base_workspaces).workspace
    assert result.lower_bound_bytes == lower_bound(subject.untangled, workspace).nbytes
    for parts in loops:
        assert f" in {parts} parts" in result.search.fission


def test_a_baselines_workspaces_lead_to_the_same_divided_plan(tight: tuple[CaseResult, Graph]) -> None:
    first, _ = tight
    second = run_case(
        case(memory_ratio=0.4), planning_workspaces=first.planning_workspaces, expected_graph=first.graph_digest
    )
    assert second.search.fission == first.search.fission != ""
    assert second.memory == first.memory
    assert second.search.states == first.search.states
    assert second.planning_workspaces == first.planning_workspaces


def test_what_stands_in_the_way_is_said(bench: Bench) -> None:
    result = run_case(case(NORM, memory_ratio=0.05), cache=bench)
    if result.search.fission:
        pytest.fail(f"runs in parts: {result.search.fission}")
    assert result.search.unsplit.startswith("native_batch_norm (2 calls: batch statistics couple the batch)")
    assert result.numbers == "bit-identical"


def test_one_picture_runs_in_parts() -> None:
    """Along its height, with rows of other parts where windows overlap: run, measured, and compared with eager."""
    asked = case("tests.fission.halo_nets:small_super_resolution", memory_ratio=0.8)
    result, graph = ran(Bench(), asked)
    bodies = [op.body.graph for op in graph.ops if op.body is not None]
    assert any(any(rows_around(op)) for body in bodies for op in body.ops)
    assert result.numbers == "within tolerance"
    assert result.original.measured == result.original.simulated
    assert result.optimized.measured == result.optimized.simulated
    assert result.lower_bound_bytes <= result.memory.peak_bytes <= 0.8 * result.original_memory.peak_bytes
