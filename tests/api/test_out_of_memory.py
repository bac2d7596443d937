"""Steps that do not fit: the original alone, both, or both beside each other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from magis.cases.case_rows import attempt
from magis.cases.run_case import run_case
from magis.planner.bench import Bench
from magis.results import Case, CaseResult
from magis.runtime.steps import EagerStep, GraphStep
from pytest_magis.baselines import ModelBaseline, stored_case, updated
from pytest_magis.verdict import judge

HUNGRY, BLOCKS = "tests.api.nets:hungry", "tests.api.nets:few_blocks"


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_every_kind_of_running_out_of_memory_is_known_and_no_other_error_taken_for_it(text: str, known: bool) -> None:
    def run() -> None:
        raise RuntimeError(text)

    with nullcontext() if known else pytest.raises(RuntimeError, match="illegal"):
        assert attempt(run) is None
    assert attempt(lambda: torch.empty(2**60, dtype=torch.uint8)) is None


def case(model: str = HUNGRY, strategy: str = "magis", ratio: float | None = 0.6) -> Case:
    return Case(model, strategy, "cpu", "small", memory_ratio=ratio, budget=300, timing_rounds=2)


@pytest.fixture(scope="module")
def alone() -> CaseResult:
    """A case whose original ran out of memory."""
    return run_case(case())


def test_the_optimized_step_runs_alone_where_the_original_ran_out_of_memory(alone: CaseResult) -> None:
    assert not alone.original.is_measured
    assert alone.original.measured_ms is None
    assert alone.optimized.measured == alone.optimized.simulated
    assert alone.optimized.measured_ms is not None
    assert alone.memory_limit_bytes is not None
    assert alone.memory.peak_bytes <= alone.memory_limit_bytes <= 0.6 * alone.original.simulated.peak_bytes
    assert alone.numbers == "not run: the original does not fit"
    assert alone.note.startswith("the original was not run: it ran out of memory: its simulated peak is ")
    assert alone.note.endswith("iB are free")
    assert "\n" not in alone.note
    assert alone.ratio is None
    assert alone.identity["simulated"] == "the original, too large to run"


def test_the_gate_takes_it_as_a_row_of_its_own_kind(alone: CaseResult) -> None:
    accepted = judge(alone, None, permissions=frozenset({"new"}))
    assert (accepted.passed, accepted.store) == (True, True)
    baseline: ModelBaseline = updated(None, HUNGRY, "x", alone.case, alone)
    stored = stored_case(baseline, "x", alone.case)
    verdict = judge(alone, stored)
    assert (verdict.passed, verdict.label) == (True, "pass")
    assert any(alone.note in note for note in verdict.notes)
    measured = alone.optimized.measured
    assert measured is not None
    worse = replace(
        alone.optimized,
        simulated=replace(measured, peak_bytes=measured.peak_bytes + 64),
        measured=replace(measured, peak_bytes=measured.peak_bytes + 64),
    )
    assert judge(replace(alone, optimized=worse, memory_limit_bytes=None), stored).label == "FAIL worse"
    off = replace(alone.optimized, simulated=replace(measured, peak_bytes=measured.peak_bytes + 64))
    assert judge(replace(alone, optimized=off), stored).label == "FAIL broken"
    whole = replace(alone, identity={k: v for k, v in alone.identity.items() if k != "simulated"})
    assert any("no measurement of this device" in note for note in judge(whole, stored).notes)


def test_the_optimized_step_may_run_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: GraphStep) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(GraphStep, "run", run)
    result = run_case(case())
    assert not result.original.is_measured
    assert not result.optimized.is_measured
    assert "nor does the optimized step fit" in result.note
    assert result.numbers == "not run"
    assert result.memory_ratio <= 0.6


def free_for(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("magis.planner.subject.free_device_memory", lambda _device: free)


def test_an_original_that_is_predicted_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even tried; what the optimized step needs is measured all the same, and predicted exactly."""
    needed = Bench().subject(case(BLOCKS)).predicted_bytes
    free_for(monkeypatch, needed - 1)
    monkeypatch.setattr(EagerStep, "run", lambda self: pytest.fail("the original ran"))
    result = run_case(case(BLOCKS))
    assert not result.original.is_measured
    assert result.optimized.measured == result.optimized.simulated
    assert result.optimized.measured_ms is not None
    assert result.note.startswith("the original was not run: it needs about ")
    assert judge(result, None).label == "FAIL new"


def test_an_optimized_step_that_is_predicted_not_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Bench().subject(case(BLOCKS))
    # room for the least that any plan needs, but not for one at 0.9 of the original's peak
    least = subject.floor.nbytes + subject.captured.graph.persistent_bytes()
    free_for(monkeypatch, least + 1)
    monkeypatch.setattr(GraphStep, "run", lambda self: pytest.fail("the optimized step ran"))
    result = run_case(case(BLOCKS, ratio=0.9))
    assert not result.optimized.is_measured
    assert result.note.startswith("not run: it needs about ")


def test_steps_that_do_not_fit_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_args: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("magis.cases.contenders.compare_by_kind", compare)
    result = run_case(case(BLOCKS))
    assert result.original.is_measured
    assert result.original.measured_ms is not None
    assert result.optimized.is_measured
    assert result.optimized.measured_ms is not None
    assert result.ratio is None
    assert result.numbers == "not run: original and optimized step do not fit together"
    assert "do not fit" in result.note
    assert judge(result, None).label == "FAIL new"


def test_what_a_step_held_is_given_back() -> None:
    class Held:
        count = 0

        def __init__(self) -> None:
            Held.count += 1

        def __del__(self) -> None:
            Held.count -= 1

    def run() -> None:
        cycle = [Held()]
        cycle.append(cycle)  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert attempt(run) is None
    assert Held.count == 0
    assert attempt(lambda: 3) == 3
