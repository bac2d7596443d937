"""Simulated bytes are the measured ones, one cause of a difference at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everywhere)
from torch.utils.checkpoint import checkpoint

from magis.capture import OptimizerSpec, Workload
from magis.cases.case_rows import Replayed
from magis.cases.comparison import compare
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case

Made = tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], Callable[..., Tensor]]


class Calling(nn.Module):
    """A module that does what a function of its parts says."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self._function(self, *inputs)


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


def wide(loss: Callable[[Tensor, Tensor], Tensor]) -> Made:
    """The peak lies right behind the loss."""
    return nn.Linear(8, 400), (torch.randn(64, 8),), (torch.randint(0, 400, (64,)),), loss


def pooled() -> Made:
    """Of the batch itself, whose pools need no gradient and no indices; of what comes behind, whose pools do."""
    net = Calling(lambda self, x: F.max_pool1d(self.a(F.max_pool1d(x, 2)), 2), a=nn.Conv1d(4, 2, 3))
    return net, (torch.randn(32, 4, 64),), (), squares


def transposed(loss: Callable[[Tensor, Tensor], Tensor]) -> Made:
    return nn.Linear(16, 5), (torch.randn(16, 16),), (torch.rand(5, 16),), lambda out, goal: loss(out.t(), goal)


def between(function: Callable[[Tensor], Tensor]) -> Made:
    """A function between two layers, on rows that are not side by side."""
    net = Calling(
        lambda self, x: self.b(function(self.a(x).transpose(1, 2)[:, ::2]).flatten(1)),
        a=nn.Linear(16, 32),
        b=nn.Linear(128, 5),
    )
    return net, (torch.randn(4, 8, 16),), (), squares


def recurrent(layer: nn.Module, width: int) -> Made:
    net = Calling(lambda self, x: self.out(self.layer(x)[0]), layer=layer, out=nn.Linear(width, 5))
    return net, (torch.randn(6, 4, 16),), (), squares


def spelled(lengths: Callable[[], Any]) -> Made:
    net = Calling(lambda self, x: self.out(self.layer(x)[0]).log_softmax(-1), layer=nn.LSTM(8, 8), out=nn.Linear(8, 7))
    goals = torch.randint(1, 7, (3, 5))

    def loss(scores: Tensor, goals: Tensor) -> Tensor:
        return F.ctc_loss(scores, goals, *lengths())

    return net, (torch.randn(12, 3, 8),), (goals,), loss


def bags(mode: str) -> Made:
    net = Calling(
        lambda self, words, starts: self.out(self.bags(words, starts)),
        bags=nn.EmbeddingBag(50, 24, mode=mode),
        out=nn.Linear(24, 5),
    )
    return net, (torch.randint(0, 50, (64,)), torch.arange(0, 64, 4)), (), squares


def normed() -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = nn.utils.weight_norm(nn.Linear(16, 64)), nn.utils.weight_norm(nn.Linear(64, 64))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]), (torch.randn(16, 16),), (), squares


def sampled() -> Made:
    def function(self: Calling, image: Tensor) -> Tensor:
        flow = torch.tanh(self.get_submodule("a")(image)).permute(0, 2, 3, 1)
        return F.grid_sample(torch.ones(2, 8, 12, 12), flow, align_corners=False)  # which asks for one gradient of two

    return Calling(function, a=nn.Conv2d(3, 2, 1)), (torch.randn(2, 3, 12, 12),), (), squares


def scaled() -> Made:
    def loss(out: Tensor, goal: Tensor) -> Tensor:
        with torch.no_grad():
            out.mul_(3)  # which autograd keeps nothing of
        return F.cross_entropy(out, goal)

    return wide(loss)


def unread(out: Tensor, _goal: Tensor) -> Tensor:
    mean = out.mean()
    mean * 0.5  # whose number goes with it
    return (mean + out).sum()


def repeated() -> Made:
    """A state of the generator is read in a step whose operators are measured on its own numbers."""

    def function(self: Calling, x: Tensor, rows: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.get_submodule("a"), x, use_reentrant=False)
        return out.index_put((rows,), x[:2])

    return (
        Calling(function, a=nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())),
        (torch.randn(64, 16), torch.tensor([5, 3])), (), squares,
    )  # fmt: skip


