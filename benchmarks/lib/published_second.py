"""A second set of published peaks, from seven places, and ours for them: one set of assumptions for each library.

The assumptions are in docs/strategies.md. They were settled from the code and the pages of the libraries before any
row was predicted; the page says which ones were changed afterwards, and why. None is set for a row by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture import Workload
from magis.extensions.models.building import REAL, WRITTEN_OUT, numbered, token_loss
from magis.extensions.models.decoders import GptConfig, gpt
from magis.extensions.models.encoders import BertConfig, bert
from magis.ops.optimizers import OptimizerSpec
from magis.predict import predict_rank
from magis.results import RankMemory, Term
from magis.strategies.distributed_names import distributed_strategy
from magis.strategies.rank_step import RankStrategy
from magis.units import GIB, MIB

from .published_libraries import (
    Accumulating,
    Megatron,
    OneGpu,
    Titan,
    checkpoint_blocks,
    vocabulary_loss,
)
from .published_models import BertClassifier, BookGpt, VisionTransformer, WrittenLlama

__all__ = ["LIBRARIES", "ROWS", "SOURCES", "Compared", "Library", "SecondRow", "compared", "counted", "source"]

ALLOCATED, RESERVED, DEVICE = "allocated", "reserved", "device"
"""What a figure counts: `max_memory_allocated`, `max_memory_reserved`, what nvidia-smi shows as used."""


@dataclass(frozen=True)
class Library:
    """What holds for every row of a library."""

    counts: str
    """ALLOCATED, RESERVED or DEVICE."""
    workspace_bytes: int
    """Of cuBLAS, of one of the two threads that call it: of the forward, and of the backward."""
    context_bytes: int = 0
    """Counted by DEVICE alone."""
    expandable: bool = False
    """Whether the allocator's segments grow, so that no gaps between them are reserved."""


A100_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""torch's default for cuBLAS (":4096:2:16:8")."""
H100_WORKSPACE = 32 * MIB
"""The same on Hopper."""

LIBRARIES = {
    "Megatron-LM": Library(ALLOCATED, 4096 * 1024 * 8),  # CUBLAS_WORKSPACE_CONFIG=:4096:8 in each configuration
    "torchtitan": Library(RESERVED, H100_WORKSPACE, expandable=True),  # as run_llama_train.sh sets it
    "torchtune": Library(ALLOCATED, A100_WORKSPACE),
    "litgpt": Library(ALLOCATED, A100_WORKSPACE),
    "torchvision": Library(RESERVED, A100_WORKSPACE),
    "LLMs-from-scratch": Library(RESERVED, A100_WORKSPACE),
    "transformers": Library(DEVICE, 0, 1343 * MIB),  # torch 1.10's workspaces are cuBLAS's own; the page tells the rest
}


@dataclass(frozen=True)
class SecondRow:
    """A published row, and what it takes to predict it."""

    library: str
    title: str
    published_bytes: int
    source: str
    """Key of `SOURCES`, and what follows it."""
    strategy: RankStrategy
    make: Callable[[], Workload]
    """The whole network with the global batch, on whatever tensors are in force."""
    ranks: int = 1
    reported: int = 0
    """The rank whose figure it is."""
    terms: tuple[Term, ...] = ()
    """What its library holds beside what ours does."""


@dataclass(frozen=True)
class Compared:
    """A prediction beside its row."""

    index: int
    """Of the row."""
    nbytes: int
    """What the figure should be."""
    error: float
    """1.0: twice what was published."""
    terms: tuple[Term, ...]
    """Of tensors, at their peak."""
    seconds: float


def compared(index: int) -> Compared:
    """The prediction of a row of `ROWS`; takes up to two minutes and next to no memory."""
    row, started = ROWS[index], time.perf_counter()
    memory = predict_rank(row.strategy, row.make, row.ranks, row.reported, device="cuda")
    nbytes = counted(row, memory)
    more = Term("workspaces of cuBLAS", 2 * LIBRARIES[row.library].workspace_bytes)
    seconds = time.perf_counter() - started
    return Compared(index, nbytes, nbytes / row.published_bytes - 1, (*memory.terms, *row.terms, more), seconds)


def counted(row: SecondRow, memory: RankMemory) -> int:
    """What the row's figure counts of a predicted rank."""
    library, found = LIBRARIES[row.library], memory.predicted
    if found is None or found.reserved_bytes is None:
        raise ValueError(f"{row.title}: nothing was predicted for a GPU")
    is_tensors = library.counts == ALLOCATED or library.expandable
    context = library.context_bytes if library.counts == DEVICE else 0
    more = 2 * library.workspace_bytes + sum(term.nbytes for term in row.terms)
    return (found.peak_bytes if is_tensors else found.reserved_bytes) + more + context


