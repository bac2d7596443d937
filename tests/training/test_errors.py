"""Steps that raise in the middle: afterwards, weights, optimizer, buffers and generators are as eager leaves them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from magis import optimize
from magis.errors import MagisError, PartialUpdateError

FAILS: set[str] = set()
"""Names of operators that raise."""


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
        self.step = optimize(net, self.loss_fn, self.optimizers[0], example, **({"budget": 60} | limits))

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
    twins = Twins(net, make, **limits)
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
