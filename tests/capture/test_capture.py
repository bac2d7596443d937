"""What capture writes down: inputs by name, phases, modules, versions, lives; and that it leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from magis.capture import Captured, capture
from magis.graph import GENERATOR, Graph, Op
from magis.ops.optimizers import OPTIMIZER_KINDS, OptimizerSpec
from tests.nets import ADAMW, NETS, SGD, Net, labels, rows
from tests.oracles import captured, same


def graph_of(name: str) -> Graph:
    return captured(NETS[name].build()).graph


def targets(graph: Graph, phase: str = "") -> Counter[str]:
    return Counter(op.target for op in graph.ops if phase in ("", op.phase))


def named(graph: Graph) -> list[str]:
    return [graph.values[value].name for value in graph.inputs]


def find(graph: Graph, target: str) -> Op:
    return next(op for op in graph.ops if op.target == target)


def test_inputs_are_named_after_what_they_are() -> None:
    assert named(graph_of("buffers")) == [
        "parameter:a.weight", "parameter:a.bias", "buffer:offset", "buffer:mean", "buffer:calls", "input:0", "target:0",
    ]  # fmt: skip
    assert named(
        captured(Net(lambda: nn.Linear(3, 2), rows(4, 3), labels(4, 2), F.cross_entropy, ADAMW).build()).graph
    )[4:] == [f"state:{kind}:{name}" for name in ("weight", "bias") for kind in ("exp_avg", "exp_avg_sq")]


def test_storage_kinds_tell_what_stays() -> None:
    graph = graph_of("constants")
    kinds = Counter(storage.kind for storage in graph.storages.values())
    assert kinds["parameter"] == 2
    assert kinds["batch"] == 2
    assert kinds["constant"] == len(graph.constants) == 2
    assert list(graph.constants.values()) == [(0.5,), (2.0, 3.0)]
    assert graph.storages[GENERATOR].kind == "generator"
    assert graph.persistent_bytes() == sum(
        graph.storages[graph.values[value].storage].nbytes for value in dict.fromkeys(graph.inputs)
    )


def test_writes_and_random_numbers_have_versions() -> None:
    graph = graph_of("batch-norm-twice")
    norms = [op for op in graph.ops if op.target == "aten.native_batch_norm.default"]
    storages = [graph.values[norms[0].inputs()[at]].storage for at in (3, 4)]  # running mean and variance
    assert [op.writes for op in norms] == [
        tuple((storage, version) for storage in storages) for version in (1, 2)
    ]  # not said by the operator's schema
    evaluated = graph_of("batch-norm-evaluated")
    assert not find(evaluated, "aten.native_batch_norm.default").writes
    drawn = [op for op in graph_of("dropout").ops if op.random]
    assert [op.reads[0] for op in drawn] == [(GENERATOR, 0), (GENERATOR, 1)]
    assert [op.writes[0] for op in drawn] == [(GENERATOR, 1), (GENERATOR, 2)]


def test_deaths_are_eagers() -> None:
    """A tensor that nobody saves dies at once, one that backward needs with its formula, a gradient with the step."""
    step = captured(
        Net(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), rows(2, 4), rows(2, 3)).build()
    )
    graph = step.graph

    def death(target: str, nth: int = 0) -> str:
        op = [op for op in graph.ops if op.target == target][nth]
        at = step.deaths.get(graph.values[op.made()[0]].storage)
        return "end" if at is None else graph.ops[at - 1].target

    assert death("aten.addmm.default", 0) == "aten.relu.default"
    assert death("aten.relu.default") == "aten.threshold_backward.default"
    assert death("aten.mse_loss.default") == "end"
    assert death("aten.mm.default", 1) == "end"


@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_capture_leaves_the_module_alone(kind: str) -> None:
    net = Net(
        NETS["batch-norm"].module,
        NETS["batch-norm"].inputs,
        NETS["batch-norm"].targets,
        F.cross_entropy,
        OptimizerSpec(kind),
    ).build()
    before = {name: tensor.clone() for name, tensor in net.module.state_dict().items()}
    state = torch.get_rng_state()
    captured(net)
    after = net.module.state_dict()
    assert all(same(before[name], after[name]) for name in before)
    assert same(state, torch.get_rng_state())
    assert all(type(p) is nn.Parameter and p.grad is None and p.requires_grad for p in net.module.parameters())
    assert all(type(b) is torch.Tensor for b in net.module.buffers())
    assert not [m for m in net.module.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert net.module.training
    assert torch.is_grad_enabled()


def test_capture_keeps_no_tensors_alive() -> None:
    net = NETS["dropout"].build()
    step = captured(net)
    references = [weakref.ref(p) for p in net.module.parameters()]
    del net
    gc.collect()
    assert [r for r in references if r() is not None] == []
    assert isinstance(step, Captured)


def test_fake_tensors_need_no_memory() -> None:
    """A layer of 16 TB, with its batch."""
    with FakeTensorMode():
        module = nn.Linear(2_000_000, 2_000_000)
        x, y = torch.empty(8, 2_000_000), torch.empty(8, 2_000_000)
    step = capture(module, (x,), (y,), F.mse_loss, SGD)
    assert step.graph.persistent_bytes() == 4 * (2_000_000**2 + 2_000_000 + 2 * 8 * 2_000_000)
    assert targets(step.graph)["aten.add_.Tensor"] == 2
