"""Optimizers whose own code is part of the step: numbers, bytes, state, and which ones stay behind the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from magis import optimize
from magis.errors import CaptureError, PartialUpdateError, UsageError
from magis.frontends.optimized_step import BY_ITS_CODE
from magis.runtime.measure import window_peak
from magis.runtime.swap_streams import is_on_host
from tests.training import optimizers
from tests.training.loops import BUDGET, Loops, batch, loss_of, net

CPU = torch.device("cpu")
WIDTH, ROWS = 48, 24
KINDS: dict[str, Callable[..., optim.Optimizer]] = {
    "Adafactor": partial(optim.Adafactor, lr=0.1, weight_decay=0.1),
    "Muon": partial(optim.Muon, lr=0.05),
    "AdamW of bfloat16": optimizers.HalfAdamW,
    "Adam of bytes": optimizers.ByteAdam,
    "Lion of bfloat16": optimizers.SmallLion,
    "counts in groups": optimizers.Counting,
    "RMSprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "NAdam by lists": partial(optim.NAdam, foreach=True),
    "AdamW, a rate that is a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
}


def matrices(depth: int = 3) -> nn.Sequential:
    """A net without biases, as Muon wants it."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))


def loops_of(make: Callable[..., optim.Optimizer], **limits: Any) -> Loops:
    return Loops(matrices(), make, example=batch(ROWS, WIDTH), **{"memory_ratio": 1.0, **limits})


def states(optimizer: optim.Optimizer) -> list[Any]:
    """The state in the order of `state_dict`, lists within it opened."""
    return [each for entries in optimizer.state_dict()["state"].values() for each in _flat([*entries.values()])]


def _flat(items: list[Any]) -> list[Any]:
    return [part for item in items for part in (_flat(item) if isinstance(item, list) else [item])]


def same_states(loops: Loops) -> bool:
    pairs = zip(states(loops.optimizer), states(loops.other), strict=True)  # type: ignore[arg-type]
    same = (torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
    return all(same) and loops.optimizer.state_dict().keys() == loops.other.state_dict().keys()  # type: ignore[union-attr]


def go(loops: Loops, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        loops.agree_on(*batch(ROWS, WIDTH, seed), seed=seed)
    assert all(map(torch.equal, loops.module.parameters(), loops.twin.parameters()))
    assert same_states(loops)


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_a_plain_loop_with_a_schedule(kind: str) -> None:
    loops = loops_of(KINDS[kind])
    assert loops.step.report().update == BY_ITS_CODE
    rates = [optim.lr_scheduler.LambdaLR(each, lambda n: 1 / (1 + n)) for each in (loops.optimizer, loops.other)]  # type: ignore[arg-type]
    for number in range(20):
        go(loops, 1, number)
        for rate in rates:
            rate.step()
    report = loops.step.report()
    assert report.update == BY_ITS_CODE
    loops.other.zero_grad(set_to_none=True)  # type: ignore[union-attr]
    data = batch(ROWS, WIDTH)
    kept = [*loops.twin.parameters(), *data, *(each for each in states(loops.other) if isinstance(each, Tensor))]  # type: ignore[arg-type]
    stays = sum(each.nbytes for each in kept if each.dim())
    # lists have scratch of a number each
    assert 0 <= report.original_bytes - stays - window_peak(lambda: loops.eager(*data), CPU).peak_bytes <= 4
    loops.other.zero_grad(set_to_none=True)  # type: ignore[union-attr]
    assert stays + window_peak(lambda: loops.step(*data), CPU).peak_bytes == report.planned_bytes


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "AdamW of bfloat16", "Adam of bytes", "Lion of bfloat16"])
def test_gradients_do_not_wait_for_each_other(kind: str) -> None:
    """Eager's update has all gradients; the plan's has a weight's less beside what is left of the backward."""
    eager = loops_of(KINDS[kind]).step.report().original_bytes
    limit = eager - 4 * WIDTH * WIDTH
    loops = loops_of(KINDS[kind], memory_ratio=None, memory_limit=limit)
    go(loops, 3)
    data = batch(ROWS, WIDTH)
    kept = [*loops.module.parameters(), *data, *(each for each in states(loops.optimizer) if isinstance(each, Tensor))]  # type: ignore[arg-type]
    stays = sum(each.nbytes for each in kept if each.dim())
    peak = stays + window_peak(lambda: loops.step(*data), CPU).peak_bytes
    assert peak == loops.step.report().planned_bytes <= limit


