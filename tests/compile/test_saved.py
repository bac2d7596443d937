"""`options={"inductor": True}`: what is saved is what was planned, and inductor's code computes eager's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F  # noqa: N812

from magis.extensions.compile.compile_options import CompileReport, as_options
from magis.extensions.compile.dynamo_backend import magis
from magis.extensions.compile.inductor_partitioner import Partitioner, kept_nodes, needed_nodes
from magis.extensions.compile.joint_graph import capture_joint
from magis.extensions.compile.joint_plan import plan_joint
from tests.compile.nets import chain, fresh_dynamo

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Halves = tuple[fx.GraphModule, fx.GraphModule]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_dynamo():
        yield


def rows(seed: int, count: int = 512) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def split(
    ratio: float, module: nn.Module, seen: list[Any], reports: list[CompileReport]
) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """Loss and gradients by the partitioner, without inductor's code; ``seen`` gets joint graphs and their halves."""
    options = as_options({"memory_ratio": ratio, "inductor": True, "budget": 300, "report": reports.append})

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **further: Any) -> Halves:
        further.pop("static_lifetime_input_indices", None)
        halves = Partitioner(options)(joint, inputs, **further)
        seen.append((joint, halves))
        return halves

    return partial(gradients_of, decomposed(module, partition), module)


def decomposed(module: nn.Module, partition: Callable[..., Halves]) -> Callable[..., Tensor]:
    """The loss as inductor sees it, run operator by operator: dropout draws other numbers than eager's."""
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        decompositions=select_decomp_table(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    call: Callable[..., Tensor] = torch.compile(lambda x, y: F.mse_loss(module(x), y), backend=backend)
    return call


def gradients_of(call: Callable[..., Tensor], module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = call(x, y)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters() if p.grad is not None]


def saved_bytes(halves: Halves) -> int:
    """Of what the backward takes and no argument of the forward is."""
    given = {node.name for node in halves[0].graph.find_nodes(op="placeholder")}
    taken = [node for node in halves[1].graph.find_nodes(op="placeholder") if node.name not in given]
    return sum(node.meta["val"].nbytes for node in taken if not node.name.startswith("tangents"))


@pytest.mark.parametrize("parts", [(), (lambda: nn.Dropout(0.3),), (lambda: nn.BatchNorm1d(32),)])
def test_gradients_are_torchs_and_less_is_saved(parts: tuple[Callable[[], nn.Module], ...]) -> None:
    module = chain(32, 4, *parts)
    seen: list[Any] = []
    reports: list[CompileReport] = []
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    sizes = []
    for ratio in (1.0, 0.8):
        module.load_state_dict(state)
        torch.compiler.reset()
        loss, gradients = split(ratio, module, seen, reports)(rows(1), rows(2))
        running = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.load_state_dict(state)
        torch.compiler.reset()
        expected, theirs = gradients_of(decomposed(module, default_partition), module, rows(1), rows(2))
        torch.testing.assert_close(loss, expected)
        assert len(gradients) == len(theirs)
        for ours, other in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(ours, other)
        for name, tensor in module.state_dict().items():
            torch.testing.assert_close(running[name], tensor)
        sizes.append(saved_bytes(seen[-1][1]))
    assert [report.fallback for report in reports] == ["", ""]
    assert sizes[1] < sizes[0]


def test_the_backward_takes_what_the_plan_keeps_and_no_other_activation() -> None:
    module = chain(32, 4)
    seen: list[Any] = []
    split(0.8, module, seen, [])(rows(1), rows(2))
    joint, (forward, backward) = seen[0]
    captured = capture_joint(joint, 1)
    planned, report = plan_joint(captured, as_options({"memory_ratio": 0.8, "budget": 300}))
    kept = {node.name for node in kept_nodes(captured, planned)}
    given = {node.name for node in forward.graph.find_nodes(op="placeholder")}
    taken = {node.name for node in backward.graph.find_nodes(op="placeholder") if "tangents" not in node.name}
    assert report.recomputed
    assert taken - given
    assert taken - given <= kept


def test_what_is_needed_besides() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    drawn = graph.call_function(torch.ops.aten.rand_like.default, (y,))
    first = graph.call_function(torch.ops.aten.mul.Tensor, (x, drawn))
    second = graph.call_function(torch.ops.aten.sin.default, (first,))
    assert set(needed_nodes([second], [])) == {x, drawn}
    assert set(needed_nodes([second], [first])) == set()
    assert set(needed_nodes([second, y], [drawn])) == {x, y}


def test_what_cannot_be_planned_is_split_as_inductor_does() -> None:
    module = chain(32, 2)
    seen: list[Any] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **further: Any) -> Halves:
        strange = next(node for node in joint.graph.nodes if node.op == "call_function")
        strange.meta["saved_tensor_with_no_vc_check"] = True
        reports: list[CompileReport] = []
        options = replace(as_options({"inductor": True}), report=reports.append)
        with pytest.warns(UserWarning, match="inductor chooses what is saved: an autograd.Function"):
            Partitioner(options)(joint, inputs, **further)
        seen.extend(reports)
        del strange.meta["saved_tensor_with_no_vc_check"]
        return default_partition(joint, inputs, **further)

    call = torch.compile(lambda x: module(x).sum(), backend=aot_autograd(fw_compiler=boxed_nop, partition_fn=partition))
    call(rows(1)).backward()
    assert "keeps tensors" in seen[0].fallback


def test_inductors_code_computes_eagers_gradients() -> None:
    module = chain(32, 2, lambda: nn.Dropout(0.0))
    reports: list[CompileReport] = []
    options = {"inductor": True, "memory_ratio": 0.8, "budget": 100, "report": reports.append}
    call = torch.compile(lambda x, y: F.mse_loss(module(x), y), backend=magis, options=options)
    loss, ours = gradients_of(call, module, rows(1), rows(2))
    expected, theirs = gradients_of(lambda x, y: F.mse_loss(module(x), y), module, rows(1), rows(2))
    torch.testing.assert_close(loss, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    (report,) = reports
    assert not report.fallback
