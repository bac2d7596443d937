"""Hugging Face's models from their configurations, with random weights: trained as in eager mode, bit by bit.

Needs the extra `hf` (`pip install 'pytest-magis[hf]'`); nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.loops import Loops

transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # theirs, of deprecations between them and torch

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WORDS, ENDS = {"vocab_size": 200}, {"bos_token_id": 0, "eos_token_id": 1}


def _bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **WORDS))


def _gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=32, **WORDS, **ENDS)
    return transformers.GPT2LMHeadModel(config)


def _gpt_neo() -> Any:
    kinds = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(
        hidden_size=64, num_layers=2, num_heads=4, attention_types=kinds, max_position_embeddings=32, **WORDS, **ENDS
    )
    return transformers.GPTNeoForCausalLM(config)


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **WORDS, **ENDS, num_key_value_heads=2))


def _t5() -> Any:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, **WORDS
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> Any:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=10)
    )


def _mixtral() -> Any:
    """Experts by products of groups of rows; a loss of the router beside the words', by hooks of the first call."""
    config = transformers.MixtralConfig(
        **{**SMALL, "intermediate_size": 96}, **WORDS, **ENDS, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _words(masked: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(0, 200, (4, 16))
    return {"input_ids": ids, "labels": ids, **({"attention_mask": torch.ones_like(ids)} if masked else {})}


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "bert": (_bert, lambda: _words(masked=True)),
    "gpt2": (_gpt2, _words),
    "gpt_neo": (_gpt_neo, _words),
    "llama": (_llama, _words),
    "mixtral": (_mixtral, _words),
    "t5": (_t5, _words),
    "vit": (_vit, _pictures),
}


def trained(module: Any, data: dict[str, Tensor], ratio: float) -> Loops:
    """Both loops after two steps."""
    loops = Loops(module, partial(torch.optim.AdamW, lr=1e-3, foreach=False), None, data, memory_ratio=ratio)
    for seed in range(2):
        loops.agree_on(**data, seed=seed)
    loops.same()
    return loops


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_eager_mode(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    assert trained(make().train(), batch(), 0.9).step.report().memory_ratio <= 0.9


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_draws_its_dropout_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = _bert().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    trained(model, _words(), 0.95)
