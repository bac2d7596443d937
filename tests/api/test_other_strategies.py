"""Cases of the strategies that magis is compared with: measured as predicted, and what is said of their numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from magis.cases.run_case import run_case
from magis.extensions.ranks.rank_cases import OFF_BY
from magis.planner.bench import Bench
from magis.results import Case
from tests.ranks import own_strategies as on_ranks

BLOCKS = "tests.api.nets:few_blocks"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def case(strategy: str, *, device: str = "cpu", model: str = BLOCKS, ranks: int = 1) -> Case:
    return Case(model, strategy, device, "small", timing_rounds=3, ranks=ranks)


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [
        ("selective-checkpoint", "bit-identical"),
        ("offload", "bit-identical"),
        ("amp", "another precision: loss within "),
        ("amp+checkpoint", "another precision: loss within "),
    ],
)
def test_what_can_be_captured_is_simulated_exactly(bench: Bench, strategy: str, numbers: str) -> None:
    result = run_case(case(strategy), cache=bench)
    assert result.numbers.startswith(numbers)
    assert result.optimized.measured is not None
    assert result.optimized.simulated.tensor_bytes == result.optimized.measured.tensor_bytes
    assert (result.off_by, result.noise, result.portable, result.is_predicted) == (0.0, 0.0, True, False)
    assert result.samples == 256
    assert result.samples_per_s == pytest.approx(256e3 / (result.optimized.measured_ms or 0))
    if strategy != "offload":  # the host is the device
        assert result.memory.peak_bytes < result.original_memory.peak_bytes


def test_on_another_device_offloading_saves_memory_and_costs_time() -> None:
    bench = Bench()
    result = run_case(case("offload", device="sim:v100"), cache=bench)
    assert result.is_predicted
    assert result.memory.peak_bytes < result.original_memory.peak_bytes
    assert result.optimized.simulated_ms > result.original.simulated_ms
    assert result.samples_per_s == pytest.approx(256e3 / result.optimized.simulated_ms)
    assert result.samples_per_s_spread is None


@pytest.mark.soak
def test_compiled_code_is_measured_where_it_runs(bench: Bench) -> None:
    result = run_case(case("compile"), cache=bench)
    assert result.optimized.is_measured
    assert result.numbers.startswith("another compiler, other random numbers: loss within ")  # of its dropout


def test_a_world_of_ranks_is_predicted_where_there_is_none() -> None:
    bench = Bench()
    plain = run_case(case("ddp", device="sim:v100", ranks=4), cache=bench)
    lean = run_case(case("zero3", device="sim:v100", ranks=4), cache=bench)
    for result in (plain, lean):
        (rank,) = result.ranks
        assert rank.predicted == result.optimized.simulated
        assert sum(term.nbytes for term in rank.terms) == result.optimized.simulated.tensor_bytes
        assert result.is_predicted
        assert result.numbers == "not run"
        assert result.samples == 256
    assert lean.memory.tensor_bytes < plain.memory.tensor_bytes < plain.original_memory.tensor_bytes
    assert [term.name for term in plain.ranks[0].terms if "communication" in term.name]


def test_a_strategy_of_the_users_own_is_measured_on_ranks_beside_a_built_in_one() -> None:
    bench = Bench()
    own = f"{on_ranks.__name__}:ddp"
    model = f"{on_ranks.__name__}:small_net"
    try:
        results = [run_case(case(name, model=model, ranks=2), cache=bench) for name in ("ddp", own)]
    finally:
        bench.close()
    for result in results:
        assert len(result.ranks) == 2
        assert result.optimized.measured is not None
        assert result.optimized.measured.tensor_bytes == max(
            rank.measured.tensor_bytes for rank in result.ranks if rank.measured
        )
        assert result.identity["ranks"].startswith("2 with ")
        assert result.samples == 8
    built_in = results[0]
    assert built_in.optimized.measured is not None
    off = built_in.optimized.simulated.tensor_bytes - built_in.optimized.measured.tensor_bytes
    assert abs(off) <= OFF_BY * built_in.optimized.measured.tensor_bytes
    assert built_in.numbers.startswith("another order of sums: loss within ")
    theirs = results[1]
    assert theirs.numbers.startswith("differs: loss by "), "it has an optimizer of its own, not the network's"
    assert theirs.optimized.simulated == theirs.optimized.measured
    assert "cannot be predicted, its step does not run on fake tensors" in theirs.note
    assert math.isinf(theirs.off_by)


def test_ranks_with_batch_norm_train_as_their_shares_do_one_by_one() -> None:
    """Without dropout, the losses are those of the steps that are measured and timed."""
    bench = Bench()
    model = f"{on_ranks.__name__}:normalized_net"
    try:
        found = {name: run_case(case(name, model=model, ranks=2), cache=bench) for name in ("zero1", "amp+zero1")}
    finally:
        bench.close()
    zero = found["zero1"]
    assert zero.numbers.startswith("another order of sums: loss within ")
    assert zero.optimized.measured is not None
    assert zero.optimized.simulated.tensor_bytes == pytest.approx(zero.optimized.measured.tensor_bytes, rel=OFF_BY)
    assert found["amp+zero1"].numbers.startswith("not run: ")


@pytest.mark.parametrize("strategy", ["checkpoint", "offload"])
def test_under_autocast_a_strategy_is_compared_with_eager_under_autocast(bench: Bench, strategy: str) -> None:
    result = run_case(Case(BLOCKS, strategy, "cpu", "small", "amp-bfloat16", timing_rounds=3), cache=bench)
    assert result.numbers == "bit-identical"
    assert result.optimized.measured is not None
    assert result.optimized.simulated.tensor_bytes == result.optimized.measured.tensor_bytes


def test_a_network_that_exists_already_is_predicted_and_left_as_it_is() -> None:
    from magis.models import from_function

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def made() -> tuple[object, ...]:
        return module, (torch.zeros(8, 8), torch.zeros(8, 4)), nn.functional.mse_loss

    for strategy in ("ddp", "zero1", "fsdp"):
        result = run_case(
            Case("own", strategy, "cpu", "small", ranks=2), cache=Bench(), make=from_function("own", made, None)
        )
        assert result.is_predicted
        assert result.memory.tensor_bytes > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert type(next(module.parameters())) is nn.Parameter
