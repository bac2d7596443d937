"""What a run shows in the terminal: progress of long cases, the table of cases, the comparison of strategies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from magis.results import CaseResult
from magis.units import aligned, format_bytes
from pytest_magis.findings import NEW, PERMISSIONS, accept_all
from pytest_magis.run_plan import Outcome

RANKS_HEADER = ("strategy", "ranks", "peak per rank", "of eager's", "samples/s", "figures")
USUAL = ("eager", "magis", "peak")
"""A run of nothing else is compared well enough in the table of its cases."""


def comparison(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One table for each model that ran under something else than eager and magis; lines of text."""
    for model in dict.fromkeys(outcome.model for outcome in outcomes):
        found = [(each.label, each.result) for each in outcomes if each.model == model and each.result is not None]
        if all(result.case.strategy in USUAL for _, result in found):
            continue
        yield f"{model}, a batch of {found[0][1].samples} samples:" if found[0][1].samples else f"{model}:"
        yield from aligned([RANKS_HEADER, *rows(found)], left=range(len(RANKS_HEADER)))


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


HEADER = ("model", "strategy", "limit", "original", "optimized", "ratio", "latency ratio", "numbers", "verdict")
LEFT = (0, 1, 2, 7, 8)
"""Columns of text; the others hold numbers and are aligned to the right."""
WIDEST = 24


def summary(
    outcomes: Sequence[Outcome], given: Sequence[tuple[str, str]], lines: Sequence[str], width: int = 80
) -> Iterator[str]:
    """The table in ``width`` columns, what it leaves unsaid about cases that passed, how to accept the rest, and what
    was written."""
    if outcomes:
        yield from table(outcomes, width)
        yield from comparison(outcomes)
    for outcome in outcomes:
        if outcome.verdict.passed:  # red cases have said all of it themselves
            accepted = "accepted, " if outcome.verdict.store else ""
            changes = [
                f"{accepted}{found.kind}: {found.text}{f'; {found.why}' if found.why else ''}"
                for found in outcome.verdict.findings
                if found.kind != NEW
            ]
            yield from (f"{outcome.name}: {text}" for text in (*changes, *outcome.verdict.notes))
    yield from _priced(outcomes)
    needed = {kind for outcome in outcomes if not outcome.verdict.store for kind in outcome.verdict.needed}
    if needed:
        words = [kind for kind in PERMISSIONS if kind in needed]
        where = [outcome.where for outcome in outcomes if outcome.verdict.needed and not outcome.verdict.store]
        yield f"accept everything that can be: {accept_all(given, words, where)}"
    yield from lines


def _priced(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line for every operator profile: what the simulated latencies rest on; and what is to be known about it."""
    known = [outcome.result.provenance for outcome in outcomes if outcome.result is not None]
    for source in dict.fromkeys(each.source for each in known if each.source):
        ours = [each for each in known if each.source == source]
        off = max(each.error for each in ours)
        between = f" (typically {off:.0%} off)" if off else ""
        yield (
            f"latencies priced by {source}: at least {min(each.measured for each in ours):.1%} measured, "
            f"at most {max(each.interpolated for each in ours):.1%} interpolated{between}, "
            f"{max(each.estimated for each in ours):.1%} estimated"
        )
    yield from dict.fromkeys(f"note: {each.note}" for each in known if each.note)


def table(outcomes: Sequence[Outcome], width: int = 80) -> Iterator[str]:
    """Header and one line per outcome, columns aligned; names are cut where the lines are wider than ``width``."""
    rows = [HEADER, *(cells(outcome) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    widest = max(WIDEST, width - sum(widths[1:]) - 2 * len(widths[1:]))
    yield from aligned([(_cut_inside(row[0], widest), *row[1:]) for row in rows], LEFT)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """A row of the table, a text for every column of the header."""
    result, case = outcome.result, outcome.case
    strategy = _cut(case.shown)
    model = outcome.model
    if result is None:
        return (model, strategy, _limit(outcome), "", "", "", "", "", outcome.verdict.label)
    original, optimized = (step.needed_bytes(case.memory_limit_of) for step in (result.original, result.optimized))
    mark = "" if result.optimized.is_measured else "~"  # simulated, not measured
    unlike = "~" if result.optimized.is_measured and not result.original.is_measured else ""
    return (
        model,
        strategy,
        _limit(outcome),
        f"{unlike}{format_bytes(original)}",
        f"{mark}{format_bytes(optimized)}",
        f"{optimized / original:.3f}" if original else "",
        _latency(outcome),
        _numbers(result.numbers),
        outcome.verdict.label,
    )


def _limit(outcome: Outcome) -> str:
    case = outcome.case
    if case.memory_ratio is not None:
        return f"{'mem' if case.memory_limit_of == 'peak' else case.memory_limit_of} {case.memory_ratio:.6g}"
    return f"lat {case.latency_ratio:.6g}" if case.latency_ratio is not None else "-"


def _latency(outcome: Outcome) -> str:
    result = outcome.result
    if result is None or outcome.case.has_one_step:
        return "-"
    if result.ratio is not None:
        return f"{result.ratio.ratio:.2f} [{result.ratio.low:.2f}, {result.ratio.high:.2f}]"
    if result.optimized.is_measured or not result.priced or not result.original.simulated_ms > 0:
        return "-"
    return f"~{result.optimized.simulated_ms / result.original.simulated_ms:.3f}"


def _numbers(numbers: str) -> str:
    return "differs" if numbers.startswith("differs") else _cut(numbers, 16)


def _cut_inside(name: str, width: int) -> str:
    """A model's name; of a long one, such as a test's or a factory's, mostly the end, which tells it from others."""
    head = (width - 3) // 4
    return name if len(name) <= width else f"{name[:head]}...{name[head + 3 - width :]}"


def _cut(text: str, width: int = WIDEST) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


# A line that shows what a long case is doing, on a terminal only, and leaves no trace.

ERASE = "\r\x1b[2K"
SECONDS_BETWEEN_UPDATES = 0.1


@contextmanager
def progress_line(config: pytest.Config, name: str) -> Iterator[Callable[[str], None] | None]:
    """A function that shows one line of text, None where no terminal would show it. The line is erased at the end."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty or config.getoption("verbose") < 0:
        yield None
        return
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    last_shown: float | None = None

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write(text, flush=True)

    def show(text: str) -> None:
        nonlocal last_shown
        now = time.monotonic()
        if last_shown is None:
            reporter.ensure_newline()
        elif now - last_shown < SECONDS_BETWEEN_UPDATES:
            return
        last_shown = now
        # one column less than the terminal has: a full line would wrap, and could not be erased
        line = " ".join(f"{name}: {text}".split())[: config.get_terminal_writer().fullwidth - 1]
        write(ERASE + line)

    try:
        yield show
    finally:
        if last_shown is not None:
            write(ERASE)
