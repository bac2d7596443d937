"""Needless order constraints go, and not a bit of any number changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import rustworkx as rx
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.graph import Graph, dump, parse, verify
from magis.graph.hazards import dependency_graph
from magis.rewrite.functionalize import functionalize, untangle
from magis.runtime.codegen import compile_step
from tests.golden.golden import before_and_after, check_golden
from tests.nets import ADAMW, NETS, SGD, Built, Net, labels, mlp, rows
from tests.oracles import captured, differences, graph_step, history, same

NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


def with_ignored(count: int, classes: int, ignored: int, every: int) -> Callable[[], tuple[Tensor, ...]]:
    """Class numbers, the ignored one at every so many places."""

    def drawn() -> tuple[Tensor, ...]:
        target = torch.randint(classes, (count,))
        target[::every] = ignored
        return (target,)

    return drawn


def classifier(targets: Callable[[], tuple[Tensor, ...]], dtype: torch.dtype = torch.float32, **loss: object) -> Net:
    """Five classes, six rows."""
    return Net(mlp(dtype), rows(6, 12, dtype=dtype), targets, functools.partial(F.cross_entropy, **loss), ADAMW)


def pixels(dtype: torch.dtype = torch.float32, ignored: float = 0.3) -> Net:
    """A class for every pixel, some of them ignored."""

    def drawn() -> tuple[Tensor, ...]:
        target = torch.randint(4, (3, 6, 5))
        return (torch.where(torch.rand(3, 6, 5) < ignored, -100, target),)

    module = functools.partial(nn.Conv2d, 2, 4, 3, padding=1, dtype=dtype)
    return Net(module, rows(3, 2, 6, 5, dtype=dtype), drawn, F.cross_entropy, SGD)


LOSSES: dict[str, Net] = {
    "every target counts": classifier(labels(6, 5)),
    "some ignored": classifier(with_ignored(6, 5, -100, 2)),
    "all but one ignored": classifier(lambda: (torch.tensor([-100, -100, 3, -100, -100, -100]),)),
    "all ignored": classifier(with_ignored(6, 5, -100, 1)),
    "a class ignored": classifier(with_ignored(6, 5, 2, 3), ignore_index=2),
    "bfloat16": classifier(labels(6, 5), torch.bfloat16),
    "bfloat16, some ignored": classifier(with_ignored(6, 5, -100, 4), torch.bfloat16),
    "bfloat16, all ignored": classifier(with_ignored(6, 5, -100, 1), torch.bfloat16),
    "float16": classifier(with_ignored(6, 5, -100, 4), torch.float16),
    "float64": classifier(with_ignored(6, 5, -100, 4), torch.float64),
    "smoothed": classifier(with_ignored(6, 5, -100, 4), label_smoothing=0.1),
    "pixels": pixels(),
    "pixels, none ignored": pixels(ignored=0.0),
    "pixels, all ignored": pixels(ignored=2.0),
    "pixels, bfloat16": pixels(torch.bfloat16),
    "one row": Net(lambda: nn.Linear(4, 5), rows(4), lambda: (torch.tensor(3),), F.cross_entropy),
    "tokens": replace(NETS["tied"], targets=with_ignored(15, 11, -100, 4)),
}
"""Means of cross-entropies, each with a trait that is easy to get wrong."""


@functools.cache
def case(name: str) -> tuple[Built, Graph, Graph]:
    net = (LOSSES[name] if name in LOSSES else NETS[name]).build()
    graph = functionalize(captured(net).graph)
    return net, graph, untangle(graph)


@pytest.mark.parametrize("name", [*LOSSES, *NETS])
def test_not_a_bit_changes(name: str) -> None:
    net, graph, after = case(name)
    verify(after)
    assert (after.inputs, after.outputs, after.constants) == (graph.inputs, graph.outputs, graph.constants)
    assert after.persistent_bytes() == graph.persistent_bytes()
    if after != graph:
        expected, found = (history(graph_step(each, net), 2) for each in (graph, after))
        assert differences(expected, found) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("flat", [True, False], ids=["rows", "pixels"])
def test_means_of_many_rows_are_the_same(dtype: torch.dtype, flat: bool) -> None:
    """More rows than numbers of half precision can count one by one."""
    net = Net(
        lambda: nn.Linear(2, 3, dtype=dtype) if flat else nn.Conv2d(2, 3, 1, dtype=dtype),
        rows(3001, 2, dtype=dtype) if flat else rows(2, 2, 40, 37, dtype=dtype),
        lambda: (torch.randint(-1, 3, (3001,) if flat else (2, 40, 37)),),
        functools.partial(F.cross_entropy, ignore_index=-1),
    ).build()
    graph = captured(net).graph
    assert differences(history(graph_step(graph, net), 2), history(graph_step(untangle(graph), net), 2)) == []
    assert untangle(graph) != graph


# --- what waits for what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_what_counts_depends_on_the_targets_alone(name: str) -> None:
    """The loss's backward formula and the loss itself take the number of targets from operators on the targets."""
    _, graph, after = case(name)
    (target,) = (value for value in graph.inputs if graph.values[value].name == "target:0")
    dag = dependency_graph(after)
    maker = {value: at for at, op in enumerate(after.ops) for value in op.made()}
    for op in after.ops:
        if "nll_loss" in op.target and "backward" in op.target:
            total = maker[op.inputs()[-1]]
            before = {total, *rx.ancestors(dag, total)}
            assert {value for at in before for value in after.ops[at].inputs() if value in after.inputs} == {target}
    assert [op.args[3] for op in after.ops if op.target in NLL] == [2]


