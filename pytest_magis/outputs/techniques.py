"""The comparison of strategies at the end of a run: what each needs on a rank, and how fast it is, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magis.results import CaseResult
from magis.units import format_bytes
from pytest_magis.outcome import Outcome

__all__ = ["HEADER", "comparison", "rows"]

HEADER = ("strategy", "ranks", "peak per rank", "of eager's", "samples/s", "figures")
USUAL = ("eager", "magis")
"""A run of nothing else is compared well enough in the table of its cases."""


def comparison(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One table for each model that ran under something else than eager and magis; lines of text."""
    for model in dict.fromkeys(outcome.model for outcome in outcomes):
        found = [(each.label, each.result) for each in outcomes if each.model == model and each.result is not None]
        if all(result.case.strategy in USUAL for _, result in found):
            continue
        lines = [HEADER, *rows(found)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        yield f"{model}, a batch of {found[0][1].samples} samples:" if found[0][1].samples else f"{model}:"
        for line in lines:
            first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            yield "  ".join((first, *others)).rstrip()


def rows(found: Sequence[tuple[str, CaseResult]]) -> Iterator[tuple[str, ...]]:
    """A line of each case (label, result): leanest first."""
    eager = next((result.memory.peak_bytes for _, result in found if result.case.strategy == "eager"), None)
    for label, result in sorted(found, key=lambda each: each[1].memory.peak_bytes):
        peak = result.memory.peak_bytes
        yield (
            label,
            str(result.case.ranks),
            format_bytes(peak),
            f"{peak / eager:.3f}" if eager else "-",
            _rate(result),
            "predicted" if result.is_predicted else "measured",
        )


def _rate(result: CaseResult) -> str:
    rate, spread = result.samples_per_s, result.samples_per_s_spread
    if rate is None:
        return "-"
    return f"{rate:.4g}" if spread is None else f"{rate:.4g} +- {spread:.2g}"
