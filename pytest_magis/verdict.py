"""The verdict on a case: pure functions from a result, its baseline and the tolerances to findings.

What is compared where (SPEC section 6): tensor bytes on every machine; peaks (tensors + workspace) and latency ratios
only where the baseline has a measurement of the same device identity. Some findings no baseline can accept: numbers
that differ from eager, a simulator that is off, a peak above the limit that the search claims to meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from magis.results import CaseResult, StepFigures
from magis.units import format_bytes
from pytest_magis.baselines import RATIO_DIGITS, CaseBaseline, Measured, identity_key, latency

__all__ = [
    "BETTER",
    "BROKEN",
    "NEW",
    "PERMISSIONS",
    "WORSE",
    "Finding",
    "Tolerances",
    "Verdict",
    "judge",
    "latency_bounds",
]

NEW, BETTER, WORSE, BROKEN = "new", "better", "worse", "broken"
PERMISSIONS = (NEW, BETTER, WORSE)
"""What --magis-update can accept; nothing accepts a broken case."""

CUDA_SIMULATOR_TOLERANCE = Fraction(1, 100)

PROVEN, NOT_FOUND = "infeasible, proven", "no plan found"
"""What an accepted case that misses its limit is called: no plan can meet it, or the search knows of none."""

DECISIVE = 0.04
"""An interval wider than this share of its ratio cannot tell a step that is a tenth slower from an unchanged one."""


_ROUNDING = 0.51 * 10**-RATIO_DIGITS
"""Of a stored latency ratio, either way."""

_UNSURE = "unsure"


@dataclass(frozen=True)
class Tolerances:
    """Shares by which a figure may exceed its baseline: 0 is exact, 0.05 is five percent."""

    memory: float = 0.0
    latency: float = 0.04


@dataclass(frozen=True)
class Finding:
    """One difference from what was expected, in one line; kind is NEW, BETTER, WORSE or BROKEN."""

    kind: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    passed: bool
    label: str
    """A few words for tables: "pass", "FAIL worse", "accepted new", ..."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    store: bool = False
    """Whether the result replaces the baseline: it differs, and every difference is permitted."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The permissions that would accept the findings; none if something is broken."""
        kinds = {finding.kind for finding in self.findings}
        return () if BROKEN in kinds else tuple(kind for kind in PERMISSIONS if kind in kinds)


def judge(
    result: CaseResult,
    stored: CaseBaseline | None,
    *,
    tolerances: Tolerances | None = None,
    permissions: frozenset[str] = frozenset(),
) -> Verdict:
    """The verdict on `result` against its baseline (None: there is none).

    `permissions` are the kinds of findings that the run accepts. All or none: a case is accepted only if every one of
    its findings is, so that a stored entry is always one measurement.
    """
    tolerances = tolerances or Tolerances()
    measured = stored.measured.get(identity_key(result)) if stored else None
    foreign = stored is not None and measured is None
    stopped = result.search.stopped_by_seconds
    notes = list(_notes(result, stored, measured, tolerances))
    broken = tuple(_broken(result, foreign=foreign))
    if broken:  # nothing else matters: figures of a broken step are no figures
        return Verdict(False, "FAIL broken", broken, tuple(notes))
    findings = tuple(_compared(result, stored, measured, tolerances, stopped=stopped))
    kinds = {finding.kind for finding in findings}
    if stopped:
        failed = WORSE in kinds
        return Verdict(not failed, "FAIL worse" if failed else "not gated", findings, tuple(notes))
    if kinds and kinds <= permissions:
        return Verdict(True, f"accepted {_words(kinds)}", findings, tuple(notes), store=True)
    if kinds - {BETTER}:
        return Verdict(False, f"FAIL {_words(kinds - {BETTER})}", findings, tuple(notes))
    # nothing to accept, or an improvement nobody asked to keep
    adopted = foreign and NEW in permissions and not kinds
    label = "pass, better" if kinds else "accepted new" if adopted else "pass"
    if label == "pass" and not result.search.feasible:
        label = PROVEN if _is_proven(result) else NOT_FOUND
    return Verdict(True, label, findings, tuple(notes), store=adopted)


def latency_bounds(stored: CaseBaseline | None, tolerances: Tolerances) -> tuple[float, ...]:
    """The latency ratios at which the verdict changes, for every device that the baseline knows."""
    known = stored.measured.values() if stored else ()
    ratios = [measured.latency_ratio for measured in known if measured.latency_ratio is not None]
    return tuple(ratio * (1 + sign * tolerances.latency) for ratio in ratios for sign in (-1, 1))


