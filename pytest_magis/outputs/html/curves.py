"""Plots of memory over simulated time: one panel per step, bytes stacked by kind, on common axes.

Shapes are an SVG that stretches with the page; labels are HTML on top of it, so that their size stays fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from magis.printable import printable
from magis.report import LinearScale, byte_scale, time_scale
from magis.results import Span
from magis.units import format_bytes, format_milliseconds
from pytest_magis.outputs.html.page_parts import element, text

WIDTH, PANEL, GAP = 1000, 170, 34
"""Width of the SVG in its own units; height in pixels of a panel, and of the labels above it."""
LINE = 16
"""Height of a line of text in pixels."""


@dataclass(frozen=True)
class Curves:
    """Plot of a case's memory over time, with one panel per step."""

    lines: Mapping[str, Sequence[Span]]
    """Time line of each step, as a sequence of operator calls."""
    limit: int | None = None
    """Memory limit in bytes; None for a case without one."""

    @cached_property
    def calls(self) -> dict[str, list[Span]]:
        """Return the calls on the compute stream by step; overlapping copies and collectives are not drawn."""
        return {step: [span for span in spans if span.stream == "compute"] for step, spans in self.lines.items()}

    @cached_property
    def most(self) -> int:
        return max(map(_most, self.lines.values()), default=0)

    @cached_property
    def end_ms(self) -> float:
        return max(map(_end_ms, self.lines.values()), default=0.0)

    @cached_property
    def kinds(self) -> dict[int, str]:
        """Return the kinds of bytes that occur, keyed by index in `Span.KINDS`; empty if a call lacks bytes by kind."""
        spans = [span for spans in self.calls.values() for span in spans]
        if not all(len(span.kinds) == len(Span.KINDS) for span in spans):
            return {}
        return {at: kind for at, kind in enumerate(Span.KINDS) if any(span.kinds[at] for span in spans)}

    def data(self) -> dict[str, Any]:
        """Return the JSON data for the page's script.

        Each step is a list of [start in ms, duration in ms, bytes, index of name] per call. Bytes by kind are a list
        with one number per call, or a single number if all are equal.
        """
        names: dict[str, int] = {}
        found = {
            step: [
                [
                    round(span.start_ms, 6),
                    round(span.ms, 6),
                    span.nbytes,
                    names.setdefault(_call_in_words(span), len(names)),
                ]
                for span in spans
            ]
            for step, spans in self.calls.items()
        }
        kinds = {
            step: [[kind, _column([span.kinds[at] for span in spans])] for at, kind in self.kinds.items()]
            for step, spans in self.calls.items()
        }
        ends = {"end": self.end_ms, "axis": self.time_scale.end, "most": self.most}
        return {"lines": found, "kinds": kinds, "names": list(names), **ends}

    def html(self, number: int, title: str) -> str:
        """Return the plot with its legend, and an output element for the script."""
        height = len(self.lines) * (PANEL + GAP)
        peaks = [f"{step}: at most {format_bytes(_most(spans))}" for step, spans in self.lines.items()]
        limit = [] if self.limit is None else [f"memory limit {format_bytes(self.limit)}"]
        inner = "".join(self._shapes())
        svg = (
            f'<svg class="curve" data-curve="{number}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" '
            f'role="img" tabindex="0" aria-labelledby="title-{number}" aria-describedby="about-{number}">'
            f'<title id="title-{number}">{text(title)}</title>'
            f'<desc id="about-{number}">{text("; ".join([*peaks, *limit]))}</desc>{inner}</svg>'
        )
        words = element("div", "".join(self._words()), aria_hidden="true")
        plot = element("div", svg + words, class_="plot", style=f"height:{height}px")
        keys = "".join(element("span", text(kind), class_=f"key k{at}") for at, kind in self.kinds.items())
        return f'<figure>{plot}<figcaption>{keys}<output class="hover"></output></figcaption></figure>'

    @cached_property
    def bytes_scale(self) -> LinearScale:
        return byte_scale(max(self.most, self.limit or 0))

    @cached_property
    def time_scale(self) -> LinearScale:
        return time_scale(self.end_ms)

    def _height(self, nbytes: float) -> float:
        return PANEL * self.bytes_scale.share(nbytes)

    def _shapes(self) -> Iterator[str]:
        for number, calls in enumerate(self.calls.values(), 1):
            base = number * (PANEL + GAP)
            yield f'<rect class="panel" y="{base - PANEL}" width="{WIDTH}" height="{PANEL}"/>'
            levels = [list(accumulate(span.kinds)) if self.kinds else [span.nbytes] for span in calls]
            starts = [WIDTH * self.time_scale.share(span.start_ms) for span in calls]
            end = WIDTH * self.time_scale.share(_end_ms(calls))
            for at in reversed(self.kinds or {0: ""}):  # the highest first: lower ones are drawn over it
                tops = [base - self._height(each[at]) for each in levels]
                yield f'<path class="k{at}" d="{_area(starts, tops, end, base)}"/>'
            yield from (self._line("grid", base, tick) for tick in self.bytes_scale.ticks)
            if self.limit is not None:
                yield self._line("limit", base, self.limit)

    def _line(self, kind: str, base: int, nbytes: float) -> str:
        y = f"{base - self._height(nbytes):.1f}"
        return f'<line class="{kind}" x2="{WIDTH}" y1="{y}" y2="{y}"/>'

    def _words(self) -> Iterator[str]:
        for number, (step, spans) in enumerate(self.lines.items(), 1):
            base = number * (PANEL + GAP)
            head = f"{step}: at most {format_bytes(_most(spans))}, {format_milliseconds(_end_ms(self.calls[step]))}"
            yield _word("step", head, base - PANEL - LINE - LINE / 2 - 2)
            for tick in self.bytes_scale.ticks:
                yield _word("y", self.bytes_scale.words(tick), base - self._height(tick) - LINE / 2)
            if self.limit is not None:
                height = self._height(self.limit)
                beside = -LINE - 2 if height + LINE + 2 <= PANEL else 2
                yield _word("limit", f"limit {format_bytes(self.limit)}", base - height + beside)
        *ticks, last = self.time_scale.ticks
        words = [*map(self.time_scale.number, ticks), self.time_scale.words(last)]
        for tick, word in zip(self.time_scale.ticks, words, strict=True):
            yield element("span", text(word), class_="x", style=f"left:{100 * self.time_scale.share(tick):.2f}%")


