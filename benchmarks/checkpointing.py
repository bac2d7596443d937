"""Magis beside activation checkpointing per block, measured: at the peak that checkpointing reaches, who is faster?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/checkpointing.py [model ...]        (default: the seven of the gate)

Prints, for every network at the preset `small` on the CPU: latency at memory ratio 0.8 (optimized / original), then the
peak ratio and latency ratio of checkpointing, and the latency ratio of magis at that very peak.
"""

from __future__ import annotations

import os
import statistics

from lib.program import arguments

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the plugin does; before torch is loaded

from magis.cases.run_case import run_case
from magis.models import GATE_NAMES
from magis.planner.bench import Bench
from magis.results import Case


def main() -> None:
    names = arguments(__doc__, names=list(GATE_NAMES)).parse_args().names
    print(
        f"{'model':9} {'0.8: lat':>9} | {'ckpt peak':>9} {'ckpt lat':>9} | {'magis peak':>10} {'magis lat':>9}  faster"
    )
    at_80 = []
    wins = 0
    for name in names:
        bench = Bench()
        easy = run_case(Case(name, "magis", "cpu", "small", memory_ratio=0.8), cache=bench)
        rival = run_case(Case(name, "checkpoint", "cpu", "small"), cache=bench)
        ours = run_case(Case(name, "magis", "cpu", "small", memory_ratio=rival.memory_ratio), cache=bench)
        at_80.append(easy.latency_ratio)
        faster = ours.memory_ratio <= rival.memory_ratio and ours.latency_ratio < rival.latency_ratio
        wins += faster
        print(
            f"{name:9} {easy.latency_ratio:9.3f} | {rival.memory_ratio:9.3f} {rival.latency_ratio:9.3f} |"
            f" {ours.memory_ratio:10.3f} {ours.latency_ratio:9.3f}  {'yes' if faster else 'NO'}",
            flush=True,
        )
    print(f"median latency ratio at memory ratio 0.8: {statistics.median(at_80):.3f}; faster on {wins} of {len(names)}")


if __name__ == "__main__":
    main()
