"""The verdict on a case: pure functions from a result, its baseline and the tolerances to findings.

Tensor bytes are compared on every machine; peaks (tensors + workspace), reserved bytes and latencies
(`pytest_magis.latency_verdict`) only if the baseline has figures of the same device identity. Three findings cannot be
accepted: numbers that differ from eager, simulated bytes that differ from measured ones, and a peak above a limit that
the search reports as met.

A planned case is red if its limit is missed, or if the training step changed and got worse. If the step is unchanged,
the planner or the machine caused the difference: the case is green with a note, and --magis-update=moved stores it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from magis.results import CaseResult, StepFigures
from magis.strategies.strategy_names import BLOCK, ORIGINAL, PLANS
from magis.units import format_bytes
from pytest_magis.baselines import (
    CaseBaseline,
    Measured,
    identity_key,
    lacks_held,
    lacks_reserved,
    latency,
    torch_release,
)
from pytest_magis.explain import Table, grown_line, why_more
from pytest_magis.findings import (
    BETTER,
    BROKEN,
    MOVED,
    NEW,
    WORSE,
    Finding,
    Part,
    Tolerances,
    against,
    merge_parts,
    moved,
    percent,
)
from pytest_magis.latency_verdict import BY_MACHINE, BY_PLANNER, lacks_latencies, latency_notes, latency_parts
from pytest_magis.option_values import PERMISSIONS

CUDA_SIMULATOR_TOLERANCE = Fraction(1, 100)
RESERVED_BYTES = "reserved bytes"

PROVEN, NOT_FOUND, LATE = "infeasible, proven", "no plan found", "limit missed"
"""Labels of a case that passes although it misses its limit: no plan can meet the limit, the search found none, or the
plan runs slower here than simulated."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of comparing a case with its baseline."""

    passed: bool
    label: str
    """Short label for tables: "pass", "FAIL worse", "accepted new", ..."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    store: bool = False
    """True if the result replaces the baseline: it differs, and every difference is permitted."""
    against: str = ""
    """Revision that the case was compared with, without storing anything; empty for a stored baseline."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the permissions that would accept the findings; () if nothing can."""
        if self.against:
            return ()
        kinds = {finding.kind for finding in self.findings}
        return () if BROKEN in kinds else tuple(kind for kind in PERMISSIONS if kind in kinds)


def judge(
    result: CaseResult,
    stored: CaseBaseline | None,
    *,
    tolerances: Tolerances | None = None,
    permissions: frozenset[str] = frozenset(),
    held: tuple[Table | None, Table | None] = (None, None),
) -> Verdict:
    """Compare a result with its baseline; `stored` is None if there is none.

    `permissions` are the kinds of findings that the run accepts; a case is accepted only if all its findings are, so
    that a stored entry is always one measurement. `held` are the baseline's tables of tensors alive at the peaks of the
    original and the optimized step.
    """
    tolerances = tolerances or Tolerances()
    measured = stored.measured.get(identity_key(result)) if stored else None
    foreign = stored is not None and measured is None
    stopped = result.search.stopped_by_seconds
    notes = list(_notes(result, stored, measured, tolerances))
    broken = tuple(_broken(result, tolerances.memory, foreign=foreign, needs_limits=tolerances.needs_limits))
    if broken:  # figures of a broken step mean nothing
        return Verdict(False, "FAIL broken", broken, tuple(notes))
    findings = tuple(_compared(result, stored, measured, tolerances, held))
    kinds = {finding.kind for finding in findings}
    if stopped:
        failed = WORSE in kinds
        return Verdict(not failed, "FAIL worse" if failed else "not gated", findings, tuple(notes))
    if kinds and kinds <= permissions:
        return Verdict(True, f"accepted {_words(kinds)}", findings, tuple(notes), store=True)
    red = kinds - {MOVED} if tolerances.keeps_wins else kinds - {MOVED, BETTER}
    if red:
        return Verdict(False, f"FAIL {_words(red)}", findings, tuple(notes))
    # nothing to accept, or only an improvement that need not be stored
    older = lacks_held(result, stored) or lacks_reserved(result, measured)
    lacks = foreign or older or lacks_latencies(result, measured)
    adopted = lacks and NEW in permissions and not kinds
    label = "accepted new" if adopted else "pass"
    if label == "pass" and not result.search.feasible:
        label = PROVEN if _is_proven(result) else NOT_FOUND
    elif label == "pass" and _is_late(result):
        label = LATE
    label = f"{label}, {_words(kinds)}" if kinds else label
    return Verdict(True, label, findings, tuple(notes), store=adopted)


