"""Published peaks of compiled training steps on one GPU, from five places, and ours for them.

How each place runs its step is read from its code. The readings were settled before a row was predicted, but for one:
docs/estimate.md says which, and what was left out. No row has a number of its own. torch is the one that is installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import magis
from magis.capture import Workload
from magis.frontends.estimating import Estimate
from magis.ops.optimizers import OptimizerSpec
from magis.units import GIB, MIB

from .published_compiled_models import CappedLoss, LitDecoder, TimmVit, TuneDecoder, chunked_loss, wide_loss
from .published_second import A100_WORKSPACE, ALLOCATED, H100_WORKSPACE, RESERVED, book_gpt, placed, tokens

__all__ = ["PLACES", "ROWS", "CompiledRow", "Found", "Place", "found", "source"]


@dataclass(frozen=True)
class Place:
    """What holds for every row of a place."""

    counts: str
    """ALLOCATED or RESERVED."""
    device: str
    """The simulated card: the one that was used, or of its kind."""
    compiled: str
    """What is compiled, as `magis.estimate` has it."""
    workspace_bytes: int
    """Of cuBLAS, of one of the two threads that call it: of the forward, and of the backward."""
    above_inputs: bool = False
    """True if a figure is what the step needs beside its weights and batch."""


PLACES = {
    "LLMs-from-scratch": Place(RESERVED, "sim:a100", "model", A100_WORKSPACE),
    "lightning-thunder": Place(ALLOCATED, "sim:h100", "model", H100_WORKSPACE),
    "torchtune": Place(ALLOCATED, "sim:a100", "loss", A100_WORKSPACE),
    "torchao": Place(ALLOCATED, "sim:rtx3090", "model", A100_WORKSPACE),  # an RTX 4070 Ti SUPER: no workspace of Hopper
    "ml-cross-entropy": Place(ALLOCATED, "sim:a100", "model", 0, above_inputs=True),
}


@dataclass(frozen=True)
class CompiledRow:
    """A published row, and what it takes to predict it."""

    place: str
    title: str
    published_bytes: int
    source: str
    """Key of `SOURCES`, and what follows it."""
    make: Callable[[], Workload]
    dtype: str | None = None


@dataclass(frozen=True)
class Found:
    """A prediction beside its row."""

    index: int
    """Of the row."""
    nbytes: int
    """What the figure should be."""
    error: float
    """1.0: twice what was published."""
    kinds: tuple[tuple[str, int], ...]
    """Of tensors, at their peak."""
    seconds: float


def found(index: int) -> Found:
    """The prediction of a row of `ROWS`; takes up to a minute and next to no memory."""
    row, started = ROWS[index], time.perf_counter()
    place = PLACES[row.place]
    estimate = magis.estimate(row.make, device=place.device, dtype=row.dtype, allocator="", compiled=place.compiled)
    nbytes = counted(row, estimate)
    kinds = tuple(sorted(estimate.by_kind.items(), key=lambda each: -each[1]))
    return Found(index, nbytes, nbytes / row.published_bytes - 1, kinds, time.perf_counter() - started)


def counted(row: CompiledRow, estimate: Estimate) -> int:
    """What the row's figure counts of an estimate."""
    place = PLACES[row.place]
    if place.above_inputs:
        return estimate.peak_bytes - sum(estimate.by_kind.get(kind, 0) for kind in ("parameter", "batch"))
    nbytes = estimate.peak_bytes if place.counts == ALLOCATED else estimate.reserved_bytes or 0
    return nbytes + 2 * place.workspace_bytes


# Steps. Tokens are zeros: no number is computed.


def decoder(
    length: int, rows: int, layers: int, width: int, inner: int, heads: int, vocabulary: int, rotary: float,
    *, neox: bool,
) -> Workload:  # fmt: skip
    """A network of litgpt in bfloat16; its logits live until those of the next step replace them."""
    module = LitDecoder(layers, length, width, inner, heads, vocabulary, rotary, neox=neox)
    held: list[Tensor] = []

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        held[:] = [logits]
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-1)

    rule = OptimizerSpec("adamw", lr=5e-4, weight_decay=0.1, fused=True)
    batch = tokens(rows, length)
    return Workload("litgpt", module, (batch,), (batch,), loss, rule).to("bfloat16")


def stablecode(length: int) -> Workload:
    """stablecode-completion-alpha-3b, one sequence."""
    return decoder(length, 1, 32, 2560, 4 * 2560, 32, 49152, 0.25, neox=True)


def llama_13b(layers: int) -> Workload:
    """Llama 2 13B, its first layers: two sequences of 4096 tokens."""
    return decoder(4096, 2, layers, 5120, 13824, 40, 32000, 1.0, neox=False)


def tune_llama(*, chunks: int = 1, checkpointed: bool = False) -> Workload:
    """Llama 3.2 3B in bfloat16, two packed sequences of 4096 tokens."""
    module = TuneDecoder(28, 4096, 3072, 8192, 24, 8, 128256, chunks=chunks, checkpointed=checkpointed)
    batch, loss = tokens(2, 4096), wide_loss if chunks == 1 else chunked_loss
    rule = OptimizerSpec("adamw", lr=2e-5, foreach=True)
    return Workload("llama", module, (batch,), (batch,), loss, rule).to("bfloat16")


