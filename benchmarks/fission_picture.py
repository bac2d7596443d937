"""Draws docs/fission.svg: memory over time of one training step, whole and in parts.

    python benchmarks/fission_picture.py [model] [parts] [--out docs/fission.svg]

Bytes are those of the exact simulator, times those of the roofline: nothing is run, nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lib.program import arguments

from magis.fission.candidates import connected, follow
from magis.fission.expand import expand
from magis.fission.loss_suffix import batch_inputs, places, suffix
from magis.fission.region import Region
from magis.graph import Graph
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.loop_nest import UNLIMITED, level, realize_level, solve
from magis.simulate.simulator import replay
from magis.units import format_bytes

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 320, 90, 46, 52
COLOURS = {"whole": "#b03a2e", "in parts": "#1f618d", "grid": "#cccccc", "text": "#333333"}

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
    longest = max(points[-1][0] for points in curves.values())
    highest = max(bytes_ for points in curves.values() for _, bytes_ in points) * 1.05

    def place(ms: float, nbytes: float) -> str:
        x = LEFT + ms / longest * (WIDTH - LEFT - 20)
        return f"{x:.1f},{HEIGHT - BOTTOM - nbytes / highest * (HEIGHT - BOTTOM - TOP):.1f}"

    text = f'font-family="sans-serif" font-size="12" fill="{COLOURS["text"]}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" {text}>{title}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        nbytes = share * highest / 1.05
        x, y = place(0.0, nbytes).split(",")
        lines.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - 20}" y2="{y}" stroke="{COLOURS["grid"]}"/>')
        lines.append(f'<text x="8" y="{float(y) + 4:.1f}" {text}>{format_bytes(int(nbytes))}</text>')
    for index, (name, points) in enumerate(curves.items()):
        path = " ".join(place(ms, nbytes) for ms, nbytes in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        peak = format_bytes(int(max(nbytes for _, nbytes in points)))
        label = f"{name}: at most {peak}, {points[-1][0]:.0f} ms"
        x = LEFT + 320 * index
        lines.append(f'<rect x="{x}" y="{HEIGHT - 24}" width="14" height="4" fill="{COLOURS[name]}"/>')
        lines.append(f'<text x="{x + 20}" y="{HEIGHT - 18}" {text}>{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


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
