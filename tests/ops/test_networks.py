"""Every operator of the networks is cut for real, or there is a reason why it cannot be."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from magis.capture import Workload, capture
from magis.graph import Graph
from magis.models import get, resolve
from magis.ops.optimizers import OptimizerSpec
from magis.ops.splits import splits, why_opaque
from magis.rewrite.functionalize import functionalize
from tests.nets import NETS
from tests.ops.cutting import Case, distinct, problems
from tests.oracles import captured

SGD = OptimizerSpec("sgd", lr=0.01)
ADAMW = OptimizerSpec("adamw", weight_decay=0.01)
NETWORKS = resolve(["all", "seed"])
QUICK = ("resnet50", "bert", "vit", "unet", "unetpp", "seed-btlm")
"""Networks that have, together, every operator of all."""


@functools.cache
def workload(name: str, dtype: str) -> Workload:
    with FakeTensorMode():
        return get(name).build("small", 0).to(dtype)


def graphs(name: str, rule: OptimizerSpec, device: str = "cpu", dtype: str = "float32") -> Iterator[Graph]:
    """The captured step, and its normal form, whose in-place operators are functional."""
    built = workload(name, dtype)
    graph = capture(
        built.module, built.inputs, built.targets, built.loss_fn, rule,
        device=device, explicit_attention=built.explicit_attention,
    ).graph  # fmt: skip
    yield graph
    yield functionalize(graph)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_parts_give_the_whole_in_small_networks(step: int) -> None:
    """Networks with one odd trait each: norms of batches and layers, which no sample of torch's cuts, among them."""
    steps = [captured(net.build()).graph for net in [*NETS.values()][::step]]
    cases = distinct([*steps, *map(functionalize, steps)])
    assert unexplained(cases) == []
    assert [line for case in cases.values() for line in problems(case, largest=8)] == []


def unexplained(cases: dict[str, Case]) -> list[str]:
    """Signatures of calls that no rule knows."""
    return [key for key, case in cases.items() if why_opaque(case.op, case.values).startswith("no rule")]


def test_every_operator_has_splits_or_a_reason() -> None:
    steps = [*((name, SGD) for name in QUICK), ("vit", ADAMW)]  # operators of an update are the same for all weights
    cases = distinct(graph for name, rule in steps for graph in graphs(name, rule))
    assert unexplained(cases) == []
    cut = {case.op.target for case in cases.values() if splits(case.op, case.values)}
    never = {case.op.target for case in cases.values()} - cut
    assert never == {
        "aten.arange.default", "aten.bernoulli_.float", "aten.nll_loss_forward.default",
        "aten.nll_loss2d_forward.default", "aten.empty.memory_format", "aten.ones_like.default",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bert", "float32"), ("gpt_neo", "bfloat16"), ("vit", "float32"), ("vit", "bfloat16"),
        pytest.param("bert", "bfloat16", marks=pytest.mark.soak),
        pytest.param("gpt_neo", "float32", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_operators_of_a_gpu_have_splits_or_a_reason(name: str, dtype: str) -> None:
    """Fused dropout and attention, substituted while tracing; batch and head can be cut where nothing is random."""
    cases = distinct([next(graphs(name, SGD, "cuda", dtype))])
    assert unexplained(cases) == []
    kernels = [case for case in cases.values() if "attention" in case.op.target]
    assert kernels
    for case in kernels:
        query = case.values[case.op.inputs()[1 if "backward" in case.op.target else 0]]
        found = splits(case.op, case.values)
        if name == "bert":  # trained with dropout
            assert why_opaque(case.op, case.values) == "random numbers would change"
            continue
        assert problems(case, largest=4) == []
        batch, head = found[:2]
        assert (batch.extent, head.extent) == (query.shape[0], query.shape[1])
        for dim, split in ((0, batch), (1, head)):
            whole = [how for how in split.outputs if how not in (None, "same")]
            assert whole == [dim] * len(whole)
            large = [case.values[number].numel > 2 for number in case.op.inputs()]
            assert [cut == dim for cut in split.inputs] == large


@pytest.mark.soak
@pytest.mark.parametrize("rule", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", NETWORKS)
def test_parts_give_the_whole(name: str, rule: OptimizerSpec) -> None:
    """Every call of a network, into 2, 3, 4 and many parts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # large calls
    try:
        cases = distinct(graphs(name, rule))
        assert unexplained(cases) == []
        assert [line for case in cases.values() for line in problems(case, largest=16)] == []
    finally:
        torch.set_num_threads(threads)
