"""Running and judging of planned cases, for the gate's own items and for users' tests.

Users' models are checked before the first case, so that a broken model ends the run with one line. The check builds,
captures and runs the model, which takes seconds, so it covers only selected cases and never `--collect-only`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from magis.errors import CaptureError, MagisError, UsageError
from magis.models.model_specs import is_factory
from magis.printable import printable
from magis.results import Case, CaseResult
from pytest_magis.baselines import held_before, planning_inputs, stored_case
from pytest_magis.findings import accept_case
from pytest_magis.gate import Gate, snapshot_file, write_front, write_trace
from pytest_magis.harness import (
    check_prices,
    check_with_magis,
    measure,
    measure_again,
    runs_every_case,
    search_front,
)
from pytest_magis.latency_verdict import latency_bounds
from pytest_magis.run_plan import FRONT, PREFIX, Outcome, PlannedCase, WrittenFront, leave
from pytest_magis.terminal_table import progress_line
from pytest_magis.verdict import Verdict, judge, judge_against

if TYPE_CHECKING:
    pass


def failure(text: str) -> BaseException:
    """Return the exception that fails a test with this text and no traceback."""
    return pytest.fail.Exception(text, pytrace=False)


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Convert a MagisError raised in the block into a test failure of one line."""
    try:
        yield
    except MagisError as error:
        raise failure(str(error)) from None


def run_item(item: pytest.Item, gate: Gate, planned: PlannedCase) -> None:
    """Run an item's case, or write its Pareto front, and report the outcome. Fails the test if the case is red."""
    __tracebackhide__ = True
    if planned.label == FRONT:
        with refused_in_one_line():
            leave(search_and_write_front(item.config, gate, planned), item.user_properties)
        return
    for outcome in run_and_judge(item.config, gate, planned):
        leave(outcome, item.user_properties)
    if not outcome.verdict.passed:
        raise failure("\n".join(report_lines(outcome, gate, item.config)))


def run_and_judge(config: pytest.Config, gate: Gate, planned: PlannedCase) -> Iterator[Outcome]:
    """Run a case and yield its outcome. An exception other than MagisError is re-raised after that."""
    make, tolerances = planned.make, planned.tolerances
    snapshots: list[Path] = []

    def file_for(step: str) -> Path:
        snapshots.append(snapshot_file(gate.settings.snapshot or Path(), planned, step))
        return snapshots[-1]

    def failed(error: str) -> Outcome:
        verdict = Verdict(False, "ERROR")
        return Outcome(planned.model, planned.label, planned.case, verdict, error=error, where=planned.where)

    try:
        baseline = gate.baseline(planned.model, planned.case)
        hand_back = planning_inputs(baseline, planned.label, planned.case)
        stored = stored_case(baseline, planned.label, planned.case)
        bounds = latency_bounds(stored, tolerances)
        # without a baseline, the latency of a strategy to compare with is only shown beside that of plans
        is_compared_with = planned.case.strategy != "magis" and planned.case.latency_ratio is None
        rough = stored is None and not gate.settings.update and is_compared_with
        with progress_line(config, planned.name) as progress:
            if progress is not None:
                progress("capturing")
            if make is not None and runs_every_case(config):
                check_with_magis(planned.case, config, keep=True, make=make, progress=progress)
            result = measure(
                config, planned.model, planned.case, hand_back, bounds, progress, make,
                rough=rough, snapshots=None if gate.settings.snapshot is None else file_for,
            )  # fmt: skip
        verdict = verdict_on(gate, planned, result)
        if not verdict.passed:
            measure_again(config, planned.case)
        # written here, since whole time lines are too long to send between processes
        folder = gate.settings.trace
        lines = result.timelines
        traced = folder is not None and lines is not None and bool(lines.original)
        trace = str(write_trace(folder, planned, result)) if folder is not None and traced else ""
    except MagisError as error:
        if planned.optional and isinstance(error, UsageError):
            pytest.skip(str(error))
        yield failed(str(error))
    except Exception as error:
        yield failed(f"{type(error).__name__}: {error}")
        raise
    else:
        # what the report shows; traces alone need calls with their streams
        lives = None if lines is None or gate.settings.report is None else replace(lines, original=(), optimized=())
        shown = replace(result, timelines=lives)
        yield Outcome(
            planned.model, planned.label, planned.case, verdict, shown,
            where=planned.where, trace=trace, snapshots=tuple(map(str, snapshots)),
        )  # fmt: skip


