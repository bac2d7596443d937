"""Terminal output of a run: the table of cases, the comparison of strategies, and progress of slow cases."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest

from magis.progress import Progress, ProgressPlace, shown_if_slow
from magis.results import CaseResult
from magis.strategies.strategy_names import BLOCK
from magis.units import aligned, format_bytes
from pytest_magis.findings import NEW, accept_all
from pytest_magis.option_values import PERMISSIONS
from pytest_magis.run_plan import Outcome

RANKS_HEADER = ("strategy", "ranks", "peak per rank", "of eager's", "samples/s", "figures")
USUAL = ("eager", "magis", "peak")
"""Strategies that appear only in the table of cases, not in the comparison."""


def comparison(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of a comparison table for each model that ran under a strategy beyond the usual ones."""
    for model in dict.fromkeys(outcome.model for outcome in outcomes):
        found = [(each.label, each.result) for each in outcomes if each.model == model and each.result is not None]
        if all(result.case.strategy in USUAL for _, result in found):
            continue
        yield f"{model}, a batch of {found[0][1].samples} samples:" if found[0][1].samples else f"{model}:"
        yield from aligned([RANKS_HEADER, *rows(found)], left=range(len(RANKS_HEADER)))


def rows(found: Sequence[tuple[str, CaseResult]]) -> Iterator[tuple[str, ...]]:
    """Yield a row per case (label, result), sorted by peak bytes."""
    eager = next((result.memory.peak_bytes for _, result in found if result.case.strategy == "eager"), None)
    for label, result in sorted(found, key=lambda each: each[1].memory.peak_bytes):
        peak = result.memory.peak_bytes
        rate, spread = result.samples_per_s, result.samples_per_s_spread
        yield (
            label,
            str(result.case.ranks),
            format_bytes(peak),
            f"{peak / eager:.3f}" if eager else "-",
            "-" if rate is None else f"{rate:.4g}" + ("" if spread is None else f" +- {spread:.2g}"),
            "predicted" if result.is_predicted else "measured",
        )


HEADER = ("model", "strategy", "limit", "original", "optimized", "ratio", "latency ratio", "numbers", "verdict")
LEFT = (0, 1, 2, 7, 8)
"""Indices of left-aligned text columns; the others hold numbers and are right-aligned."""
SHORTEST = 24
"""Minimum number of characters that a shortened name keeps."""


def summary(
    outcomes: Sequence[Outcome], given: Sequence[tuple[str, str]], lines: Sequence[str], width: int | None = 80
) -> Iterator[str]:
    """Yield the summary: tables, findings and notes of passed cases, a command to accept red ones, ``lines``.

    The table fits ``width`` columns; None: any width.
    """
    if outcomes:
        yield from table(outcomes, width)
        yield from comparison(outcomes)
    for outcome in outcomes:
        if outcome.verdict.passed:  # red cases have reported theirs
            accepted = "accepted, " if outcome.verdict.store else ""
            changes = [
                f"{accepted}{found.kind}: {found.text}{f'; {found.why}' if found.why else ''}"
                for found in outcome.verdict.findings
                if found.kind != NEW
            ]
            yield from (f"{outcome.name}: {text}" for text in (*changes, *outcome.verdict.notes))
    # the sources of simulated latencies, one line per operator profile, and notes on profiles
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
    needed = {kind for outcome in outcomes if not outcome.verdict.store for kind in outcome.verdict.needed}
    if needed:
        words = [kind for kind in PERMISSIONS if kind in needed]
        where = [outcome.where for outcome in outcomes if outcome.verdict.needed and not outcome.verdict.store]
        yield f"accept everything that can be: {accept_all(given, words, where)}"
    yield from lines


