"""Gradients of cross-entropies in one tensor of their scores' size: the same numbers, in fewer bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from magis.errors import VerifyError
from magis.fission.candidates import numbers_of_parts
from magis.fission.expand import expand
from magis.fission.loss_suffix import pieces
from magis.fission.proof import verify_fission
from magis.fission.region import Region, most_parts
from magis.graph import Graph, verify
from magis.planner.plan_proof import prove
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.losses import with_lean_cross_entropy
from magis.search.fission_pareto import whole_front
from magis.simulate.simulator import replay
from tests.nets import SGD, Built, Net, rows
from tests.oracles import Costs, captured, graph_step, history, observed, workspaces
from tests.rewrite.test_untangle import LOSSES, SUMS, with_ignored

WIDE = Net(
    lambda: nn.Linear(4, 4000), rows(8, 4, dtype=torch.float32), with_ignored(8, 4000, -100, 3),
    nn.functional.cross_entropy, SGD,
)  # fmt: skip
SMALL = Net(
    lambda: nn.Linear(4, 40), rows(8, 4, dtype=torch.float32), lambda: (torch.arange(8, dtype=torch.uint8),),
    nn.functional.cross_entropy, SGD,
)  # fmt: skip
NETS = {**LOSSES, **SUMS, "many classes": WIDE, "class numbers of a byte": SMALL}
KEPT = ("of a byte", "bfloat16", "float16", "pixels", "one row", "smoothed", "class weights")
"""Losses whose gradient stays torch's: other types, layouts and formulas."""
SCORES = "aten._log_softmax_backward_data.default"


@functools.cache
def case(name: str) -> tuple[Built, Graph, Graph]:
    net = NETS[name].build()
    graph = untangle(functionalize(captured(net).graph))
    return net, graph, with_lean_cross_entropy(graph)


def is_kept(name: str) -> bool:
    return any(kind in name for kind in KEPT)


@pytest.mark.parametrize("name", NETS)
def test_the_numbers_are_torchs_but_for_the_last_digits(name: str) -> None:
    net, graph, lean = case(name)
    verify(lean)
    assert (lean == graph) == is_kept(name) == any(op.target == SCORES for op in lean.ops)
    assert (lean.inputs, lean.outputs) == (graph.inputs, graph.outputs)
    expected, found = (history(graph_step(each, net), 2) for each in (graph, lean))
    for their, our in zip(expected, found, strict=True):
        for key, tensor in their.items():
            wide = tensor.dtype == torch.float64
            rtol, atol = (1e-12, 1e-13) if wide else (2e-5, 1e-6)
            torch.testing.assert_close(our[key], tensor, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in NETS if not is_kept(name)])
def test_parts_of_it_are_parts_of_the_step(name: str) -> None:
    """In the bytes that are simulated; and no plan of the step with torch's own kernels."""
    net, graph, lean = case(name)
    regions = [piece.cuts for piece in pieces(lean) if any("scatter_add" in lean.ops[at].target for at in piece.cuts)]
    assert regions
    looped = expand(lean, Region(regions[0], numbers_of_parts(most_parts(regions[0]))[0]), in_place=True)
    verify(looped)
    verify_fission(looped, lean)
    prove(looped, lean)
    with pytest.raises(VerifyError):
        prove(looped, graph)
    _, peak, _ = observed(graph_step(looped, net), looped.persistent_bytes())
    assert peak == replay(looped, workspaces().of(looped)).peak_bytes


def test_it_overwrites_the_log_softmax() -> None:
    """The largest tensor, of scores, is there once less; another operator holds the peak then."""
    _, graph, lean = case("many classes")
    peaks = [min(p.peak for p in whole_front(each, Costs(each), reuse=True).points) for each in (graph, lean)]
    assert peaks[0] - peaks[1] >= 0.5 * 8 * 4000 * 4