# Networks and batches. Tokens are zeros: no number is computed.


def tokens(batch: int, length: int) -> Tensor:
    """int64 [batch, length]."""
    return torch.zeros(batch, length, dtype=torch.long)


def megatron_gpt(batch: int, *, tensor: int = 1, fused: bool = False) -> Workload:
    """The GPT of Megatron-LM's tests, its vocabulary cut among the ``tensor`` ranks and padded for them."""
    padded = -(-50257 // (128 * tensor)) * 128
    config = GptConfig(batch_size=batch, layers=12, width=512, heads=8, vocab_size=padded)
    work = gpt(config, REAL if fused else WRITTEN_OUT, "gpt", 0)
    return replace(work, loss_fn=vocabulary_loss, optimizer=OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01))


def recomputed_gpt(batch: int) -> Workload:
    """The same under Transformer Engine, every layer checkpointed."""
    return checkpoint_blocks(megatron_gpt(batch, fused=True))


def megatron_bert(batch: int, *, tensor: int = 1) -> Workload:
    """BERT-large of Megatron-LM's tests; the vocabulary is that of uncased BERT, cut and padded likewise."""
    padded = -(-30522 // (128 * tensor)) * 128
    config = BertConfig(batch_size=batch, seq_len=512, layers=24, width=1024, heads=16, vocab_size=padded)
    work = bert(config, WRITTEN_OUT, "bert", 0)

    def loss(output: tuple[Tensor, Tensor], words: Tensor, order: Tensor) -> Tensor:
        return vocabulary_loss(output[0], words) + functional.cross_entropy(output[1].float(), order)

    return replace(work, loss_fn=loss, optimizer=OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01))


def scores(batch: int, heads: int, length: int) -> tuple[Term, ...]:
    """The buffer that Megatron-LM hands to the product of queries and keys, which does not write to it."""
    return (Term("buffer of scores", batch * heads * length * length * 2, "get_global_memory_buffer in attention"),)


def titan_llama(ranks: int, layers: int = 32) -> Workload:
    """Llama 3.1 8B, two sequences of 8192 tokens a rank."""
    batch = tokens(2 * ranks, 8192)
    module = WrittenLlama(layers, 8192, 4096, 14336, 32, 8, 128256, packed=False, wide=True)
    rule = OptimizerSpec("adamw", lr=3e-4, foreach=True)
    blocks = tuple(numbered("layers", layers))
    return Workload("llama", module, (batch,), (batch,), wide_loss, rule, blocks)


def wide_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of tokens, of a float32 copy of the logits."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tiny_llama(ranks: int) -> Workload:
    """TinyLlama 1.1B in bfloat16, four sequences of 2048 tokens a rank."""
    module, batch = WrittenLlama(22, 2048, 2048, 5632, 32, 4, 32000), tokens(4 * ranks, 2048)
    rule = OptimizerSpec("adamw", lr=4e-4, weight_decay=0.1, fused=True)
    work = Workload("tiny-llama", module, (batch,), (batch,), wide_loss, rule, tuple(numbered("layers", 22)))
    return work.to("bfloat16")


def tune_llama() -> Workload:
    """Llama 3.2 3B in bfloat16, two packed sequences of 4096 tokens."""
    module, batch = WrittenLlama(28, 4096, 3072, 8192, 24, 8, 128256, wide=True, tied=True), tokens(2, 4096)
    rule = OptimizerSpec("adamw", lr=2e-5, foreach=True)
    return Workload("llama", module, (batch,), (batch,), wide_loss, rule, tuple(numbered("layers", 28))).to("bfloat16")


def vit(batch: int, *, dtype: str = "float32", rule: str = "adam", frees: bool = True) -> Workload:
    """ViT-L/16. ``frees``: gradients of the step before are there until the loss is known, then gone."""
    module = VisionTransformer()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        found = functional.cross_entropy(logits, targets)
        if frees:
            module.zero_grad(set_to_none=True)
        return found

    inputs, targets = (torch.zeros(batch, 3, 224, 224),), (torch.zeros(batch, dtype=torch.long),)
    update = OptimizerSpec(rule, lr=5e-5, foreach=True)
    return Workload("vit", module, inputs, targets, loss, update, tuple(numbered("layers", 24))).to(dtype)


