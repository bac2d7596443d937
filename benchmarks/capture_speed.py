"""Seconds from a module to a verified graph, at the sizes of the paper, without allocating a tensor.

python benchmarks/capture_speed.py [model ...]        (default: the seven of the gate and their seed variants)
"""

from __future__ import annotations

import resource
import time

from lib.program import arguments

from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES
from magis.planner.bench import Bench
from magis.results import Case


def main() -> None:
    parser = arguments(__doc__, names=[*GATE_NAMES, *SEED_NAMES])
    print(f"{'model':14} {'operators':>9} {'build s':>8} {'capture s':>9} {'persistent GB':>13} {'max RSS GB':>10}")
    for name in parser.parse_args().names:
        subject = Bench().subject(Case(name, "eager", "sim:rtx3090", "paper"))
        start = time.perf_counter()
        _ = subject.blocks  # builds the module on fake tensors
        built = time.perf_counter()
        graph = subject.captured.graph
        done = time.perf_counter()
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{name:14} {len(graph.ops):9} {built - start:8.2f} {done - built:9.2f}"
            f" {graph.persistent_bytes() / 1e9:13.2f} {rss:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