def judge_against(
    revision: str,
    result: CaseResult,
    found: CaseBaseline | None,
    *,
    tolerances: Tolerances | None = None,
    held: tuple[Table | None, Table | None] = (None, None),
) -> Verdict:
    """Compare a result with figures of another revision, measured earlier in this run; nothing is stored.

    A case that the revision lacks or could not run passes.
    """
    if found is None:
        verdict = judge(result, None, tolerances=tolerances, permissions=frozenset((NEW,)))
        note = f"nothing to compare with: {revision} has no such case"
        label = "new" if verdict.passed else verdict.label
        findings = tuple(finding for finding in verdict.findings if finding.kind != NEW)
        return replace(
            verdict, label=label, findings=findings, notes=(*verdict.notes, note), store=False, against=revision
        )
    return replace(judge(result, found, tolerances=tolerances, held=held), against=revision)


def _broken(result: CaseResult, tolerance: float, *, foreign: bool, needs_limits: bool) -> Iterator[Finding]:
    """Yield findings that no baseline can accept; ``foreign``: the baseline has no figures of this device identity."""
    if result.numbers.startswith("differs"):
        yield Finding(BROKEN, f"numbers: {' '.join(result.numbers.split())}")
    steps = [("original", result.original), ("optimized", result.optimized)]
    if result.original == result.optimized:
        del steps[1]  # the eager strategy: one step under two names
    for name, step in steps:
        # other strategies hold tensors that are not in the graph (states of generators): only tensor bytes are compared
        if name == "optimized":
            off_by, theirs = result.off_by, result.case.strategy not in (ORIGINAL, *PLANS)
        else:
            off_by, theirs = result.original_off_by, result.original_off_by > 0
        share = Fraction(tolerance)
        if result.case.device.startswith("cuda"):
            share = max(share, CUDA_SIMULATOR_TOLERANCE)
        if theirs:
            if math.isinf(off_by):
                continue
            share = max(share, Fraction(off_by))
        yield from _simulator_off(name, step, share, tensors_only=foreign or theirs)
    if needs_limits and not result.search.feasible and not result.search.stopped_by_seconds:
        yield Finding(BROKEN, f"the limit is required and not met: {_shortfall(result)}", why="loosen the limit")
    limit = result.memory_limit_bytes
    what, used = _limited_bytes(result)
    if limit is not None and result.search.feasible and used > limit:
        yield Finding(BROKEN, f"optimized {what} above the memory limit: {against(used, limit)}")


