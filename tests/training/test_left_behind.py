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
from torch.utils.checkpoint import checkpoint

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


class CarryingInput(Odd):
    def forward(self, x: Tensor) -> Tensor:
        before, self.carried = self.carried, x
        return self.body(x if before is None else x + before)


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


def test_results_that_a_loss_module_keeps_are_left_there() -> None:
    class Keeping(nn.Module):
        last: Tensor | None = None

        def forward(self, out: Tensor, wanted: Tensor) -> Tensor:
            self.last = out
            return loss_of(out, wanted)

    loss, module = Keeping(), net(depth=2)
    step = optimize(module, batch(), loss, None, **ANY)
    for _ in range(2):
        inputs, targets = batch()
        step(inputs + torch.rand(1), targets)
        kept = loss.last
        assert kept is not None
    inputs, targets = batch()
    step(inputs, targets)
    assert torch.equal(loss.last.detach(), module(inputs))
    assert "last" not in vars(module)


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


class ReadByHook(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(lambda grad: grad / self.calls)
        return x


class ReadByBackward(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        return Divided.apply(super().forward(x), self)


class ReadByName(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "calls")  # noqa: B009 (what is tested)


class ReadElsewhere(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.calls < 3 else self.body(x)


class ReadByModuleHook(Tallying):
    def __init__(self) -> None:
        super().__init__()
        self.body[2].register_full_backward_hook(lambda module, given, taken: (given[0] / self.calls,))


class ReadByMethodHook(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(self.divided)
        return x

    def divided(self, grad: Tensor) -> Tensor:
        return grad / self.calls


class ReadByPattern(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        match self:
            case Tallying(calls=3):
                return x * 2
        return x


class Uneven(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += random.randrange(1, 1000)
        return self.body(x)


class Twofold(Tallying):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Tallying) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.module.calls, None


def test_numbers_that_are_counted_again_in_the_backward_count_on() -> None:
    loops = Loops(Twofold(), MOMENTUM, **ANY)
    loops.agree(3)
    assert loops.module.calls == loops.twin.calls == 6


def test_numbers_that_are_only_counted_count_on() -> None:
    loops = Loops(Tallying(), MOMENTUM, **ANY)
    assert (loops.module.calls, loops.module.rows) == (0, 0)
    loops.agree(3)
    assert (loops.module.calls, loops.module.rows) == (loops.twin.calls, loops.twin.rows) == (3, 198)
    plan = loops.step.report()
    loops.module.calls = loops.twin.calls = 10  # as loops do, from epoch to epoch
    loops.agree(1)
    assert loops.module.calls == loops.twin.calls == 11
    assert loops.step.report() is plan


READERS = (ReadByHook, ReadByMethodHook, ReadByModuleHook, ReadByBackward, ReadByName, ReadByPattern, ReadElsewhere)


@pytest.mark.parametrize("kind", READERS)
def test_numbers_that_are_looked_at_are_as_in_eager_mode(kind: type[Tallying]) -> None:
    loops = Loops(kind(), MOMENTUM, **ANY)
    assert (loops.module.calls, loops.module.rows) == (0, 0)
    for _ in range(6):
        loops.agree(1)
        assert (loops.module.calls, loops.module.rows) == (loops.twin.calls, loops.twin.rows)


@pytest.mark.parametrize("kind", [Counting, Drawing])
def test_counters_and_draws_are_as_in_eager_mode(kind: type[Odd]) -> None:
    loops = Loops(kind(), MOMENTUM, **ANY)
    for seed in range(5):
        state = random.getstate()
        loss = loops.step(*batch(seed=seed))
        drawn = random.getstate()
        random.setstate(state)
        assert torch.equal(loss, loops.eager(*batch(seed=seed)))
        assert drawn == random.getstate()
        assert loops.module.calls == loops.twin.calls
    loops.same()


def test_numbers_that_are_counted_by_chance_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"every forward changes model.calls"):
        optimize(Uneven(), batch(), loss_of, None, **ANY)


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


class Collecting(Tallying):
    """Feature maps in a list, as hooks collect them."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.maps = [x.detach()]
        return x


def test_results_in_other_places_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"model.maps keeps results of the step that was planned"):
        loops = Loops(Collecting(), MOMENTUM, **ANY)
    loops.agree(2)


class Named(Tallying):
    """Leaves a result under a key of somebody else's."""

    def __init__(self, key: object) -> None:
        super().__init__()
        self.maps: dict[object, Tensor] = {}
        self.key = key

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.maps[self.key] = x.detach()
        return x


@pytest.mark.parametrize("key", ["x\r\n::warning::y", "##[error]y", "\x1b[2J", "a\u2028::add-mask::b"])
def test_names_in_that_warning_can_only_be_read(key: object) -> None:
    with pytest.warns(UserWarning, match="keeps results of the step that was planned") as caught:
        optimize(Named(key), batch(), loss_of, None, **ANY)
    (said,) = {str(each.message) for each in caught}
    assert said.isprintable()
    assert "##[" not in said


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


def test_an_optimizer_finds_numbers_as_after_the_forward() -> None:
    seen: list[int] = []
    module = Tallying()
    optimizer = SGD(module.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(module.calls))
    step = optimize(module, batch(), loss_of, optimizer, **ANY)
    for _ in range(3):
        step(*batch())
    assert seen == [1, 2, 3]
