"""Random regions of the networks: what loops compute is what the whole operators do, in the bytes that were said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from magis.capture import OptimizerSpec
from magis.fission.candidates import grow
from magis.fission.proof import verify_fission
from magis.fission.region import Region
from magis.graph import verify
from magis.rewrite.functionalize import functionalize, untangle
from magis.search.split_at_peak import with_loop_inside
from tests.fission.cutout import check_same, loops
from tests.fission.draws import NETWORKS, drawn, nested
from tests.fission.test_components import COSTS
from tests.nets import Block, Net
from tests.oracles import captured, graph_step, history

MIB = 1 << 20
QUICK = 2
PER_BATCH = 24
BATCHES = 6


def check_seed(name: str, seed: int, most_bytes: int, *, uneven: bool = False) -> int:
    """One fission of a network; with an odd seed nested, if its body can be split. Returns the number of loops."""
    inside = seed % 2 == 1
    fission = drawn(name, seed, most_bytes=most_bytes, uneven=uneven and not inside)
    fission = (nested(fission, seed, uneven=uneven) if inside else None) or fission
    verify(fission.looped)
    verify_fission(fission.looped, fission.graph)
    whole, looped = fission.pair
    verify(whole)
    check_same(whole, looped, seed)
    return len(loops(fission.looped))


@pytest.mark.parametrize("name", NETWORKS)
def test_regions_compute_the_same_in_the_bytes_said(name: str) -> None:
    found = [check_seed(name, seed, 8 * MIB) for seed in range(QUICK)]
    assert len(found) == QUICK


@pytest.mark.parametrize("name", NETWORKS)
def test_regions_with_a_smaller_last_part_compute_the_same_in_the_bytes_said(name: str) -> None:
    for seed in range(QUICK):
        check_seed(name, seed, 8 * MIB, uneven=True)


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", NETWORKS)
def test_many_regions_compute_the_same_in_the_bytes_said(name: str, batch: int) -> None:
    """Together 2,016, about half of them nested."""
    found = [check_seed(name, 1000 + batch * PER_BATCH + at, 48 * MIB) for at in range(PER_BATCH)]
    assert found.count(2) >= PER_BATCH // 6


def test_what_no_result_needs_is_no_part_of_the_last_part() -> None:
    """Softmaxes run over scores that nobody reads; other operators of the loop are needed."""

    def run(net: Block, x: Tensor) -> Tensor:
        y: Tensor = net.up(x)
        torch.softmax(y * 2, -1).tanh()
        return y.square().mean()

    make = lambda: Block(run, up=nn.Linear(8, 64)).double()  # noqa: E731
    data = lambda: (torch.randn(9, 8, dtype=torch.float64),)  # noqa: E731
    net = Net(make, data, tuple, None, OptimizerSpec("sgd", lr=0.1)).build()
    graph = untangle(functionalize(captured(net).graph))
    (given,) = (value for value in graph.inputs if graph.values[value].name.startswith("input:"))
    cuts = grow(graph, {given: 0}, range(len(graph.ops)))
    cuts = {at: split for at, split in cuts.items() if graph.ops[at].target.split(".")[1] not in ("mean", "sum")}
    looped = with_loop_inside(graph, Region(cuts, 5, uneven=True), COSTS, reuse=True)
    (body,) = (op.body.graph for op in looped.ops if op.body is not None)
    assert any(op.target == "aten._softmax.out" for op in body.ops)
    for their, our in zip(*(history(graph_step(each, net), 2) for each in (graph, looped)), strict=True):
        for key, tensor in their.items():
            torch.testing.assert_close(our[key], tensor)
