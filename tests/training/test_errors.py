"""Steps that raise in the middle: afterwards, weights, optimizer, buffers and generators are as eager leaves them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from magis import optimize
from magis.capture import OptimizerSpec, capture
from magis.errors import CaptureError, PartialUpdateError, UsageError
from magis.ops.raising import may_raise

FAILS: set[str] = set()
"""Names of operators that raise."""


@pytest.fixture(autouse=True)
def nothing_fails() -> Iterator[None]:
    yield
    FAILS.clear()


def _call(name: str) -> None:
    if name in FAILS:
        raise RuntimeError(f"{name} is out of memory")


@torch.library.custom_op("errors::forth", mutates_args=())
def forth(x: Tensor) -> Tensor:
    _call("forth")
    return x * 1.5


@torch.library.custom_op("errors::back", mutates_args=())
def back(gradient: Tensor) -> Tensor:
    _call("back")
    return gradient * 1.5


forth.register_fake(torch.empty_like)
back.register_fake(torch.empty_like)
forth.register_autograd(lambda _context, gradient: back(gradient))


class Rows(torch.autograd.Function):
    """Adds rows of a table; its backward looks up other places than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient * gradient.new_ones(20, 1).index_select(0, places), None


class Net(nn.Module):
    """Embedding, blocks with norms, dropout and operators that may raise, a classifier."""

    def __init__(self, depth: int, *, raising: int, norm: bool, dropout: float, checkpointed: bool, rows: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) if norm else nn.Identity() for _ in range(depth))
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(16, 5)
        self.raising, self.checkpointed, self.rows = raising, checkpointed, rows

    def block(self, number: int, x: Tensor) -> Tensor:
        x = torch.tanh(self.norms[number](self.linears[number](x)))
        return self.drop(forth(x) if number == self.raising else x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number in range(len(self.linears)):
            if self.checkpointed and number % 2:
                x = checkpoint(self.block, number, x, use_reentrant=False)
            else:
                x = self.block(number, x)
        return self.last(Rows.apply(x, ids) if self.rows else x)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "behind": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
}


class Twins:
    """Two loops from one start, one of them planned; after every step all that they have must be the same."""

    def __init__(self, net: nn.Module, make: Callable[[Any], torch.optim.Optimizer] | None, **limits: Any) -> None:
        self.nets = net, copy.deepcopy(net)
        self.optimizers = [None if make is None else make(each.parameters()) for each in self.nets]
        self.loss_fn = nn.functional.cross_entropy
        example = torch.randint(0, 20, (24,)), torch.randint(0, 5, (24,))
        self.step = optimize(net, example, self.loss_fn, self.optimizers[0], **({"budget": 60} | limits))

    def eager(self, ids: Tensor, labels: Tensor) -> Tensor:
        optimizer = self.optimizers[1]
        if optimizer is not None:
            optimizer.zero_grad()
        loss: Tensor = self.loss_fn(self.nets[1](ids), labels)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    def agree_on(self, ids: Tensor, labels: Tensor, seed: int, fails: set[str]) -> str:
        """Both go a step; returns the name of the error that both raised."""
        ended: list[Any] = []
        for step in (self.step, self.eager):
            torch.manual_seed(seed)
            FAILS.update(fails)
            try:
                loss = step(ids, labels)
                ended.append(("", float(loss), torch.get_rng_state()))
            except (RuntimeError, IndexError, ValueError) as error:
                ended.append((f"{type(error).__name__}: {error}", 0.0, torch.get_rng_state()))
            finally:
                FAILS.clear()
        (said, loss, state), (eagers, other, theirs) = ended
        assert (said, loss) == (eagers, other)
        assert torch.equal(state, theirs)
        ours, others = ({f"module {k}": v for k, v in net.state_dict().items()} for net in self.nets)
        for optimizer, known in zip(self.optimizers, (ours, others), strict=True):
            if optimizer is not None:
                for number, each in optimizer.state_dict()["state"].items():
                    known |= {f"{number} {kind}": value for kind, value in each.items()}
        if said or self.optimizers[0] is None:  # planned steps with an optimizer leave no gradients behind
            for net, known in zip(self.nets, (ours, others), strict=True):
                known |= {f"gradient {name}": p.grad for name, p in net.named_parameters()}
        assert ours.keys() == others.keys()
        for name, one in ours.items():
            same = torch.equal(one, others[name]) if isinstance(one, Tensor) else one is others[name]
            assert same, f"{name} after {said or 'a step that went well'}"
        return said


