"""The verdict on latency.

For timed steps only the latency ratio is compared, by its whole interval, since milliseconds vary by machine and load.
A simulated latency is exact (whole nanoseconds, from the graph and the device's constants), so on simulated devices the
latency of each step is compared, too: the ratio misses it if both steps get slower alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from magis.results import CaseResult
from magis.units import format_milliseconds
from pytest_magis.baselines import RATIO_DIGITS, CaseBaseline, Measured, constants_version, latency, simulated_ns
from pytest_magis.findings import BETTER, WORSE, Part, Tolerances, moved, percent

DECISIVE = 0.04
"""Relative width of a ratio's interval above which a step that is 10% slower cannot be told from an unchanged one."""

BY_PLANNER, BY_MACHINE = "planner", "machine"
"""Causes of a change in a plan's figures if the training step is still the baseline's."""

_ROUNDING = 0.51 * 10**-RATIO_DIGITS
"""Rounding error of a stored latency ratio, either way."""

_UNSURE = "unsure"

_SLOWER = 0.05
"""Difference of latency ratios from which a slow link is worth a note."""


def latency_bounds(stored: CaseBaseline | None, tolerances: Tolerances) -> tuple[float, ...]:
    """Return the latency ratios at which the verdict on a timed step changes, two for each device in the baseline."""
    known = stored.measured.values() if stored else ()
    ratios = [measured.latency_ratio for measured in known if measured.latency_ratio is not None]
    return tuple(ratio * (1 + sign * tolerances.latency) for ratio in ratios for sign in (-1, 1))


def latency_parts(
    result: CaseResult, measured: Measured | None, tolerances: Tolerances, mover: str = "", *, stopped: bool
) -> Iterator[Part]:
    """Yield differences in latency; if the search was stopped, only those of the original step.

    A non-empty ``mover`` means that the step is still the baseline's, and that the planner or the machine caused the
    change. The machine accounts for timed ratios only: timing noise alone never fails a case.
    """
    if measured is None or not _comparable(result, measured):
        return
    tolerance = tolerances.of_latency(result.case.device)
    kinds = set()
    original, optimized = simulated_ns(result) or (None, None)
    for part in _step("original", original, measured.original_latency_ns, tolerance):
        kinds.add(part.kind)
        yield part
    if not stopped and not result.case.has_one_step:
        for part in _step("optimized", optimized, measured.optimized_latency_ns, tolerance):
            kinds.add(part.kind)
            yield moved(part, mover if mover == BY_PLANNER else "")
    judged = None if stopped else _judge_ratio(result, measured, tolerance)
    # a slower original makes any ratio look better: that is no improvement
    if judged is not None and (judged.kind == WORSE or (judged.kind == BETTER and WORSE not in kinds)):
        yield moved(judged, mover if mover == BY_PLANNER or result.ratio is not None else "")


def latency_notes(result: CaseResult, measured: Measured | None, tolerances: Tolerances) -> Iterator[str]:
    """Yield notes on the latencies that are not gated, with the reason, and on a plan that a slow link would slow."""
    planned, halved = result.search.worst_latency_ratio, result.search.halved_latency_ratio
    if planned is not None and halved is not None and halved > planned + _SLOWER:
        half = f"with a link half as fast, the step would take x{halved:.2f} of eager's time, within the slack at most"
        yield f"{half} x{planned:.2f}; --magis-slack=0.5 plans for that"
    if result.ratio is not None and result.ratio.doubt:
        yield f"latency is not gated: {result.ratio.doubt}"
        return
    if measured is None:
        return
    if not _comparable(result, measured):
        yield (
            f"latency is not gated: it is simulated with version {constants_version(result)} of the devices' "
            f"constants, the baseline's with version {measured.constants}; --magis-update=new renews it"
        )
        return
    if (latency(result)[0] is None) != (measured.latency_ratio is None):
        where = "the baseline" if measured.latency_ratio is None else "this run"
        way_out = "; --magis-update=new adds one" if lacks_latencies(result, measured) else ""
        yield f"latency is not gated: {where} has no latency ratio{way_out}"
    elif lacks_latencies(result, measured):
        what = "latency is not gated" if result.case.has_one_step else "of latency only the ratio is gated"
        yield f"{what}: the baseline has no simulated latencies; --magis-update=new adds them"
    if not result.search.stopped_by_seconds:
        judged = _judge_ratio(result, measured, tolerances.of_latency(result.case.device))
        if judged is not None and judged.kind == _UNSURE:
            yield judged.text


def lacks_latencies(result: CaseResult, measured: Measured | None) -> bool:
    """Return True if --magis-update=new would add latencies to the baseline, or replace those of other constants.

    A baseline lacks them if it was stored on a busy machine, for example.
    """
    if measured is None:
        return False
    if simulated_ns(result) is None:
        return measured.latency_ratio is None and latency(result)[0] is not None
    return measured.original_latency_ns is None or not _comparable(result, measured)


def _comparable(result: CaseResult, measured: Measured) -> bool:
    """Return True unless both latencies are simulated, with different constants."""
    return measured.constants is None or measured.constants == constants_version(result)


def _step(step: str, seen: int | None, before: int | None, tolerance: float) -> Iterator[Part]:
    """Compare the simulated latency of one step with its baseline, in nanoseconds; skip if either is None."""
    if seen is None or before is None:
        return
    slack = int(before * Fraction(str(tolerance)))  # the decimal that was written: 0.03 allows 3% to the nanosecond
    allowed, what = before + slack, f"{step} simulated latency"
    if seen > allowed:
        share = percent(seen, allowed)
        yield Part(
            WORSE,
            f"{what}: {_in_words(seen)}, allowed {_in_words(allowed)} (baseline {before:,} + {tolerance:.3g}), {share}",
            f"{step} {share}",
        )
    elif seen < before - slack:
        share = percent(seen, before)
        yield Part(BETTER, f"{what}: {_in_words(seen)}, baseline {_in_words(before)}, {share}", f"{step} {share}")


def _in_words(nanoseconds: int) -> str:
    return f"{nanoseconds:,} ns ({format_milliseconds(nanoseconds / 1e6)})"


def _judge_ratio(result: CaseResult, measured: Measured, tolerance: float) -> Part | None:
    """Compare the latency ratio with its baseline: WORSE, BETTER or _UNSURE; None if it is unchanged or unknown.

    It is worse or better only if the whole interval is, so that noise alone never decides; an interval too wide to
    decide is _UNSURE. The baseline's own interval is ignored: one from a busy machine would let any ratio pass.
    """
    ratio, low, high = latency(result)
    before = measured.latency_ratio
    if ratio is None or low is None or high is None or before is None:
        return None
    seen = f"{ratio:.4f}" if low == high else f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
    allowed = before * (1 + tolerance)
    what = f"latency ratio (opt/ori): {seen}"
    if low > allowed + _ROUNDING:
        share = percent(ratio, allowed)
        why = f"baseline {before:g} + {tolerance:.3g}"
        return Part(WORSE, f"{what}, allowed {allowed:.3f} ({why}), {share}", f"their ratio (opt/ori) {share}")
    if high < before * (1 - tolerance) - _ROUNDING:
        share = percent(ratio, before)
        return Part(BETTER, f"{what}, baseline {before:g}, {share}", f"their ratio (opt/ori) {share}")
    if high > allowed + _ROUNDING and high - low > DECISIVE * ratio:
        return Part(_UNSURE, f"{what} is too uncertain to gate: time it on a quieter machine", "")
    return None