def _broken(result: CaseResult, *, foreign: bool) -> Iterator[Finding]:
    if result.numbers.startswith("differs"):
        yield Finding(BROKEN, f"numbers: {' '.join(result.numbers.split())}")
    steps = [("original", result.original), ("optimized", result.optimized)]
    if result.original == result.optimized:
        del steps[1]  # the eager strategy: one step under two names
    for name, step in steps:
        # checkpointing keeps generator states, which are no part of the step's graph: its tensors must be as simulated
        loose = foreign or (result.case.strategy == "checkpoint" and name == "optimized")
        yield from _simulator_off(name, step, result.case.device, tensors_only=loose)
    limit = result.memory_limit_bytes
    # A foreign machine has other scratch inside operators, hence another limit than the one that was planned for.
    if limit is not None and result.search.feasible and not foreign and result.memory.peak_bytes > limit:
        used = result.memory.peak_bytes
        yield Finding(BROKEN, f"optimized peak bytes above the memory limit: {_against(used, limit)}")


def _simulator_off(name: str, step: StepFigures, device: str, *, tensors_only: bool) -> Iterator[Finding]:
    """Simulated bytes must be the measured ones: exactly on cpu, within 1% on cuda."""
    if step.measured is None:
        return
    simulated, measured = step.simulated, step.measured
    share = CUDA_SIMULATOR_TOLERANCE if device.startswith("cuda") else Fraction(0)
    pairs = [("tensor bytes", simulated.tensor_bytes, measured.tensor_bytes)]
    if not tensors_only:
        pairs.append(("peak bytes", simulated.peak_bytes, measured.peak_bytes))
    for what, expected, seen in pairs:
        if abs(expected - seen) > share * seen:
            text = f"simulated {expected:,}, measured {seen:,} ({expected - seen:+,})"
            yield Finding(BROKEN, f"{name} {what} are not as simulated: {text}")
            return  # a wrong peak follows from wrong tensors: one line says it


@dataclass(frozen=True)
class _Part:
    """A difference, in full and as an addition to another one of its kind that comes first."""

    kind: str
    text: str
    brief: str


def _compared(
    result: CaseResult, stored: CaseBaseline | None, measured: Measured | None, tolerances: Tolerances, *, stopped: bool
) -> Iterator[Finding]:
    """At most one finding about memory of each kind, and one about latency: a wider layer is one line, not three."""
    if stored is None:
        if not stopped:
            yield Finding(NEW, "no baseline")
        return
    parts: dict[str, list[_Part]] = {}
    for part in _memory_parts(result, stored, measured, tolerances.memory, stopped=stopped):
        parts.setdefault(part.kind, []).append(part)
    for kind, (first, *others) in parts.items():
        yield Finding(kind, "; ".join([first.text, *(part.brief for part in others)]))
    judged = None if stopped else _latency(result, measured, tolerances.latency)
    if judged is not None and judged[0] in (WORSE, BETTER):
        yield Finding(*judged)


def _memory_parts(
    result: CaseResult, stored: CaseBaseline, measured: Measured | None, tolerance: float, *, stopped: bool
) -> Iterator[_Part]:
    yield from _memory(
        "original",
        (result.original_memory.tensor_bytes, stored.original_tensor_bytes),
        (result.original_memory.peak_bytes, measured.original_peak_bytes) if measured else None,
        tolerance,
    )
    if stopped:
        return
    if result.case.strategy != "eager":  # whose optimized step is the original
        yield from _memory(
            "optimized",
            (result.memory.tensor_bytes, stored.optimized_tensor_bytes),
            (result.memory.peak_bytes, measured.optimized_peak_bytes) if measured else None,
            tolerance,
        )
    if stored.feasible and not result.search.feasible:
        text = "the limit is no longer met"
        yield _Part(WORSE, f"{text}: {_shortfall(result)}", text)
    elif result.search.feasible and not stored.feasible:
        text = "the limit is met now, the baseline says infeasible"
        yield _Part(BETTER, text, text)


def _memory(step: str, tensors: tuple[int, int], peaks: tuple[int, int] | None, tolerance: float) -> Iterator[_Part]:
    """At most one part of each kind: where tensor bytes changed, the peak follows and is not reported again."""
    kinds = set()
    for what, pair in (("tensor bytes", tensors), ("peak bytes", peaks)):
        if pair is None:
            continue
        seen, before = pair
        slack = int(before * Fraction(tolerance))  # exact: a float product loses bytes above 2**53
        if seen > before + slack:
            kind, text, share = WORSE, _against(seen, before + slack), _percent(seen, before + slack)
        elif seen < before - slack:
            kind, share = BETTER, _percent(seen, before)
            text = f"{seen:,}, baseline {before:,}, {share}"
        else:
            continue
        if kind not in kinds:
            kinds.add(kind)
            yield _Part(kind, f"{step} {what}: {text}", f"{step} {share}")


