"""Ten published outcomes of a remedy against too much memory: step, card, bytes before and after.

They were chosen, and their steps settled, before any was predicted. Each step is the usual loop (zero_grad to None in
front of the forward), whatever the place's own script does beside; no number is fitted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.ops.optimizers import OptimizerSpec
from magis.units import GIB, MIB

from .published_compiled import vit_giant, vit_huge
from .published_models import VisionTransformer
from .published_second import (
    A100_WORKSPACE,
    ALLOCATED,
    DEVICE,
    LIBRARIES,
    RESERVED,
    book_gpt,
    classifier,
    tune_llama,
    vit,
)

__all__ = ["OUTCOMES", "Outcome"]

GIGA = 10**9


@dataclass(frozen=True)
class Outcome:
    """What somebody reported of one remedy."""

    title: str
    remedy: str
    """As `magis.why` names it."""
    before: int | None
    """Bytes; None: ran out of memory."""
    after: int
    counts: str
    """ALLOCATED, RESERVED or DEVICE (nvidia-smi)."""
    source: str
    """Address, date, card."""
    make: Callable[[], Any]
    device: str
    keywords: dict[str, Any]
    """Further arguments of `magis.why`."""
    more_bytes: int = 0
    """What the figure counts beside torch's tensors: CUDA's context, workspaces of cuBLAS."""


def first_vit() -> Workload:
    """torchvision's vit_l_16, one picture, the sum of its scores as loss, Adam."""

    def loss(scores: Tensor) -> Tensor:
        return scores.sum()

    picture = torch.zeros(1, 3, 224, 224)
    rule = OptimizerSpec("adam")
    return Workload("vit_l_16", VisionTransformer(classes=1000), (picture,), (), loss, rule)


def t5(kind: str, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    """A T5 of Hugging Face with gated GELU: eight tweets of 64 tokens, labels of four, AdamW weight by weight."""
    library = importlib.import_module("transformers")
    config = getattr(library, f"{kind}Config")(
        d_kv=64, num_layers=24, feed_forward_proj="gated-gelu", tie_word_embeddings=False, use_cache=False,
        decoder_start_token_id=0, **sizes,
    )  # fmt: skip
    net: nn.Module = getattr(library, f"{kind}ForConditionalGeneration")(config)
    words, labels = torch.zeros(8, 64, dtype=torch.long), torch.zeros(8, 4, dtype=torch.long)
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}
    return net, batch, torch.optim.AdamW(net.parameters(), lr=3e-3, foreach=False)


T0_3B = partial(t5, "T5", vocab_size=32128, d_model=2048, d_ff=5120, num_heads=32)
MT0_XXL = partial(t5, "MT5", vocab_size=250112, d_model=4096, d_ff=10240, num_heads=64)

PAGE = "github.com/huggingface/transformers 0016acf7 docs/source/en/perf_train_gpu_one.mdx, 2022-01: V100 16 GB"
PEFT = "github.com/huggingface/peft 0032f32a README.md, 2023: A100 80 GB"
CONTEXT = LIBRARIES["transformers"].context_bytes
AO = "github.com/pytorch/ao 03cf0ade torchao/prototype/low_bit_optim/README.md, 2024-08: RTX 4070 Ti SUPER 16 GB"

OUTCOMES = (
    Outcome(
        "BERT-large, batch 4, float32", "accumulate4", 14949 * MIB, 8681 * MIB, DEVICE, PAGE,
        partial(classifier, 4), "sim:v100", {"memory_limit": "v100-16gb"}, CONTEXT,
    ),
    Outcome(
        "BERT-large, 4 x batch 1, float32", "checkpoint", 8681 * MIB, 6775 * MIB, DEVICE, PAGE,
        partial(classifier, 1), "sim:v100", {"memory_limit": "v100-16gb", "accumulate": 4}, CONTEXT,
    ),
    Outcome(
        "ViT-L/16, batch 64, float32", "amp", 26_790_000_000, 18_210_000_000, RESERVED,
        "github.com/rasbt/pytorch-memory-optim f6eddcd2 logs.md, 2023-07: A100",
        partial(vit, 64, frees=False), "sim:a100", {}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "GPT 124M, batch 8 of 1024, float32", "bfloat16", round(26.2422 * GIB), round(13.7871 * GIB), RESERVED,
        "github.com/rasbt/LLMs-from-scratch 28c65cdf ch05/10_llm-training-speed/README.md, 2025-03-24: A100",
        partial(book_gpt, "mask"), "sim:a100", {}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "ViT-H, batch 8, bfloat16 autocast", "8-bit-state", round(12.94 * GIGA), round(8.31 * GIGA), ALLOCATED, AO,
        vit_huge, "sim:rtx3090", {"dtype": "amp-bfloat16", "memory_limit": "16 GiB"}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "ViT-g, batch 32, bfloat16, checkpointed", "host-state", round(9.82 * GIGA), round(5.24 * GIGA), ALLOCATED, AO,
        vit_giant, "sim:rtx3090", {"memory_limit": "16 GiB"}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "ViT-L/16, batch 1, float32", "early-update", 6 * GIGA, 4 * GIGA, ALLOCATED,
        "docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html, 2023-10-02",
        first_vit, "sim:a100", {}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "T0_3B, batch 8, float32; for 16 GB", "lora", round(47.14 * GIGA), round(14.4 * GIGA), ALLOCATED, PEFT,
        T0_3B, "sim:a100", {"memory_limit": "16 GiB"}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "mt0-xxl (13B), batch 8, float32", "lora", None, 56 * GIGA, ALLOCATED, PEFT,
        MT0_XXL, "sim:a100", {}, 2 * A100_WORKSPACE,
    ),
    Outcome(
        "Llama 3.2 3B, packed 2 x 4096, bfloat16", "compile", round(60.0 * GIB), round(51.0 * GIB), ALLOCATED,
        "github.com/pytorch/torchtune bd2a0fc7 README.md, 2024-11-18: A100",
        tune_llama, "sim:a100", {}, 2 * A100_WORKSPACE,
    ),
)  # fmt: skip
