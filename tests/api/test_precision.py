"""Cases under autocast and in tf32; what a device cannot do is one line, wherever it is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from magis.cases.run_case import run_case
from magis.errors import UsageError
from magis.extensions.models.network_names import GATE_NAMES
from magis.planner.bench import Bench, check_device, products_of
from magis.report import row_from_result
from magis.results import Case

NET = "tests.api.nets:{}"


def case(net: str, dtype: str, device: str = "cpu", strategy: str = "magis") -> Case:
    ratio = 0.8 if strategy == "magis" else None
    return Case(NET.format(net), strategy, device, "small", dtype, memory_ratio=ratio, budget=300, timing_rounds=2)


@pytest.mark.parametrize("net", ["transformer", "convolutions", "tied"])
@pytest.mark.parametrize("dtype", ["amp-bfloat16", "amp-float16"])
def test_a_step_under_autocast_is_eagers_bit_by_bit_and_byte_by_byte(net: str, dtype: str) -> None:
    result = run_case(case(net, dtype))
    assert result.numbers == "bit-identical"
    for step in (result.original, result.optimized):
        assert step.measured == step.simulated
    assert result.dtype == dtype
    row = row_from_result(result)
    assert row["ori-memory"] == result.original_memory.peak_bytes / 4
    assert row["weight memory"] == result.weight_bytes / 4
    plain = run_case(case(net, "float32", strategy="eager"))
    assert result.weight_bytes == plain.weight_bytes
    assert result.original_memory != plain.original_memory


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["eager", "magis"])
@pytest.mark.parametrize("model", GATE_NAMES)
def test_the_networks_of_the_gate_under_autocast(model: str, strategy: str) -> None:
    result = run_case(replace(case("tied", "amp-bfloat16", strategy=strategy), model=model))
    assert result.numbers == ("bit-identical" if strategy == "magis" else "reference")
    for step in (result.original, result.optimized):
        assert step.measured == step.simulated


def test_checkpointing_under_autocast_is_as_simulated() -> None:
    result = run_case(case("transformer", "amp-bfloat16", strategy="checkpoint"))
    assert result.numbers == "bit-identical"
    assert result.original.measured == result.original.simulated
    assert result.optimized.measured is not None
    assert result.optimized.measured.tensor_bytes == result.optimized.simulated.tensor_bytes


def test_the_rules_of_a_gpu_make_another_step_than_the_cpus() -> None:
    cache = Bench()
    cpu = run_case(case("transformer", "amp-bfloat16", strategy="eager"), cache=cache)
    gpu = run_case(case("transformer", "amp-bfloat16", "sim:h200", "eager"), cache=cache)
    assert gpu.graph_digest != cpu.graph_digest
    plain = run_case(case("transformer", "float32", "sim:h200", "eager"), cache=cache)
    assert gpu.original.simulated.peak_bytes < plain.original.simulated.peak_bytes


def settings() -> list[Any]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return [cuda.allow_tf32, cudnn.allow_tf32, cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]


def test_tf32_is_allowed_inside_only() -> None:
    before = settings()
    with products_of("tf32"):
        assert settings() == [True, True, "tf32", "tf32", "tf32"]
    assert settings() == before
    with pytest.raises(UsageError), products_of("tf32"):
        check_device("none")
    assert settings() == before
    for dtype in ("float32", "bfloat16", "amp-bfloat16"):
        with products_of(dtype):
            assert settings() == before
