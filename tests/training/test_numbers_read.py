"""Numbers that Python reads off integer tensors (a check of indices, the place in a ring): inputs of one plan."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import magis
from magis.frontends import planned
from magis.frontends.audits import Audits


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
