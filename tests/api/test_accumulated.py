"""Gradient accumulation on one device: estimate, fit, plans and strategies against loops written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magis
from magis.capture import OptimizerSpec
from magis.cli.main import main
from magis.errors import UsageError
from magis.models.custom import as_workload
from magis.planner.bench import Bench
from magis.results import Case, CaseResult
from magis.runtime.measure import window_peak
from magis.runtime.steps import EagerStep


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def rows(count: int = 256, width: int = 32) -> tuple[Any, ...]:
    net = nn.Sequential(*(Block(width) for _ in range(3)))
    batch = torch.randn(count, width), torch.randn(count, width)
    return net, *batch, nn.functional.mse_loss, torch.optim.AdamW(net.parameters())


def wide() -> tuple[Any, ...]:
    """Gradients that outweigh activations."""
    return rows(8, 128)


def pictures() -> tuple[Any, ...]:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(512, 10)
    )
    batch = torch.randn(16, 3, 8, 8), torch.randint(0, 10, (16,))
    return net, *batch, nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def tied() -> tuple[Any, ...]:
    """A weight with two gradients in each backward."""
    table = nn.Embedding(64, 16)
    head = nn.Linear(16, 64, bias=False)
    head.weight = table.weight
    net = nn.Sequential(table, Block(16), head, nn.Flatten(0, 1))
    words = torch.randint(0, 64, (4, 32))
    return net, words, words.flatten(), nn.functional.cross_entropy, torch.optim.Adam(net.parameters())


NETS = (rows, wide, pictures, tied)


def loop(make: Callable[[], tuple[Any, ...]], count: int) -> Callable[[], None]:
    """The step that people write."""
    net, inputs, targets, loss_fn, optimizer = make()

    def step() -> None:
        for _ in range(count):
            loss = loss_fn(net(inputs), targets) / count
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    return step


@pytest.mark.parametrize("make", NETS)
def test_the_estimate_is_what_a_loop_needs(make: Callable[[], tuple[Any, ...]]) -> None:
    one = magis.estimate(make, device="cpu")
    peaks = set()
    for count in (2, 3, 5):
        found = magis.estimate(make, device="cpu", accumulate=count)
        measured = window_peak(loop(make, count)).peak_bytes
        assert found.peak_bytes == found.result.persistent_bytes + measured
        assert found.result.conformance == "whole step"
        peaks.add(found.peak_bytes)
    assert peaks == {max(peaks)}, "two micro-batches tell what more of them need"
    if make is rows:  # whose peak is where the backward begins
        assert max(peaks) - one.peak_bytes == sum(found.against(one).values()) > 0
        assert found.against(one)["gradient"] > 0


def _results(make: Callable[[], tuple[Any, ...]], *cases: Case) -> list[CaseResult]:
    bench = Bench()

    def work(_seed: int) -> Any:
        return as_workload("net", make())

    return [magis.run_case(case, cache=bench, make=work) for case in cases]


def _case(strategy: str, **given: Any) -> Case:
    return Case("net", strategy, "cpu", "small", timing_rounds=3, budget=100, **given)


def test_strategies_and_plans_of_an_accumulated_step() -> None:
    eager, checkpointed, planned, cast = _results(
        rows,
        _case("eager", accumulate=3),
        _case("checkpoint", accumulate=3),
        _case("magis", accumulate=3, memory_ratio=0.8),
        _case("amp", accumulate=3),
    )
    for each in (eager, checkpointed, planned, cast):
        assert each.optimized.measured is not None
        assert each.optimized.measured.peak_bytes == each.optimized.simulated.peak_bytes
    assert checkpointed.numbers == planned.numbers == "bit-identical"
    assert planned.memory.peak_bytes <= 0.8 * eager.memory.peak_bytes
    assert cast.numbers.startswith("another precision: ")


@pytest.mark.parametrize("make", [rows, pictures])
def test_the_gates_strategy_divides_the_batch(make: Callable[[], tuple[Any, ...]]) -> None:
    names = ("accumulate4", "accumulate2+amp", *(["accumulate4+checkpoint"] if make is rows else []))
    eager, *divided = _results(make, _case("eager"), *map(_case, names))
    for each in divided:
        assert each.optimized.measured is not None
        assert each.optimized.measured.peak_bytes == each.optimized.simulated.peak_bytes < eager.memory.peak_bytes
        assert "order of sums: loss within" in each.numbers


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        ("accumulate3", {}, "a batch of 256 has no 3 equal micro-batches"),
        ("accumulate4", {"accumulate": 2}, "does not run 2 batches for one update"),
        ("ddp", {"accumulate": 2}, "does not run 2 batches for one update"),
        ("accumulate2+compile", {}, "adds up no micro-batches"),
        ("by-hand", {"accumulate": 2}, "adds up no micro-batches"),
        ("accumulate2+", {}, "unknown strategy"),
        ("eager", {"accumulate": 0}, "accumulate=0; give a whole number that is at least 1"),
    ],
)
def test_what_is_refused(strategy: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _results(rows, _case(strategy, **given))


def test_the_largest_micro_batch() -> None:
    limit = magis.estimate(rows, device="cpu", accumulate=2).peak_bytes
    found = magis.fit(rows, memory_limit=limit, device="cpu", accumulate=2, budget=100, most=256)
    once = magis.fit(rows, memory_limit=limit, device="cpu", budget=100, most=512)
    assert found.eager is not None
    assert once.eager is not None
    assert (found.eager.size, found.eager.peak_bytes) == (256, limit)
    assert once.eager.size > 256


def test_a_micro_batch_that_fails_leaves_the_step_with_its_batch() -> None:
    """The next step has all of it, not parts of a part."""
    sizes = list[int]()

    def loss(found: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(found))
        if len(sizes) == 2:
            raise ValueError("once")
        return nn.functional.mse_loss(found, targets)

    net, inputs, targets, *_ = rows(8)
    step = EagerStep(net, (inputs,), (targets,), loss, OptimizerSpec("sgd", accumulate=4, cuts=True))
    with pytest.raises(ValueError, match="once"):
        step.run()
    step.prepare()
    step.run()
    assert sizes == [2] * 6


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}:rows"
    peaks = []
    for count in ("1", "2"):
        assert main(["estimate", name, "--device", "sim:h100", "--accumulate", count]) == 0
        peaks.append(capsys.readouterr().out.splitlines()[0])
    assert peaks[0] != peaks[1]
    assert main(["fit", name, "--device", "cpu", "--memory-limit", "1 KiB", "--accumulate", "2", "--most", "2"]) == 1
    capsys.readouterr()  # progress, on a slow machine
    for wrong in (["--accumulate", "0"], ["--accumulate", "x"], ["--accumulate", "2", "--compiled"]):
        assert main(["estimate", name, "--device", "cpu", *wrong]) == 4
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_remedies_keep_the_micro_batches() -> None:
    step = magis.estimate(rows, device="cpu", accumulate=2, memory_limit="64 KiB")
    (checkpointed, *_) = step.remedies
    (case,) = _results(rows, _case("checkpoint", accumulate=2))
    assert (checkpointed.name, checkpointed.how) == ("checkpoint", "checkpoint each block")
    assert checkpointed.needed_bytes == case.memory.peak_bytes
