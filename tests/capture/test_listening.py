"""What eager's run of a step tells a capture: strides that torch's functions for fakes give otherwise, and branches."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from magis.capture import Captured, OptimizerSpec, capture
from magis.capture.captured import record_eager
from magis.capture.refusals import BranchError
from magis.errors import CaptureError
from magis.graph import Graph, Value
from magis.planner.conformance import check_conforms, first_difference
from magis.simulate.simulator import replay
from tests.nets import Built
from tests.oracles import differences, eager_step, graph_step, observed, workspaces

RULE = OptimizerSpec("gradients")


class OneQuery(nn.Module):
    """Attention of a single token, whose strides kernels choose."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows, words, width = x.shape
        q = self.q(x[:, 0]).unsqueeze(1).reshape(rows, 1, 2, width // 2).permute(0, 2, 1, 3)
        k, v = self.kv(x).reshape(rows, words, 2, 2, width // 2).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, width)


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def test_a_capture_follows_eagers_layouts() -> None:
    module, inputs = OneQuery(), (torch.randn(3, 5, 16),)
    eager = record_eager(module, inputs, (), squares, RULE)
    plain = capture(module, inputs, (), squares, RULE)
    assert first_difference(plain.graph, eager.graph)
    following = capture(module, inputs, (), squares, RULE, heard=eager.heard)
    assert not first_difference(following.graph, eager.graph)
    assert not following.expects


def test_only_strides_that_say_nothing_may_differ() -> None:
    """Those of dimensions of one element: kernels and torch's functions for fake tensors choose them freely."""
    found = capture(OneQuery(), (torch.randn(3, 5, 16),), (), squares, RULE).graph
    odd = next(value for op in found.ops for value in op.outputs if value is not None and is_odd(found.values[value]))

    def strided(index: int) -> Graph:
        value = found.values[odd]
        stride = tuple(each + 7 * (at == index) for at, each in enumerate(value.stride))
        return replace(found, values={**found.values, odd: replace(value, stride=stride)})

    for index, size in enumerate(found.values[odd].shape):
        other = strided(index)
        assert first_difference(other, found)
        with nullcontext() if size == 1 else pytest.raises(CaptureError, match="not what eager runs"):
            check_conforms(other, found)


class Weighted(nn.Module):
    """A sum of parts, each by its own weights: the backward multiplies a spread gradient by weights that lie across."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.split, self.weights, self.joined = nn.Linear(6, parts * 6), nn.Linear(6, parts), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.split(x).unflatten(-1, (-1, 6)).movedim(1, 0)
        return (self.joined(y) * self.weights(x).softmax(-1).T[..., None]).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_results_lie_where_eagers_lie_in_any_dtype(dtype: torch.dtype, autocast: str | None) -> None:
    """Torch's functions for fakes lay out a product of half precision as if its operands were copied first."""
    module, inputs = Weighted(4).to(dtype), (torch.randn(5, 6, dtype=dtype),)
    eager = record_eager(module, inputs, (), squares, RULE, autocast=autocast)
    found = capture(module, inputs, (), squares, RULE, autocast=autocast)
    check_conforms(found.graph, eager.graph)
    net = Built(module, inputs, (), squares, RULE)
    if autocast is None:
        persistent = found.graph.persistent_bytes()
        expected, peak, tensors = observed(eager_step(net), persistent)
        profile = replay(found.graph, workspaces().of(found.graph), deaths=found.deaths, numbers=found.numbers)
        assert [peak, tensors] == [profile.peak_bytes, profile.tensor_bytes]
        assert differences(expected, observed(graph_step(found.graph, net), persistent)[0]) == []


def test_a_difference_of_strides_alone_is_said() -> None:
    found = capture(OneQuery(), (torch.randn(3, 5, 16),), (), squares, RULE).graph
    moved = next(value for op in found.ops for value in op.made() if len(found.values[value].shape) > 2)
    stride = (999, *found.values[moved].stride[1:])
    other = replace(found, values={**found.values, moved: replace(found.values[moved], stride=stride)})
    assert f"strides {[*stride]} captured" in first_difference(other, found)


def is_odd(value: Value) -> bool:
    return 1 in value.shape and max(value.shape) > 1


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        for _ in range(2):
            if torch.isfinite(y).all():
                y = y.tanh()
        return y if y.max() > 5 else -y


def taken(found: Captured) -> list[object]:
    return [op.args[1] for op in found.graph.ops if op.target == "magis.expect.default"]


def test_branches_go_where_eagers_go() -> None:
    module, inputs = Branching(), (torch.randn(3, 4),)
    with pytest.raises(BranchError, match=r"test_listening\.py"):
        capture(module, inputs, (), squares, RULE)
    eager = record_eager(module, inputs, (), squares, RULE, expects=True)
    found = capture(module, inputs, (), squares, RULE, heard=eager.heard)
    assert taken(found) == taken(eager) == [True, True, False]
    assert not first_difference(found.graph, eager.graph)
    other = record_eager(module, (torch.full((3, 4), torch.inf),), (), squares, RULE, expects=True)
    assert taken(other)[0] is False
    assert first_difference(found.graph, other.graph)
