"""How the time of planning grows with the step: decoders of 6, 12, 24 ... layers on a simulated GPU.

    python benchmarks/front_speed.py [--layers 6 12 24 48 96] [--device sim:rtx3090] [--memory 0.4] [--fission]
        [--picture FILE.svg] [--drawn-from FILE.txt]

``--drawn-from`` measures nothing: the picture is of the rows in a file that an earlier run has printed.

Columns: nodes of the search; seconds of capture, of a plan for the memory limit without fission, of the front without
fission, and (--fission) of the front with it; largest resident memory so far. Below: the exponent of the growth between
the first and the last row, ln(t2 / t1) / ln(n2 / n1); n log n is about 1.15 from 1,000 to 10,000 nodes.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from lib.program import arguments

from magis.quiet import before_torch

before_torch()

from magis.extensions.models.building import SEED
from magis.extensions.models.decoders import GptNeoConfig, gpt_neo
from magis.planner.planning import plan_whole
from magis.planner.plans import PlanScratch
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.report.pictures import EAGER, OURS, TEXT, across, framed, label
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.fission_pareto import whole_front
from magis.search.loop_places import divided_front
from magis.simulate.compiled_problem import compile_problem

TITLE = "Seconds of planning, by the operators of a step"
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 40, 40


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = arguments(
        __doc__,
        layers=[6, 12, 24, 48, 96],
        device="sim:rtx3090",
        memory=0.4,
        fission=False,
        picture=Path,
        drawn_from=Path,
    )
    asked = parser.parse_args()
    if asked.drawn_from is not None:
        if asked.picture is None:
            parser.error("--drawn-from needs --picture")
        draw(asked.picture, list(stored(asked.drawn_from)))
        return
    print(f"{'layers':>6} {'nodes':>6} {'capture s':>9} {'plan s':>7} {'front s':>8} {'fission s':>9} {'RSS GB':>7}")
    rows = []
    for number, layers in enumerate([2, *asked.layers]):  # the first one loads compiled code
        config = GptNeoConfig(layers=layers, width=512, heads=8, vocab_size=8192, seq_len=512)
        make = partial(gpt_neo, config, SEED, f"decoder-{layers}")
        subject = Subject(Source(f"decoder-{layers}", make, "bfloat16", asked.device, 0))
        captured = seconds(lambda subject=subject: subject.normal)
        graph, costs = subject.normal, subject.costs({})
        nodes = compile_problem(graph, costs, reuse=True).problem.n_nodes
        goal = Objective(memory_limit=int(asked.memory * subject.original.peak_bytes))
        planned = seconds(partial(plan_whole, PlanScratch(subject, None), goal))
        front = seconds(partial(whole_front, graph, costs, reuse=True))
        divided = 0.0
        if asked.fission:
            wanted = PlanRequest(goal, 0)
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
        if asked.picture is not None:
            draw(asked.picture, rows)


def stored(path: Path) -> Iterator[tuple[int, float, float]]:
    """Nodes, seconds of a plan and of the front, of every row of a table."""
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = line.split()
        if len(cells) == 7 and cells[0].isdigit():
            yield int(cells[1]), float(cells[3]), float(cells[4])


def draw(path: Path, rows: Sequence[tuple[int, float, float]]) -> None:
    path.write_text("\n".join(framed((WIDTH, HEIGHT), TITLE, picture(rows))) + "\n", encoding="utf-8")


def picture(rows: Sequence[tuple[int, float, float]]) -> Iterator[str]:
    """Seconds over nodes, both to logarithmic scales; dashed: n log n through the first plan."""
    (first, low), last = rows[0][:2], rows[-1][0]
    steepest = [(nodes, low * nodes * math.log(nodes) / (first * math.log(first))) for nodes, *_ in rows]
    curves = [
        ("plan", OURS, "", [(nodes, plan) for nodes, plan, _ in rows]),
        ("front", EAGER, "", [(nodes, front) for nodes, _, front in rows]),
        ("n log n", TEXT, "6 4", steepest),
    ]
    every = [seconds for *_, points in curves for _, seconds in points]
    bottom, top = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))

    def where(nodes: float, seconds: float) -> tuple[float, float]:
        x = math.log(nodes / first) / math.log(last / first)
        y = (math.log10(seconds) - bottom) / (top - bottom)
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    yield label((LEFT, 22), TITLE)
    for power in range(bottom, top + 1):
        y = where(first, 10.0**power)[1]
        yield across(LEFT, WIDTH - RIGHT, y)
        yield label((LEFT - 8, y + 4), f"{10.0**power:g} s", "end")
    for nodes, *_ in rows:
        yield label((where(nodes, 1.0)[0], HEIGHT - BOTTOM + 18), f"{nodes}", "middle")
    for number, (name, colour, dashes, points) in enumerate(curves):
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in (where(*point) for point in points))
        pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{pattern}/>'
        yield label((LEFT + 12, TOP + 16 + 16 * number), name, colour=colour)


if __name__ == "__main__":
    main()
