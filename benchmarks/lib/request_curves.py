"""The memory that was asked for against the memory that was needed: rows of a table, what they come to, a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from magis.report.axes import LinearScale, decimal_scale
from magis.report.pictures import BOUND, EAGER, GRID, OURS, TEXT, across, framed, label

HEADING = (
    f"{'size':8} {'planner':7} {'request':>7} {'limit bytes':>13} {'peak bytes':>13} {'saved bytes':>13}"
    f" {'reached':>7} {'least':>6} {'cpu s':>6}  verdict"
)
KEPT, ABOVE, LEANEST = "kept", "ABOVE", "LEANEST"
"""Verdicts; the last one where a planner says itself that it found no plan within the limit."""


@dataclass(frozen=True)
class Row:
    """A planner's answer to one request. A share is of what is saved at torch's budget of 1: peaks that are a share
    of those bytes apart are that share apart, and the peak at budget 1 is 1."""

    size: str
    planner: str
    request: float
    limit_bytes: int
    peak_bytes: int
    saved_bytes: int
    reached: float
    """The share that the peak comes to."""
    least: float
    """The share at which only parameters, batch and gradients would fit: no request below it can be kept."""
    cpu_s: float
    verdict: str

    @property
    def is_possible(self) -> bool:
        return self.request >= self.least

    def __str__(self) -> str:
        return (
            f"{self.size:8} {self.planner:7} {self.request:7.2f} {self.limit_bytes:13} {self.peak_bytes:13}"
            f" {self.saved_bytes:13} {self.reached:7.3f} {self.least:6.3f} {self.cpu_s:6.2f}  {self.verdict}"
        )


@dataclass(frozen=True)
class Scale:
    """From bytes to shares, for one network."""

    full_bytes: int
    """Peak at budget 1."""
    saved_bytes: int
    """Saved at budget 1."""
    least_bytes: int
    """Of parameters, batch and gradients."""

    def limit_bytes(self, request: float) -> int:
        """The peak if that share of the activations were saved, and all else stayed."""
        return self.full_bytes - round((1 - request) * self.saved_bytes)

    def share(self, peak_bytes: int) -> float:
        return 1 - (self.full_bytes - peak_bytes) / self.saved_bytes

    @property
    def least(self) -> float:
        return self.share(self.least_bytes)


def rows_of(lines: Iterable[str]) -> list[Row]:
    """Rows among printed lines; the last one where a request was measured twice."""
    found: dict[tuple[str, str, float], Row] = {}
    for line in lines:
        cells = line.split(maxsplit=9)
        if len(cells) == 10 and cells[3].isdigit():
            size, planner, request, limit, peak, saved, reached, least, cpu, verdict = cells
            row = Row(
                size, planner, float(request), int(limit), int(peak), int(saved), float(reached), float(least),
                float(cpu), verdict.strip(),
            )  # fmt: skip
            found[size, planner, row.request] = row
    return list(found.values())


def curves(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """By size and planner, the largest request first."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda each: -each.request):
        found.setdefault((row.size, row.planner), []).append(row)
    return dict(sorted(found.items()))


def rises(curve: Sequence[Row]) -> int:
    """Steps of a curve on which less was asked for and more was needed."""
    return sum(after.peak_bytes > before.peak_bytes for before, after in pairwise(curve))


def summary(rows: Iterable[Row]) -> Iterator[str]:
    """How often each planner needs more than asked for, of requests that can be kept, and how often its peak rises."""
    found = curves(rows)
    for (size, planner), curve in found.items():
        possible = [row for row in curve if row.is_possible]
        above = [row for row in possible if row.peak_bytes > row.limit_bytes]
        worst = max((row.reached - row.request for row in above), default=0.0)
        words = f", by {worst:.3f} at most" if above else ""
        yield (
            f"# {size} {planner}: rises at {rises(curve)} of {len(curve) - 1} steps;"
            f" above {len(above)} of {len(possible)} requests{words}; leanest {min(row.reached for row in curve):.3f}"
        )
    for planner in dict.fromkeys(planner for _, planner in found):
        own = [curve for (_, name), curve in found.items() if name == planner]
        possible = [row for curve in own for row in curve if row.is_possible]
        broken = sum(row.peak_bytes > row.limit_bytes for row in possible)
        steps = sum(len(curve) - 1 for curve in own)
        yield (
            f"# all {planner}: rises at {sum(map(rises, own))} of {steps} steps;"
            f" above {broken} of {len(possible)} requests"
        )