def test_state_is_the_optimizers_own() -> None:
    """The state goes out, comes back, into others' optimizers, too; the plan goes on with the tensors that came."""
    loops = loops_of(KINDS["Adam of bytes"])
    go(loops, 3)
    kept = copy.deepcopy((loops.module.state_dict(), loops.optimizer.state_dict()))  # type: ignore[union-attr]
    go(loops, 3, first=3)
    for module, optimizer in ((loops.module, loops.optimizer), (loops.twin, loops.other)):
        module.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))  # type: ignore[union-attr]
    go(loops, 4, first=6)
    fresh = optimizers.ByteAdam(loops.twin.parameters())
    fresh.load_state_dict(copy.deepcopy(loops.optimizer.state_dict()))  # type: ignore[union-attr]
    loops.other = fresh
    go(loops, 2, first=10)
    assert loops.step.report().update == BY_ITS_CODE


def test_other_batches_and_numbers_of_groups() -> None:
    loops = Loops(
        net(WIDTH, 2),
        lambda params: optim.RMSprop([{"params": each, "lr": 0.01 * n} for n, each in enumerate(params, 1)]),
        example=batch(ROWS, WIDTH),
        memory_ratio=1.0,
    )
    go(loops, 2)
    loops.agree_on(*batch(ROWS // 2, WIDTH))
    for each in (loops.optimizer, loops.other):
        each.param_groups[0]["weight_decay"] = 0.1  # type: ignore[union-attr]
    go(loops, 3, first=2)
    assert loops.step.report().update == BY_ITS_CODE


@pytest.mark.parametrize("kind", ["AdamW of bfloat16", "RMSprop"])
def test_state_in_host_memory(kind: str) -> None:
    """State of whatever layout waits in host memory, from the first step on, in which the optimizer makes it."""
    make = KINDS[kind]
    limit = loops_of(make).step.report().original_bytes - 3 * 4 * WIDTH * WIDTH
    with pytest.raises(UsageError, match="no plan found"):
        loops_of(make, memory_ratio=None, memory_limit=limit)
    loops = loops_of(make, host_limit="1 GiB", memory_ratio=None, memory_limit=limit)
    report = loops.step.report()
    assert report.host_bytes
    assert report.planned_bytes <= limit
    go(loops, 4)
    tensors = [each for each in states(loops.optimizer) if isinstance(each, Tensor) and each.dim()]  # type: ignore[arg-type]
    moved = [each for each in tensors if is_on_host(each, "cpu")]
    assert sum(each.nbytes for each in moved) == report.host_bytes
    for each in (loops.optimizer, loops.other) if kind == "RMSprop" else ():  # to which torch does not change types
        each.load_state_dict(copy.deepcopy(each.state_dict()))  # type: ignore[union-attr]
    go(loops, 2, first=4)
    data = batch(ROWS, WIDTH)
    kept = [*loops.module.parameters(), *data, *(each for each in tensors if not is_on_host(each, "cpu"))]
    peak = window_peak(lambda: loops.step(*data), CPU).peak_bytes
    assert sum(each.nbytes for each in kept) + peak == report.planned_bytes


COUPLED: dict[str, tuple[Callable[..., optim.Optimizer], str]] = {
    "a norm that Python reads": (optimizers.Clipped, "does something else with several parameters"),
    "a norm in tensors": (optimizers.Normed, "computes with several parameters at once"),
    "an order of parameters": (optimizers.Ranked, "does something else with several parameters"),
    "a list of its own": (optimizers.Listing, "does something else with several parameters"),
    "random numbers": (optimizers.Noisy, "draws random numbers"),
    "state that is replaced": (optimizers.Replacing, "puts a new tensor in the place of 'mean'"),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_what_is_not_of_one_parameter_stays_behind_the_step(kind: str) -> None:
    make, why = COUPLED[kind]
    loops = loops_of(make)
    update = loops.step.report().update
    assert update.startswith("by the optimizer itself, after the step: ")
    assert why in update
    go(loops, 4)


def test_an_audit_finds_code_that_begins_to_couple_parameters() -> None:
    loops = loops_of(optimizers.Later)
    assert loops.step.report().update == BY_ITS_CODE
    go(loops, 30)
    loops.step._entries[-1].audits.due = 0.0
    with pytest.raises(CaptureError, match=r"has become another one .* with several parameters at once"):
        loops.step(*batch(ROWS, WIDTH))
    go(loops, 3, first=30)
    assert "several parameters at once" in loops.step.report().update


def test_a_number_of_the_first_parameter_for_all() -> None:
    """torch's Adafactor takes the smallest number of the first parameter's data type for all of a group."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(self.small(x.bfloat16()).float())

    torch.manual_seed(0)
    loops = Loops(Mixed(), partial(optim.Adafactor, lr=0.1), example=batch(8, 8), memory_ratio=1.0)
    assert "does something else with several parameters" in loops.step.report().update
    for seed in range(3):
        loops.agree_on(*batch(8, 8, seed))
    assert all(map(torch.equal, loops.module.parameters(), loops.twin.parameters()))


def test_an_update_that_raises() -> None:
    """What is updated by then is named, and nothing goes on until the state is loaded."""

    class Failing(optimizers.SmallLion):
        fails = False

        def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            super().move(parameter, grad, state, group)
            if self.fails:
                raise ArithmeticError("no more")

    module = matrices()
    optimizer = Failing(module.parameters())
    step = optimize(module, batch(ROWS, WIDTH), loss_of, optimizer, memory_ratio=1.0, budget=BUDGET)
    assert step.report().update == BY_ITS_CODE
    step(*batch(ROWS, WIDTH))
    kept = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    Failing.fails = True
    with pytest.raises(PartialUpdateError, match="ArithmeticError: no more"):
        step(*batch(ROWS, WIDTH))
    Failing.fails = False
    with pytest.raises(PartialUpdateError, match="half updated"):
        step(*batch(ROWS, WIDTH))
    assert all(each.grad is None for each in module.parameters())
    module.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    twin = matrices()
    twin.load_state_dict(kept[0])
    step(*batch(ROWS, WIDTH))
    other = optimizers.SmallLion(twin.parameters())
    other.load_state_dict(kept[1])
    loss_of(twin(batch(ROWS, WIDTH)[0]), batch(ROWS, WIDTH)[1]).backward()
    other.step()
    assert all(map(torch.equal, module.parameters(), twin.parameters()))


def test_a_step_that_raises_before_its_update_changes_nothing() -> None:
    module = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4))
    optimizer = optim.Adafactor(module.parameters())
    data = torch.arange(8), torch.randint(4, (8,))
    step = optimize(module, data, nn.functional.cross_entropy, optimizer, memory_ratio=1.0, budget=BUDGET)
    assert step.report().update == BY_ITS_CODE
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(IndexError):
        step(torch.full((8,), 9), data[1])
    assert all(map(torch.equal, before.values(), module.state_dict().values()))
    assert not optimizer.state
    step(*data)


def test_a_group_without_gradients_counts_as_well() -> None:
    """The counter of a group that this step does not reach moves, as in a plain loop."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.used(x)
            return found

    def make(params: Any) -> optim.Optimizer:
        first, second, *rest = params
        return optimizers.Counting([{"params": [first, second]}, {"params": rest}])

    torch.manual_seed(0)
    loops = Loops(Two(), make, example=batch(8, 8), memory_ratio=1.0)
    assert loops.step.report().update.endswith("it counts steps in a group of parameters without gradients")
    for seed in range(3):
        loops.agree_on(*batch(8, 8, seed))
    assert [each["k"] for each in loops.optimizer.param_groups] == [3, 3]  # type: ignore[union-attr]
    assert all(map(torch.equal, loops.module.parameters(), loops.twin.parameters()))


def test_momenta_of_a_schedule_leave_the_code_behind_the_step() -> None:
    loops = loops_of(partial(optim.RMSprop, lr=1e-3, momentum=0.5))
    rates = [optim.lr_scheduler.OneCycleLR(each, 0.01, total_steps=20) for each in (loops.optimizer, loops.other)]  # type: ignore[arg-type]
    for number in range(6):
        go(loops, 1, number)
        for rate in rates:
            rate.step()
    assert loops.step.report().update.endswith("its numbers change from step to step")


def test_gradients_of_gradients_within_the_optimizers_code() -> None:
    """The code runs as where a loop calls it: with autograd."""

    class Sharp(optimizers.SmallLion):
        def move(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            with torch.enable_grad():
                weight = parameter.detach().requires_grad_()
                (slope,) = torch.autograd.grad((weight.sin() * grad).sum(), weight)
            super().move(parameter, grad + 0.1 * slope, state, group)

    loops = loops_of(Sharp)
    assert loops.step.report().update == BY_ITS_CODE
    go(loops, 4)


def test_a_kept_plan(tmp_path: Path) -> None:
    loops = loops_of(KINDS["Lion of bfloat16"])
    go(loops, 2)
    loops.step.save(tmp_path / "plan.txt")
    taken = optimize(
        loops.module, batch(ROWS, WIDTH), loss_of, loops.optimizer, memory_ratio=1.0, plan=tmp_path / "plan.txt"
    )
    loops.step = taken
    go(loops, 2, first=2)
    assert taken.report().fission == "as saved"
