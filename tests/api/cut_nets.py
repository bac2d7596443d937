"""Networks that say where to cut, small enough for ranks of a test."""

from __future__ import annotations

from dataclasses import replace

from magis.capture import OptimizerSpec, Workload
from magis.extensions.models.building import REAL
from magis.extensions.models.decoders import BtlmConfig, GptNeoConfig, btlm, gpt_neo
from magis.extensions.models.encoders import BertConfig, bert

THREE_HEADS = GptNeoConfig(8, seq_len=8, layers=3, width=24, heads=3, window=3, vocab_size=33, max_positions=8)


def three_heads() -> Workload:
    """Two ranks divide neither them nor the vocabulary; the first and the last stage share a weight. Eight samples."""
    return gpt_neo(THREE_HEADS, REAL, "three_heads", 0)


def dropped_heads() -> Workload:
    """The same with dropout, of attention too."""
    return gpt_neo(replace(THREE_HEADS, dropout=0.1), REAL, "dropped_heads", 0)


def two_heads() -> Workload:
    """Four samples."""
    sizes = BertConfig(4, seq_len=32, layers=2, width=16, heads=2, vocab_size=32, max_positions=32)
    return bert(sizes, REAL, "two_heads", 0)


def packed() -> Workload:
    """Query, key and value in one projection. Four samples."""
    sizes = BtlmConfig(4, seq_len=8, layers=2, width=16, inner=24, heads=2, vocab_size=32, mup_base_width=16)
    return btlm(sizes, REAL, "packed", 0)


def four_blocks() -> Workload:
    """Two stages on each of two ranks; the first and the last stage share a weight. Eight samples.

    Its weights move by their gradients as they are, so that losses tell a gradient of the wrong size.
    """
    sizes = BertConfig(8, seq_len=16, layers=4, width=16, heads=2, vocab_size=32, max_positions=16)
    work = bert(sizes, REAL, "four_blocks", 0)
    return replace(work, optimizer=OptimizerSpec("momentum", lr=0.1, momentum=0.9))