NETS: dict[str, Callable[[], Made]] = {
    "loss / 2": lambda: wide(lambda out, goal: F.cross_entropy(out, goal) / 2),
    "loss * 0.5": lambda: wide(lambda out, goal: F.cross_entropy(out, goal) * 0.5),
    "rounded quotient": lambda: wide(lambda out, _: (torch.div(out, 3.0, rounding_mode="floor") + out).mean()),
    "xlogy": lambda: wide(lambda out, _: torch.xlogy(out.exp(), 2.0).mean()),
    "gelu by hand": lambda: wide(lambda out, _: (0.5 * out * (1 + torch.tanh(0.79 * (out + 0.04 * out**3)))).mean()),
    "smooth l1, transposed": lambda: transposed(F.smooth_l1_loss),
    "elu of slices": lambda: between(F.elu),
    "log-sigmoid of slices": lambda: between(F.logsigmoid),
    "rrelu of slices": lambda: between(lambda x: F.rrelu(x, training=True)),
    "pools of a batch": pooled,
    "lstm": lambda: recurrent(nn.LSTM(16, 16, num_layers=2, bidirectional=True, dropout=0.1), 32),
    "gru": lambda: recurrent(nn.GRU(16, 16, batch_first=True), 16),
    "ctc": lambda: spelled(lambda: ((12,) * 3, (5,) * 3)),
    "ctc of tensors": lambda: spelled(lambda: (torch.full((3,), 12), torch.full((3,), 5))),
    "mean of bags": lambda: bags("mean"),
    "maxima of bags": lambda: bags("max"),
    "weight norm by hooks": normed,
    "sampled": sampled,
    "scaled without gradient": scaled,
    "checkpoint, and rows put": repeated,
    "a half that nobody reads": lambda: wide(unread),
    "product": lambda: wide(lambda out, _: (out[:4, :4] + 3).prod() + out.mean()),
    "products of rows": lambda: wide(lambda out, _: out[:, :5].prod(1).mean()),
    "products of rows with zeros": lambda: wide(lambda out, _: out[:, :5].relu().prod(1).mean()),
    "running products": lambda: wide(lambda out, _: out.cumprod(1).square().mean()),
    "variance and mean": lambda: wide(lambda out, _: sum(part.abs().sum() for part in torch.var_mean(out, 1))),
    "deviation, mean and more": lambda: wide(
        lambda out, _: sum(part.abs().sum() for part in (*torch.std_mean(out, 1), out.exp()))
    ),
}


def subject_of(make: Callable[[], Made], rule: str = "sgd") -> Subject:
    def workload(seed: int) -> Workload:
        torch.manual_seed(seed)
        return Workload("net", *make(), OptimizerSpec(rule))

    return Bench().subject(Case("net", "eager", "cpu", "small"), workload)


@pytest.mark.parametrize("name", NETS)
def test_simulated_bytes_are_the_measured_ones(name: str) -> None:
    subject = subject_of(NETS[name])
    assert subject.original == subject.original_measured
    assert subject.scratches.note == ""
    step = subject.generated(subject.normal)
    assert compare(subject.eager(), step, 0) == "bit-identical"
    assert subject.measure(step) == subject.simulate_graph(subject.normal)


def test_where_bytes_part_is_told() -> None:
    subject = subject_of(NETS["gelu by hand"])
    graph = subject.normal
    step = subject.generated(graph)
    for _ in range(2):
        step.prepare()
        step.run()
    assert Replayed(subject, graph).first_difference(step.run) is None
    wrong = next(op for op in graph.ops if op.target == "aten.tanh.default")
    table = subject.scratches.known
    key = next(key for key in table if key.startswith("aten.tanh.default("))
    table[key] += 1000
    step.prepare()
    found = Replayed(subject, graph).first_difference(step.run)
    assert found is not None
    assert (found.op, found.simulated - found.measured) == (wrong, 1000)
    assert "aten.tanh.default in the forward of the loss" in str(found)
