"""Hugging Face's language models, run on a CPU at small sizes: `python benchmarks/hugging_face_steps.py [NAME ...]`.

    python benchmarks/hugging_face_steps.py [llama qwen3 gemma mixtral t5 modernbert] [--length 512]

Made from configurations, with one sequence and ``labels=``, updated by AdamW. By hand is the strategy "by-hand": every
block checkpointed, head and loss in chunks, weights updated in the backward. The planned step may need 5% less than the
step by hand. Columns: eager's measured peak, the peak by hand and its time over eager's, ours and its time, whether
measured bytes are the planned ones, and the numbers beside eager's (with parts: as close to float64 as eager's). Needs
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import torch
from torch import nn

import magis
from magis.results import Case, CaseResult
from magis.units import MIB

WORDS, WIDTH = 16_000, 256
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}


def _t5(lib: Any) -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 64, "d_ff": 3 * WIDTH, "num_layers": 4, "num_heads": 4}
    config = lib.T5Config(**sizes, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    net: nn.Module = lib.T5ForConditionalGeneration(config)
    return net


NETWORKS: dict[str, Callable[[Any], nn.Module]] = {
    "llama": lambda lib: lib.LlamaForCausalLM(lib.LlamaConfig(**DECODER)),
    "qwen3": lambda lib: lib.Qwen3ForCausalLM(lib.Qwen3Config(**DECODER, head_dim=64)),
    "gemma": lambda lib: lib.GemmaForCausalLM(lib.GemmaConfig(**DECODER, head_dim=64)),
    "mixtral": lambda lib: lib.MixtralForCausalLM(
        lib.MixtralConfig(**DECODER, num_local_experts=4, experts_implementation="grouped_mm")
    ),
    "t5": _t5,
    "modernbert": lambda lib: lib.ModernBertForMaskedLM(
        lib.ModernBertConfig(**SIZES, pad_token_id=0, attn_implementation="sdpa", reference_compile=False)
    ),
}


def run(name: str, length: int, case: Case) -> CaseResult:
    """One case of a network."""
    import transformers

    def build() -> tuple[object, ...]:
        net: nn.Module = NETWORKS[name](transformers).train()
        ids = torch.randint(1, WORDS, (1, length))
        return net, {"input_ids": ids, "labels": ids.clone()}, torch.optim.AdamW(net.parameters(), lr=1e-4)

    return magis.run_case(case, make=magis.models.from_function(name, build))


def rows(names: list[str], length: int) -> Iterator[str]:
    """The lines of the table."""
    yield "| network | eager, MiB | by hand, MiB | time | ours, MiB | time | ours / by hand | bytes | numbers |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in names:
        hand = run(name, length, Case(name, "by-hand", "cpu", "paper"))
        peaks = [hand.original_memory.peak_bytes, hand.memory.peak_bytes]
        case = Case(name, "magis", "cpu", "paper", memory_ratio=0.95 * peaks[1] / peaks[0])
        ours = run(name, length, case)
        off = ours.memory.tensor_bytes - ours.optimized.simulated.tensor_bytes
        yield (
            f"| {name} | {peaks[0] / MIB:.1f} | {peaks[1] / MIB:.1f} | x{hand.latency_ratio:.2f} "
            f"| {ours.memory.peak_bytes / MIB:.1f} | x{ours.latency_ratio:.2f} "
            f"| {ours.memory.peak_bytes / peaks[1]:.3f} | {'equal' if not off else f'{off:+d}'} | {ours.numbers} |"
        )


def main() -> None:
    asked = arguments(__doc__, names=list(NETWORKS), length=512).parse_args()
    printed((*head(), *rows(asked.names, asked.length)))


if __name__ == "__main__":
    main()
