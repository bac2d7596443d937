"""The best figure over time, ours and the published search's, with heuristics left out (paper, Figure 13).

    python benchmarks/progress.py [NAME] [--limit lat 1.1 | --limit mem 0.4] [--states 3000] [--device sim:rtx3090]
        [--preset paper] [--output FILE.svg]

Under a latency limit the figure is the peak as a share of eager's, under a memory limit the latency overhead to
eager, of the best plan judged so far; everything is simulated. *ours*: a hasty look at the whole step and at one
piece of it, then the front of the whole step, then that with fission; it serves all limits. *no fission*: the front
of the whole step alone; *no mixing*: plans of a front are not mixed. *published*: `magis.extensions.paper`; *one
level*: its F-Tree with one level of heat instead of four. Seconds are this machine's (processor seconds, since it may
be busy), on one thread; capture is left out of both. FILE.svg is a picture; the table stands beside it in FILE.txt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from cells import Limit

from magis.extensions.paper.coordinated_search import STATES, PaperSearch
from magis.extensions.paper.ftree import LEVELS
from magis.models import resolve
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.report.pictures import BOUND, EAGER, OURS, across, framed, label
from magis.results import Case
from magis.rewrite.rules.rule_table import quickest
from magis.search.budgeted_evaluator import Objective, PlanRequest, Watch
from magis.search.fission_pareto import HASTY, Efforts, whole_front, work_of
from magis.search.loop_places import places_front, sketch
from magis.search.pareto_sweep import BODY, BRIEF, FULL, Effort

PAPER_SECONDS = 180.0
"""What the paper gives its search."""
WARMING = "seed-resnet50"
"""Searched first, small, so that compiled code is loaded."""
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
COLOURS = (OURS, "#85c1e9", BOUND, EAGER, "#e59866")


@dataclass(frozen=True)
class Curve:
    """The best figure after so many seconds, and when the search ended."""

    name: str
    points: tuple[tuple[float, float], ...]
    seconds: float

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points else None

    def first_at(self, figure: float) -> float | None:
        """Seconds after which the figure is reached."""
        return next((seconds for seconds, reached in self.points if reached <= figure), None)


class Progress:
    """The best plan under a limit of those that it is told of, with the time."""

    def __init__(self, subject: Subject, limit: Limit) -> None:
        self._original = (subject.original.peak_bytes, subject.latency_ns(subject.captured.graph))
        self._goal = limit.goal(subject)
        self._by_memory = limit.memory is not None
        self._began = time.process_time()
        self.points: list[tuple[float, float]] = []

    def figure(self, peak: int, latency_ns: int) -> float:
        return latency_ns / self._original[1] - 1.0 if self._by_memory else peak / self._original[0]

    def see(self, peak: int, latency_ns: int) -> None:
        if self._goal.met(peak, latency_ns):
            figure = self.figure(peak, latency_ns)
            if not self.points or figure < self.points[-1][1]:
                self.points.append((self.seconds, figure))

    @property
    def seconds(self) -> float:
        return time.process_time() - self._began

    def curve(self, name: str) -> Curve:
        return Curve(name, tuple(self.points), self.seconds)


def ours(subject: Subject, limit: Limit, name: str, *, mixing: bool) -> Curve:
    """The curve of both fronts, in the order of ``magis.pareto``: a hasty look at either, then one after the other."""
    progress = Progress(subject, limit)

    def some(effort: Effort, watch: Watch | None = progress.see) -> Effort:
        return replace(effort, mixed=effort.mixed if mixing else 0, watch=watch)

    costs, reuse = subject.roofline, subject.source.reuse
    whole_front(subject.normal, costs, reuse=reuse, effort=some(HASTY))
    merged = quickest(subject.untangled, subject.latency_ns)  # what ``Subject.aggregated`` keeps
    efforts = Efforts(some(BODY, None), some(BRIEF), some(HASTY))
    work = work_of(merged, costs, reuse=reuse, efforts=efforts)
    sketch(work)
    whole_front(subject.normal, costs, reuse=reuse, effort=some(FULL))
    places_front(work, PlanRequest(Objective(memory_limit=0), 0))
    return progress.curve(name)


def undivided(subject: Subject, limit: Limit, name: str) -> Curve:
    """The curve of the front without fission."""
    progress = Progress(subject, limit)
    effort = replace(FULL, watch=progress.see)
    whole_front(subject.normal, subject.roofline, reuse=subject.source.reuse, effort=effort)
    return progress.curve(name)


def theirs(subject: Subject, limit: Limit, name: str, states: int, levels: int) -> Curve:
    """The curve of the published search."""
    graph, goal, progress = subject.untangled, limit.goal(subject), Progress(subject, limit)
    found = PaperSearch(graph, subject.roofline, goal, reuse=subject.source.reuse, states=states, levels=levels).run()
    points = [
        (point.seconds, progress.figure(point.figures.peak, point.figures.latency_ns))
        for point in found.curve
        if goal.met(point.figures.peak, point.figures.latency_ns)
    ]
    return Curve(name, tuple(points), progress.seconds)


def curves(subject: Subject, limit: Limit, states: int) -> list[Curve]:
    return [
        ours(subject, limit, "ours", mixing=True),
        undivided(subject, limit, "no fission"),
        ours(subject, limit, "no mixing", mixing=False),
        theirs(subject, limit, "published", states, LEVELS),
        theirs(subject, limit, "one level", states, 1),
    ]


def table(found: Sequence[Curve], limit: Limit) -> Iterator[str]:
    """A row per curve, and how long ours takes to where the published search ends."""
    yield f"{'search':12} {'best':>8} {'reached s':>9} {'ended s':>8}"
    for each in found:
        best = f"{'missed':>8} {'-':>9}" if each.last is None else f"{each.last:8.4f} {each.points[-1][0]:9.2f}"
        yield f"{each.name:12} {best} {each.seconds:8.1f}"
    mine, other = found[0], next(each for each in found if each.name == "published")
    yield ""
    if other.last is None:
        yield f"the published search does not keep {limit.text}"
        return
    reached = mine.first_at(other.last)
    if reached is None:
        yield f"ours never reaches {other.last:.4f}, the published search's best"
        return
    yield f"ours reaches the published search's best, {other.last:.4f}, after {reached:.2f} s:"
    for what, seconds in (
        ("its own seconds to its best", other.points[-1][0]),
        ("its own seconds to its end", other.seconds),
        ("the paper's three minutes", PAPER_SECONDS),
    ):
        yield f"  {seconds / reached:7.1f} times less than {what}, {seconds:.1f}"


def picture(title: str, found: Sequence[Curve], limit: Limit) -> Iterator[str]:
    """Steps over time, which is drawn to a logarithmic scale."""
    every = [point for each in found for point in each.points]
    early = max(0.01, min((seconds for seconds, _ in every), default=0.1))
    low, high = math.floor(math.log10(early)), math.log10(max(each.seconds for each in found))
    most = max((figure for _, figure in every), default=1.0) if limit.memory is not None else 1.0

    def x(seconds: float) -> float:
        return LEFT + (math.log10(max(seconds, early)) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(figure: float) -> float:
        return HEIGHT - BOTTOM - min(1.0, figure / most) * (HEIGHT - TOP - BOTTOM)

    yield label((LEFT, 22), title)
    yield label((LEFT - 56, TOP - 10), "overhead" if limit.memory is not None else "peak / eager's")
    for fifth in range(6):
        at = most * fifth / 5
        yield across(LEFT, WIDTH - RIGHT, y(at))
        yield label((LEFT - 8, y(at) + 4), f"{at:.1f}" if limit.memory is None else f"{100 * at:.0f}%", "end")
    for power in range(low, math.floor(high) + 1):
        yield label((x(10.0**power), HEIGHT - BOTTOM + 18), f"{10.0**power:g}", "middle")
    yield label(((LEFT + WIDTH) / 2, HEIGHT - 12), "seconds", "middle")
    for number, (each, colour) in enumerate(zip(found, COLOURS, strict=True)):
        steps: list[str] = []
        for (seconds, figure), after in zip(each.points, [*each.points[1:], None], strict=True):
            until = each.seconds if after is None else after[0]
            steps += [f"{x(seconds):.1f},{y(figure):.1f}", f"{x(until):.1f},{y(figure):.1f}"]
        yield f'<polyline points="{" ".join(steps)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield label((WIDTH - RIGHT - 100, TOP + 16 + 16 * number), each.name, colour=colour)


def main() -> None:
    """Print the table; write it and the picture."""
    parser = arguments(__doc__, states=STATES, device="sim:rtx3090", preset="paper", output=Path)
    parser.add_argument("name", nargs="?", default="seed-vit")
    parser.add_argument("--limit", nargs=2, default=["lat", "1.1"], metavar=("lat|mem", "RATIO"))
    asked = parser.parse_args()
    kind, ratio = asked.limit
    if kind not in ("lat", "mem"):
        parser.error(f"--limit takes lat or mem, not {kind}")
    limit = Limit(latency=float(ratio)) if kind == "lat" else Limit(memory=float(ratio))
    warm = Bench().subject(Case(WARMING, "magis", asked.device, "small"))
    curves(warm, limit, 100)
    (name,) = resolve([asked.name])
    subject = Bench().subject(Case(name, "magis", asked.device, asked.preset))
    found = curves(subject, limit, asked.states)
    printed(chain(head(), table(found, limit)), asked.output and asked.output.with_suffix(".txt"))
    if asked.output is not None:
        title = f"{name} ({asked.preset}) on {asked.device}, {limit.text}: best plan so far"
        asked.output.write_text(
            "\n".join(framed((WIDTH, HEIGHT), title, picture(title, found, limit))) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
