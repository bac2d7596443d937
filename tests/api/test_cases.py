"""Whole cases: capture, plan, run, measure."""

from __future__ import annotations

import dataclasses

import pytest

from magis.cases.comparison import compare
from magis.cases.run_case import run_case
from magis.errors import CaptureError, UsageError
from magis.planner.bench import Bench, check_device, default_device
from magis.results import Case, CaseResult

BLOCKS = "tests.api.nets:few_blocks"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def own(bench: Bench) -> CaseResult:
    return run_case(case(), cache=bench)


def case(strategy: str = "magis", model: str = BLOCKS, device: str = "cpu", **more: object) -> Case:
    if strategy == "magis" and "latency_ratio" not in more:
        more.setdefault("memory_ratio", 0.6)
    return Case(model, strategy, device, "small", budget=600, timing_rounds=2, **more)  # type: ignore[arg-type]


def as_judged(result: CaseResult) -> str:
    """What the comparison of numbers should say: a plan with fission sums in another order than eager."""
    return "within tolerance" if result.search.fission else "bit-identical"


def assert_exact(result: CaseResult) -> None:
    assert result.original.measured == result.original.simulated
    assert result.optimized.measured == result.optimized.simulated


@pytest.mark.parametrize("ratio", [0.8, 0.55])
def test_a_memory_limit_is_kept_exactly_predicted_and_changes_no_number(bench: Bench, ratio: float) -> None:
    told: list[str] = []
    result = run_case(case(memory_ratio=ratio), cache=bench, progress=told.append)
    assert result.numbers == as_judged(result)
    assert_exact(result)
    assert result.memory_limit_bytes is not None
    assert result.memory.peak_bytes <= result.memory_limit_bytes
    assert result.memory_limit_bytes <= ratio * result.original_memory.peak_bytes
    assert result.lower_bound_bytes <= result.memory.peak_bytes
    assert result.persistent_bytes > result.weight_bytes > 0
    assert result.ratio is not None
    assert result.ratio.low <= result.ratio.ratio <= result.ratio.high
    assert told[0] == "capturing"
    assert "timing" in told
    assert [text for text in told if text.startswith("searching, best so far 0.")]
    assert result.search.recomputed_ops > 0 or ratio == 0.8
    assert result.search.swapped_bytes == 0  # a host copy frees nothing on the CPU


def test_a_limit_out_of_reach_is_infeasible_and_the_bound_proves_it(bench: Bench) -> None:
    result = run_case(case(memory_ratio=0.05), cache=bench)
    assert not result.search.feasible
    assert result.memory_limit_bytes is not None
    assert result.memory_limit_bytes < result.lower_bound_bytes <= result.memory.peak_bytes
    assert_exact(result)


def test_latency_mode_gives_less_memory_for_more_time(bench: Bench) -> None:
    results = [run_case(case(latency_ratio=ratio), cache=bench) for ratio in (1.0, 1.3)]
    assert results[0].memory.peak_bytes > results[1].memory.peak_bytes
    assert all(result.memory_limit_bytes is None and result.numbers == "bit-identical" for result in results)
    assert results[1].optimized.simulated_ms <= 1.3 * results[1].original.simulated_ms


@pytest.mark.parametrize("strategy", ["eager", "checkpoint"])
def test_other_strategies_are_predicted_exactly_too(bench: Bench, strategy: str) -> None:
    result = run_case(case(strategy), cache=bench)
    if strategy == "eager":
        assert_exact(result)
    assert result.optimized.measured is not None
    assert result.optimized.measured.tensor_bytes == result.optimized.simulated.tensor_bytes
    assert result.numbers == ("reference" if strategy == "eager" else "bit-identical")
    assert (result.memory_ratio < 0.9) == (strategy == "checkpoint")


def test_the_same_request_gives_the_same_plan(own: CaseResult) -> None:
    again = run_case(case(), cache=Bench())
    assert own.memory == again.memory
    assert own.search.states == again.search.states
    assert own.graph_digest == again.graph_digest
    assert own.planning_workspaces == again.planning_workspaces


def test_a_baselines_workspaces_decide_the_plan_not_this_machines(bench: Bench, own: CaseResult) -> None:
    # Another machine: every operator that has scratch here has ten times as much there.
    there = {key: 10 * value for key, value in own.planning_workspaces.items()}
    results = [
        run_case(case(), cache=each, planning_workspaces=there, expected_graph=own.graph_digest)
        for each in (bench, Bench())
    ]
    assert results[0].memory.tensor_bytes == results[1].memory.tensor_bytes
    assert_exact(results[0])
    same = run_case(case(), cache=bench, planning_workspaces=own.planning_workspaces, expected_graph=own.graph_digest)
    assert same.memory == own.memory


