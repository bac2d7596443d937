"""What cannot be captured is refused in one line that says where, and leaves the module as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.errors import CaptureError
from tests.nets import FORWARD, Block, Net, rows
from tests.oracles import captured

OUTSIDE = torch.ones(4)
BATCH = rows(3, 4)


class Stubborn(nn.Module):
    """A sub-module whose forward does what ``run`` says."""

    def __init__(self, run: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self._run = run

    def forward(self, x: Tensor) -> object:
        return self._run(self, x)


def branch(module: Any, x: Tensor) -> Tensor:
    h: Tensor = module.a(x)
    if h.sum() > 0:
        return h * 2
    return h


def item(module: Any, x: Tensor) -> Tensor:
    scale = module.a(x).mean().item()
    return x * scale


def shape(module: Any, x: Tensor) -> Tensor:
    return module.a(x)[x > 0]  # type: ignore[no-any-return]


def sparse(module: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), module.a.weight)


HIDDEN = torch.Generator()


def generator(module: Any, x: Tensor) -> Tensor:
    return module.a(x) + torch.rand(4, generator=globals()["HIDDEN"])  # type: ignore[no-any-return]


def failing(module: Any, x: Tensor) -> Tensor:
    raise KeyError("two\nlines")


def mismatch(module: Any, x: Tensor) -> Tensor:
    return module.a(x) @ module.a(x)  # type: ignore[no-any-return]


def running(module: Any, x: Tensor) -> Tensor:
    h: Tensor = module.a(x)
    return h.cumprod_(1)


def meta(module: Any, x: Tensor) -> Tensor:
    return module.a(x) + torch.ones(4, device="meta")  # type: ignore[no-any-return]


def replaced(module: Any, x: Tensor) -> Tensor:
    module.seen = module.seen * 0.5 + 1
    return module.a(x) + module.seen  # type: ignore[no-any-return]


def reshaped(module: Any, x: Tensor) -> Tensor:
    return module.a(x) + module.seen.unsqueeze_(0)  # type: ignore[no-any-return]


def hook(module: Any, x: Tensor) -> Tensor:
    h: Tensor = module.a(x)
    h.register_hook(lambda grad: grad / 0 if grad.sum() else 1 / 0)  # type: ignore[no-untyped-call]
    return h


DATA = "the step depends on the data of a tensor"
INSIDE: dict[str, tuple[Callable[[Any, Tensor], object], str]] = {
    "branch": (branch, f"{DATA} (aten._local_scalar_dense.default) {{place:3}}; replace"),
    "item": (item, f"{DATA} (aten._local_scalar_dense.default) {{place:2}}; replace"),
    "shape": (shape, f"{DATA} (aten.index.Tensor) {{place:2}}; replace"),
    "sparse": (sparse, "the step handles a tensor that is sparse_coo; only dense, strided tensors can be captured"),
    "generator": (generator, "draws from a generator that was not there before the step"),
    "failing": (failing, "KeyError {place:2}: 'two\\nlines'; the step must run eagerly"),
    "mismatch": (mismatch, "RuntimeError {place:2}: mat1 and mat2 shapes cannot be multiplied"),
    "running": (running, "cumprod_ is called on a tensor that has a gradient, and its formula looks for zeros"),
    "meta": (meta, "{place:2}: "),
    "replaced": (replaced, "the forward replaces buffer 'part.1.seen': the next step would not see that; update"),
    "reshaped": (reshaped, "the step changes the shape of buffer:part.1.seen from [4] to [1, 4] in place; use a view"),
    "hook": (hook, f"{DATA} (aten._local_scalar_dense.default) in the backward at test_errors.py"),
}  # fmt: skip


def refusal(net: Net, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line; and nothing else may be printed, logged or left behind."""
    built = net.build()
    kept = dict(built.module.__dict__)
    capfd.readouterr()
    with pytest.raises(CaptureError) as caught:
        captured(built)
    assert capfd.readouterr() == ("", "")
    assert len(str(caught.value).splitlines()) == 1
    for module in built.module.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(type(p) is nn.Parameter and p.grad is None for p in built.module.parameters())
    assert all(type(b) is Tensor for b in built.module.buffers())
    assert dict(built.module.__dict__) == kept
    return str(caught.value)