def random_loop(seed: int) -> set[str]:
    """A loop whose steps raise at random; the errors that it met."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    depth = chance.randint(2, 5)
    net = Net(
        depth,
        raising=chance.randint(-1, depth - 1),
        norm=chance.random() < 0.5,
        dropout=chance.choice((0.0, 0.2)),
        checkpointed=chance.random() < 0.4,
        rows=chance.random() < 0.3,
    )
    make = chance.choice([None, *OPTIMIZERS.values(), *OPTIMIZERS.values()])
    limits: dict[str, Any] = chance.choice(({"latency_ratio": 1.5}, {"memory_ratio": 0.95}, {"memory_ratio": 1.0}))
    try:
        twins = Twins(net, make, **limits)
    except UsageError:  # as small a net has little to give up
        twins = Twins(net, make, latency_ratio=1.5)
    seen = set()
    for step in range(8):
        ids, labels = torch.randint(0, 20, (24,)), torch.randint(0, 5, (24,))
        kind = chance.choice(("", "", "label", "id", "forth", "back", "dtype", "shape", "other size"))
        fails: set[str] = set()
        if kind == "label":
            labels[chance.randrange(24)] = 77
        elif kind == "id":
            ids[chance.randrange(24)] = chance.choice((20, -1))
        elif kind == "dtype":
            ids = ids.float()
        elif kind == "shape":
            labels = labels[:20]
        elif kind == "other size":
            ids, labels = ids[:16], labels[:16]
            labels[0] = chance.choice((0, 77))
        elif kind:
            fails = {kind}
        seen.add(twins.agree_on(ids, labels, 100 * seed + step, fails))
        if make is None and chance.random() < 0.5:
            for each in twins.nets:
                each.zero_grad()
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_random_loops_whose_steps_raise(seed: int) -> None:
    random_loop(seed)


@pytest.mark.soak
def test_many_random_loops_whose_steps_raise() -> None:
    seen = set().union(*(random_loop(seed) for seed in range(100, 400)))
    assert len(seen) > 6  # errors of every kind, and steps that went well


class Tall(nn.Module):
    """Layers whose gradients do not fit under a tight limit all at once; the end of the backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = x if number else forth(x)
        return x


