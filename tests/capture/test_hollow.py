"""Capture on hollow tensors: no library tells them from real ones, and numbers are read only where they are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from magis.capture import Captured, OptimizerSpec, capture
from magis.capture.captured import record_eager
from magis.errors import CaptureError
from magis.ops.python_objects import told
from magis.planner.conformance import first_difference

SGD = OptimizerSpec("sgd")


class Calls(nn.Module):
    """A linear layer, and whatever else is done to its output."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("sizes", torch.tensor([2, 3]))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, self.a(x))


def of(call: Callable[[Any, Tensor], Tensor], *inputs: Tensor, **settings: Any) -> tuple[Captured, Captured, Calls]:
    """The capture, the same recorded on real tensors, and the module."""
    module = Calls(call)
    batch = inputs or (torch.ones(3, 4),)
    torch.manual_seed(0)
    found = capture(module, batch, (), lambda out, *_: out.sum(), SGD, **settings)
    eager = record_eager(module, batch, (), lambda out, *_: out.sum(), SGD)
    return found, eager, module


def tells_apart(_module: Any, x: Tensor) -> Tensor:
    return x.exp() if isinstance(x, FakeTensor) or type(x) is not Tensor or x.is_meta else x.sin()


def makes_a_mask(_module: Any, x: Tensor) -> Tensor:
    mask = torch.ones(3, 4, dtype=torch.bool).tril()
    return x if mask.all() else x.masked_fill(mask, 0.0)


def uses_numpy(_module: Any, x: Tensor) -> Tensor:
    return x[:, : int(torch.arange(3).numpy().max())] * torch.linspace(0, 1, 3).tolist()[1]


def loops_over_a_buffer(module: Any, x: Tensor) -> Tensor:
    for size in module.sizes.tolist():
        x = x + size
    return x


def checkpoints_by_chance(_module: Any, x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.0 else torch.dropout(x, 0.5, True)


@pytest.mark.parametrize(
    "call",
    [tells_apart, makes_a_mask, uses_numpy, loops_over_a_buffer, checkpoints_by_chance],
    ids=lambda c: c.__name__,
)
def test_what_is_captured_is_what_eager_runs(call: Callable[[Any, Tensor], Tensor]) -> None:
    found, eager, _ = of(call)
    assert first_difference(found.graph, eager.graph) == ""
    assert not found.drawn


@pytest.mark.parametrize(
    "read", [lambda x: bool(x.sum() > 0), lambda x: x.tolist(), lambda x: x.detach().numpy(), lambda x: x[0, 0].item()]
)
def test_numbers_of_the_data_cannot_be_read(read: Callable[[Tensor], object]) -> None:
    def call(_module: Any, x: Tensor) -> Tensor:
        read(x)
        return x

    with pytest.raises(CaptureError, match="the step depends on the data of a tensor"):
        of(call)
    assert torch.ones(2).tolist() == [1.0, 1.0]  # as ever, outside


@pytest.mark.parametrize("seed", range(4))
def test_a_draw_on_the_host_is_taken_as_eager_takes_it(seed: int) -> None:
    def call(module: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.dropout(x, 0.5, True)
            x = x.sin() if torch.rand([]) < 0.5 else x.cos()
        return x

    module = Calls(call)
    batch = (torch.ones(3, 4),)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    found = capture(module, batch, (), lambda out: out.sum(), SGD)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.drawn
    assert first_difference(found.graph, record_eager(module, batch, (), lambda out: out.sum(), SGD).graph) == ""


def test_tensors_that_python_holds_are_named_by_where_they_are() -> None:
    weights = {"of": [torch.ones(4)]}

    def call(module: Any, x: Tensor) -> Tensor:
        return x * weights["of"][0] + module.plain

    module = Calls(call)
    module.plain = torch.ones(4)
    found = capture(module, (torch.ones(3, 4),), (), lambda out: out.sum(), SGD)
    names = {value.name for value in found.graph.values.values() if value.name.startswith("held:")}
    assert names == {"held:module/.plain", "held:module/.call/(weights/{of/[0"}


def test_the_module_is_left_as_it_was() -> None:
    def call(module: Any, x: Tensor) -> Tensor:
        module.seen = x
        module.many.append(x)
        module.late = torch.ones(4)
        module.sizes.add_(1)
        return x

    module = Calls(call)
    module.many = []
    weight, plain = module.a.weight, module.a.weight.detach().clone()
    found = capture(module, (torch.ones(3, 4),), (), lambda out: out.sum(), SGD)
    assert {told(path) for path in found.left} == {"model.late", "model.many", "model.seen"}
    assert (module.many, hasattr(module, "seen"), hasattr(module, "late")) == ([], False, False)
    assert module.a.weight is weight
    assert torch.equal(weight, plain)
    assert weight.grad is None
    assert module.sizes.tolist() == [2, 3]


def test_what_module_and_loss_hold_is_left_as_it_was_at_any_depth() -> None:
    seen, module = [], Calls(lambda module, x: module.settings.note(x))
    module.settings = Noting()

    def loss_fn(out: Tensor) -> Tensor:
        seen.append(out)
        return out.sum()

    found = capture(module, (torch.ones(3, 4),), (), loss_fn, SGD)
    assert {told(path) for path in found.left} == {
        "loss closure seen",
        "model.settings.last",
        "model.settings.of.a[0]",
    }
    assert (seen, vars(module.settings)) == ([], {"of": {"a": [[]]}})


class Noting:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.of: dict[str, list[list[Tensor]]] = {"a": [[]]}

    def note(self, x: Tensor) -> Tensor:
        self.of["a"][0].append(x)
        self.last = x
        return x


def test_hooks_that_the_first_forward_registers_are_taken_away_again() -> None:
    """As transformers records outputs: once, and a second capture must not find two of them."""

    def call(module: Any, x: Tensor) -> Tensor:
        if not hasattr(module, "hooked"):
            module.hooked = module.a.register_forward_hook(lambda _part, _inputs, out: out + 1)
        return x

    module = Calls(call)
    graphs = [capture(module, (torch.ones(3, 4),), (), lambda out: out.sum(), SGD).graph for _ in range(2)]
    assert not module.a._forward_hooks
    assert not first_difference(*graphs)
