"""Optimizer state in host memory: eager's numbers and predicted bytes in every order of copies, on any memory limit."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from magis.errors import VerifyError
from magis.graph import Graph, Op, verify
from magis.planner.plan_proof import prove
from magis.rewrite.copies_ahead import with_copies_ahead
from magis.rewrite.functionalize import functionalize
from magis.rewrite.moved_state import (
    first_states,
    host_bytes,
    movable_state,
    moved_state,
    with_moved_state,
)
from magis.rewrite.realize import realize
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.simulator import replay
from magis.simulate.timeline import elapsed_ns
from tests.nets import NETS, Built
from tests.oracles import captured, differences, eager_step, graph_step, history, observed, one_thread, workspaces
from tests.runtime.swapping import Costs, recorded
from tests.runtime.test_streams import check
from tests.strategies import examples, random_flags

MOVING = ["batch-norm", "dropout", "bfloat16"]
EVERY = [name for name, net in NETS.items() if net.build().rule.kind in ("momentum", "adam", "adamw")]


@functools.cache
def built(name: str) -> Built:
    return NETS[name].build()


@functools.cache
def step_of(name: str) -> Graph:
    return functionalize(captured(built(name)).graph)


@functools.cache
def eager(name: str) -> list[dict[str, Tensor]]:
    return history(eager_step(built(name)), 3)


def moved(name: str, share: float = 1.0) -> Graph:
    graph = step_of(name)
    whole = sum(graph.storages[each].nbytes for each in movable_state(graph))
    found = with_moved_state(graph, first_states(graph, int(share * whole)))
    verify(found)
    return found


def peak(graph: Graph) -> int:
    return replay(graph, workspaces().of(graph)).peak_bytes


@pytest.mark.parametrize("name", EVERY)
def test_state_moves_and_bytes_are_those_predicted(name: str) -> None:
    with one_thread():
        plain, graph = step_of(name), moved(name)
        size = host_bytes(graph)
        assert graph.persistent_bytes() == plain.persistent_bytes() - size < plain.persistent_bytes()
        names = [plain.values[each].name for each in plain.inputs]
        assert moved_state(graph) == {each.partition(":")[2] for each in names if each.startswith("state:")}
        seen, allocated, tensors = observed(graph_step(graph, built(name)), graph.persistent_bytes())
        found = replay(graph, workspaces().of(graph))
        assert differences(eager(name)[:2], seen) == []
        assert (tensors, allocated) == (found.tensor_bytes, found.peak_bytes)
        prove(graph, plain)


@pytest.mark.parametrize("name", MOVING)
@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    room=st.sampled_from([0.0, 0.1, 0.5, 9.0]),
    hurry=st.sampled_from([1.0, 4.0, 64.0]),
)
@examples(8)
def test_any_plan_with_copies_ahead_is_eagers_step_within_its_limit(
    name: str, seed: int, share: float, room: float, hurry: float
) -> None:
    """Copies of state and of activations run ahead within the limit, never above it or the plan's own peak, also those
    that a link faster than the device's was planned for; no order of streams races."""
    with one_thread():
        graph = moved(name, share)
        compiled = compile_problem(graph, Faster(hurry))
        order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
        flags = random_flags(compiled.problem, np.random.default_rng(seed))
        plan = realize(compiled, expand(compiled.problem, order, flags))
        workspace = workspaces().of(plan)
        own = replay(plan, workspace).peak_bytes
        limit = int(own * (1 + room))
        found = with_copies_ahead(plan, Costs(), workspace, 1, limit)
        verify(found)
        prove(found, step_of(name))
        assert replay(found, workspace).peak_bytes <= limit
        assert elapsed_ns(found, Costs()) <= elapsed_ns(plan, Costs())
        gpu, seen, _ = recorded(found, built(name), 3)
        assert differences(eager(name), seen) == []
        check(gpu)


class Faster(Costs):
    """Costs with a faster host link."""

    def __init__(self, hurry: float) -> None:
        self.link_bytes_per_s = hurry * Costs.link_bytes_per_s
        self.copy_ns = round(Costs.copy_ns / hurry)


def test_a_step_whose_link_is_quick_waits_for_no_copy() -> None:
    class Quick(Costs):
        link_bytes_per_s, copy_ns = 1e15, 0

    plain, graph = step_of("encoder-layer"), moved("encoder-layer")
    found = with_copies_ahead(graph, Quick(), workspaces().of(graph), 1, 2 * peak(graph))
    own = sum(op.target.startswith("magis.") for op in graph.ops)
    assert own == 3 * len(moved_state(graph))
    assert elapsed_ns(found, Quick()) <= 1.01 * elapsed_ns(plain, Quick())


def refused(graph: Graph) -> None:
    def check_all() -> None:
        verify(graph)
        prove(graph, step_of("encoder-layer"))

    with pytest.raises(VerifyError):
        check_all()


@pytest.mark.parametrize("left_out", ["magis.store", "magis.load", "magis.wait"])
def test_a_plan_without_one_of_the_copies_is_refused(left_out: str) -> None:
    graph = moved("encoder-layer")
    first = next(op for op in graph.ops if op.target == left_out)
    broken = replace(graph, ops=tuple(op for op in graph.ops if op is not first))
    refused(broken)


def test_a_plan_that_stores_something_else_is_refused() -> None:
    graph = moved("encoder-layer")
    stores = [op for op in graph.ops if op.target == "magis.store"]
    alike = {op.id: graph.values[op.inputs()[0]].shape for op in stores}
    one, other = next((a, b) for a in stores for b in stores if a.id < b.id and alike[a.id] == alike[b.id])

    def swapped(op: Op) -> Op:
        into = {one.id: other, other.id: one}.get(op.id)
        if into is None:
            return op
        return replace(op, args=(op.args[0], into.args[1]), outputs=into.outputs, writes=into.writes)

    refused(replace(graph, ops=tuple(map(swapped, graph.ops))))
