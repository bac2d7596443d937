"""The GPT of the vendor's row in docs/strategies.md: sizes, causality, options."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from magis.extensions.models.building import REAL, SelfAttention
from magis.extensions.models.decoders import GptConfig, gpt
from magis.models import get

TINY = GptConfig(2, 6, layers=2, width=8, heads=2, vocab_size=9, max_positions=7, dropout=0.0)


def test_paper_size_is_the_vendor_s_row() -> None:
    with FakeTensorMode():
        made = get("gpt").build("paper", 0)
        assert tuple(made.inputs[0].shape) == tuple(made.targets[0].shape) == (4, 1024)
        assert made.optimizer.kind == "adam"
        assert made.module.get_parameter("word.weight").shape == (50304, 2048)
        assert made.module.get_parameter("position.weight").shape == (1024, 2048)
        assert len(made.blocks) == 24
        rates = {part.p for part in made.module.modules() if isinstance(part, nn.Dropout)}
        attentions = [part for part in made.module.modules() if isinstance(part, SelfAttention)]
        assert rates | {part.dropout for part in attentions} == {0.1}
        assert {part.heads for part in attentions} == {32}
        assert made.loss_fn(made.module(*made.inputs), *made.targets).requires_grad


def test_attention_written_out_by_torch_gives_the_same_numbers() -> None:
    made = gpt(TINY, REAL, "gpt", 0)
    fused = made.module(*made.inputs)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(made.module(*made.inputs), fused)
