"""Parts of a step that are others at every one, or belong to nobody else: averages over all batches, shared weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from magis import optimize
from tests.training.loops import BUDGET, Loops, assert_same, batch, gate, loss_of, net


class Averaged(nn.Module):
    """A batch norm that averages over all batches; called twice, and a third time in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32, momentum=None)
        self.fixed = nn.BatchNorm1d(32, momentum=None, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = checkpoint(lambda y: self.norm(torch.tanh(self.last(y))), x, use_reentrant=False)
        return torch.tanh(self.last(self.fixed(x)))


def test_statistics_that_average_over_all_batches_go_on_as_in_eager_mode() -> None:
    loops = Loops(Averaged(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loops.agree()
    loops.module.eval()
    loops.twin.eval()
    loops.agree()
    loops.module.train()
    loops.twin.train()
    for each in (loops.module, loops.twin):
        each.norm.reset_running_stats()
    loops.agree()
    assert loops.module.norm.momentum is None


class OfOneTensor(nn.Module):
    """Keeps several windows of one plain tensor, which is no buffer."""

    def __init__(self, windows: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.windows = nn.Linear(32, 32), windows(torch.randn(2, 32))

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.windows
        return torch.tanh(self.layer(x) * first + last)


@pytest.mark.parametrize(
    "windows",
    [Tensor.unbind, partial(torch.chunk, chunks=2), lambda whole: (whole.flatten()[:32], whole.flatten()[9:41])],
    ids=["unbound", "chunks", "overlapping"],
)
def test_windows_of_one_plain_tensor_are_read_as_in_eager_mode(
    windows: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    loops = Loops(OfOneTensor(windows), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    loops.agree()
    for each in (loops.module, loops.twin):
        each.windows[1].mul_(0.5)
    loops.agree()


class AveragedAndCounted(Averaged):
    """Its first call leaves something behind, so that the gate calls it once before it captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class CountedOnes(nn.BatchNorm1d):
    """All of its weights are known when it is made: only the batch is hollow in its first call."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def classes(_seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 6), torch.randint(0, 6, (6,))


@pytest.mark.parametrize(
    ("module", "data", "loss"),
    [
        (AveragedAndCounted, lambda _seed: batch(), loss_of),
        (partial(CountedOnes, 6), classes, nn.functional.cross_entropy),
    ],
)
def test_a_first_call_ahead_of_the_capture_averages_too(
    module: Callable[[], nn.Module], data: Callable[[int], tuple[Tensor, Tensor]], loss: Callable[..., Tensor]
) -> None:
    def make(seed: int) -> Workload:
        inputs, targets = data(seed)
        return Workload("counted", module(), (inputs,), (targets,), loss, OptimizerSpec("sgd"))

    assert Subject(Source("counted", make, "float32", "cpu", 0)).conformance == "whole step"


class WithGaps(nn.Module):
    """Weights that lie in memory with gaps, and in one another's: kernels copy such as they do not copy others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = torch.randn(6, 8)
        self.first, self.even, self.odd = nn.Linear(8, 6), nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,ij->...j", self.first(x), self.even) @ self.odd.T


class CutOff(nn.Module):
    """A number that autograd keeps as long as a node lives that no backward runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.free, self.last = nn.Parameter(torch.randn(36, 6)), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = (self.free + x.var(-2)).mul_(-1.5)
        kept = kept.detach()
        return self.last(kept)


class Tempered(nn.Module):
    """A loss with a temperature that is learned, and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.norm(output) * self.scale.exp() - target).abs().mean()


def with_its_loss() -> tuple[nn.Module, Tempered, torch.optim.Optimizer]:
    module, loss = net(), Tempered()
    return module, loss, torch.optim.AdamW([*module.parameters(), *loss.parameters()], lr=0.01)


@pytest.mark.parametrize("apart", [False, True], ids=["in the step", "gradients alone"])
def test_a_loss_with_parameters_of_its_own_is_trained(apart: bool) -> None:
    (module, loss, optimizer), (twin, other, their) = with_its_loss(), with_its_loss()
    step = optimize(module, batch(), loss, None if apart else optimizer, memory_ratio=0.9, budget=BUDGET)
    for seed in range(3):
        inputs, targets = batch(seed=seed)
        optimizer.zero_grad()
        their.zero_grad()
        ours = step(inputs, targets)
        if apart:
            optimizer.step()
        expected = other(twin(inputs), targets)
        expected.backward()
        their.step()
        assert torch.equal(ours, expected)
    assert not torch.equal(loss.scale, Tempered().scale)
    for mine, plain in ((module, twin), (loss, other), (optimizer, their)):
        assert_same(mine.state_dict(), plain.state_dict())


class Packed(nn.Module):
    """A recurrent layer on sequences of their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTM(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(padded.amax(1))


def sequences(*lengths: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(len(lengths), 6, 8), torch.tensor(lengths)), torch.randn(len(lengths), 8)


def test_packed_sequences_are_trained_as_in_eager_mode() -> None:
    loops = Loops(Packed(), torch.optim.AdamW, example=sequences(5, 2, 6), memory_ratio=1.0)
    for lengths in ((5, 2, 6), (5, 2, 6), (3, 6, 1)):  # other lengths are another step
        data = sequences(*lengths)
        loops.agree_on(*data)
    loops.same()


class Shared(nn.Module):
    """An embedding whose weight is the head's, and two layers that are one; under two names each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.first, self.second, self.third = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.head.weight = self.embed.weight
        self.third = self.first
        self.second.weight = self.first.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x))
        return self.head(x)


def words(seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(40, (16, 13), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Seeded(nn.Module):
    """Draws from generators that it makes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net(depth=2)
        self.more = net(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        mine = torch.Generator("cpu")
        x = self.body(x * torch.rand(x.shape, generator=mine))
        x = x[torch.randperm(len(x), generator=mine)]
        mine.manual_seed(-5)
        x = x * torch.bernoulli(torch.full_like(x, 0.7), generator=mine)
        assert isinstance(mine, torch.Generator)
        other = torch.Generator().manual_seed(3)
        return self.more(x + torch.randn(x.shape, generator=other)) + torch.randn(x.shape, generator=mine)


def with_its_own_loss() -> tuple[object, ...]:
    module, loss, optimizer = with_its_loss()
    return module, batch(), loss, optimizer


def tied(kind: Callable[..., torch.optim.Optimizer]) -> tuple[object, ...]:
    module = Shared()
    return module, words(), word_loss, kind(module.parameters(), lr=0.1)


def total(out: Tensor) -> Tensor:
    return out.sum()


GATED: dict[str, tuple[Callable[[], tuple[object, ...]], float]] = {
    "averages over all batches": (lambda: (Averaged(), batch(), loss_of), 0.95),
    "weights with gaps": (lambda: (WithGaps(), ((torch.randn(5, 3, 8, 8),), ()), total), 1.0),
    "a number that autograd keeps": (lambda: (CutOff(), ((torch.randn(6, 6),), ()), total), 1.0),
    "a loss with parameters": (with_its_own_loss, 0.95),
    "packed sequences": (lambda: (Packed(), sequences(5, 2, 6), loss_of), 1.0),
    "tied weights, adamw": (partial(tied, torch.optim.AdamW), 0.8),
    "tied weights, sgd": (partial(tied, torch.optim.SGD), 0.8),
    "generators of the step": (lambda: (Seeded(), batch(), loss_of), 0.8),
}


@pytest.mark.parametrize("name", GATED)
def test_the_gate_runs_them(name: str) -> None:
    make, ratio = GATED[name]
    gate(make(), ratio)