@pytest.mark.parametrize("share", [0, 0.1, 2])
def test_a_limit_that_a_baselines_workspaces_miss_is_met_by_this_machines(share: float) -> None:
    """Of another machine: less scratch than here makes a plan that is too large here, more than here one that fits."""
    bench, wanted = Bench(), case(model="tests.api.nets:convolutions", memory_ratio=0.7)
    own = run_case(wanted, cache=bench)
    there = {key: nbytes for key, each in own.planning_workspaces.items() if (nbytes := int(share * each))}
    found = run_case(wanted, cache=bench, planning_workspaces=there, expected_graph=own.graph_digest)
    assert_exact(found)
    assert found.memory_limit_bytes == own.memory_limit_bytes is not None
    assert found.memory.peak_bytes <= found.memory_limit_bytes
    assert (found.portable, found.planning_workspaces == there) == ((True, True) if share == 2 else (False, False))
    assert found.portable or found.memory == own.memory


def test_simulated_devices_swap_and_run_nothing() -> None:
    result = run_case(case(device="sim:rtx3090", memory_ratio=0.5))
    assert not result.optimized.is_measured
    assert result.ratio is None
    assert result.numbers == "not run"
    assert result.memory_ratio <= 0.5
    assert result.original.simulated.peak_bytes % 512 == 0


def test_a_step_that_does_not_fit_is_simulated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magis.planner.subject.free_device_memory", lambda _device: 1000)
    result = run_case(case())
    assert "not run: it needs about" in result.note
    assert not result.original.is_measured
    assert not result.optimized.is_measured
    assert result.memory_ratio <= 0.6


def test_a_seconds_cap_that_ends_the_search_is_said(bench: Bench) -> None:
    # one case with more work than the cap allows: "stopped by seconds" is a fact of the row, not an error
    hungry = dataclasses.replace(case(memory_ratio=0.4, seconds=0.3), budget=100_000_000)
    result = run_case(hungry, cache=bench)
    assert result.search.stopped_by_seconds
    assert result.numbers == "bit-identical"


def test_compare_names_what_differs(bench: Bench) -> None:
    subject = bench.subject(case())
    eager, other = subject.eager(), subject.eager()
    next(other.module.parameters()).data.view(-1)[0] += 1.0
    assert compare(eager, other, 0).startswith("differs: loss of step 1")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (case("fly"), "unknown strategy 'fly'"),
        (case("magis+pp2+zb"), r"ranks of pp2\+zb run no plans"),
        (case(model="nosuch"), "nosuch"),
        (case(device="sim:abacus"), "unknown device 'sim:abacus'"),
        (case("checkpoint", model="tests.api.nets:no_blocks"), "names no blocks to checkpoint"),
        (case(dtype="int3"), "unknown data type 'int3'"),
        (dataclasses.replace(case(), preset="huge"), "unknown preset 'huge'"),
        (dataclasses.replace(case(), budget=0), "budget of a case must be a number above 0, not 0"),
        (dataclasses.replace(case(), budget=-1), "budget of a case must be a number above 0, not -1"),
        (dataclasses.replace(case(), seconds=0.0), "cap in seconds of a case must be a number above 0, not 0.0"),
        (dataclasses.replace(case(), seconds=float("nan")), "cap in seconds of a case .* not nan"),
        (dataclasses.replace(case(), memory_ratio=-0.5), "memory ratio of a case .* not -0.5"),
        (dataclasses.replace(case(), latency_ratio=float("inf")), "latency ratio of a case .* not inf"),
        (dataclasses.replace(case(), memory_ratio=80), "memory ratio of a case is 80; 80% of eager's peak is 0.8"),
        (dataclasses.replace(case(), seed=-1), "seed=-1; give a whole number that is at least 0"),
        (dataclasses.replace(case(), slack=0.95), "slack of a case must be a number from 0 to 0.9, not 0.95"),
        (dataclasses.replace(case(), memory_ratio=None), "needs a memory limit or a latency ratio"),
    ],
)
def test_bad_requests_get_one_line(request_: Case, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_case(request_)
    assert "\n" not in str(caught.value)


def test_a_plan_with_the_slack_of_a_halved_link_survives_it() -> None:
    """A plan without it waits there, and its result says for how long."""
    usual = Case("vit", "magis", "sim:rtx3090", "small", memory_ratio=0.5, budget=3000)
    hasty, patient = (run_case(each).search for each in (usual, dataclasses.replace(usual, slack=0.5)))
    assert hasty.worst_latency_ratio is not None
    assert patient.worst_latency_ratio is not None
    assert (hasty.halved_latency_ratio or 0) > hasty.worst_latency_ratio + 0.05
    assert (patient.halved_latency_ratio or 9) <= patient.worst_latency_ratio * 1.001


def test_a_module_that_branches_on_data_is_refused_by_name_and_line() -> None:
    with pytest.raises(CaptureError, match=r"depends on the data .* at nets\.py:\d+"):
        run_case(case(model="tests.api.nets:branches"))


def test_devices() -> None:
    check_device(default_device())
    check_device("cpu")
    check_device("sim:h200")