def joined(lines: Iterable[str]) -> Iterator[str]:
    """Heads and rows of several tables, and what all of them come to."""
    kept = [line for line in lines if not (line.startswith("# ") and ": rises at " in line)]
    yield from kept
    yield from summary(rows_of(kept))


TITLE = "Peak of one forward and backward, against the activation memory that was asked for"
PANEL, GAP, LEFT, TOP, BOTTOM = 250, 36, 56, 92, 60
LEAST_WIDTH = 780
"""Room for the legend."""
COLOURS = {"dp": EAGER, "ilp": BOUND, "magis": OURS}
NAMES = {"dp": "torch, dp", "ilp": "torch, ilp", "magis": "magis"}
DIAGONAL, LEAST = "6 4", "2 4"
"""Dashes of the request, and of what weights and gradients need."""


def curves_svg(rows: Sequence[Row]) -> str:
    """A stand-alone picture with a panel for each size. ValueError without rows."""
    if not rows:
        raise ValueError("a picture needs at least one row")
    sizes = sorted({row.size for row in rows})
    size = (max(LEFT + len(sizes) * (PANEL + GAP), LEAST_WIDTH), TOP + PANEL + BOTTOM)
    found = curves(rows)
    reached = decimal_scale(max(1.0, *(row.reached for row in rows)))
    lines = [label((8, 22), TITLE), *_legend([name for name in NAMES if any(name == planner for _, planner in found)])]
    lines.append(label((8, TOP - 10), "peak"))
    for number, name in enumerate(sizes):
        own = {planner: curve for (of, planner), curve in found.items() if of == name}
        lines += _panel(name, own, LEFT + number * (PANEL + GAP), reached, numbered=not number)
    return "\n".join(framed(size, TITLE, lines, "; ".join(each.lstrip("# ") for each in summary(rows)))) + "\n"


def _legend(planners: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    kinds = [(NAMES[name], COLOURS[name], "") for name in planners]
    for words, colour, dashes in (*kinds, ("the request", TEXT, DIAGONAL), ("weights and gradients", TEXT, LEAST)):
        yield across(x, x + 24, 46, colour, dashes)
        yield label((x + 30, 50), words, colour=colour)
        x += 50 + 7.2 * len(words)


def _panel(name: str, own: dict[str, list[Row]], left: float, reached: LinearScale, *, numbered: bool) -> Iterator[str]:
    """The curves of one size, on a square from 0 to 1 of requests."""
    asked = LinearScale(0.2, 5, "")

    def place(request: float, share: float) -> tuple[float, float]:
        return left + asked.share(request) * PANEL, TOP + PANEL - reached.share(share) * PANEL

    layers, _, length = name.partition("x")
    yield label((left + PANEL / 2, TOP - 10), f"{layers} layers, {length} tokens", "middle")
    for tick in reached.ticks:
        y = place(0, tick)[1]
        yield across(left, left + PANEL, y)
        if numbered:
            yield label((left - 8, y + 4), reached.number(tick), "end")
    for tick in asked.ticks:
        x = place(tick, 0)[0]
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + PANEL}" stroke="{GRID}"/>'
        yield label((x, TOP + PANEL + 18), asked.number(tick), "middle")
    yield label((left + PANEL / 2, TOP + PANEL + 42), "request", "middle")
    (x1, y1), (x2, y2) = place(0, 0), place(1, 1)
    yield (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{TEXT}" stroke-dasharray="{DIAGONAL}"/>'
    )
    yield across(left, left + PANEL, place(0, next(iter(own.values()))[0].least)[1], TEXT, LEAST)
    for planner, curve in own.items():
        colour = COLOURS[planner]
        places = [place(row.request, row.reached) for row in curve]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for (x, y), row in zip(places, curve, strict=True):
            words = escape(f"{NAMES[planner]}: asked {row.request:g}, reached {row.reached:.3f}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{words}</title></circle>'
