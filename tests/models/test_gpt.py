"""The GPT of the vendor's row in docs/strategies.md: sizes, causality, options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from magis.extensions.models.building import REAL, SEED, SelfAttention
from magis.extensions.models.decoders import Gpt, GptConfig, gpt
from magis.models import get, resolve

TINY = GptConfig(2, 6, layers=2, width=8, heads=2, vocab_size=9, max_positions=7, dropout=0.0)


def test_it_is_registered_but_not_of_the_gate() -> None:
    assert resolve(["gpt", "seed-gpt"]) == ("gpt", "seed-gpt")
    assert "gpt" not in resolve(["all"])


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


@pytest.mark.parametrize("style", [REAL, SEED])
def test_a_token_sees_itself_and_those_before_it(style: object) -> None:
    torch.manual_seed(0)
    net = Gpt(TINY, SEED if style is SEED else REAL).double()
    text = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for at in range(6):
        changed = text.clone()
        changed[0, at] = 8
        differs = (net(text) != net(changed)).any(-1)[0]
        assert differs.tolist() == [i >= at for i in range(6)]


def test_positions_count() -> None:
    torch.manual_seed(0)
    logits = Gpt(TINY, REAL)(torch.full((1, 6), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_attention_written_out_by_torch_gives_the_same_numbers() -> None:
    made = gpt(TINY, REAL, "gpt", 0)
    fused = made.module(*made.inputs)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(made.module(*made.inputs), fused)


def test_gelu_and_dropout_are_options() -> None:
    tanh, erf = (gpt(replace(TINY, gelu=kind), REAL, "gpt", 0) for kind in ("tanh", "erf"))
    one, other = (made.module(*made.inputs) for made in (tanh, erf))
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    dropped = gpt(replace(TINY, dropout=0.5), REAL, "gpt", 0)
    assert not torch.equal(dropped.module(*dropped.inputs), dropped.module(*dropped.inputs))
