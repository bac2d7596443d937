"""What a forward leaves behind in Python: refused where a step could not repeat it, and put back after capturing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured
from torch.optim import SGD

from magis import CaptureError, optimize
from tests.nets import Block
from tests.training.loops import Loops, batch, loss_of, net

ANY: dict[str, Any] = {"memory_ratio": 1.0, "budget": 1}
MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net(depth=2)
        self.calls = 0
        self.history: list[int] = []
        self.carried: Tensor | None = None
        self.memory: Tensor | None = None
        self.is_ready = False


class Listing(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.history.append(len(self.history))
        return self.body(x)


class Carrying(Odd):
    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        x = x if self.carried is None else x + self.carried
        self.carried = x.detach()
        return x


class CarryingInput(Odd):
    def forward(self, x: Tensor) -> Tensor:
        before, self.carried = self.carried, x
        return self.body(x if before is None else x + before)


class Starting(Odd):
    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            x = x - x.mean()
            self.is_ready = True
        return self.body(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Listing, r"every forward changes model.history"),
        (Carrying, r"takes the tensor model.carried from one step to the next"),
        (CarryingInput, r"takes the tensor model.carried from one step to the next"),
        (Starting, r"the first forward computes aten.mean.*call the module once before"),
    ],
)
def test_forwards_that_leave_something_behind_are_refused(make: Callable[[], Odd], message: str) -> None:
    module = make()
    state = random.getstate()
    with pytest.raises(CaptureError, match=message):
        optimize(module, batch(), loss_of, None, **ANY)
    assert random.getstate() == state
    assert (module.calls, module.history, module.carried, module.is_ready) == (0, [], None, False)


def test_what_the_first_call_sets_up_and_results_that_are_kept_are_fine() -> None:
    class Lazy(Odd):
        def forward(self, x: Tensor) -> Tensor:
            if self.memory is None:
                self.memory = torch.linspace(0, 1, 32)
            self.calls = 1
            self.carried = self.body(x) * self.memory  # for whoever looks at it: nothing reads it here
            return self.carried

    loops = Loops(Lazy(), MOMENTUM, **ANY)
    loops.agree(2)


def test_statistics_of_what_the_forward_writes_over_are_taken_in_time() -> None:
    buffers = {name: torch.zeros(32) for name in ("first", "second", "third")}

    def noting(m: nn.Module, x: Tensor) -> Tensor:
        for name in ("first", "second", "third"):
            m.get_buffer(name).lerp_(x[0], 0.1)
            x.mul_(2)
        return m.body(x)

    ours, theirs = batch(), batch()
    loops = Loops(Block(noting, body=net(depth=2), **buffers), MOMENTUM, **ANY)
    for _ in range(2):
        assert torch.equal(loops.step(*ours), loops.eager(*theirs))
    assert torch.equal(ours[0], theirs[0])
    loops.same()


class Tallying(nn.Module):
    """Counts calls and rows, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net(depth=2)
        self.calls = self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows = self.rows + 2
        self.rows += x.shape[0]
        return self.body(x)


class Shown(nn.Module):
    """Leaves what it has computed for whoever looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net(depth=3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.given, self.row = x, x[0]
        x = self.body(x)
        self.last = x.softmax(-1)
        self.top = self.last[:, :4]
        return x


def pruned() -> nn.Module:
    module = net(depth=3)
    l1_unstructured(module[0], "weight", 0.3)
    vars(module[0])["weight"] = module[0].weight.detach()  # for `deepcopy`
    return module


@pytest.mark.parametrize(("make", "shown"), [(Shown, ("last", "top", "given", "row")), (pruned, ("0.weight",))])
@pytest.mark.parametrize("rule", [MOMENTUM, torch.optim.RMSprop])
def test_tensors_that_the_forward_leaves_in_attributes_are_those_of_the_last_step(
    make: Callable[[], nn.Module], shown: tuple[str, ...], rule: Any
) -> None:
    loops = Loops(make(), rule, memory_ratio=1.0, budget=20)
    for steps in (1, 2):
        loops.agree(steps)
        for name in shown:
            path, _, attribute = name.rpartition(".")
            ours, theirs = (getattr(each.get_submodule(path), attribute) for each in (loops.module, loops.twin))
            assert torch.equal(ours, theirs)
        loops.module(batch()[0])  # somebody looks at it in between
        loops.twin(batch()[0])
    assert len(loops.step._entries) == 1  # planned once


class Drawn(Tallying):
    """Draws from a generator of its own, and from one that it makes at its first call; writes into a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.later = torch.Generator().manual_seed(3), None
        self.mean = torch.zeros(32)
        self.calls = True

    def forward(self, x: Tensor) -> Tensor:
        if self.later is None:
            self.later = torch.Generator().manual_seed(5)
        x = super().forward(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        x = x + torch.rand(x.shape, generator=self.own) * torch.rand(x.shape, generator=self.later)
        return x + self.mean


class CountedLoss(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return loss_of(output, target)


def test_planning_moves_neither_generators_nor_tensors_nor_numbers() -> None:
    module, loss_fn = Drawn(), CountedLoss()
    loops = Loops(module, MOMENTUM, loss_fn=loss_fn, memory_ratio=1.0, budget=5)
    assert loss_fn.calls == 0
    assert not module.mean.any()
    for _ in range(2):
        loops.agree(1)
        assert torch.equal(loops.module.mean, loops.twin.mean)
        assert loops.module.calls == loops.twin.calls
    assert loss_fn.calls == 4  # of both loops
