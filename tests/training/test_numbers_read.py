"""Numbers that Python reads off integer tensors (a check of indices, the place in a ring): inputs of one plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import magis
from magis.frontends import planned
from magis.frontends.audits import Audits
from tests.training.loops import Loops, net


@pytest.fixture(autouse=True)
def audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit every step: none of these is another one than was planned."""
    monkeypatch.setattr(Audits, "_schedule", lambda _self: None)


class Words(nn.Module):
    """An embedding that looks at its indices first."""

    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.check = nn.Embedding(50, 16), nn.Linear(16, 5), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.out(self.table(x))


def largest_below(x: Tensor) -> None:
    if int(x.max()) >= 50:
        raise ValueError("too large")


def within_range(x: Tensor) -> None:
    low, high = x.min().item(), x.max().item()
    if not 0 <= low <= high < 50:
        raise ValueError("out of range")


def shorter_than(x: Tensor) -> None:
    if float((x > 3).sum()) / x.numel() > 1.0 or int(x[0]) + 1 > 50:
        raise ValueError("too many")


@pytest.mark.parametrize("check", [largest_below, within_range, shorter_than])
def test_checks_of_numbers_read_off_a_batch(check: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Words(check)
    twin, optimizers = copy.deepcopy(model), []
    optimizers += [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    generator, y = torch.Generator().manual_seed(4), torch.randint(0, 5, (8,))
    batches = [torch.randint(0, 50, (8,), generator=generator) for _ in range(8)]
    step = magis.optimize(model, (batches[0], y), functional.cross_entropy, optimizers[0], latency_ratio=1.5, budget=40)
    captures: list[int] = []
    seen = planned.captured_step
    monkeypatch.setattr(planned, "captured_step", lambda *args, **names: captures.append(1) or seen(*args, **names))
    for x in batches:
        loss = step(x, y)
        eager = functional.cross_entropy(twin(x), y)
        eager.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert torch.equal(loss, eager.detach())
    assert len(captures) == 1
    before = model.table.weight.clone()
    with pytest.raises((ValueError, IndexError)):
        step(torch.full((8,), 60), y)
    assert torch.equal(model.table.weight, before)


class Queue(nn.Module):
    """Keys of the last batches in a ring, as MoCo keeps them; the place in it is a buffer, or a number."""

    def __init__(self, *, buffer: bool, length: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.key, self.length = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False), length
        self.register_buffer("queue", torch.randn(8, length))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.at, self.buffer, self.steps = 0, buffer, 0
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.one.parameters(), self.key.parameters(), strict=True):
                theirs.data = theirs.data * 0.99 + ours.data * 0.01
            keys = self.key(x)
        out = self.one(x) @ self.queue.clone().detach()
        self.seen += 1
        start = int(self.place) if self.buffer else self.at
        self.queue[:, start : start + len(x)] = keys.T
        if self.buffer:
            self.place[0] = (start + len(x)) % self.length
        else:
            self.at = (start + len(x)) % self.length
        return out / (1 - 0.9 ** self.seen.item())


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.parametrize("limit", [{"latency_ratio": 1.5}, {"memory_ratio": 0.9}])
def test_a_ring_of_keys(buffer: bool, limit: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Queue(buffer=buffer)
    twin, optimizers = copy.deepcopy(model), []
    optimizers += [torch.optim.AdamW(each.one.parameters()) for each in (model, twin)]
    batches = [(torch.randn(8, 16), torch.randint(0, 40, (8,))) for _ in range(14)]
    step = magis.optimize(model, batches[0], functional.cross_entropy, optimizers[0], budget=40, **limit)
    captures: list[int] = []
    seen = planned.captured_step
    monkeypatch.setattr(planned, "captured_step", lambda *args, **names: captures.append(1) or seen(*args, **names))
    for x, y in batches:
        loss = step(x, y)
        eager = functional.cross_entropy(twin(x), y)
        eager.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        equal = torch.allclose if step.report().fission else torch.equal  # parts sum in another order
        assert equal(loss, eager.detach())
        assert all(map(equal, model.state_dict().values(), twin.state_dict().values()))
        assert model.at == twin.at
    assert len(captures) <= 3  # the places 0 and 40 - 8 + 8 are numbers of their own


class Tallies(nn.Module):
    """Counts on by numbers that are read off the batch, or that the loop sets, and by one; nothing looks at them."""

    total: int

    def __init__(self, add: Callable[[Tallies, Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.add = nn.Embedding(50, 16), nn.Linear(16, 5), add
        self.total, self.share, self.calls = 100, 1, 5

    def forward(self, x: Tensor) -> Tensor:
        self.add(self, x)
        self.calls += 1
        return self.out(self.table(x))


def by_the_loops(tallies: Tallies, _x: Tensor) -> None:
    tallies.total += tallies.share


def by_two_reads(tallies: Tallies, x: Tensor) -> None:
    tallies.total -= int(x.min()) + 2 * (x > 20).sum().item()


@pytest.mark.parametrize("add", [by_the_loops, by_two_reads])
def test_what_is_counted_follows_numbers_that_change(add: Callable[[Tallies, Tensor], object]) -> None:
    model = Tallies(add)
    twin, y = copy.deepcopy(model), torch.randint(0, 5, (8,))
    batches = [torch.randint(index, 50 - index, (8,)) for index in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = magis.optimize(model, (batches[0], y), functional.cross_entropy, optimizer, latency_ratio=1.5, budget=40)
    for index, x in enumerate(batches):
        model.share = twin.share = 1 + index
        step(x, y)
        twin(x)
        assert (model.total, model.calls) == (twin.total, twin.calls), f"step {index}"


class OfClass(nn.Module):
    """A part that counts on from numbers of its class, and of its class's parent."""

    seen, left = 0, 40

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 2
        self.left -= 1
        return x


class Warming(OfClass):
    share = 0.1

    def forward(self, x: Tensor) -> Tensor:
        self.share = self.share + 0.1
        return super().forward(x) * self.share / self.left


@pytest.mark.parametrize("kind", [OfClass, Warming])
def test_numbers_that_begin_as_their_classes_count_on(kind: type[OfClass]) -> None:
    loops = Loops(nn.Sequential(net(), kind()), partial(SGD, lr=0.1, momentum=0.9), memory_ratio=1.0, budget=1)
    for _ in range(4):
        loops.agree(1)
        ours, theirs = (vars(each[1]) for each in (loops.module, loops.twin))
        for name in ("seen", "left", "share"):
            assert ours.get(name) == theirs.get(name)
