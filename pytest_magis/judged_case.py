"""Runs a planned case and judges it: what the gate's own items and the tests of users have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from magis.errors import MagisError, UsageError
from magis.report import thinned_timelines
from magis.results import Case, CaseResult
from pytest_magis.baselines import held_before, planning, stored_case
from pytest_magis.findings import Tolerances, accept_case
from pytest_magis.gate import Gate
from pytest_magis.harness import check_with_magis, measure, measure_again, runs_every_case
from pytest_magis.latency_verdict import latency_bounds
from pytest_magis.outcome import Outcome
from pytest_magis.outputs.output_files import write_trace
from pytest_magis.outputs.terminal import progress_line
from pytest_magis.run_plan import PlannedCase
from pytest_magis.verdict import Verdict, judge, judge_against

if TYPE_CHECKING:
    from magis.api import Workload


@dataclass(frozen=True)
class Live:
    """What a test brings along: how to build its network from a seed, its tolerances, and the node id to run it by."""

    make: Callable[[int], Workload]
    tolerances: Tolerances
    where: str


def judged(config: pytest.Config, gate: Gate, planned: PlannedCase, live: Live | None = None) -> Iterator[Outcome]:
    """The outcome of a case, run now. After that of a case that could not run comes its error, unless magis refused."""
    where = live.where if live else ""
    make = live.make if live else None
    tolerances = live.tolerances if live else gate.settings.tolerances

    def failed(error: str) -> Outcome:
        verdict = Verdict(False, "ERROR")
        return Outcome(planned.model, planned.label, planned.case, verdict, error=error, where=where)

    try:
        baseline = gate.baseline(planned)
        hand_back = planning(baseline, planned.label, planned.case)
        stored = stored_case(baseline, planned.label, planned.case)
        line = nullcontext() if gate.is_worker else progress_line(config, planned.name)
        bounds = latency_bounds(stored, tolerances)
        rough = stored is None and not gate.settings.updates and _is_beside(planned.case)
        with line as progress:
            if make is not None and runs_every_case(config):
                check_with_magis(planned.case, config, keep=True, make=make)
            result = measure(config, planned.model, planned.case, hand_back, bounds, progress, make, rough=rough)
        verdict = verdict_on(gate, planned, result, tolerances)
        if not verdict.passed:
            measure_again(config, planned.case)
        # written from here: whole time lines are too much to hand from process to process
        trace = _traced(gate.settings.trace, planned, result)
    except MagisError as error:
        if planned.optional and isinstance(error, UsageError):
            pytest.skip(str(error))
        yield failed(str(error))
    except Exception as error:
        yield failed(f"{type(error).__name__}: {error}")
        raise
    else:
        shown = thinned_timelines(result) if gate.settings.report is not None else replace(result, timelines=None)
        yield Outcome(planned.model, planned.label, planned.case, verdict, shown, where=where, trace=trace)


def verdict_on(gate: Gate, planned: PlannedCase, result: CaseResult, tolerances: Tolerances) -> Verdict:
    """The verdict on a result of a planned case, by what it is compared with. Raises BaselineError."""
    baseline = gate.baseline(planned)
    stored = stored_case(baseline, planned.label, planned.case)
    held = held_before(baseline, planned.label, planned.case)
    settings = gate.settings
    if settings.against:
        return judge_against(settings.against, result, stored, tolerances=tolerances, held=held)
    return judge(result, stored, tolerances=tolerances, permissions=settings.updates, held=held)


def _is_beside(case: Case) -> bool:
    """Whether a case shows what users compare with, whose latency, without a baseline, is no more than a figure beside
    that of the plans for the step as it is."""
    return case.strategy != "magis" and case.latency_ratio is None


def _traced(folder: Path | None, planned: PlannedCase, result: CaseResult) -> str:
    """The file that the time lines were written to; empty where none are asked for, or the core has none."""
    return "" if folder is None or result.timelines is None else str(write_trace(folder, planned, result))


def lines_of(outcome: Outcome, gate: Gate, config: pytest.Config) -> Iterator[str]:
    """What a red case says: what is wrong, how much, and how to accept it."""
    if outcome.error:
        yield outcome.error
    verdict = outcome.verdict
    path = gate.path(outcome.model, outcome.case)
    for finding in verdict.findings:
        missing = f" in {_relative(path, config)}" if finding.kind == "new" else ""
        yield f"{finding.kind}: {finding.text}{missing}"
        if finding.why:
            yield finding.why
    for note in verdict.notes:
        yield f"note: {note}"
    if verdict.against:
        yield f"compared with {verdict.against}, measured in this run"
    elif verdict.needed:
        action = "create it" if verdict.needed == ("new",) else "accept"
        command = accept_case(gate.settings.given, outcome.model, outcome.case, verdict.needed, outcome.where)
        yield f"{action} with: {command}"
    elif any(finding.kind == "broken" for finding in verdict.findings):
        yield "no baseline can accept this"


def _relative(path: Path, config: pytest.Config) -> str:
    start = config.invocation_params.dir
    return str(path.relative_to(start) if path.is_relative_to(start) else path)