def book_gpt(
    way: str, *, scratch: bool = True, dtype: str = "float32", fused: bool = True, rows: int = 8,
    vocabulary: int = 50257,
) -> Workload:  # fmt: skip
    """GPT of 124 million parameters, ``rows`` sequences of 1024 tokens; ``fused``: the update."""
    batch = tokens(rows, 1024)
    rule = OptimizerSpec("adamw", lr=5e-4, weight_decay=0.1, fused=fused, foreach=not fused)
    module = BookGpt(way, scratch=scratch, vocabulary=vocabulary)
    work = Workload("gpt", module, (batch,), (batch,), token_loss, rule)
    return work.to(dtype)


def classifier(batch: int, *, checkpointed: bool = False) -> Workload:
    """BERT-large for two classes, sequences of 512 tokens, updated weight by weight."""
    config = BertConfig(batch_size=batch, seq_len=512, layers=24, width=1024, heads=16)
    ids, classes = tokens(batch, 512), torch.zeros(batch, dtype=torch.long)
    rule = OptimizerSpec("adamw", lr=5e-5, foreach=False)
    module: nn.Module = BertClassifier(config)
    blocks = tuple(numbered("layers", config.layers))
    work = Workload("bert", module, (ids, ids), (classes,), functional.cross_entropy, rule, blocks)
    return checkpoint_blocks(work) if checkpointed else work


# Rows, with their sources.

SOURCES = {
    "megatron": "github.com/NVIDIA/Megatron-LM, d98e8a64, tests/functional_tests/test_cases/",
    "titan": "github.com/pytorch/torchtitan, b5bcd76c, benchmarks/llama3_h100_202412_torchtitan.md",
    "tune": "github.com/pytorch/torchtune, bd2a0fc7, README.md",
    "litgpt": "github.com/Lightning-AI/litgpt, 26857050, extensions/thunder/README.md",
    "vit": "github.com/rasbt/pytorch-memory-optim, f6eddcd2, logs.md",
    "book": "github.com/rasbt/LLMs-from-scratch, 28c65cdf, ch05/10_llm-training-speed/README.md",
    "transformers": "github.com/huggingface/transformers, 0016acf7, docs/source/en/perf_train_gpu_one.mdx",
}
"""Repository, commit, path."""


def source(row: SecondRow) -> str:
    """Where the figure of a row is published."""
    return placed(SOURCES, row.source)


def placed(sources: Mapping[str, str], text: str) -> str:
    """The address of a source, by its key and what follows it."""
    key, _, place = text.partition(" ")
    return sources[key] + place if sources[key].endswith("/") else f"{sources[key]} {place}".rstrip()


_ONE, _KEEPS = OneGpu(), Accumulating(OneGpu())


def _megatron(
    case: str, published: int, strategy: Megatron, make: Callable[[], Workload], terms: tuple[Term, ...] = ()
) -> SecondRow:
    """Of eight GPUs; the last rank of all writes the figure: of the last stage."""
    folder, _, file = case.partition(" ")
    return SecondRow(
        "Megatron-LM", folder, published, f"megatron {folder}/golden_values_{file}.json", strategy, make,
        ranks=8, reported=strategy.group - 1, terms=terms,
    )  # fmt: skip


