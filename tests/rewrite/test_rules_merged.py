"""Weights that are merged: which layouts can be, what becomes of versions, and that nothing is copied in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magis.errors import MagisError
from magis.extensions.paper.interim_rules import rule
from magis.graph import Graph, Op, Ref, Storage, Value, verify
from magis.ops.optimizers import OptimizerSpec
from magis.rewrite.functionalize import functionalize
from magis.rewrite.rules.matching import Index
from magis.rewrite.rules.merged_weights import MERGED
from magis.rewrite.rules.rule_table import aggregated, apply, matches
from magis.runtime.steps import GraphStep
from tests.golden.golden import before_and_after, check_golden
from tests.nets import ADAMW, FORWARD, OPTIMIZERS, Block, Net, rows
from tests.oracles import captured, graph_step, history, observed
from tests.rewrite.alike import check_training, merge
from tests.strategies import adversarial_orders, reordered


class Heads(nn.Module):
    """Three linear layers on one input, of several widths, and their sum's use."""

    def __init__(self, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, width, bias=bias, dtype=dtype) for width in (4, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        # not softmax, of which the gradient of the key's bias is rounding alone, which Adam divides by its own size
        mixed: Tensor = torch.tanh(query @ key.t()) @ value
        return mixed.sum(1)


def heads(rule_of_update: OptimizerSpec, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> Net:
    return Net(
        lambda: Heads(bias=bias, dtype=dtype), rows(7, 6, dtype=dtype), rows(7, dtype=dtype), rule=rule_of_update
    )


def normal(net: Net) -> Graph:
    return functionalize(captured(net.build()).graph)


def merged_inputs(graph: Graph) -> list[Value]:
    return [graph.values[number] for number in graph.inputs if graph.values[number].name.startswith(MERGED)]


def copies_of_weights(graph: Graph) -> list[Op]:
    """Calls other than updates that make a copy of a parameter."""
    copying = ("aten.cat.default", "aten.clone.default")
    weights = {number for number, value in graph.values.items() if graph.storages[value.storage].kind == "parameter"}
    return [op for op in graph.ops if op.target in copying and weights.intersection(op.inputs())]


def test_golden() -> None:
    before = normal(heads(FORWARD, bias=False))
    after = apply(before, next(matches(rule("merge-mm"), before)))
    verify(after)
    check_golden("rules_merged_weights.txt", before_and_after(before, after))


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_training(kind: str, bias: bool) -> None:
    """Three steps of every optimizer come to eager's weights and state; bytes are as simulated; nothing is copied."""
    net = heads(OPTIMIZERS[kind], bias=bias)
    before = normal(net)
    after, applied = aggregated(before)
    verify(after)
    assert applied["merge-addmm" if bias else "merge-mm"] == 1
    assert sum(op.target in ("aten.mm.default", "aten.addmm.default") for op in after.ops) < sum(
        op.target in ("aten.mm.default", "aten.addmm.default") for op in before.ops
    )
    assert len(merged_inputs(after)) == 1 + bias
    assert copies_of_weights(after) == []
    assert after.persistent_bytes() == before.persistent_bytes()
    check_training(after, net.build(), history(graph_step(before, net.build())), rtol=1e-9, atol=1e-11)


def test_every_legal_order_computes_the_same() -> None:
    """The versions of the common storage keep updates behind the readers of all parts."""
    net = heads(ADAMW)
    after, _ = aggregated(normal(net))
    expected, *_ = observed(graph_step(after, net.build()), 0)
    for order in adversarial_orders(after, 3, randoms=3):
        moved = reordered(after, order)
        verify(moved)
        found, *_ = observed(graph_step(moved, net.build()), 0)
        for theirs, ours in zip(expected, found, strict=True):
            assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_the_way_back_reads_windows_of_the_merged_weight() -> None:
    """Split again, each product reads its own rows: bit-identical to the products of the parameters."""
    net = heads(FORWARD, bias=False)
    before = normal(net)
    after = apply(before, next(matches(rule("merge-mm"), before)))
    back = apply(after, next(matches(rule("split-mm"), after)))
    verify(back)
    assert [op.target for op in back.ops].count("aten.mm.default") == [op.target for op in before.ops].count(
        "aten.mm.default"
    )
    assert copies_of_weights(back) == []
    left, right = (history(graph_step(graph, net.build()), 1)[0]["loss"] for graph in (before, back))
    assert torch.equal(left, right)


def test_an_update_in_between_forbids_the_merge() -> None:
    """A layer runs, one of the weights is updated, another layer with the same input runs: versions differ."""

    def run(block: Any, x: Tensor) -> Tensor:
        first = block.a(x)
        block.b.weight.add_(1.0)
        return torch.relu(first) + torch.relu(block.b(x))

    def layers() -> Block:
        return Block(run, a=nn.Linear(3, 2, bias=False), b=nn.Linear(3, 2, bias=False))

    graph = normal(Net(layers, rows(4, 3), rule=FORWARD, loss_fn=None))
    assert [*rule("merge-mm").occurrences(Index(graph))]
    assert not [*matches(rule("merge-mm"), graph)]


def test_a_match_that_is_refused_half_way_leaves_its_weights_apart() -> None:
    """Of three pairs the second has biases that can lie side by side, and one weight for both, which cannot."""

    def pair(block: Any, one: str, other: str, x: Tensor) -> Tensor:
        first, second = getattr(block, one), getattr(block, other)
        return torch.relu(first(x)) * torch.tanh(second(x))

    def run(block: Any, x: Tensor) -> Tensor:
        return pair(block, "e", "f", pair(block, "c", "d", pair(block, "a", "b", x))).sum(1)

    def layers() -> Block:
        block = Block(run, **{name: nn.Linear(4, 4, dtype=torch.float64) for name in "abcdef"})
        block.d.weight = block.c.weight  # type: ignore[union-attr]
        return block

    net = Net(layers, rows(7, 4, dtype=torch.float64), rows(7, dtype=torch.float64), rule=FORWARD)
    before = normal(net)
    after, applied = aggregated(before)
    verify(after)
    assert applied["merge-addmm"] == 2
    merged = {value.name.removeprefix(MERGED) for value in merged_inputs(after)}
    assert merged == {
        f"parameter:{a}.{kind},parameter:{b}.{kind}" for a, b in ("ab", "ef") for kind in ("weight", "bias")
    }
    check_training(after, net.build(), history(graph_step(before, net.build())), rtol=1e-9, atol=1e-11)


# -- layouts ----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, bool]] = {
    "rows of a matrix": ((3, 4), (4, 1), 0, True),
    "columns of a row-major matrix": ((3, 4), (4, 1), 1, False),
    "columns of a transposed weight": ((4, 3), (1, 4), 1, True),
    "rows of a transposed weight": ((4, 3), (1, 4), 0, False),
    "a bias": ((5,), (1,), 0, True),
    "channels out": ((3, 2, 3, 3), (18, 9, 3, 1), 0, True),
    "channels in": ((3, 2, 3, 3), (18, 9, 3, 1), 1, False),
    "channels out, channels last": ((3, 2, 3, 3), (18, 1, 6, 2), 0, True),
    "one row": ((1, 4), (4, 1), 0, True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    shape, stride, dim, possible = LAYOUTS[name]
    graph, values = two_weights(shape, stride)
    found = merge(graph, values, dim)
    assert (found is not None) == possible
    if found is None:
        return
    after, window = found
    verify(after)
    first, second = (torch.randn(shape).as_strided(shape, stride) for _ in range(2))
    whole = after.values[window.base]
    memory = torch.empty(whole.shape)
    for number, tensor in zip((0, 1), (first, second), strict=True):
        part = after.values[number]
        memory.as_strided(part.shape, part.stride, part.offset).copy_(tensor)
    shown = memory[window.low : window.high].permute(window.dims)
    assert torch.equal(shown, torch.cat([first, second], dim))


def two_weights(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Graph, list[Value]]:
    values = [Value(number, shape, stride, "float32", number + 1, 0, f"parameter:{number}") for number in range(2)]
    storages = {number + 1: Storage(number + 1, values[0].nbytes, "parameter") for number in range(2)}
    return Graph(storages, {value.id: value for value in values}, (), (0, 1), ()), values


def refusals() -> Iterator[Any]:
    graph, (a, b) = two_weights((3, 4), (4, 1))
    other = replace(b, dtype="int32")
    yield pytest.param(replace(graph, values={0: a, 1: other}), [a, other], id="two data types")
    yield pytest.param(graph, [a, a], id="the same weight twice")
    part = replace(a, id=2, shape=(2, 4))
    yield pytest.param(replace(graph, values={0: a, 1: b, 2: part}), [part, b], id="not all of a storage")
    batch = {1: graph.storages[1], 2: replace(graph.storages[2], kind="batch")}
    yield pytest.param(replace(graph, storages=batch), [a, b], id="no parameter")
    placed = Op(0, "aten.as_strided.default", (Ref(0), (2,), (1,), 3), (), ())
    yield pytest.param(replace(graph, ops=(placed,)), [a, b], id="somebody names an absolute place")


@pytest.mark.parametrize(("graph", "values"), [*refusals()])
def test_refused(graph: Graph, values: list[Value]) -> None:
    assert merge(graph, values, 0) is None


# -- placement --------------------------------------------------------------------------------------------------------


def bound(graph: Graph, module: nn.Module, net: Net) -> GraphStep:
    built = net.build()
    return GraphStep(graph, module, built.inputs, built.targets, built.rule)


def test_parameters_keep_identity_and_values() -> None:
    net = heads(ADAMW)
    after, _ = aggregated(normal(net))
    module = net.build().module
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    step = bound(after, module, net)
    for name, parameter in module.named_parameters():
        same, values = before[name]
        assert parameter is same
        assert torch.equal(parameter, values)
    memory = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(memory) == 2  # weights and biases
    again = bound(after, module, net)  # lies there already: both steps stay good
    for each in (step, again):
        each.prepare()
        each.run()


def test_a_moved_parameter_is_noticed() -> None:
    net = heads(ADAMW)
    after, _ = aggregated(normal(net))
    module = net.build().module
    step = bound(after, module, net)
    key: Any = module.key
    key.weight.data = key.weight.data.clone()
    with pytest.raises(MagisError, match=r"parameter:key\.weight lies no longer"):
        step.prepare()
