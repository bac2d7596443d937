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

__all__ = ["BETTER", "BROKEN", "NEW", "PERMISSIONS", "WORSE", "Finding", "Tolerances", "Verdict", "judge"]

NEW, BETTER, WORSE, BROKEN = "new", "better", "worse", "broken"
PERMISSIONS = (NEW, BETTER, WORSE)
"""What --magis-update can accept; nothing accepts a broken case."""

CUDA_SIMULATOR_TOLERANCE = Fraction(1, 100)


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
    findings = [
        *_broken(result, foreign=foreign),
        *_compared(result, stored, measured, tolerances, stopped=stopped),
    ]
    notes = list(_notes(result, stored, measured))
    kinds = {finding.kind for finding in findings}
    if BROKEN in kinds:
        return Verdict(False, "FAIL broken", tuple(findings), tuple(notes))
    if stopped:
        failed = WORSE in kinds
        return Verdict(not failed, "FAIL worse" if failed else "not gated", tuple(findings), tuple(notes))
    if kinds and kinds <= permissions:
        return Verdict(True, f"accepted {_words(kinds)}", tuple(findings), tuple(notes), store=True)
    if kinds - {BETTER}:
        return Verdict(False, f"FAIL {_words(kinds - {BETTER})}", tuple(findings), tuple(notes))
    # nothing to accept, or an improvement nobody asked to keep
    adopted = foreign and NEW in permissions and not kinds
    label = "pass, better" if kinds else "accepted new" if adopted else "pass"
    if label == "pass" and not result.search.feasible:
        label = "infeasible"
    return Verdict(True, label, tuple(findings), tuple(notes), store=adopted)


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


def _compared(
    result: CaseResult, stored: CaseBaseline | None, measured: Measured | None, tolerances: Tolerances, *, stopped: bool
) -> Iterator[Finding]:
    if stored is None:
        if not stopped:
            yield Finding(NEW, "no baseline")
        return
    yield from _memory(
        "original",
        (result.original_memory.tensor_bytes, stored.original_tensor_bytes),
        (result.original_memory.peak_bytes, measured.original_peak_bytes) if measured else None,
        tolerances.memory,
    )
    if stopped:
        return
    if result.case.strategy != "eager":  # whose optimized step is the original
        yield from _memory(
            "optimized",
            (result.memory.tensor_bytes, stored.optimized_tensor_bytes),
            (result.memory.peak_bytes, measured.optimized_peak_bytes) if measured else None,
            tolerances.memory,
        )
    if stored.feasible and not result.search.feasible:
        yield Finding(WORSE, f"the limit is no longer met: {_shortfall(result)}")
    elif result.search.feasible and not stored.feasible:
        yield Finding(BETTER, "the limit is met now; the baseline says infeasible")
    if measured is not None:
        yield from _latency(result, measured, tolerances.latency)


def _memory(step: str, tensors: tuple[int, int], peaks: tuple[int, int] | None, tolerance: float) -> Iterator[Finding]:
    """At most one finding of each kind: where tensor bytes changed, the peak follows and is not reported again."""
    kinds = set()
    for what, pair in (("tensor bytes", tensors), ("peak bytes", peaks)):
        if pair is None:
            continue
        seen, before = pair
        slack = int(before * Fraction(tolerance))  # exact: a float product loses bytes above 2**53
        if seen > before + slack:
            found = Finding(WORSE, f"{step} {what}: {_against(seen, before + slack)}")
        elif seen < before - slack:
            found = Finding(BETTER, f"{step} {what}: {seen:,}, baseline {before:,}, {_percent(seen, before)}")
        else:
            continue
        if found.kind not in kinds:
            kinds.add(found.kind)
            yield found


def _latency(result: CaseResult, measured: Measured, tolerance: float) -> Iterator[Finding]:
    """Red only if the whole interval lies above what is allowed: noise alone must not decide."""
    ratio, low, high = latency(result)
    before = measured.latency_ratio
    if ratio is None or low is None or high is None or before is None:
        return
    seen = f"{ratio:.4f}" if low == high else f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
    rounding = 0.51 * 10**-RATIO_DIGITS  # of the stored ratio
    allowed = before * (1 + tolerance)
    if low > allowed + rounding:
        text = f"{seen}, allowed {allowed:.3f} (baseline {before:g} + {tolerance:.3g}), {_percent(ratio, allowed)}"
        yield Finding(WORSE, f"latency ratio (opt/ori): {text}")
    elif high < before * (1 - tolerance) - rounding:
        yield Finding(BETTER, f"latency ratio (opt/ori): {seen}, baseline {before:g}, {_percent(ratio, before)}")


def _notes(result: CaseResult, stored: CaseBaseline | None, measured: Measured | None) -> Iterator[str]:
    if result.note:
        yield " ".join(result.note.split())
    if result.search.stopped_by_seconds:
        yield "stopped by the cap in seconds: the optimized step is not gated"
    if not result.search.feasible:
        yield f"infeasible: {_shortfall(result)}"
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
    asked, (ratio, low, _) = result.case.latency_ratio, latency(result)
    if asked is not None and ratio is not None and low is not None and low > asked and result.search.feasible:
        yield f"latency ratio {ratio:.3f} is above the limit of {asked:g} that was asked for"


def _shortfall(result: CaseResult) -> str:
    """Why a limit is not met: below what any plan needs, or just not reached."""
    limit, bound = result.memory_limit_bytes, result.lower_bound_bytes
    if limit is None:
        return "no plan within the latency limit was found"
    if bound > limit:
        return f"the lower bound {bound:,} ({format_bytes(bound)}) exceeds the limit {limit:,} ({format_bytes(limit)})"
    return f"best peak bytes {_against(result.memory.peak_bytes, limit)}; lower bound {bound:,}"


def _against(seen: int, allowed: int) -> str:
    return f"{seen:,} ({format_bytes(seen)}), allowed {allowed:,} ({format_bytes(allowed)}), {_percent(seen, allowed)}"


def _percent(seen: float, reference: float) -> str:
    if not reference:
        return "was 0"
    share = 100 * float(Fraction(seen) / Fraction(reference) - 1)
    return f"{share:+.1f}%" if abs(share) >= 0.05 else f"{share:+.2g}%"


def _words(kinds: set[str]) -> str:
    return "+".join(kind for kind in (*PERMISSIONS, BROKEN) if kind in kinds)
