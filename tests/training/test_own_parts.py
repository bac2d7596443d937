"""Parts of a step that are others at every one, or belong to nobody else: averages over all batches, shared weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from magis import optimize
from magis.capture import OptimizerSpec, Workload, capture
from magis.errors import CaptureError
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
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


class Miscounting(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return super().forward(x)


def test_counts_other_than_of_calls_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Miscounting(4, momentum=None))
    with pytest.raises(CaptureError, match=r"^1 has momentum None and counts 2 batches in 1 calls; give it a momentum"):
        capture(net, (torch.randn(3, 4),), (), lambda out: out.sum(), OptimizerSpec("sgd"))


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


def test_a_loss_that_is_no_module_may_not_train_parameters() -> None:
    module, loss, optimizer = with_its_loss()
    with pytest.raises(CaptureError, match=r"requires a gradient is used .*a loss with such is an nn.Module"):
        optimize(module, batch(), lambda out, target: 2 * loss(out, target), optimizer, memory_ratio=0.9)


class Returns(nn.Module):
    """What a model with a loss of its own may return."""

    def __init__(self, how: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.net, self.how = net(), how

    def forward(self, x: Tensor, target: Tensor) -> object:
        out = self.net(x)
        return self.how(out, loss_of(out, target))


class Named(NamedTuple):
    logits: Tensor
    total: Tensor
    steps: Tensor


FOUND: dict[str, Callable[[Tensor, Tensor], object]] = {
    "(logits, loss)": lambda out, loss: (out, loss),
    "once more": lambda out, loss: {"parts": [loss], "all": loss, "seen": loss.detach()},
    "named": lambda out, loss: Named(out, loss, torch.tensor(3)),
    ".loss before others": lambda out, loss: {"loss": loss, "aside": loss * 2},
}


@pytest.mark.parametrize("how", FOUND)
def test_the_only_number_that_can_be_trained_is_the_loss(how: str) -> None:
    module = Returns(FOUND[how])
    step = optimize(
        module, (batch(), ()), None, torch.optim.SGD(module.parameters(), lr=0.1), memory_ratio=0.9, budget=BUDGET
    )
    expected = loss_of(module.net(batch()[0]), batch()[1])
    assert torch.equal(step(batch(), ()), expected)


UNCLEAR: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "two": (
        lambda out, loss: (out, {"a": loss, "b": loss + 1}),
        r"a tuple with several numbers: \[1\]\['a'\], \[1\]\['b'\]",
    ),
    "none": (lambda out, loss: [out], "a list without a loss"),
    "a loss of None": (lambda out, loss: {"loss": None, "aside": loss}, "a dict without a loss"),
}


@pytest.mark.parametrize("how", UNCLEAR)
def test_what_may_or_may_not_be_the_loss_is_not_guessed(how: str) -> None:
    module = Returns(UNCLEAR[how][0])
    with pytest.raises(CaptureError, match=UNCLEAR[how][1]):
        optimize(module, (batch(), ()), None, torch.optim.SGD(module.parameters(), lr=0.1), memory_ratio=0.9)


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


def test_lengths_that_the_step_computes_are_refused() -> None:
    class Computes(Packed):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(x, (x.sum((1, 2)) > 0).long() + lengths - 1)

    with pytest.raises(CaptureError, match="depends on the data of a tensor"):
        capture(Computes(), sequences(5, 2, 6)[0], (), lambda out: out.sum(), OptimizerSpec("sgd"))


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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)])
def test_tied_weights_are_trained_as_one(kind: Callable[..., torch.optim.Optimizer]) -> None:
    loops = Loops(Shared(), kind, word_loss, words(), memory_ratio=0.8)
    assert loops.step.report().update == "part of the step"
    for seed in range(3):
        data = words(seed)
        loops.agree_on(*data)
    loops.same()
    assert loops.module.head.weight is loops.module.embed.weight
    assert loops.module.second.weight is loops.module.third.weight


def test_tied_weights_count_once_in_the_gate() -> None:
    module = Shared()
    found = capture(module, (words()[0],), (words()[1],), word_loss, OptimizerSpec("adam"))
    assert found.parameters == tuple(name for name, _ in module.named_parameters())
    kept = sum(parameter.nbytes for parameter in module.parameters())
    nbytes = {
        kind: sum(s.nbytes for s in found.graph.storages.values() if s.kind == kind) for kind in ("parameter", "state")
    }
    assert nbytes == {"parameter": kept, "state": 2 * kept}


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


@pytest.mark.parametrize("ratio", [1.0, 0.8])
def test_generators_that_a_step_makes_begin_anew_in_every_step(ratio: float) -> None:
    loops = Loops(Seeded(), partial(torch.optim.SGD, lr=0.1, momentum=0.9), memory_ratio=ratio)
    loops.agree(3)


@pytest.mark.parametrize(
    ("handled", "message"),
    [
        (lambda generator: generator.seed(), r"seeds a generator by chance; use manual_seed"),
        (lambda generator: generator.get_state(), r"reads the state of a generator that it makes"),
        (lambda generator: generator.set_state(torch.get_rng_state()), r"sets the state .* use manual_seed"),
    ],
)
def test_states_of_generators_that_a_step_makes_are_not_handled(
    handled: Callable[[torch.Generator], object], message: str
) -> None:
    class Handling(Seeded):
        def forward(self, x: Tensor) -> Tensor:
            mine = torch.Generator()
            handled(mine)
            return super().forward(x + torch.rand(x.shape, generator=mine))

    with pytest.raises(CaptureError, match=message):
        optimize(Handling(), batch(), loss_of, None, memory_ratio=1.0)


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