def _word(kind: str, words: str, top: float) -> str:
    return element("span", text(words), class_=kind, style=f"top:{top:.1f}px")


def _most(spans: Sequence[Span]) -> int:
    return max((span.nbytes for span in spans), default=0)


def _end_ms(spans: Sequence[Span]) -> float:
    return max((span.start_ms + span.ms for span in spans), default=0.0)


def _column(values: Sequence[int]) -> Sequence[int] | int:
    return values[0] if len(set(values)) == 1 else values


def _area(starts: Sequence[float], levels: Sequence[float], end: float, base: float) -> str:
    """Return the SVG path of a filled step curve; each level lasts until the next start."""
    found = [f"M0 {base}"]
    drawn = f"{base:.1f}"
    for x, level in zip(starts, levels, strict=True):
        y = f"{level:.1f}"
        if y != drawn:
            found.append(f"H{x:.1f}V{y}")
            drawn = y
    return "".join([*found, f"H{end:.1f}V{base}Z"])


def _call_in_words(span: Span) -> str:
    """Return a call as text: operator, module, phase, and line of source."""
    module = f" of {span.module}" if span.module else ""
    again = ", recomputed" if span.again else ""
    return printable(f"{span.op}{module} ({span.phase}{again}){f' {span.line}' if span.line else ''}")