def table(outcomes: Sequence[Outcome], width: int | None = 80) -> Iterator[str]:
    """Yield the header and one line per outcome, columns aligned.

    Names are shortened if that saves a line on a terminal of ``width`` columns; None: any width.
    """
    rows = [HEADER, *(cells(outcome) for outcome in outcomes)]
    if width is not None:
        model, strategy, *others = (max(len(row[column]) for row in rows) for column in range(len(HEADER)))
        rest = sum(others) + 2 * (len(HEADER) - 1)
        lines = -(-(rest + min(model, SHORTEST) + min(strategy, SHORTEST)) // width)
        room = lines * width - rest
        model = max(min(model, SHORTEST), min(model, room - strategy))
        strategy = min(strategy, room - model)
        rows = [(_cut(row[0], model), _cut(row[1], strategy), *row[2:]) for row in rows]
    yield from aligned(rows, LEFT)


def state_of_run(outcomes: Sequence[Outcome]) -> str:
    """Return the number of red cases as text."""
    red = sum(not outcome.verdict.passed for outcome in outcomes)
    return f"{red} of {len(outcomes)} cases red" if red else f"all {len(outcomes)} cases green"


def cells(outcome: Outcome) -> tuple[str, ...]:
    """Return the texts of one table row, in the order of the header."""
    result, case = outcome.result, outcome.case
    model, strategy = outcome.model, outcome.label if case.strategy == BLOCK else case.shown
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
        result.numbers.partition(":")[0],  # figures are in the csv
        outcome.verdict.label,
    )


def _limit(outcome: Outcome) -> str:
    case = outcome.case
    if case.limits_memory:
        limit = f"{case.memory_ratio:.6g}" if case.memory_limit is None else format_bytes(case.memory_limit)
        return f"{'mem' if case.memory_limit_of == 'peak' else case.memory_limit_of} {limit}"
    return f"lat {case.latency_ratio:.6g}" if case.latency_ratio is not None else "-"


def _latency(outcome: Outcome) -> str:
    result = outcome.result
    if result is None or outcome.case.has_one_step:
        return "-"
    if result.ratio is not None:
        return f"{result.ratio.ratio:.2f} [{result.ratio.low:.2f}, {result.ratio.high:.2f}]"
    if result.optimized.is_measured or not result.priced or not result.original.simulated_ms > 0:
        return "-"
    bound = result.latency_ratio_bound
    least = "" if bound is None else f" (at least {bound:.3f})"
    return f"~{result.optimized.simulated_ms / result.original.simulated_ms:.3f}{least}"


def _cut(name: str, width: int) -> str:
    """Return a name shortened to a width; mostly the end is kept, since it differs between names."""
    head = (width - 3) // 4
    return name if len(name) <= width else f"{name[:head]}...{name[head + 3 - width :]}"


_PLACE: pytest.StashKey[ProgressPlace] = pytest.StashKey()


@contextmanager
def progress_line(config: pytest.Config, name: str) -> Iterator[Progress | None]:
    """Yield a function that reports a case's progress on stderr if the case is slow; None with `-q`.

    Workers of pytest-xdist share stderr, so they write whole lines.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    silent = reporter is None and not hasattr(config, "workerinput")
    if silent or config.getoption("verbose", default=0) < 0:
        yield None
        return
    if _PLACE not in config.stash:
        config.stash[_PLACE] = _stderr_of_session(config, reporter)
    with shown_if_slow(config.stash[_PLACE], name) as tell:
        yield tell


def _stderr_of_session(config: pytest.Config, reporter: Any) -> ProgressPlace:
    """Return the real stderr as a place for progress, bypassing pytest's capture."""
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        stream, terminal = sys.stderr, sys.stderr.isatty()
        try:
            copy = os.dup(stream.fileno())
        except (OSError, ValueError):  # no file, as in a pytest run within a test
            return ProgressPlace(partial(print, end="", file=stream, flush=True))
        config.add_cleanup(partial(os.close, copy))
        try:
            together = terminal or os.path.sameopenfile(copy, sys.stdout.fileno())
        except (OSError, ValueError):
            together = False

    def write(text: str) -> None:
        with suppress(OSError):  # stderr was closed
            os.write(copy, text.encode(errors="replace"))

    if reporter is None:  # a worker does not know the column of the process that has the terminal
        return ProgressPlace(write, column=lambda: 1)
    writer = config.get_terminal_writer()
    # without capture, erasing the line would erase what tests print
    rewritten = terminal and reporter.isatty and config.getoption("capture", default="no") != "no"

    def column() -> int:
        if together and not rewritten:
            reporter.currentfspath = None  # pytest then begins the test's line again for its result
        return writer.width_of_current_line if together else 0

    return ProgressPlace(write, writer.fullwidth if rewritten else None, column)
