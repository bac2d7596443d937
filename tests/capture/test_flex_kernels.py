"""`flex_attention` on a simulated GPU: the buffers of its kernels, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

import magis
from magis.capture import capture
from magis.cost.cost_model import device_model
from magis.errors import CaptureError
from magis.graph import Graph, verify
from tests.nets import SGD

BATCH, ROWS, HEADS, HEAD = 2, 384, 4, 64
FORWARD, BACKWARD = "magis_flex.flex_attention.default", "magis_flex.flex_attention_backward.default"


class Flexible(nn.Module):
    """Causal attention, by a block mask, with half as many heads of keys and an additive bias."""

    def __init__(self, call: Callable[..., Any], *, trained: bool = False) -> None:
        super().__init__()
        self.call = call
        self.query, self.key = nn.Linear(32, HEADS * HEAD), nn.Linear(32, HEADS // 2 * HEAD)
        self.slopes = nn.Parameter(torch.ones(HEADS), requires_grad=trained)
        self.blocks = flex.create_block_mask(lambda _b, _h, i, j: i >= j, None, None, ROWS, ROWS, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        slopes = self.slopes * 2

        def biased(score: Tensor, _batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + slopes[head] * (column - row)

        query, key = (part(x).unflatten(2, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key))
        out: Tensor = self.call(query, key, key, score_mod=self.mod(biased), block_mask=self.blocks, enable_gqa=True)
        return out

    def mod(self, biased: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return biased


class ByMethod(Flexible):
    """Its bias is read by a method."""

    def mod(self, _biased: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self.biased

    def biased(self, score: Tensor, _batch: Tensor, head: Tensor, _row: Tensor, _column: Tensor) -> Tensor:
        return score + self.slopes[head]


class ByClosure(ByMethod):
    """Its bias is read by a function whose closure has the module."""

    def mod(self, _biased: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda score, _batch, head, _row, _column: score + self.slopes[head]


def step(module: nn.Module, capability: tuple[int, int] | None = (9, 0)) -> Graph:
    inputs, targets = (torch.randn(BATCH, ROWS, 32),), (torch.randn(BATCH, HEADS, ROWS, HEAD),)
    graph = capture(module, inputs, targets, F.mse_loss, SGD, device="cuda", capability=capability).graph
    verify(graph)
    return graph


def test_the_step_has_the_buffers_of_the_kernels() -> None:
    graph = step(Flexible(torch.compile(flex.flex_attention)))
    (forward,), (backward,) = ([op for op in graph.ops if op.target == target] for target in (FORWARD, BACKWARD))
    out, rows, most = (graph.values[number] for number in forward.made())
    assert (out.shape, out.stride) == ((BATCH, HEADS, ROWS, HEAD), (ROWS * HEADS * HEAD, HEAD, HEADS * HEAD, 1))
    assert {(each.shape, each.dtype) for each in (rows, most)} == {((BATCH, HEADS, ROWS), "float32")}
    made = [graph.values[number] for number in backward.made()]
    assert [each.shape[1] for each in made] == [HEADS, HEADS // 2, HEADS // 2, HEADS]
    assert made[3].shape == rows.shape
    kept = set(forward.inputs()) & set(backward.inputs())
    assert len(kept) == len(set(forward.inputs()))  # the biases and the block mask, too
    assert set(forward.made()[:2]) <= set(backward.inputs())
    assert not any(value.shape[-2:] == (ROWS, ROWS) for value in graph.values.values())
    costs = device_model("sim:h100")
    assert costs.workspace(backward, graph.values) == 0
    assert costs.nanoseconds(backward, graph.values) > costs.nanoseconds(forward, graph.values)


def test_an_estimate_counts_it() -> None:
    def peak(call: Callable[..., Any]) -> int:
        targets = torch.randn(BATCH, HEADS, ROWS, HEAD)
        batch = torch.randn(BATCH, ROWS, 32), targets
        return magis.estimate(Flexible(call), batch, F.mse_loss, device="sim:h100").peak_bytes

    def written_out(query: Tensor, key: Tensor, value: Tensor, **_how: object) -> Tensor:
        return F.scaled_dot_product_attention(query.double(), key.double(), value.double(), enable_gqa=True).float()

    assert peak(torch.compile(flex.flex_attention)) + 4 * BATCH * HEADS * ROWS**2 < peak(written_out)


def test_calls_that_hold_scores_or_train_their_bias_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"outside of torch.compile; call torch.compile\(flex_attention\)"):
        step(Flexible(flex.flex_attention))
    with pytest.raises(CaptureError, match=r"outside of torch.compile"):
        step(Flexible(lambda *args, **named: checkpoint(flex.flex_attention, *args, use_reentrant=False, **named)))
    for kind in (Flexible, ByMethod, ByClosure):
        step(kind(torch.compile(flex.flex_attention)))
        with pytest.raises(CaptureError, match="score_mod is trained"):
            step(kind(torch.compile(flex.flex_attention), trained=True))
    with pytest.raises(CaptureError, match="does not support backward on CPU"):  # a real GPU runs its own kernel
        step(Flexible(torch.compile(flex.flex_attention)), None)


def test_a_checkpoint_runs_the_kernel_again() -> None:
    compiled = torch.compile(flex.flex_attention)
    graph = step(Flexible(lambda *args, **named: checkpoint(compiled, *args, use_reentrant=False, **named)))
    assert [op.phase for op in graph.ops if op.target == FORWARD] == ["forward", "backward"]


def test_torch_is_as_it_was() -> None:
    before = dict(vars(flex))
    step(Flexible(torch.compile(flex.flex_attention)))
    assert vars(flex) == before