def _simulator_off(name: str, step: StepFigures, share: Fraction, *, tensors_only: bool) -> Iterator[Finding]:
    """Yield a finding if simulated and measured bytes differ by more than a share of the measured bytes."""
    if step.measured is None:
        return
    simulated, measured = step.simulated, step.measured
    pairs = [("tensor bytes", simulated.tensor_bytes, measured.tensor_bytes)]
    if not tensors_only:
        pairs.append(("peak bytes", simulated.peak_bytes, measured.peak_bytes))
    for what, expected, seen in pairs:
        if abs(expected - seen) > share * seen:
            text = f"simulated {expected:,}, measured {seen:,} ({expected - seen:+,})"
            # strictly above the share: written as a float, the share itself may be a little less
            enough = (abs(expected - seen) * 10_000 // max(seen, 1) + 1) / 10_000
            yield Finding(
                BROKEN,
                f"{name} {what} are not as simulated: {text}",
                why=f"report the operator that a note names; --magis-memory-tolerance={enough:g} lets it pass",
            )
            return  # wrong tensor bytes imply a wrong peak: one finding is enough


def _compared(
    result: CaseResult,
    stored: CaseBaseline | None,
    measured: Measured | None,
    tolerances: Tolerances,
    held: tuple[Table | None, Table | None],
) -> Iterator[Finding]:
    """Yield at most one finding per kind for memory, and one for latency: a wider layer gives two lines, not five."""
    if result.growth is not None and result.growth.nbytes > ((stored and stored.growth_bytes) or 0):
        yield Finding(WORSE, str(result.growth))
    stopped = result.search.stopped_by_seconds
    if stored is None:
        if not stopped:
            yield Finding(NEW, "no baseline")
        return
    mover = _mover(result, stored)
    for finding in merge_parts(_memory_parts(result, stored, measured, tolerances.memory, mover, stopped=stopped)):
        yield _explained(finding, result, held) if finding.kind == WORSE else finding
    yield from merge_parts(latency_parts(result, measured, tolerances, mover, stopped=stopped))


def _mover(result: CaseResult, stored: CaseBaseline) -> str:
    """Return the cause of changes in a plan of the baseline's step: the planner if its code changed, else the machine.

    Empty if the step may have changed, or nothing was planned. A baseline without a digest of the planner is of an
    older planner. A new planner may write the same step as another graph; the digest of its operators shows that.
    """
    same = stored.original_tensor_bytes == result.original_memory.tensor_bytes
    if not result.planner or not same:
        return ""
    if stored.planner == result.planner:
        return BY_MACHINE if stored.graph == result.graph_digest else ""
    return BY_PLANNER if _has_same_operators(result, stored) else ""


def _has_same_operators(result: CaseResult, stored: CaseBaseline) -> bool:
    return stored.graph == result.graph_digest or stored.step == result.step_digest


def _explained(finding: Finding, result: CaseResult, held: tuple[Table | None, Table | None]) -> Finding:
    """Add the modules that grew, and the line, to a finding of more memory, in the original step if that grew."""
    before_original, before_optimized = held
    if RESERVED_BYTES in finding.text.partition(":")[0]:
        return replace(finding, why="the peak did not grow: more is lost in gaps between blocks, and in their rounding")
    step, peak, before = "optimized", result.optimized.at_peak, before_optimized
    if result.case.has_one_step or finding.text.startswith("original"):
        step, peak, before = "original", result.original.at_peak, before_original
    return replace(finding, why=why_more(step, peak, before), line=grown_line(peak, before))


def _memory_parts(
    result: CaseResult, stored: CaseBaseline, measured: Measured | None, tolerance: float, mover: str, *, stopped: bool
) -> Iterator[Part]:
    yield from _memory_of_step(
        "block" if result.case.strategy == BLOCK else "original",
        (result.original_memory.tensor_bytes, stored.original_tensor_bytes),
        (result.original_memory.peak_bytes, measured.original_peak_bytes) if measured else None,
        (result.original.reserved_bytes, measured.original_reserved_bytes) if measured else None,
        tolerance,
    )
    if stopped:
        return
    if not result.case.has_one_step:
        own = measured.optimized_tensor_bytes if measured else None
        tensors = stored.optimized_tensor_bytes if own is None else own
        for part in _memory_of_step(
            "optimized",
            (result.memory.tensor_bytes, tensors) if result.portable or measured else None,
            (result.memory.peak_bytes, measured.optimized_peak_bytes) if measured else None,
            (result.optimized.reserved_bytes, measured.optimized_reserved_bytes) if measured else None,
            tolerance,
            0.0 if result.is_predicted else result.noise,
        ):
            yield moved(part, mover if mover == BY_PLANNER else "")
    if stored.feasible and not result.search.feasible:
        text = "the limit is no longer met"
        yield Part(WORSE, f"{text}: {_shortfall(result)}", text)
    elif result.search.feasible and not stored.feasible:
        text = "the limit is met now, the baseline says infeasible"
        yield Part(BETTER, text, text)


def _memory_of_step(
    step: str,
    tensors: tuple[int, int] | None,
    peaks: tuple[int, int] | None,
    held: tuple[int | None, int | None] | None,
    tolerance: float,
    noise: float = 0.0,
) -> Iterator[Part]:
    """Compare pairs of bytes (now, stored), and yield at most one difference per kind.

    Peak and reserved bytes follow tensor bytes and are not reported again. ``noise`` is the tolerance for peaks alone.
    """
    kinds = set()
    for what, pair in (("tensor bytes", tensors), ("peak bytes", peaks), (RESERVED_BYTES, held)):
        seen, before = pair or (None, None)
        if seen is None or before is None:
            continue
        allowed = max(tolerance, noise) if what == "peak bytes" else tolerance
        slack = int(before * Fraction(allowed))  # exact: a float product loses bytes above 2**53
        if seen > before + slack:
            kind, text, share = WORSE, against(seen, before + slack), percent(seen, before + slack)
        elif seen < before - slack:
            kind, share = BETTER, percent(seen, before)
            text = f"{seen:,}, baseline {before:,}, {share}"
        else:
            continue
        if kind not in kinds:
            kinds.add(kind)
            yield Part(kind, f"{step} {what}: {text}", f"{step} {share}")


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
    if stored is not None and result.case.strategy in PLANS and not result.portable:
        yield "planned for the workspaces of this machine: with those of the baseline the limit is missed here"
    now = torch_release()
    if stored is not None and now and stored.torch not in (None, now):
        yield f"the baseline is of torch {stored.torch}, this is {now}: " + (
            "the step has the same operators, and all of it can be judged"
            if _has_same_operators(result, stored)
            else f"it runs other operators; --magis-against=torch=={stored.torch} says what torch moved"
        )
    if lacks_reserved(result, measured):
        yield "reserved bytes are not gated: the baseline has none; --magis-update=new adds them"
    yield from latency_notes(result, measured, tolerances)
    if _is_late(result) and result.search.feasible:
        asked = result.case.latency_ratio
        yield f"latency ratio {latency(result)[0]:.3f} is above the limit of {asked:g} that was asked for"


def _is_late(result: CaseResult) -> bool:
    """Return True if the whole interval of the latency ratio lies above its limit."""
    asked, (_, low, _) = result.case.latency_ratio, latency(result)
    return asked is not None and low is not None and low > asked


def _is_proven(result: CaseResult) -> bool:
    """Return True if no plan can meet the memory limit, since the lower bound exceeds it."""
    return result.memory_limit_bytes is not None and result.lower_bound_bytes > result.memory_limit_bytes


def _shortfall(result: CaseResult) -> str:
    """Return why a limit is not met: the lower bound of all plans exceeds it, or the search found no plan."""
    limit, bound = result.memory_limit_bytes, result.lower_bound_bytes
    if limit is None:
        return "the search found none within the latency limit"
    what, best = _limited_bytes(result)
    if _is_proven(result):
        return (
            f"the lower bound {bound:,} ({format_bytes(bound)}) exceeds the limit {limit:,} ({format_bytes(limit)}); "
            f"best {what.partition(' ')[0]} found {best:,} ({format_bytes(best)})"
        )
    return f"best {what} {against(best, limit)}; the lower bound {bound:,} does not rule it out"


def _limited_bytes(result: CaseResult) -> tuple[str, int]:
    """Return the name and the bytes of the optimized step's figure that a memory limit applies to."""
    what = result.case.memory_limit_of
    if result.ranks:  # workspaces of collectives differ from run to run
        return "tensor bytes", (result.optimized.measured or result.optimized.simulated).tensor_bytes
    return f"{what} bytes", result.optimized.needed_bytes(what)


def _words(kinds: set[str]) -> str:
    return "+".join(kind for kind in (*PERMISSIONS, BROKEN) if kind in kinds)
