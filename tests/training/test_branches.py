"""Branches on data: planned as they went in the example, and run by eager where a batch takes another way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from magis import CaptureError, optimize, run_case
from magis.api import Bench
from magis.capture.workload import as_batch
from magis.cases.check import check_case
from magis.models import from_function
from magis.ops.call import EXPECT, ExpectationError
from magis.ops.raising import undone
from magis.results import Case
from magis.runtime.steps import GraphStep
from tests.nets import Block
from tests.training.loops import BUDGET, Loops, assert_same, batch, gate, loss_of, net


def clamping(m: nn.Module, x: Tensor) -> Tensor:
    """Clamps what is not finite, as encoders of detection networks do."""
    x = m.first(x)
    if torch.isinf(x).any() or torch.isnan(x).any():
        x = torch.clamp(torch.nan_to_num(x), min=-100.0, max=100.0)
    return m.second(x)


def clamped() -> nn.Module:
    return Block(clamping, first=nn.Linear(32, 32), second=net(dropout=0.1))


def batches(scales: tuple[float, ...]) -> list[tuple[Tensor, Tensor]]:
    return [
        (scale * inputs, targets) for scale, (inputs, targets) in ((s, batch(seed=i)) for i, s in enumerate(scales))
    ]


def branching(m: nn.Module, x: Tensor) -> Tensor:
    """Branches on its input, behind dropout and statistics that have moved by then."""
    noisy = m.drop(m.norm(x))
    if (x.abs().amax() + 0 * noisy.sum()) > 50:
        noisy = torch.rand_like(noisy) * noisy
    return m.body(noisy)


def branches() -> nn.Module:
    return Block(branching, norm=nn.BatchNorm1d(32), drop=nn.Dropout(0.2), body=net())


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(AdamW, lr=1e-2),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "by itself": partial(torch.optim.RMSprop, lr=1e-2),
}


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (1.0, 100.0, 1.0), (100.0, 1.0, 100.0)])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_every_way_that_a_batch_takes_is_eagers(make: Any, scales: tuple[float, ...]) -> None:
    loops = Loops(branches(), make)
    states = []
    for step in (loops.step, loops.eager):
        torch.manual_seed(7)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses = [step(*data) for data in batches(scales)]
        states.append((losses, torch.get_rng_state()))
        assert len([each for each in told if "another way" in str(each.message)]) == (
            scales.count(100.0) if step is loops.step else 0
        )
    assert_same(*states)
    loops.same()


def test_gradients_are_left_to_the_caller_either_way() -> None:
    loops = Loops(branches(), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data in batches((1.0, 100.0)):
            loops.agree_on(*data, seed=3)
    loops.same()


def test_infinite_activations_are_clamped_as_by_eager() -> None:
    loops = Loops(clamped(), MAKES["adamw"])
    data = batch()
    data[0][3, 4] = float("inf")
    loops.agree(2)
    with pytest.warns(UserWarning, match="another way"):
        loops.agree_on(*data)


def test_nothing_is_updated_before_the_last_expectation() -> None:
    loops = Loops(branches(), MAKES["adamw"])
    entry = loops.step.prepare(as_batch(batch()))
    written = undone(entry.plan.graph)
    assert written
    assert {name.partition(":")[0] for name in written} == {"buffer"}
    report = loops.step.report()
    assert report.limit_bytes is not None
    assert report.planned_bytes <= report.limit_bytes


def compared(m: nn.Module, x: Tensor) -> Tensor:
    y = m.body(x)
    return y if torch.equal(y, x) else y + x


def test_contents_may_be_compared() -> None:
    Loops(Block(compared, body=net()), MAKES["momentum"]).agree()


def test_the_gate_runs_what_its_batch_takes() -> None:
    case = Case("branches", "magis", "cpu", "small", memory_ratio=0.95, budget=BUDGET, timing_rounds=1)
    make, bench = from_function("branches", lambda: (clamped(), batch(), loss_of)), Bench()
    check_case(case, cache=bench, make=make)
    subject = bench.subject(case, make)
    targets = [op.target for op in subject.captured.graph.ops]
    assert targets.count(EXPECT) == 2
    assert subject.conformance == "whole step"
    result = run_case(case, cache=bench, make=make, rough=True)
    assert result.numbers == "bit-identical"
    assert result.optimized.measured is not None
    assert result.optimized.simulated.peak_bytes == result.optimized.measured.peak_bytes
    step = subject.generated(subject.captured.graph)
    assert isinstance(step, GraphStep)
    with torch.no_grad():
        step.tensors[0].fill_(float("inf"))
    with pytest.raises(ExpectationError, match="branches on is True for this batch, False when it was captured"):
        step.run()


@pytest.mark.parametrize("product", [lambda y: y.prod(-1), Tensor.prod, lambda y: y.cumprod(-1)])
def test_products_round_as_eagers_and_may_meet_zeros(product: Any) -> None:
    """Whose formulas look for zeros, but not while somebody watches."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def loss(y: Tensor, scale: Tensor) -> Tensor:
            return product(y * scale).square().mean()  # type: ignore[no-any-return]

        several = [((torch.randn(7, 5),), (torch.ones(5),)) for _ in range(3)]
        several.append((several[0][0], (torch.tensor([1.0, 0, 1, 1, 1]),)))
        step = optimize(model, several[0], loss, optimizer, memory_ratio=1.0, budget=5) if planned else None
        for inputs, targets in several:
            if step is None:
                optimizer.zero_grad()
                loss(model(*inputs), *targets).backward()
                optimizer.step()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that eager mode runs the batch with zeros
                    step(inputs, targets)
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*found, strict=True))


def scaled(m: nn.Module, x: Tensor) -> Tensor:
    y = m.body(x)
    return y * y.abs().max().item()


def test_numbers_are_still_refused() -> None:
    with pytest.raises(CaptureError, match=r"depends on the data of a tensor.*test_branches\.py"):
        optimize(Block(scaled, body=net()), batch(), loss_of, None, memory_ratio=1.0, budget=1)


def left_out(m: nn.Module, x: Tensor) -> Tensor:
    """Leaves a layer out by a draw behind one of which a capture does not know how many numbers it takes."""
    y = m.first(x)
    y = y + torch.normal(y.detach(), 1.0)
    return m.body(y) if torch.rand(()) < 0.7 else y


@pytest.mark.parametrize("seed", range(3))
def test_the_gate_repeats_what_a_late_draw_decides(seed: int) -> None:
    gate((Block(left_out, first=nn.Linear(32, 32), body=net()), batch(), loss_of), seed=seed)
