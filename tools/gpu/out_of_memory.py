"""A case whose original is out of memory on a GPU that is held to a share of its memory.

    python tools/gpu/out_of_memory.py MODEL DEVICE PRESET

The share lets the optimized step at memory ratio 0.5 run, and not eager's: its row must become simulated, and say so.
"""

from __future__ import annotations

import sys

import torch

from magis.cases.run_case import run_case
from magis.planner.bench import Bench
from magis.results import Case


def main(model: str, device: str, preset: str) -> int:
    """Run the case and print what became of both steps; 0 if it was as it must be."""
    if device != "cuda":
        print("skipped: only the allocator of a GPU can be held to a share of its memory")
        return 0
    bench = Bench()
    case = Case(model, "magis", device, preset, memory_ratio=0.5)
    subject = bench.subject(case)
    persistent = subject.captured.graph.persistent_bytes()
    held = persistent + int(0.8 * subject.original.peak_bytes)
    torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
    result = run_case(case, cache=bench)
    print(f"original {result.original_memory.peak_bytes:,} bytes, measured: {result.original.is_measured}")
    print(f"optimized {result.memory.peak_bytes:,} bytes, measured: {result.optimized.is_measured}")
    print(f"held to {held:,} bytes; numbers: {result.numbers}; note: {result.note}")
    return 0 if result.optimized.is_measured and not result.original.is_measured else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
