"""What `magis.estimate` says of Llama 3 8B, in how many seconds and bytes: `python benchmarks/estimate_llama.py`.

Full training by AdamW in bfloat16 on one sequence of 2048 tokens, on a simulated H100: with the default allocator, what
would make it fit, and with segments that grow. Needs transformers, and PEFT for the row of adapters. Then each remedy
of the gate's own is run as a case, whose bytes must be those of the estimate.
"""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from functools import partial
from typing import Any

from lib.llama import in_bfloat16
from lib.program import arguments

from magis.quiet import before_torch

before_torch()

import torch

import magis
from magis.results import Case

DEVICE = "sim:h100"
GROWING = "expandable_segments:True"


def make() -> tuple[Any, ...]:
    """Llama 3 8B with a batch of one sequence, and AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    net = in_bfloat16(partial(LlamaForCausalLM, config))
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    return net, {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(net.parameters())


def main() -> None:
    """Print the estimate, its remedies, what it took, and the gate's own figures."""
    arguments(__doc__).parse_args()
    started = time.perf_counter()
    step = magis.estimate(make, device=DEVICE, allocator="")
    estimated = time.perf_counter() - started
    print(step)
    for remedy in step.remedies:
        print(remedy)
    whole = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    grown = magis.estimate(make, device=DEVICE, allocator=GROWING)
    print(*str(grown).splitlines()[:2], sep="\n")
    print(f"seconds: {estimated:.1f} the estimate, {whole:.1f} with remedies; {peak:.2f} GiB resident at most")
    name = f"{__name__}:make"
    for remedy in step.remedies:
        ratio = float(remedy.how.rpartition("=")[2]) if remedy.name == "magis" else None
        if remedy.name != "lora":
            case = Case(name, remedy.name, DEVICE, "paper")
            if remedy.name == "expandable":
                case = Case(name, "eager", DEVICE, "paper", allocator=GROWING)
            if remedy.name == "magis":
                case = replace(case, memory_ratio=ratio, memory_limit_of="reserved", budget=3000)
            found = magis.run_case(case).optimized.reserved_bytes
            print(f"the gate's case {remedy.name}: {found} bytes reserved, the estimate's {remedy.needed_bytes}")


if __name__ == "__main__":
    main()