def search_and_write_front(config: pytest.Config, gate: Gate, planned: PlannedCase) -> WrittenFront:
    """Search a model's Pareto front and write its files. Raises UsageError on failure."""
    with progress_line(config, planned.name) as progress:
        if progress is not None:
            progress("searching the front")
        front = search_front(config, planned.model, planned.case, planned.make)
    return write_front(gate.settings.pareto or Path(), planned, front)


def verdict_on(gate: Gate, planned: PlannedCase, result: CaseResult) -> Verdict:
    """Return the verdict on a result, by its baseline or by the figures of the revision to compare with.

    Raises BaselineError.
    """
    baseline = gate.baseline(planned.model, planned.case)
    stored = stored_case(baseline, planned.label, planned.case)
    held = held_before(baseline, planned.label, planned.case)
    settings, tolerances = gate.settings, planned.tolerances
    if settings.against:
        return judge_against(settings.against, result, stored, tolerances=tolerances, held=held)
    return judge(result, stored, tolerances=tolerances, permissions=settings.update, held=held)


def report_lines(outcome: Outcome, gate: Gate, config: pytest.Config) -> Iterator[str]:
    """Yield the report of a red case, line by line: its findings, its notes, and the command that accepts it."""
    verdict, lines = outcome.verdict, [outcome.error] if outcome.error else []
    path, start = gate.path(outcome.model, outcome.case), config.invocation_params.dir
    shown = path.relative_to(start) if path.is_relative_to(start) else path
    for finding in verdict.findings:
        missing = f" in {shown}" if finding.kind == "new" else ""
        lines += filter(None, (f"{finding.kind}: {finding.text}{missing}", finding.why))
    lines += [f"note: {note}" for note in verdict.notes]
    if verdict.against:
        lines.append(f"compared with {verdict.against}, measured in this run")
    elif verdict.needed:
        action = "create it" if verdict.needed == ("new",) else "accept"
        command = accept_case(gate.settings.given, outcome.model, outcome.case, verdict.needed, outcome.where)
        lines.append(f"{action} with: {command}")
    elif any(finding.kind == "broken" for finding in verdict.findings):
        lines.append("no baseline can accept this")
    yield from map(printable, lines)


def check_factories(config: pytest.Config, gate: Gate, node_ids: Collection[str], *, keep: bool) -> None:
    """Check the operator profile and the factory models of selected cases. Raises pytest.UsageError.

    Nothing is checked if another plugin may run cases, since it may support other models. `keep` the captures if the
    cases run in this process.
    """
    if not runs_every_case(config):
        return
    # --dist=loadgroup appends "@<group>" to node ids
    chosen = {*node_ids, *(node_id.rpartition("@")[0] for node_id in node_ids)}
    priced: dict[object, Case] = {}
    made: dict[object, PlannedCase] = {}
    for planned in (*gate.cases, *gate.fronts):
        case = planned.case
        if f"{PREFIX}{planned.name}" in chosen:
            priced.setdefault((case.device, case.dtype, case.preset, planned.model), case)
            if is_factory(case.model):  # strategies with checkpointing need a separate capture
                made.setdefault((planned.model, "checkpoint" in case.strategy), planned)
    for case in priced.values():
        try:
            check_prices(case, config)  # refuses an operator profile of another device, data type or schema
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
    for planned in made.values():
        with progress_line(config, planned.model) as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the case gives the same warnings
            if progress is not None:
                progress("checking the model")
            call = pytest.CallInfo.from_call(
                partial(check_with_magis, planned.case, config, keep=keep, progress=progress),
                when="setup",
                reraise=(KeyboardInterrupt, pytest.exit.Exception),
            )
        found = None if call.excinfo is None else call.excinfo.value
        if isinstance(found, (UsageError, CaptureError)):  # anything else is a defect, which the case shows in full
            text = str(found)
            raise pytest.UsageError(text if text.startswith(f"{planned.case.model}:") else f"{planned.model}: {text}")
