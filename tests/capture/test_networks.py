"""Small networks of every trait: the captured step is eager's, number by number and byte by byte."""

from __future__ import annotations

import functools

import pytest

from magis.capture import Captured
from magis.graph import Graph, verify
from magis.simulate.simulator import replay
from tests.nets import NETS, Built
from tests.oracles import captured, differences, eager_step, graph_step, history, interpret, measured, same, workspaces
from tests.strategies import adversarial_orders, reordered


@functools.cache
def case(name: str) -> tuple[Built, Captured]:
    net = NETS[name].build()
    return net, captured(net)


@functools.cache
def all_workspaces_known() -> None:
    """One profile for all networks instead of one each."""
    workspaces().learn(*(case(name)[1].graph for name in NETS))


def simulated(graph: Graph, step: Captured | None = None) -> tuple[int, int]:
    """Peak and tensor bytes; of eager's own lifetimes if ``step`` is given."""
    all_workspaces_known()
    eager = {} if step is None else {"deaths": step.deaths, "numbers": step.numbers}
    profile = replay(graph, workspaces().of(graph), **eager)  # type: ignore[arg-type]
    return profile.peak_bytes, profile.tensor_bytes


@pytest.mark.parametrize("name", NETS)
def test_three_steps_equal_eager(name: str) -> None:
    """Loss, weights, buffers, optimizer state and the generator, bit for bit."""
    net, step = case(name)
    verify(step.graph)
    eager = history(eager_step(net))
    assert differences(eager, history(graph_step(step.graph, net))) == []
    if net.rule.kind not in ("none", "gradients") and name != "empty-batch":
        changed = [key for key in eager[0] if key != "random" and not same(eager[0][key], eager[2][key])]
        assert changed, "nothing was trained"


@pytest.mark.parametrize("name", NETS)
def test_simulated_bytes_are_the_measured_ones(name: str) -> None:
    """Of eager's step, and of the captured graph run as it is."""
    net, step = case(name)
    persistent = step.graph.persistent_bytes()
    assert simulated(step.graph, step) == measured(eager_step(net), persistent)
    assert simulated(step.graph) == measured(graph_step(step.graph, net), persistent)


@pytest.mark.parametrize("name", NETS)
def test_storages_are_as_large_as_the_kernels_make_them(name: str) -> None:
    """And every value looks at them as the real tensor does."""
    net, step = case(name)
    graph = step.graph
    for value, tensor in interpret(graph, net, all_values=True).items():
        known = graph.values[int(value)]
        assert tuple(tensor.shape) == known.shape, value
        assert str(tensor.dtype) == f"torch.{known.dtype}", value
        strides = [(a, b) for a, b, size in zip(tensor.stride(), known.stride, known.shape, strict=True) if size > 1]
        assert tensor.numel() == 0 or all(a == b for a, b in strides), value
        assert tensor.storage_offset() == known.offset, value
        if graph.storages[known.storage].kind == "temporary":
            assert tensor.untyped_storage().nbytes() == graph.storages[known.storage].nbytes, value


@pytest.mark.parametrize("name", NETS)
def test_every_legal_order_gives_the_same_numbers(name: str) -> None:
    net, step = case(name)
    expected = interpret(step.graph, net)
    for order in adversarial_orders(step.graph, seed=len(name)):
        verify(reordered(step.graph, order))
        found = interpret(step.graph, net, order)
        assert [key for key in expected if not same(expected[key], found[key])] == [], order


def test_captures_repeat() -> None:
    for name in ("tied", "batch-norm", "attention-dropout"):
        again = captured(NETS[name].build())
        assert again == case(name)[1]
