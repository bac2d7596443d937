"""The operators of a GPU in a step traced on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture import capture
from magis.capture.autocast import device_forms
from magis.graph import Graph, verify
from tests.nets import NETS, Attention, Block, Net, rows

EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"
CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def on(device: str, net: Net) -> Graph:
    built = net.build()
    graph = capture(
        built.module, built.inputs, built.targets, built.loss_fn, built.rule,
        device=device, explicit_attention=built.explicit_attention,
    ).graph  # fmt: skip
    verify(graph)
    return graph


def names(graph: Graph) -> set[str]:
    return {op.target for op in graph.ops}


def attention(dtype: torch.dtype = torch.float32, **more: object) -> Net:
    return Net(
        lambda: Attention(**more).to(dtype), rows(2, 6, 16, dtype=dtype), rows(2, 6, 16, dtype=dtype)  # type: ignore[arg-type]
    )  # fmt: skip


def test_attention_is_fused_as_the_device_does_it() -> None:
    assert CPU in names(on("cpu", attention()))
    assert {EFFICIENT, EFFICIENT.replace("attention.", "attention_backward.")} <= names(on("cuda", attention()))
    for half in (torch.float16, torch.bfloat16):
        assert {FLASH, FLASH.replace("attention.", "attention_backward.")} <= names(on("cuda", attention(half)))


@pytest.mark.parametrize("boolean", [False, True])
def test_a_mask_becomes_a_bias(boolean: bool) -> None:
    def run(block: nn.Module, x: Tensor) -> object:
        mask = torch.ones(6, 6, dtype=torch.bool).tril() if boolean else torch.zeros(6, 6)
        return F.scaled_dot_product_attention(x, x * block.w, x, attn_mask=mask)

    net = Net(lambda: Block(run, w=nn.Parameter(torch.ones(8))), rows(2, 2, 6, 8), rows(2, 2, 6, 8))
    graph = on("cuda", net)
    (op,) = [op for op in graph.ops if op.target == EFFICIENT]
    bias = graph.values[op.inputs()[3]]
    assert (bias.shape, bias.dtype) == ((2, 2, 6, 6), "float32")
    assert ("aten.where.self" in names(graph)) == boolean


def test_dropout_is_one_operator_on_a_gpu() -> None:
    assert "aten.native_dropout.default" not in names(on("cpu", NETS["dropout"]))
    graph = on("cuda", NETS["dropout"])
    assert len([op for op in graph.ops if op.target == "aten.native_dropout.default"]) == 2
    assert len([op for op in graph.ops if op.random]) == 2
    assert "aten.native_dropout_backward.default" in names(graph)


def test_attention_dropout_draws_random_numbers() -> None:
    for device, target in (("cuda", EFFICIENT), ("cpu", CPU)):
        for dropout in (0.0, 0.25):
            ops = [op for op in on(device, attention(dropout=dropout)).ops if op.target == target]
            assert device == "cpu" or len(ops) == 1
            assert all(op.random == (dropout > 0) for op in ops)


def test_the_forms_compute_the_same() -> None:
    """On real tensors of the CPU, where the operators exist there at all."""
    x = torch.randn(2, 3, 4)
    torch.manual_seed(1)
    with device_forms("cuda"):
        kept = F.dropout(x, 0.5) != 0
    assert 0 < int(kept.sum()) < x.numel()
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    with device_forms("cpu"):
        assert torch.equal(F.dropout(x, 0.0), x)
