"""Runs a planned case and judges it: what the gate's own items and the tests of users have in common.

Users' own models are looked at before the first case: what is wrong with one ends the run as bad input does. That a
factory's module branches on its data, lies on another device or mixes data types is found only by building, capturing
and running it, which would cost seconds in runs that need no such model (`--collect-only`, a deselected case, a file's
own tests); so it waits until the cases are chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from magis.errors import CaptureError, MagisError, UsageError
from magis.models.model_specs import is_factory
from magis.printable import printable
from magis.report import thinned_timelines
from magis.results import Case, CaseResult
from pytest_magis.baselines import held_before, planning_inputs, stored_case
from pytest_magis.findings import Tolerances, accept_case
from pytest_magis.gate import Gate, write_front, write_trace
from pytest_magis.harness import (
    check_prices,
    check_with_magis,
    measure,
    measure_again,
    runs_every_case,
    search_front,
)
from pytest_magis.latency_verdict import latency_bounds
from pytest_magis.run_plan import PREFIX, Outcome, PlannedCase, WrittenFront
from pytest_magis.terminal_table import progress_line
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
        hand_back = planning_inputs(baseline, planned.label, planned.case)
        stored = stored_case(baseline, planned.label, planned.case)
        bounds = latency_bounds(stored, tolerances)
        rough = stored is None and not gate.settings.updates and _is_beside(planned.case)
        with progress_line(config, planned.name) as progress:
            if progress is not None:
                progress("capturing")
            if make is not None and runs_every_case(config):
                check_with_magis(planned.case, config, keep=True, make=make, progress=progress)
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


def searched_front(config: pytest.Config, gate: Gate, planned: PlannedCase, live: Live | None = None) -> WrittenFront:
    """The front of a model, searched and written now. Raises UsageError where the files cannot be written."""
    with progress_line(config, planned.name) as progress:
        if progress is not None:
            progress("searching the front")
        front = search_front(config, planned.model, planned.case, live.make if live else None)
    return write_front(gate.settings.pareto or Path(), planned, front)


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
    yield from map(printable, _lines_of(outcome, gate, config))


def _lines_of(outcome: Outcome, gate: Gate, config: pytest.Config) -> Iterator[str]:
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


def check_factories(config: pytest.Config, gate: Gate, node_ids: Collection[str], *, keep: bool) -> None:
    """Check the operator profile, and the model of every chosen case that a factory makes. Raises pytest.UsageError in
    one line.

    Nothing is checked where another plugin may run the case, which may support what magis does not. `keep` says
    whether the cases run in this process, and may use the captures again.
    """
    if not runs_every_case(config):
        return
    chosen = _plain(node_ids)
    _check_profile(config, gate, chosen)
    for planned in _distinct((*gate.cases, *gate.fronts), chosen):
        with progress_line(config, planned.model) as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the case gives them again
            if progress is not None:
                progress("checking the model")
            problem = _problem(config, planned, progress, keep=keep)
        if problem is not None:
            raise pytest.UsageError(problem)


def _check_profile(config: pytest.Config, gate: Gate, chosen: Collection[str]) -> None:
    """A profile of another device, data type or schema, before anything is measured with it."""
    seen = set()
    for planned in (*gate.cases, *gate.fronts):
        key = (planned.case.device, planned.case.dtype, planned.case.preset, planned.model)
        if key not in seen and f"{PREFIX}{planned.name}" in chosen:
            seen.add(key)
            try:
                check_prices(planned.case, config)
            except UsageError as error:
                raise pytest.UsageError(str(error)) from None


def _plain(node_ids: Collection[str]) -> set[str]:
    """--dist=loadgroup appends "@<group>" to them."""
    return {*node_ids, *(node_id.rpartition("@")[0] for node_id in node_ids)}


def _distinct(cases: Collection[PlannedCase], chosen: Collection[str]) -> Iterator[PlannedCase]:
    """One chosen case of each factory; two where one of them wraps the model's blocks, since that is a capture more."""
    seen = set()
    for planned in cases:
        key = (planned.model, "checkpoint" in planned.case.strategy)
        if is_factory(planned.case.model) and f"{PREFIX}{planned.name}" in chosen and key not in seen:
            seen.add(key)
            yield planned


def _problem(
    config: pytest.Config, planned: PlannedCase, progress: Callable[[str], None] | None, *, keep: bool
) -> str | None:
    call = pytest.CallInfo.from_call(
        lambda: check_with_magis(planned.case, config, keep=keep, progress=progress),
        when="setup",
        reraise=(KeyboardInterrupt, pytest.exit.Exception),
    )
    error = None if call.excinfo is None else call.excinfo.value
    if not isinstance(error, (UsageError, CaptureError)):
        return None  # fine, or a defect: the case meets it again and shows all of it
    text = str(error)
    return text if text.startswith(f"{planned.case.model}:") else f"{planned.model}: {text}"