def test_a_mean_as_a_reader_sees_it() -> None:
    net = Net(lambda: nn.Linear(4, 3), rows(5, 4), labels(5, 3), F.cross_entropy).build()
    graph = functionalize(captured(net).graph)
    check_golden("fission_untangle.txt", before_and_after(graph, untangle(graph)))


# --- what must stay ---------------------------------------------------------------------------------------------------


LIKE = """magis graph 1
storage 1 batch 24
storage 2 temporary 24
storage 3 temporary 12
value 1 @1 float32 [2, 3] {3, 1} +0
value 2 @2 float32 [2, 3] {3, 1} +0
input 1
op 0 %2 = aten.relu.default(%1) reads 1:0 phase forward
"""


def like(call: str, value: str = "float32 [2, 3] {3, 1}", nbytes: int = 24) -> Graph:
    graph = parse(
        f"{LIKE}storage 4 temporary {nbytes}\nvalue 3 @4 {value} +0\n"
        f'op 1 %3 = aten.{call} reads 2:0 phase backward module "a.b"\noutput 3\n'
    )
    verify(graph)
    return graph


@pytest.mark.parametrize(
    ("call", "value", "expected"),
    [
        ("ones_like.default(%2)", "float32 [2, 3] {3, 1}", "aten.full.default([2, 3], 1, "),
        ("zeros_like.default(%2)", "float32 [2, 3] {3, 1}", "aten.full.default([2, 3], 0, "),
        ("full_like.default(%2, 0.5)", "float32 [2, 3] {3, 1}", "aten.full.default([2, 3], 0.5, "),
        ("full_like.default(%2, 7, dtype=<dtype int64>)", "int64 [2, 3] {3, 1}", "aten.full.default([2, 3], 7, "),
        ("empty_like.default(%2)", "float32 [2, 3] {3, 1}", "aten.empty.memory_format([2, 3], "),
    ],
)
def test_a_factory_forgets_what_it_is_like(call: str, value: str, expected: str) -> None:
    graph = like(call, value, 48 if "int64" in value else 24)
    after = untangle(graph)
    verify(after)
    (_, op), (_, same_op) = graph.ops, after.ops
    assert (same_op.inputs(), same_op.reads, same_op.outputs) == ((), (), op.outputs)
    assert (same_op.phase, same_op.module) == ("backward", "a.b")
    dtype, _, _ = value.partition(" ")
    assert expected in dump(after)
    assert f"dtype=<dtype {dtype}>" in dump(after)
    results = [compile_step(each)([torch.randn(2, 3)], {})[0] for each in (graph, after)]
    assert results[0].dtype == results[1].dtype
    assert "empty" in call or same(*results)