@pytest.mark.parametrize("name", INSIDE)
def test_a_step_that_is_no_graph(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    run, message = INSIDE[name]
    whole = Net(lambda: Block(lambda m, x: m.part(x), part=nn.Sequential(nn.Linear(4, 4), Stubborn(run))), BATCH, BATCH)
    first = inspect.getsourcelines(run)[1]
    for line in range(1, 5):
        message = message.replace(f"{{place:{line}}}", f"in module 'part.1' at test_errors.py:{first + line - 1}")
    assert message in refusal(whole, capfd)


OUTER: dict[str, tuple[Net, str]] = {
    "batch written to": (
        Net(lambda: Block(lambda m, x: x.lerp_(m.a(x.clone()), 0.5) * 2, a=nn.Linear(4, 4)), BATCH, BATCH),
        "the step writes what depends on trained parameters into input:0, in place; write to a clone of it",
    ),
    "parameter elsewhere": (
        Net(lambda: nn.Linear(4, 4, device="meta"), BATCH, BATCH),
        "weight is on device meta; build it on the CPU, not on 'meta': a factory is called on fake tensors",
    ),
    "input elsewhere": (
        Net(lambda: nn.Linear(4, 4), lambda: (torch.ones(3, 4, device="meta"),), BATCH),
        "input 0 is on device meta; build",
    ),
    "target elsewhere": (
        Net(lambda: nn.Linear(4, 4), BATCH, lambda: (torch.ones(3, 4, device="meta"),)),
        "target 0 is on device meta; build",
    ),
    "mixed parameters": (
        Net(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double()), BATCH, BATCH),
        "mixed data types: aten.addmm.default in module '1' is given float32 and float64; the step must run eagerly",
    ),
    "input of another type": (
        Net(lambda: nn.Linear(4, 4), rows(3, 4, dtype=torch.float64), BATCH),
        "mixed data types: aten.addmm.default in module '(root)' is given float32 and float64; the step must run",
    ),
    "loss of many numbers": (
        Net(lambda: nn.Linear(4, 4), BATCH, loss_fn=lambda output: output),
        "the loss is not a single number but of shape (3, 4); pass a loss_fn that returns a scalar: its mean() or",
    ),
    "loss of no tensor": (
        Net(lambda: nn.Linear(4, 4), BATCH, loss_fn=lambda output: 1.0),  # type: ignore[arg-type,return-value]
        "the loss is not a single number but of type float; pass a loss_fn that returns a scalar tensor, without item",
    ),
    "loss without return": (
        Net(lambda: nn.Linear(4, 4), BATCH, loss_fn=lambda output: None),  # type: ignore[arg-type,return-value]
        "but of type NoneType; pass a loss_fn that returns a scalar tensor: it lacks a return",
    ),
    "loss that calls backward": (
        Net(lambda: nn.Linear(4, 4), BATCH, loss_fn=lambda output: (output.sum().backward(), output.sum())[1]),
        "the model or its loss function calls backward, which is called on the loss that it returns; leave it out",
    ),
    "loss of wrong sizes": (
        Net(lambda: nn.Linear(4, 4), BATCH, rows(2, 4), lambda output, target: (output - target).sum()),
        "RuntimeError in the loss function at test_errors.py",
    ),
    "loss of torch of wrong sizes": (
        Net(lambda: nn.Linear(4, 4), BATCH, lambda: (torch.zeros(2, dtype=torch.int64),), F.cross_entropy),
        "ValueError in the loss function: Expected input batch_size (3) to match target batch_size (2)",
    ),
    "loss of a mapping": (
        Net(lambda: Block(lambda m, x: {"loss": m.a(x).sum()}, a=nn.Linear(4, 4)), BATCH, loss_fn=None),
        "the loss is not a single number but of type dict",
    ),
    "no trained parameter": (
        Net(lambda: nn.Linear(4, 4).requires_grad_(requires_grad=False), BATCH, BATCH),
        "there is nothing to train: no parameter requires a gradient; unfreeze one (requires_grad_), or pass",
    ),
    "loss cut off": (
        Net(lambda: nn.Linear(4, 4), BATCH, BATCH, lambda output, target: F.mse_loss(output.detach(), target)),
        "the loss does not depend on any trained parameter; look for what cuts it off: detach(), .data, item()",
    ),
    "loss that branches": (
        Net(lambda: nn.Linear(4, 4), BATCH, loss_fn=lambda output: output.sum() if output.sum() > 0 else -output.sum()),
        f"{DATA} (aten._local_scalar_dense.default) in the loss function at test_errors",
    ),
    "sparse input": (
        Net(lambda: nn.Linear(4, 4), lambda: (torch.eye(4).to_sparse(),), rows(4, 4)),
        "input 0 is sparse_coo; only dense, strided tensors can be captured",
    ),
    "nested input": (
        Net(lambda: nn.Linear(4, 4), lambda: (torch.nested.nested_tensor([torch.ones(2, 4)]),), BATCH),
        "input 0 is nested; only dense",
    ),
    "sparse gradient": (
        Net(lambda: nn.Embedding(5, 4, sparse=True), lambda: (torch.tensor([1, 2]),), rows(2, 4)),
        "the step handles a tensor that is sparse_coo",
    ),
    "wrong sizes": (
        Net(lambda: nn.Linear(5, 4), BATCH, BATCH),
        "RuntimeError in module '(root)': mat1 and mat2 shapes cannot be multiplied",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", OUTER)
def test_a_step_that_does_not_fit(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    net, message = OUTER[name]
    assert message in refusal(net, capfd)


@pytest.mark.parametrize(
    ("inputs", "windows"),
    [
        ((torch.ones(6, 8)[::2, ::2],), [((3, 4), (16, 2), 0)]),
        ((torch.ones(1, 4).expand(3, 4),), [((3, 4), (0, 1), 0)]),
        ((OUTSIDE.view(1, 4), OUTSIDE.view(1, 4)), [((1, 4), (4, 1), 0)]),
        ((torch.ones(3, 4)[1:],), [((2, 4), (4, 1), 4)]),
    ],
)
def test_views_as_inputs_are_fine(inputs: tuple[Tensor, ...], windows: list[object]) -> None:
    """Slices, expanded tensors and one tensor given twice are strided windows like any other."""
    net = Net(
        lambda: Block(lambda m, *x: sum(m.a(t) for t in x).sum(), a=nn.Linear(4, 4)), lambda: inputs, loss_fn=None
    )
    graph = captured(net.build()).graph
    found = [graph.values[v] for v in graph.inputs if graph.values[v].name.startswith("input")]
    assert [(v.shape, v.stride, v.offset) for v in found] == windows


def test_a_module_may_catch_its_own_errors() -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        try:
            block.bad(x)
        except ZeroDivisionError:
            return block.a(x)  # type: ignore[no-any-return]
        raise AssertionError

    net = Net(
        lambda: Block(run, a=nn.Linear(4, 4), bad=Block(lambda m, x: 1 / 0)), BATCH, loss_fn=None, rule=FORWARD
    ).build()
    assert {op.module for op in captured(net).graph.ops} == {"a"}
