"""Eager's in-place additions of gradients and biases, seen although somebody watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from magis.ops.eager_only import Unwatched, unwatched
from magis.runtime.measure import tensor_peak, window_peak
from magis.simulate.simulator import replay
from tests.nets import Block, Net
from tests.oracles import captured, differences, eager_step, graph_step, observed, workspaces

Scenario = Callable[[Tensor, Tensor], Tensor]


class Watch(TorchDispatchMode):
    """Notes every operator of a backward, as it is called and as it would be."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forms: Unwatched = unwatched()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        form = self.forms.form(func, args, kwargs or {})
        self.seen.append((str(func), str(form)))
        return form(*args, **(kwargs or {}))


def run(scenario: Scenario) -> tuple[list[str], Tensor]:
    """Forms of the additions and scatters of the backward, and the gradient."""
    torch.manual_seed(0)
    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16)
    loss = scenario(x, w)
    with Watch() as watch:
        loss.backward()
    assert x.grad is not None
    wanted = tuple(f"aten.{name}" for name in ("add.", "scatter", "index_put", "index_add", "put", "masked_scatter"))
    return [form for func, form in watch.seen if func.startswith(wanted)], x.grad


def plain(scenario: Scenario) -> tuple[int, int, Tensor]:
    """The allocator's count of the backward, the count of tensors, and the gradient, nobody watching."""
    grads = []
    counts = []
    for count in (lambda fn: window_peak(fn).peak_bytes, tensor_peak):
        torch.manual_seed(0)
        x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16)
        loss = scenario(x, w)
        counts.append(count(loss.backward))
        grads.append(x.grad)
    assert grads[0] is not None
    return counts[0], counts[1], grads[0]


def two_readers(x: Tensor, w: Tensor) -> Tensor:
    h = x.exp()
    return (h @ w).sum() + (h @ w.t()).sum()


def three_readers(x: Tensor, w: Tensor) -> Tensor:
    h = x.exp()
    return (h @ w).sum() + (h * w).sum() + h.sin().sum()


def held_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    """What ``h`` gets from ``h + s`` is at the same time what ``s`` gets, whose formula runs after that of ``c``."""
    h = x.exp()
    s = h.sin()
    c = h.cos()
    return (h + s).exp().sum() + c.exp().sum()


def expanded(x: Tensor, w: Tensor) -> Tensor:
    h = x.exp()
    return (h @ w).sum() + h.sum()


def window(x: Tensor, w: Tensor) -> Tensor:
    h = x.exp()
    return (h.t() @ w).sum() + (h.t() @ w.t()).sum()


def gathered(x: Tensor, w: Tensor) -> Tensor:
    h = x.exp()
    return (
        h.gather(1, torch.arange(16).expand(16, 16).contiguous()).sum() + h[torch.arange(4)].sum() + h.sort(1)[0].sum()
    )


def picked(x: Tensor, w: Tensor) -> Tensor:
    h = x.exp()
    rows = h.index_select(0, torch.arange(4)).sum() + h.sin().index_select(1, torch.tensor([0, 1, 0])).sum()
    return rows + h.cos().take(torch.arange(0, 256, 3)).sum() + h.exp().masked_select(w > 0).sum()


def put(x: Tensor, w: Tensor) -> Tensor:
    """The formula of what is put reads the gradient that the formula of what is overwritten makes zeros in."""
    h = x.exp().index_put((torch.arange(4),), x.sin()[:4])
    h[torch.arange(4, 8)] = x.cos()[:4]
    h = h.scatter(1, torch.arange(8).expand(16, 8).contiguous(), x[:, :8].sin())
    return (h @ w).sum()


class Doubled(torch.autograd.Function):
    """Its own backward adds what it has just made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        whole = grad * 1
        both = whole + grad
        return both + (whole - both) + whole


def own_formula(x: Tensor, w: Tensor) -> Tensor:
    return (Doubled.apply(x.exp()) @ w).sum()


SCENARIOS = [two_readers, three_readers, held_elsewhere, expanded, window, gathered, picked, put, own_formula]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_numbers_and_the_bytes_are_those_of_nobody_watching(scenario: Scenario) -> None:
    forms, grad = run(scenario)
    assert forms, "nothing was added"
    peak, tensors, expected = plain(scenario)
    assert torch.equal(grad, expected)
    assert tensors <= peak <= tensors + 1024  # workspaces


def test_it_asks_in_any_mode() -> None:
    expected = unwatched()
    with torch.no_grad(), Watch():
        assert unwatched() == expected
    with torch.inference_mode():
        assert unwatched() == expected


# --- biases -----------------------------------------------------------------------------------------------------------


def linear(view: Callable[[Tensor], Tensor], **how: Any) -> nn.Module:
    return Block(lambda m, x: m.layer(view(x)), layer=nn.Linear(16, 32, **how))


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "transposed": (lambda: linear(lambda x: x.transpose(0, 1)), 1),
    "every other row": (lambda: linear(lambda x: x[:, ::2]), 1),
    "four dimensions": (lambda: linear(lambda x: x.unflatten(0, (2, 4)).transpose(0, 2)), 1),
    "a column": (lambda: linear(lambda x: x.reshape(16, -1)[:, 1]), 1),
    "attention": (
        lambda: Block(lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(16, 2, batch_first=True)), 1,
    ),
    "decoder": (
        lambda: Block(lambda m, x: m.layer(x, x), layer=nn.TransformerDecoderLayer(16, 2, 8, batch_first=True)), 3,
    ),
    "contiguous": (lambda: linear(lambda x: x), 0),
    "a matrix": (lambda: linear(lambda x: x[:, 0]), 0),
    "no bias": (lambda: linear(lambda x: x.transpose(0, 1), bias=False), 0),
}  # fmt: skip
"""Layers by what a linear layer in them is given, and the number of biases that eager adds in place to a product."""


@pytest.mark.parametrize("name", LAYERS)
def test_a_product_of_strided_rows_takes_its_bias_in_place(name: str) -> None:
    make, count = LAYERS[name]
    net = Net(make, lambda: (torch.randn(8, 6, 16),), loss_fn=torch.sum).build()
    step = captured(net)
    graph, persistent = step.graph, step.graph.persistent_bytes()
    assert sum(op.target == "aten.add_.Tensor" and op.phase == "forward" for op in graph.ops) == count
    expected, *counted = observed(eager_step(net), persistent)
    numbers, *counted_of_graph = observed(graph_step(graph, net), persistent)
    assert differences(expected, numbers) == []
    for found, lifetimes in ((counted, {"deaths": step.deaths, "numbers": step.numbers}), (counted_of_graph, {})):
        profile = replay(graph, workspaces().of(graph), **lifetimes)  # type: ignore[arg-type]
        assert found == [profile.peak_bytes, profile.tensor_bytes]
