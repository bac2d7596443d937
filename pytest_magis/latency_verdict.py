"""The verdict on latency.

Where steps are timed, only their ratio is compared, by its whole interval: a machine's milliseconds hold for that
machine and that hour. A simulated latency is no time but a count, like bytes: whole nanoseconds, computed from the
graph and the device's committed constants, identical everywhere. So on simulated devices the latency of each step is
compared as well: a network whose original and optimized step got slower alike has the ratio that it had.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from magis.results import CaseResult
from magis.units import format_milliseconds
from pytest_magis.baselines import RATIO_DIGITS, CaseBaseline, Measured, constants, latency, simulated_ns
from pytest_magis.findings import BETTER, WORSE, Part, Tolerances, moved, percent

DECISIVE = 0.04
"""An interval wider than this share of its ratio cannot tell a step that is a tenth slower from an unchanged one."""

BY_PLANNER, BY_MACHINE = "planner", "machine"
"""Who moved figures of a step that is the baseline's."""

_ROUNDING = 0.51 * 10**-RATIO_DIGITS
"""Of a stored latency ratio, either way."""

_UNSURE = "unsure"


def latency_bounds(stored: CaseBaseline | None, tolerances: Tolerances) -> tuple[float, ...]:
    """The latency ratios at which the verdict on a timed step changes, for every device that the baseline knows."""
    known = stored.measured.values() if stored else ()
    ratios = [measured.latency_ratio for measured in known if measured.latency_ratio is not None]
    return tuple(ratio * (1 + sign * tolerances.latency) for ratio in ratios for sign in (-1, 1))


def latency_parts(
    result: CaseResult, measured: Measured | None, tolerances: Tolerances, mover: str = "", *, stopped: bool
) -> Iterator[Part]:
    """What differs in latency; of a search that was stopped only the original counts.

    With a ``mover`` the step is that of the baseline, so that no difference of its plan is the step's doing. A timed
    ratio of the same plan, too, is not: noise alone never decides.
    """
    if measured is None or not _comparable(result, measured):
        return
    tolerance = tolerances.of_latency(result.case.device)
    kinds = set()
    for part in _steps(result, measured, tolerance, stopped=stopped):
        kinds.add(part.kind)
        yield moved(part, mover if mover == BY_PLANNER and part.text.startswith("optimized") else "")
    judged = None if stopped else _ratio(result, measured, tolerance)
    # An original that got slower makes any ratio look better: that is no improvement of its own.
    if judged is not None and (judged.kind == WORSE or (judged.kind == BETTER and WORSE not in kinds)):
        yield moved(judged, mover if mover == BY_PLANNER or result.ratio is not None else "")


def latency_notes(result: CaseResult, measured: Measured | None, tolerances: Tolerances) -> Iterator[str]:
    """What of the latency is not gated, and why."""
    if result.ratio is not None and result.ratio.doubt:
        yield f"latency is not gated: {result.ratio.doubt}"
        return
    if measured is None:
        return
    if not _comparable(result, measured):
        yield (
            f"latency is not gated: it is simulated with version {constants(result)} of the devices' constants, "
            f"the baseline's with version {measured.constants}; --magis-update=new renews it"
        )
        return
    if (latency(result)[0] is None) != (measured.latency_ratio is None):
        where = "the baseline" if measured.latency_ratio is None else "this run"
        way_out = "; --magis-update=new adds one" if lacks_latencies(result, measured) else ""
        yield f"latency is not gated: {where} has no latency ratio{way_out}"
    elif lacks_latencies(result, measured):
        what = "latency is not gated" if result.case.has_one_step else "of latency only the ratio is gated"
        yield f"{what}: the baseline has no simulated latencies; --magis-update=new adds them"
    judged = (
        None
        if result.search.stopped_by_seconds
        else _ratio(result, measured, tolerances.of_latency(result.case.device))
    )
    if judged is not None and judged.kind == _UNSURE:
        yield judged.text


def lacks_latencies(result: CaseResult, measured: Measured | None) -> bool:
    """Whether the baseline was stored without figures that this result would be compared with (a ratio, say, on a busy
    machine), or with those of other constants: it takes them over where new figures are permitted."""
    if measured is None:
        return False
    if simulated_ns(result) is None:
        return measured.latency_ratio is None and latency(result)[0] is not None
    return measured.original_latency_ns is None or not _comparable(result, measured)


def _comparable(result: CaseResult, measured: Measured) -> bool:
    """Whether both were simulated with the same constants; timed ones always may be compared."""
    return measured.constants is None or measured.constants == constants(result)


def _steps(result: CaseResult, measured: Measured, tolerance: float, *, stopped: bool) -> Iterator[Part]:
    """The simulated latency of each step; none where it was timed."""
    found = simulated_ns(result)
    if found is None:
        return
    original, optimized = found
    yield from _step("original", original, measured.original_latency_ns, tolerance)
    if not stopped and not result.case.has_one_step:  # whose optimized step is the original
        yield from _step("optimized", optimized, measured.optimized_latency_ns, tolerance)


def _step(step: str, seen: int, before: int | None, tolerance: float) -> Iterator[Part]:
    if before is None:
        return
    slack = int(before * Fraction(str(tolerance)))  # the decimal that was written: 0.03 allows 3% to the nanosecond
    allowed, what = before + slack, f"{step} simulated latency"
    if seen > allowed:
        share = percent(seen, allowed)
        yield Part(
            WORSE,
            f"{what}: {_words(seen)}, allowed {_words(allowed)} (baseline {before:,} + {tolerance:.3g}), {share}",
            f"{step} {share}",
        )
    elif seen < before - slack:
        share = percent(seen, before)
        yield Part(BETTER, f"{what}: {_words(seen)}, baseline {_words(before)}, {share}", f"{step} {share}")


def _words(nanoseconds: int) -> str:
    return f"{nanoseconds:,} ns ({format_milliseconds(nanoseconds / 1e6)})"


def _ratio(result: CaseResult, measured: Measured, tolerance: float) -> Part | None:
    """What the latency ratio is, WORSE, BETTER or _UNSURE, and why in words; None if it is as before, or not known.

    The whole interval must lie beyond what is allowed: noise alone must not decide. What passes although its interval
    is too wide to decide is unsure. The baseline's own interval counts nothing: one from a busy machine would let
    anything pass.
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
