"""Plans per second of the evaluator: ``python benchmarks/evaluator_speed.py``.

Transformers of three depths; half of the tensors that may be dropped are, so that the passes have work to do.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
from lib.program import arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, RECOMPUTE, SWAP
from tests.search.networks import transformer

LAYERS = (14, 31, 83)
ROUNDS = 5


def main() -> None:
    """Print one line per size and kind of plan."""
    arguments(__doc__).parse_args()
    print(f"{'nodes':>6} {'plan':<24} {'recomputed':>10} {'swapped':>8} {'plans/s':>9}")
    for layers in LAYERS:
        problem, _ = transformer(layers, xfer_ns_per_byte=0.02)
        evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
        rng = np.random.default_rng(0)
        for name, swapped in (("recomputation", 0.0), ("recomputation and swaps", 0.2)):
            chosen = rng.random(problem.n_storages)
            flags = np.where(chosen < 0.5, RECOMPUTE, DROP).astype(np.int8)
            flags[chosen < swapped] = SWAP
            result = evaluator.evaluate(flags)
            speed = statistics.median(plans_per_second(evaluator, flags) for _ in range(ROUNDS))
            print(f"{problem.n_nodes:6} {name:<24} {result.redos:10} {result.swaps:8} {speed:9.0f}")


def plans_per_second(evaluator: Evaluator, flags: np.ndarray) -> float:
    """Judge one plan over and over for 0.2 s."""
    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < 0.2:
        for _ in range(50):
            evaluator.quick(flags)
        count += 50
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