def pictures(module: TimmVit, rows: int, dtype: str) -> Workload:
    """Fine-tuning of a vision transformer."""
    inputs, targets = (torch.zeros(rows, 3, 224, 224),), (torch.zeros(rows, dtype=torch.long),)
    rule = OptimizerSpec("adamw", lr=1e-4, weight_decay=0.0, fused=True)
    return Workload("vit", module, inputs, targets, functional.cross_entropy, rule).to(dtype)


def vit_huge() -> Workload:
    """vit_huge_patch14_224."""
    return pictures(TimmVit(32, 1280, 16, 5120), 8, "float32")


def vit_giant() -> Workload:
    """vit_giant_patch14_dinov2 of pictures of 224 pixels, every block checkpointed."""
    return pictures(TimmVit(40, 1536, 24, 8192, swiglu=True, checkpointed=True), 32, "bfloat16")


def capped_loss() -> Workload:
    """The loss of Gemma 2 2B, 8192 tokens, all of them counted."""
    targets = torch.zeros(8192, dtype=torch.long)

    def loss(found: Tensor) -> Tensor:
        return found

    work = Workload("loss", CappedLoss(8192, 2304, 256000), (targets,), (), loss, OptimizerSpec("sgd", lr=0.1))
    return work.to("bfloat16")


# Rows, with their sources.

SOURCES = {
    "book": "github.com/rasbt/LLMs-from-scratch, 28c65cdf, ch05/10_llm-training-speed/README.md",
    "thunder": "github.com/Lightning-AI/lightning-thunder/issues/",
    "tune": "github.com/pytorch/torchtune, 1814feb1, README.md",
    "ao": "github.com/pytorch/ao,",
    "loss": "github.com/apple/ml-cross-entropy, af5f96a7, README.md",
}
"""Repository, commit, path; or the thread."""


def source(row: CompiledRow) -> str:
    """Where, when, on what card and with which torch the figure of a row was published."""
    return placed(SOURCES, row.source)


BOOK = partial(book_gpt, "fused", scratch=False, dtype="bfloat16")
GIGA = 10**9


def _book(step: str, title: str, published: float, **settings: int) -> CompiledRow:
    where = f"book {step}, 2025-03-24: A100, torch 2.6"
    return CompiledRow("LLMs-from-scratch", title, round(published * GIB), where, partial(BOOK, **settings))


def _thunder(thread: str, title: str, published: float, make: Callable[[], Workload]) -> CompiledRow:
    return CompiledRow("lightning-thunder", title, round(published * GIGA), f"thunder {thread}", make)


CODE = "1175, 2024-09-20: H100, lightning-thunder 9580411e, torch of that week"
THIRTEEN = "474, 2024-06-11: H100, lightning-thunder 21f29da6, torch of that week"
TUNE = "2024-11-18: A100, torch of that month"

ROWS = (
    _book("8", "GPT 124M, batch 8 of 1024", 6.1875),
    _book("9", "the same, vocabulary 50304", 5.8906, vocabulary=50304),
    _book("10", "the same, batch 32", 22.5078, vocabulary=50304, rows=32),
    _thunder(CODE, "stablecode 3B, 2048 tokens", 23.63, partial(stablecode, 2048)),
    _thunder(CODE, "the same, 4096", 30.46, partial(stablecode, 4096)),
    _thunder(CODE, "the same, 8192", 44.2, partial(stablecode, 8192)),
    _thunder(CODE, "the same, 12288", 57.94, partial(stablecode, 12288)),
    _thunder(CODE, "the same, 16384", 71.73, partial(stablecode, 16384)),
    _thunder(THIRTEEN, "Llama 2 13B, 2 layers, batch 2", 11.33, partial(llama_13b, 2)),
    _thunder(THIRTEEN, "the same, 4 layers", 18.35, partial(llama_13b, 4)),
    _thunder(THIRTEEN, "the same, 10 layers", 39.43, partial(llama_13b, 10)),
    _thunder(THIRTEEN, "the same, 20 layers", 74.56, partial(llama_13b, 20)),
    CompiledRow("torchtune", "Llama 3.2 3B, packed", round(51.0 * GIB), f"tune {TUNE}", tune_llama),
    CompiledRow(
        "torchtune", "the same, loss in 8 parts", round(42.9 * GIB), f"tune {TUNE}", partial(tune_llama, chunks=8)
    ),
    CompiledRow(
        "torchtune", "the same, checkpointed", round(24.9 * GIB), f"tune {TUNE}",
        partial(tune_llama, chunks=8, checkpointed=True),
    ),
    CompiledRow(
        "torchao", "ViT-H, batch 8, bfloat16 autocast", round(12.23 * GIGA),
        "ao 1e7f132e, torchao/prototype/low_bit_optim/README.md, 2024-09-06: RTX 4070 Ti SUPER, torch 2.4",
        vit_huge, "amp-bfloat16",
    ),
    CompiledRow(
        "torchao", "ViT-g, batch 32, checkpointed", round(9.90 * GIGA),
        "ao 1b1e94c5, torchao/prototype/low_bit_optim/README.md, 2024-08-06: RTX 4070 Ti SUPER, torch of that month",
        vit_giant,
    ),
    CompiledRow(
        "ml-cross-entropy", "loss of Gemma 2 2B, 8192 tokens", round(16000.1 * MIB),
        "loss 2024-11-13: A100, torch 2.4.1", capped_loss,
    ),
)  # fmt: skip
