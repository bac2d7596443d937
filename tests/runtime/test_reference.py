"""The exact step against torch's own double precision, and what counts as close to it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from magis.ops.optimizers import OptimizerSpec
from magis.runtime.double_precision import (
    RELATIVE,
    closeness,
    exact,
    gradient_values,
    least_error,
)
from tests import nets
from tests.oracles import captured, eager_step, graph_step

RULES = [OptimizerSpec("sgd", lr=0.1), OptimizerSpec("momentum", lr=0.1), nets.ADAMW, OptimizerSpec("adam", lr=0.1)]


def deep(**parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), *parts.values(), nn.Linear(8, 3))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_loss_and_gradients_are_those_of_a_double_module(rule: OptimizerSpec) -> None:
    net = nets.Net(deep, nets.rows(4, 6), nets.labels(4, 3), F.cross_entropy, rule).build()
    graph = captured(net).graph
    gradients = gradient_values(graph)
    assert sorted(gradients) == sorted(name for name, _ in net.module.named_parameters())
    before = {name: tensor.clone() for name, tensor in net.module.state_dict().items()}
    found, _ = exact(graph, graph_step(graph, net).tensors, [*graph.outputs, *gradients.values()])
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.module.state_dict().items())

    twin = copy.deepcopy(net.module).double()
    loss = F.cross_entropy(twin(net.inputs[0].double()), net.targets[0])
    loss.backward()  # type: ignore[no-untyped-call]
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-12, atol=0)
    for (name, parameter), gradient in zip(twin.named_parameters(), found[1:], strict=True):
        assert name in gradients
        torch.testing.assert_close(found[1 + list(gradients).index(name)], parameter.grad, rtol=1e-10, atol=1e-14)
        assert gradient.dtype == torch.float64


class Recurrent(nn.Module):
    """A layer whose kernel knows no doubles, and packs what its backward needs only while gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


def test_a_recurrent_layer_runs_in_its_own_precision() -> None:
    net = nets.Net(
        Recurrent, nets.rows(4, 6, dtype=torch.float32), nets.labels(4, 3), F.cross_entropy, RULES[0]
    ).build()
    graph = captured(net).graph
    gradients = gradient_values(graph)
    found, _ = exact(graph, graph_step(graph, net).tensors, [*graph.outputs, *gradients.values()])
    double = copy.deepcopy(net.module).double()
    loss = F.cross_entropy(double(net.inputs[0].double()), *net.targets)
    loss.backward()
    wanted = [loss, *(dict(double.named_parameters())[name].grad for name in gradients)]
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-6)


def test_random_numbers_are_those_of_the_step() -> None:
    """Dropout of half the elements: exact and eager drop the same ones, or the gradients would be far apart."""
    net = nets.Net(lambda: deep(dropout=nn.Dropout(0.5)), nets.rows(16, 6), nets.labels(16, 3), F.cross_entropy).build()
    graph = captured(net).graph
    gradients = gradient_values(graph)
    torch.manual_seed(5)
    found, _ = exact(graph, graph_step(graph, net).tensors, [*graph.outputs, *gradients.values()])
    eager = eager_step(net)
    torch.manual_seed(5)
    eager.prepare()
    loss = eager.run()
    torch.testing.assert_close(found[0].float(), loss, rtol=1e-5, atol=0)
    for name, gradient in zip(gradients, found[1:], strict=True):
        torch.testing.assert_close(gradient.float(), eager.gradients()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs", "share"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0 + 1e-6], [1.0, 2.0], 0.5),  # half of 1e-6 * 2
        ([1.0, 2.0 + 4e-6], [1.0, 2.0 - 1e-6], 1.0),  # 2 * 1e-6 + 1e-6 * 2
        ([1.0, 2.1], [1.0, 2.0], 0.1 / 2e-6),
    ],
)
def test_closeness_is_the_share_of_what_is_allowed(ours: list[float], theirs: list[float], share: float) -> None:
    reference = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = closeness(
        "w", torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64), reference
    )
    assert found.share == pytest.approx(share, rel=1e-4)


def test_numbers_that_are_none_are_never_close() -> None:
    nan = torch.tensor([float("nan")])
    assert closeness("w", nan, torch.tensor([1.0]), torch.tensor([1.0]).double()).share == float("inf")
    zero = torch.zeros(3)
    assert closeness("w", zero, zero, zero.double()).share == 0.0
    assert closeness("w", torch.ones(3), zero, zero.double()).share == float("inf")
    empty = torch.zeros(0)
    assert closeness("w", empty, empty, empty.double()).share == 0.0


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.float32, RELATIVE), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
def test_a_number_may_be_off_by_what_the_least_precise_type_rounds_away(dtype: torch.dtype, share: float) -> None:
    """The loss is in float32; eager's may be exact by chance."""

    def loss_of(out: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return out.square().mean().float()

    net = nets.Net(
        lambda: nn.Linear(6, 3).to(dtype), lambda: (torch.randn(4, 6).to(dtype),), nets.labels(4, 3), loss_of
    ).build()
    assert least_error(captured(net).graph) == share
    exact_loss, loss = torch.tensor(1.0).double(), torch.tensor(1.0)
    assert closeness("loss", loss + 0.9 * share, loss, exact_loss, share).share == pytest.approx(0.9, rel=0.1)
    assert closeness("loss", loss + 1.2 * share, loss, exact_loss, share).share > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_that_cancel_leave_their_rounding(dtype: torch.dtype) -> None:
    """The same number more in each row changes nothing behind a softmax over rows; a row that is left out does."""
    rows = 400
    net = nets.Net(
        lambda: nn.Linear(6, 3).to(dtype),
        lambda: (torch.randn(rows, 6).to(dtype),),
        lambda: (torch.randn(rows, 3).to(dtype),),
        lambda out, target: (out.softmax(0) * target).sum(),
    ).build()
    graph = captured(net).graph
    gradients = gradient_values(graph)
    (_, right), (_, terms) = exact(graph, graph_step(graph, net).tensors, [gradients["weight"], gradients["bias"]])
    out = net.module(*net.inputs).double().detach().requires_grad_()
    (out.softmax(0) * net.targets[0].double()).sum().backward()  # type: ignore[no-untyped-call]
    assert out.grad is not None
    assert terms == pytest.approx(float(out.grad.square().sum(0).max().sqrt()), rel=0.05)
    eps = torch.finfo(dtype).eps
    zero = torch.zeros_like(right)
    assert closeness("bias", (zero + 1.8 * eps * terms).to(dtype), zero.to(dtype), zero, terms=terms).share <= 1.0
    without = out.grad[out.grad.abs().sum(1).argmax()].to(dtype)
    assert closeness("bias", without, zero.to(dtype), zero, terms=terms).share > 1.0


# --- numbers that are none are equal where both are -------------------------------------------------------------------

NAN, INF = math.nan, math.inf


def test_no_slack_hides_behind_an_overflow() -> None:
    theirs = torch.tensor([INF, 1.0])
    assert closeness("loss", torch.tensor([INF, 2.0]), theirs, theirs.double()).share > 1.0