ROWS = (
    _megatron(
        "gpt/gpt3_mcore_tp4_pp1_resume_torch_dist dev_dgx_h100", 1598662656,
        Megatron(4), partial(megatron_gpt, 8, tensor=4), scores(4, 2, 1024),
    ),
    _megatron(
        "gpt/gpt3_mcore_tp1_pp2_resume_torch_dist dev_dgx_a100", 3547033088,
        Megatron(stages=2, micro_batches=2), partial(megatron_gpt, 32), scores(4, 8, 1024),
    ),
    _megatron(
        "gpt/gpt3_mcore_tp1_pp4_resume_torch_dist dev_dgx_a100", 2676108288,
        Megatron(stages=4, micro_batches=4), partial(megatron_gpt, 32), scores(4, 8, 1024),
    ),
    _megatron(
        "gpt/gpt3_mcore_tp2_pp2_uninstall_te dev_dgx_a100", 2086473728,
        Megatron(2, 2, micro_batches=4), partial(megatron_gpt, 32, tensor=2), scores(4, 4, 1024),
    ),
    _megatron(
        "gpt/gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather dev_dgx_h100",
        4608815616, Megatron(sharded=True), partial(megatron_gpt, 32), scores(4, 8, 1024),
    ),
    _megatron(
        "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute dev_dgx_h100", 2561334272,
        Megatron(dtype="bfloat16"), partial(recomputed_gpt, 32),
    ),
    _megatron(
        "bert/bert_mcore_tp4_pp1 dev_dgx_h100", 3220183552,
        Megatron(4, dtype="bfloat16"), partial(megatron_bert, 8, tensor=4), scores(4, 4, 512),
    ),
    _megatron(
        "bert/bert_mcore_tp1_pp2 dev_dgx_h100", 5707393024,
        Megatron(stages=2, dtype="bfloat16", micro_batches=2), partial(megatron_bert, 32), scores(4, 16, 512),
    ),
    _megatron(
        "bert/bert_mcore_tp2_pp2_local_spec dev_dgx_h100", 3096314368,
        Megatron(2, 2, "bfloat16", micro_batches=2), partial(megatron_bert, 16, tensor=2), scores(4, 8, 512),
    ),
    SecondRow(
        "torchtitan", "Llama 3.1 8B, FSDP 8", round(82.4 * GIB), "titan table 1", Titan(), partial(titan_llama, 8), 8
    ),
    SecondRow(
        "torchtitan", "Llama 3.1 8B, FSDP 128", round(67.0 * GIB), "titan table 3", Titan(),
        partial(titan_llama, 128), 128,
    ),
    SecondRow("torchtune", "Llama 3.2 3B, packed", round(60.0 * GIB), "tune", _ONE, tune_llama),
    SecondRow(
        "litgpt", "TinyLlama 1.1B, FSDP", 22_130_000_000, "litgpt", distributed_strategy("fsdp"),
        partial(tiny_llama, 8), 8,
    ),
    SecondRow(
        "litgpt", "TinyLlama 1.1B, DDP", 32_040_000_000, "litgpt", Accumulating(distributed_strategy("ddp")),
        partial(tiny_llama, 8), 8,
    ),
    SecondRow("litgpt", "TinyLlama 1.1B", 29_840_000_000, "litgpt", _KEEPS, partial(tiny_llama, 1)),
    SecondRow("torchvision", "ViT-L/16, batch 64", 26_790_000_000, "vit 01", _KEEPS, partial(vit, 64)),
    SecondRow(
        "torchvision", "the same, float16 autocast", 18_210_000_000, "vit 02", Accumulating(OneGpu(amp=True)),
        partial(vit, 64),
    ),
    SecondRow(
        "torchvision", "the same, bfloat16", 13_820_000_000, "vit 03", _KEEPS, partial(vit, 64, dtype="bfloat16")
    ),
    SecondRow("torchvision", "the same, batch 16", 5_690_000_000, "vit 04", _KEEPS, partial(vit, 16, dtype="bfloat16")),
    SecondRow(
        "torchvision", "the same, 4 of 4", 3_910_000_000, "vit 05", _KEEPS,
        partial(vit, 4, dtype="bfloat16", frees=False),
    ),
    SecondRow(
        "torchvision", "the same, SGD", 2_020_000_000, "vit 06", _KEEPS,
        partial(vit, 4, dtype="bfloat16", rule="sgd", frees=False),
    ),
    SecondRow(
        "LLMs-from-scratch", "GPT 124M, batch 8 of 1024", round(26.2617 * GIB), "book baseline", _ONE,
        partial(book_gpt, "buffer", fused=False),
    ),
    SecondRow(
        "LLMs-from-scratch", "mask made anew, fused AdamW", round(26.2422 * GIB), "book 1 to 4", _ONE,
        partial(book_gpt, "mask"),
    ),
    SecondRow(
        "LLMs-from-scratch", "the same, bfloat16", round(13.7871 * GIB), "book 5", _ONE,
        partial(book_gpt, "mask", dtype="bfloat16"),
    ),
    SecondRow(
        "LLMs-from-scratch", "the same, torch's norm and GELU", round(11.5645 * GIB), "book 6", _ONE,
        partial(book_gpt, "mask", scratch=False, dtype="bfloat16"),
    ),
    SecondRow(
        "LLMs-from-scratch", "the same, FlashAttention", round(5.9004 * GIB), "book 7", _ONE,
        partial(book_gpt, "fused", scratch=False, dtype="bfloat16"),
    ),
    SecondRow("transformers", "BERT-large, batch 4", 14949 * MIB, "transformers", _KEEPS, partial(classifier, 4)),
    SecondRow("transformers", "the same, 4 of 1", 8681 * MIB, "transformers", _KEEPS, partial(classifier, 1)),
    SecondRow(
        "transformers", "the same, checkpointed", 6775 * MIB, "transformers", _KEEPS,
        partial(classifier, 1, checkpointed=True),
    ),
    SecondRow(
        "transformers", "batch 4, float16 autocast", 13939 * MIB, "transformers", Accumulating(OneGpu(amp=True)),
        partial(classifier, 4),
    ),
    SecondRow(
        "transformers", "4 of 1, float16, checkpointed", 7275 * MIB, "transformers", Accumulating(OneGpu(amp=True)),
        partial(classifier, 1, checkpointed=True),
    ),
)  # fmt: skip
