"""magis beside what users reach for first, measured in one process: peak memory at equal or lower latency.

    python benchmarks/strategies.py [--models bert,gpt] [--rounds 12] [--output FILE]

Every strategy is timed in turns with eager, so ratios compare. For each rival the leanest plan of magis is named that
is at most as slow, and whose numbers are at least as near to eager's: under autocast only beside autocast, compiled
only beside compiled. "better" counts rivals that such a plan beats.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()


from magis.cases.run_case import run_case
from magis.planner.bench import Bench
from magis.results import Case, CaseResult
from magis.units import MIB

RIVALS = ("amp", "checkpoint", "selective-checkpoint", "compile", "compile-budget")
RATIOS = {"magis": (0.8, 0.6, 0.4, 0.3, 0.25), "magis+amp": (0.8, 0.6, 0.4), "magis+compile": (0.8, 0.6, 0.5, 0.4)}


@dataclass(frozen=True)
class Point:
    """A strategy's figures, relative to eager in float32."""

    name: str
    peak_bytes: int
    latency: float
    numbers: str

    @property
    def kind(self) -> str:
        """Of the step: what changes its numbers."""
        return "amp" if "amp" in self.name else "compiled" if "compile" in self.name else "float32"

    def is_as_exact(self, other: Point) -> bool:
        """Whether a plan of magis is as near to eager's numbers: in float32 without a compiler they are the same."""
        return self.kind in {other.kind, "float32"}


def main() -> int:
    """Print both tables; 1 where a rival is not beaten."""
    given = arguments(
        __doc__, models="bert,gpt", rounds=12, output=Path(__file__).parent / "results" / "strategies.txt"
    ).parse_args()
    found = (_compared(model, _measured(model, given.rounds)) for model in given.models.split(","))
    lines = printed(chain(head(), chain.from_iterable(found)), given.output)
    beaten = f"  better in {len(RIVALS)} of {len(RIVALS)}"
    return 0 if lines.count(beaten) == len(given.models.split(",")) else 1


def _measured(model: str, rounds: int) -> list[Point]:
    bench = Bench()
    cases = [Case(model, name, "cpu", "small", timing_rounds=rounds) for name in RIVALS]
    for name, ratios in RATIOS.items():
        dtype = "amp-bfloat16" if name == "magis+amp" else None
        cases += [
            Case(model, name, "cpu", "small", dtype, memory_ratio=ratio, timing_rounds=rounds) for ratio in ratios
        ]
    points: list[Point] = []
    for case in cases:
        print(f"{model}: {case.strategy} {case.memory_ratio or ''}", file=sys.stderr, flush=True)
        points.append(_point(case, run_case(case, cache=bench), points))
    bench.close()
    return points


def _point(case: Case, result: CaseResult, before: Sequence[Point]) -> Point:
    """Of a plan under autocast, timed beside eager under autocast, by way of that one's own ratio."""
    name = case.strategy if case.memory_ratio is None else f"{case.strategy}-mem{case.memory_ratio:g}"
    base = next((point.latency for point in before if point.name == "amp"), 1.0) if case.dtype else 1.0
    return Point(name, result.memory.peak_bytes, base * result.latency_ratio, result.numbers)


def _compared(model: str, points: Sequence[Point]) -> Iterator[str]:
    yield f"{model}: {'strategy':24}{'peak MiB':>10}{'latency':>9}  numbers"
    for p in points:
        yield f"{'':{len(model) + 2}}{p.name:24}{p.peak_bytes / MIB:10.2f}{p.latency:9.3f}  {p.numbers}"
    ours = [point for point in points if point.name.startswith("magis")]
    beaten = 0
    for rival in (point for point in points if not point.name.startswith("magis")):
        lean = [p for p in ours if p.latency <= rival.latency and p.peak_bytes < rival.peak_bytes]
        same = [p for p in lean if p.is_as_exact(rival)]
        best = min(same, key=lambda p: p.peak_bytes, default=None)
        beaten += best is not None
        said = (
            "NOT beaten at its latency"
            if best is None
            else f"{best.name}: {best.peak_bytes / rival.peak_bytes:.2f} of its peak, {best.latency:.3f} of eager"
        )
        yield f"  {rival.name:22} {rival.peak_bytes / MIB:8.2f} MiB, {rival.latency:.3f}: {said}"
    yield f"  better in {beaten} of {len(RIVALS)}"


if __name__ == "__main__":
    sys.exit(main())
