"""Draws docs/fission.svg: memory over time of one training step, whole and in parts.

    python benchmarks/fission_picture.py [model] [parts] [--out docs/fission.svg]

Bytes are those of the exact simulator, times those of the roofline: nothing is run, nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from lib.program import arguments

from magis.fission.candidates import connected, follow
from magis.fission.expand import expand
from magis.fission.loss_suffix import batch_inputs, places, suffix
from magis.fission.region import Region
from magis.graph import Graph
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.report.axes import byte_scale, time_scale
from magis.report.pictures import EAGER, OURS, across, framed, label
from magis.results import Case
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.loop_nest import UNLIMITED, level, realize_level, solve
from magis.simulate.simulator import replay
from magis.units import format_bytes

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 72, 28, 40, 60
COLOURS = {"whole": EAGER, "in parts": OURS}

Curve = list[tuple[float, float]]


def curve(subject: Subject, graph: Graph) -> Curve:
    """(milliseconds, bytes) at the end of every operator; a loop's body once per part."""
    points: Curve = [(0.0, float(graph.persistent_bytes()))]
    for ms, level_bytes in _levels(subject, graph, 0.0):
        points.append((points[-1][0] + ms, level_bytes))
    return points


def _levels(subject: Subject, graph: Graph, base: float) -> Iterator[tuple[float, float]]:
    costs = subject.roofline
    for op, tensors in zip(graph.ops, tensor_bytes(graph), strict=True):
        if op.body is None:
            yield costs.nanoseconds(op, graph.values) / 1e6, base + tensors
            continue
        around = base + tensors - max(tensor_bytes(op.body.graph), default=0)
        for _ in range(op.body.parts):
            yield from _levels(subject, op.body.graph, around)


def tensor_bytes(graph: Graph) -> tuple[int, ...]:
    """Bytes of tensors while each operator runs."""
    return replay(graph, lambda _op, _values: 0).tensors


def planned(subject: Subject, graph: Graph) -> Graph:
    """The step in its best order, with nothing recomputed."""
    here = level(graph, subject.roofline, reuse=True)
    return realize_level(here, solve(here, PlanRequest(Objective(memory_limit=UNLIMITED), 0, 200), brief=True))


def in_parts(subject: Subject, parts: int) -> Graph:
    """The whole step, from its inputs to the loss and back, in so many parts."""
    graph = subject.untangled
    axis = follow(graph, batch_inputs(graph))
    cuts = connected(graph, suffix(graph, axis, places(graph, axis, 1)[0]))[0]
    return planned(subject, expand(graph, Region(cuts, parts), in_place=True))


def svg(title: str, curves: dict[str, Curve]) -> str:
    """The picture."""
    times = time_scale(max(points[-1][0] for points in curves.values()))
    levels = byte_scale(round(max(nbytes for _, nbytes in chain(*curves.values()))))

    def x(ms: float) -> float:
        return LEFT + times.share(ms) * (WIDTH - LEFT - RIGHT)

    def y(nbytes: float) -> float:
        return HEIGHT - BOTTOM - levels.share(nbytes) * (HEIGHT - BOTTOM - TOP)

    lines = [label((8, 20), title)]
    for tick in levels.ticks:
        lines += [across(LEFT, WIDTH - RIGHT, y(tick)), label((LEFT - 8, y(tick) + 4), levels.words(tick), "end")]
    lines += [label((x(tick), HEIGHT - BOTTOM + 18), times.words(tick), "middle") for tick in times.ticks]
    for index, (name, points) in enumerate(curves.items()):
        path = " ".join(f"{x(ms):.1f},{y(nbytes):.1f}" for ms, nbytes in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        peak = format_bytes(int(max(nbytes for _, nbytes in points)))
        key = LEFT + 320 * index
        lines.append(f'<rect x="{key}" y="{HEIGHT - 18}" width="14" height="4" fill="{COLOURS[name]}"/>')
        lines.append(label((key + 20, HEIGHT - 12), f"{name}: at most {peak}, {points[-1][0]:.0f} ms"))
    return "\n".join(framed((WIDTH, HEIGHT), title, lines)) + "\n"


def main() -> None:
    """Write the picture."""
    parser = arguments(__doc__, out=Path("docs/fission.svg"))
    parser.add_argument("model", nargs="?", default="gpt_neo")
    parser.add_argument("parts", nargs="?", type=int, default=4)
    asked = parser.parse_args()
    subject = Bench().subject(Case(asked.model, "magis", "cpu", "small", memory_ratio=0.5))
    curves = {
        "whole": curve(subject, planned(subject, subject.untangled)),
        "in parts": curve(subject, in_parts(subject, asked.parts)),
    }
    title = f"Tensors in memory during one training step of {asked.model} (small), {asked.parts} parts"
    asked.out.write_text(svg(title, curves), encoding="utf-8")
    print(f"{asked.out}: " + ", ".join(f"{n} {max(b for _, b in c):,.0f} bytes" for n, c in curves.items()))


if __name__ == "__main__":
    main()
