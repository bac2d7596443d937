"""How the time of planning grows with the step: decoders of 6, 12, 24 ... layers on a simulated GPU.

    python benchmarks/front_speed.py [--layers 6 12 24 48 96] [--device sim:rtx3090] [--memory 0.4] [--fission]

Columns: nodes of the search; seconds of capture, of a plan for the memory limit without fission, of the front without
fission, and (--fission) of the front with it; largest resident memory so far. Below: the exponent of the growth between
the first and the last row, ln(t2 / t1) / ln(n2 / n1); n log n is about 1.15 from 1,000 to 10,000 nodes.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable
from functools import partial

from magis.quiet import before_torch

before_torch()

from magis.api.planning import plan_whole  # noqa: E402
from magis.api.plans import Scratch  # noqa: E402
from magis.api.subject import Source, Subject  # noqa: E402
from magis.models.gpt_neo import GptNeoConfig, gpt_neo  # noqa: E402
from magis.models.style import SEED  # noqa: E402
from magis.search.fronts import divided_front, whole_front  # noqa: E402
from magis.search.judge import Goal, Wanted  # noqa: E402
from magis.simulate.compile import compile_problem  # noqa: E402


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48, 96])
    parser.add_argument("--device", default="sim:rtx3090")
    parser.add_argument("--memory", type=float, default=0.4)
    parser.add_argument("--fission", action="store_true")
    arguments = parser.parse_args()
    print(f"{'layers':>6} {'nodes':>6} {'capture s':>9} {'plan s':>7} {'front s':>8} {'fission s':>9} {'RSS GB':>7}")
    rows = []
    for number, layers in enumerate([2, *arguments.layers]):  # the first one loads compiled code
        config = GptNeoConfig(layers=layers, width=512, heads=8, vocab_size=8192, seq_len=512)
        make = partial(gpt_neo, config, SEED, f"decoder-{layers}")
        subject = Subject(Source(f"decoder-{layers}", make, "bfloat16", arguments.device, 0))
        captured = seconds(lambda subject=subject: subject.normal)
        graph, costs = subject.normal, subject.costs({})
        nodes = compile_problem(graph, costs, reuse=True).problem.n_nodes
        goal = Goal(memory_limit=int(arguments.memory * subject.original.peak_bytes))
        planned = seconds(partial(plan_whole, subject, Scratch(subject, None), goal))
        front = seconds(partial(whole_front, graph, costs, reuse=True))
        divided = 0.0
        if arguments.fission:
            wanted = Wanted(goal, 0)
            divided = seconds(partial(divided_front, subject.aggregated, costs, wanted, reuse=True))
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        if number == 0:
            continue
        rows.append((nodes, planned, front))
        print(f"{layers:6} {nodes:6} {captured:9.2f} {planned:7.2f} {front:8.2f} {divided:9.2f} {rss:7.2f}", flush=True)
    (n1, *first), (n2, *last) = rows[0], rows[-1]
    if n2 > n1:
        grown = [math.log(late / early) / math.log(n2 / n1) for early, late in zip(first, last, strict=True)]
        print(f"exponents: plan {grown[0]:.2f}, front {grown[1]:.2f}")


if __name__ == "__main__":
    main()