def tall(**limits: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    module, example = Tall(), (torch.randn(64, 96), torch.randn(64, 96))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module, optimizer, optimize(module, example, nn.functional.mse_loss, optimizer, budget=60, **limits), example


def contents(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    named = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        named |= {f"{kind} {name}": t.clone() for kind, t in optimizer.state.get(parameter, {}).items()}
    return named


def test_a_limit_that_needs_early_updates_says_so_and_waits_for_state_after_an_error() -> None:
    module, optimizer, step, example = tall(memory_ratio=0.92)
    assert "errors.back.default or running out of memory may leave a step" in str(step.report())
    step(*example)
    weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    FAILS.add("back")
    said = r"has updated layers\.1\.weight, .* and \d+ more before it raised RuntimeError: back"
    with pytest.raises(PartialUpdateError, match=said) as raised:
        step(*example)
    FAILS.clear()
    assert isinstance(raised.value.__cause__, RuntimeError)
    for load in (lambda: None, lambda: module.load_state_dict(weights)):
        load()
        with pytest.raises(PartialUpdateError, match="half updated"):
            step(*example)
    optimizer.load_state_dict(state)
    twin = copy.deepcopy(module)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(copy.deepcopy(state))
    assert torch.equal(step(*example), nn.functional.mse_loss(twin(example[0]), example[1]).detach())
    nn.functional.mse_loss(twin(example[0]), example[1]).backward()
    other.step()
    assert all(map(torch.equal, module.parameters(), twin.parameters()))


class RaisesAt(TorchDispatchMode):
    """Raises at one of the operators that run under it."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        super().__init__()
        self.error, self.left = error, at

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # it changes no number, and a step may be called under it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error("here")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_whichever_operator_runs_out_of_memory_nothing_or_all_that_is_named_is_updated(error: Any) -> None:
    module, optimizer, step, example = tall(latency_ratio=1.5)
    assert not step.report().torn_by
    whole = partial = 0
    for at in range(0, 1000, 5):
        before, held = contents(module, optimizer), copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        try:
            with RaisesAt(error, at):
                step(*example)
            break
        except error:
            after = contents(module, optimizer)
            assert before.keys() == after.keys()
            assert all(torch.equal(each, after[name]) for name, each in before.items())
            whole += 1
        except PartialUpdateError:
            partial += 1
        module.load_state_dict(held[0])
        optimizer.load_state_dict(held[1])
    assert whole > partial > 0


def raising(forward: Callable[[Tensor, Tensor], Tensor]) -> set[tuple[str, str]]:
    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.eye(6) + 1)

        def forward(self, places: Tensor) -> Tensor:
            return forward(self.table, places).square().mean()

    module = Of()
    rule = OptimizerSpec("sgd", lr=0.1)
    graph = capture(module, (torch.randint(0, 6, (6,)),), (), None, rule).graph
    found, phases = may_raise(graph), {op.id: op.phase for op in graph.ops}
    return {(target.split(".")[1], phases[number]) for number, target in found.items()}


FORWARDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[tuple[str, str]]]] = {
    "arithmetic": (lambda table, _places: torch.softmax(table, -1), set()),
    "embedding": (lambda table, places: nn.functional.embedding(places, table), {("embedding", "forward")}),
    "index": (lambda table, places: table[places], {("index", "forward")}),
    "gather": (lambda table, places: table.gather(0, places[None]), {("gather", "forward")}),
    "select": (lambda table, places: table.index_select(1, places), {("index_select", "forward")}),
    "loss": (nn.functional.cross_entropy, {("nll_loss_forward", "forward")}),
    "maximum": (lambda table, _places: table.max(0).values, set()),
    "sorted": (lambda table, _places: table.sort(-1).values[:, :2], set()),
    "best": (lambda table, _places: table.topk(2).values, set()),
    "other places": (lambda table, places: Rows.apply(table, places)[:, :1], {("index_select", "backward")}),
    "a user's own": (lambda table, _places: forth(table), {("forth", "forward"), ("back", "backward")}),
    "whole numbers": (lambda table, places: table * (7 // (places + 1)), {("floor_divide", "forward")}),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_may_raise_is_code_of_the_users_own_or_looks_at_contents_for_the_first_time(name: str) -> None:
    forward, expected = FORWARDS[name]
    assert raising(forward) == expected


TABLE = torch.zeros(5)


class Keeping(nn.Module):
    """Keeps tensors in many places, and numbers, behind an operator that may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(16, 5), nn.Linear(5, 5)
        self.kept, self.mean, self.count, self.feature = (
            {"queue": torch.zeros(8, 5)},
            torch.zeros(5),
            3,
            torch.zeros(()),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = forth(self.one(x))
        self.kept["queue"][:4] = h.detach()[:4]
        TABLE.add_(h.detach().mean(0))
        self.mean = self.mean * 0.9 + h.detach().mean(0)
        self.count += 1
        self.feature = h
        return self.last(h - self.mean) * self.count + TABLE


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_that_does_not_come_again_changes_no_tensor_anywhere(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(name: str) -> None:
        if name in FAILS:
            FAILS.clear()
            raise kind("once")

    monkeypatch.setitem(globals(), "_call", once)
    net, data = Keeping(), (torch.randn(8, 16), torch.randint(0, 5, (8,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = optimize(net, data, nn.functional.cross_entropy, optimizer, latency_ratio=1.5, budget=20)
    step(*data)

    def state() -> list[Any]:
        tensors = (*net.parameters(), net.kept["queue"], net.mean, TABLE)
        return [net.count, *(each.tolist() for each in tensors)]

    before = state()
    assert net.feature is not None
    FAILS.add("forth")
    with pytest.raises(kind) as raised:
        step(*data)
    assert state() == before
    assert net.feature is None
    assert any("feature" in each for each in raised.value.__notes__)
    step(*data)
    assert net.count == before[0] + 1
    assert net.feature.shape == (8, 5)


def test_a_gradient_that_the_forward_retains_is_refused() -> None:
    class Retaining(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.retain_grad()  # which has one anyway
            self.between = super().forward(x)
            self.between.retain_grad()
            return self.between

    net, data = Retaining(16, 5), (torch.randn(8, 16), torch.randint(0, 5, (8,)))
    with pytest.raises(CaptureError, match="retain_grad"):
        optimize(net, data, nn.functional.cross_entropy, torch.optim.SGD(net.parameters()), memory_ratio=1.0)
    assert "retain_grad" not in vars(Tensor)
