"""What a forward leaves behind in Python: refused where a step could not repeat it, and put back after capturing."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from magis import CaptureError, optimize
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


class Counting(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) * self.calls


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


class Drawing(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * random.random()


class Starting(Odd):
    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            x = x - x.mean()
            self.is_ready = True
        return self.body(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Counting, r"every forward changes model.calls, .*keep it in a buffer"),
        (Listing, r"every forward changes model.history"),
        (Carrying, r"takes the tensor model.carried from one step to the next"),
        (Drawing, r"a number in an operator .* draws from Python's or numpy's random numbers"),
        (Starting, r"the first forward computes aten.mean.*call the module once before"),
    ],
)
def test_forwards_that_leave_something_behind_are_refused(make: Callable[[], Odd], message: str) -> None:
    module = make()
    state = random.getstate()
    with pytest.raises(CaptureError, match=message):
        optimize(module, loss_of, None, batch(), **ANY)
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
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net(depth=2)
            for name in ("first", "second", "third"):
                self.register_buffer(name, torch.zeros(32))

        def forward(self, x: Tensor) -> Tensor:
            for name in ("first", "second", "third"):
                self.get_buffer(name).lerp_(x[0], 0.1)
                x.mul_(2)
            return self.body(x)

    ours, theirs = batch(), batch()
    loops = Loops(Noting(), MOMENTUM, **ANY)
    for _ in range(2):
        assert torch.equal(loops.step(*ours), loops.eager(*theirs))
    assert torch.equal(ours[0], theirs[0])
    loops.same()