def _latency(result: CaseResult, measured: Measured | None, tolerance: float) -> tuple[str, str] | None:
    """What the latency ratio is, WORSE, BETTER or _UNSURE, and why in words; None if it is as before, or not known.

    The whole interval must lie beyond what is allowed: noise alone must not decide. What passes although its interval
    is too wide to decide is unsure. The baseline's own interval counts nothing: one from a busy machine would let
    anything pass.
    """
    ratio, low, high = latency(result)
    before = measured.latency_ratio if measured else None
    if measured is None or ratio is None or low is None or high is None or before is None:
        return None
    seen = f"{ratio:.4f}" if low == high else f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
    allowed = before * (1 + tolerance)
    if low > allowed + _ROUNDING:
        why = f"baseline {before:g} + {tolerance:.3g}"
        return WORSE, f"latency ratio (opt/ori): {seen}, allowed {allowed:.3f} ({why}), {_percent(ratio, allowed)}"
    if high < before * (1 - tolerance) - _ROUNDING:
        return BETTER, f"latency ratio (opt/ori): {seen}, baseline {before:g}, {_percent(ratio, before)}"
    if high > allowed + _ROUNDING and high - low > DECISIVE * ratio:
        return _UNSURE, f"latency ratio (opt/ori): {seen} is too uncertain to gate: time it on a quieter machine"
    return None


def _notes(
    result: CaseResult, stored: CaseBaseline | None, measured: Measured | None, tolerances: Tolerances
) -> Iterator[str]:
    if result.note:
        yield " ".join(result.note.split())
    if result.search.unsplit:
        yield f"nothing runs in parts: {result.search.unsplit}"
    if result.search.stopped_by_seconds:
        yield "stopped by the cap in seconds: the optimized step is not gated"
    if not result.search.feasible:
        why = (
            f"; the bound: {' '.join(result.bound.split())}"
            if result.bound and result.memory_limit_bytes is not None
            else ""
        )
        yield f"{PROVEN if _is_proven(result) else NOT_FOUND}: {_shortfall(result)}{why}"
    if stored is not None and measured is None:
        yield (
            f"only tensor bytes are gated: the baseline has no measurement of this device ({identity_key(result)}); "
            "--magis-update=new adds one"
        )
        seen, simulated = result.optimized.measured, result.optimized.simulated
        if seen is not None and result.case.device == "cpu" and seen.peak_bytes != simulated.peak_bytes:
            off = simulated.peak_bytes - seen.peak_bytes
            yield f"optimized peak bytes are not as simulated on this device ({off:+,})"
        limit = result.memory_limit_bytes
        if limit is not None and result.search.feasible and result.memory.peak_bytes > limit:
            yield f"peak bytes above the memory limit on this device: {_against(result.memory.peak_bytes, limit)}"
    if measured is not None and (latency(result)[0] is None) != (measured.latency_ratio is None):
        where = "the baseline" if measured.latency_ratio is None else "this run"
        yield f"latency is not gated: {where} has no latency ratio"
    judged = None if result.search.stopped_by_seconds else _latency(result, measured, tolerances.latency)
    if judged is not None and judged[0] == _UNSURE:
        yield judged[1]
    asked, (ratio, low, _) = result.case.latency_ratio, latency(result)
    if asked is not None and ratio is not None and low is not None and low > asked and result.search.feasible:
        yield f"latency ratio {ratio:.3f} is above the limit of {asked:g} that was asked for"


def _is_proven(result: CaseResult) -> bool:
    """Whether no plan at all can meet the memory limit."""
    return result.memory_limit_bytes is not None and result.lower_bound_bytes > result.memory_limit_bytes


def _shortfall(result: CaseResult) -> str:
    """Why a limit is not met: below what any plan needs, or just not reached."""
    limit, bound = result.memory_limit_bytes, result.lower_bound_bytes
    if limit is None:
        return "the search found none within the latency limit"
    if _is_proven(result):
        best = result.memory.peak_bytes
        return (
            f"the lower bound {bound:,} ({format_bytes(bound)}) exceeds the limit {limit:,} ({format_bytes(limit)}); "
            f"best peak found {best:,} ({format_bytes(best)})"
        )
    return (
        f"best peak bytes {_against(result.memory.peak_bytes, limit)}; the lower bound {bound:,} does not rule it out"
    )


def _against(seen: int, allowed: int) -> str:
    return f"{seen:,} ({format_bytes(seen)}), allowed {allowed:,} ({format_bytes(allowed)}), {_percent(seen, allowed)}"


def _percent(seen: float, reference: float) -> str:
    if not reference:
        return "was 0"
    share = 100 * float(Fraction(seen) / Fraction(reference) - 1)
    return f"{share:+.1f}%" if abs(share) >= 0.05 else f"{share:+.2g}%"


def _words(kinds: set[str]) -> str:
    return "+".join(kind for kind in (*PERMISSIONS, BROKEN) if kind in kinds)
