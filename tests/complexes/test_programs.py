"""Random programs on complex tensors: captured, planned, run in parts; eager's bits, and bytes as simulated."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from magis.fission.proof import verify_fission
from magis.fission.region import Region, region_problems
from magis.graph.hazards import dependency_graph
from magis.ops.splits import splits
from magis.rewrite.functionalize import untangle
from magis.simulate.problem import SWAP
from tests.complexes.programs import programs
from tests.fission.cutout import check_same, in_float64
from tests.fission.draws import Fission, expanded, position_of_loop, regions
from tests.nets import Block, Built, Net
from tests.oracles import differences, eager_step, graph_step, history
from tests.rewrite.cases import Case
from tests.strategies import examples

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real")


@given(net=programs(), seed=st.integers(0, 10_000))
@examples(12)
def test_plans_compute_eagers_numbers(net: Net, seed: int) -> None:
    """As captured three steps, then with recomputation, swaps and memory taken over, in several orders."""
    case = Case(_running(net))
    assert differences(history(eager_step(case.net)), history(graph_step(case.step.graph, case.net))) == []
    for at in range(3):
        case.check(*case.drawn_plan(3 * seed + at))


@given(net=programs(), seed=st.integers(0, 10_000))
@examples(6)
def test_parts_compute_the_same(net: Net, seed: int) -> None:
    """A random region of the step as a loop, in double precision."""
    graph = in_float64(untangle(Case(_running(net)).graph))
    for region in regions(graph, dependency_graph(graph), random.Random(seed), 20):
        looped = expanded(graph, region)
        if looped is not None:
            verify_fission(looped, graph)
            check_same(*Fission(graph, region, looped, position_of_loop(looped)).pair, seed)
            return
    assume(False)


def _negated(made: Tensor) -> Tensor:
    made.real.neg_()
    return made.real.sin() * made.imag


def test_what_was_written_through_a_view_of_another_type_comes_back_from_the_host() -> None:
    """The backward reads the view that was written through, on the copy that was loaded."""
    net = Net(
        lambda: Block(lambda block, z: _negated(z @ block.w), w=nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))),
        lambda: (torch.randn(4, 6, dtype=torch.complex64),),
        loss_fn=lambda made: made.mean(),
    )
    case = Case(net.build())
    graph, _ = case.check(case.program_order(), np.full(case.compiled.problem.n_storages, SWAP, dtype=np.int8))
    loaded = {value for op in graph.ops if op.target == "magis.load" for value in op.made()}
    views = {op.target for op in graph.ops if op.made() and loaded.issuperset(op.inputs())}
    assert "aten.view_as_real.default" in views


def _running(net: Net) -> Built:
    built = net.build()
    try:
        eager_step(built).run()
    except RuntimeError:  # strides that eager refuses to view as complex numbers
        assume(False)
    return built


def test_no_loop_opens_views_of_a_conjugated_batch() -> None:
    """A part of the batch would be a plain copy, its conjugate one that products copy once more."""
    net = Net(
        lambda: Block(
            lambda block, z: (z.conj() * block.w).abs(), w=nn.Parameter(torch.randn(6, dtype=torch.complex64))
        ),
        lambda: (torch.randn(6, 4, 6, dtype=torch.complex64).conj(),),
        loss_fn=lambda made: made.sum(),
    )
    graph = untangle(Case(net.build()).graph)
    view = next(at for at, op in enumerate(graph.ops) if op.target == "aten._conj.default")
    used = next(at for at, op in enumerate(graph.ops) if set(op.inputs()) & set(graph.ops[view].made()))
    along = next(split for split in splits(graph.ops[view], graph.values) if split.inputs == (1,))
    other = next(split for split in splits(graph.ops[used], graph.values) if split.inputs[0] == 1)
    (problem, *_) = region_problems(graph, Region({view: along, used: other}, 2))
    assert problem.endswith("opens a view in parts of value 1, which has the bits conj"), problem
