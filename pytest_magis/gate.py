"""One run of the gate: its cases, their outcomes, and the files written at its end."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from magis import registry
from magis.errors import MagisError, UsageError
from magis.plain_records import from_plain
from magis.report import (
    Cell,
    check_writable,
    front_svg,
    front_text,
    row_from_result,
    trace_text,
    write_csv,
    write_text_atomically,
)
from magis.results import Case, CaseResult, ParetoFront
from magis.strategies.strategy_names import check_installed
from pytest_magis import harness
from pytest_magis.baseline_files import baseline_path, file_name, locked, read_baseline, write_baseline
from pytest_magis.baselines import ModelBaseline, updated
from pytest_magis.flags import Settings
from pytest_magis.options import read_settings
from pytest_magis.run_plan import (
    FRONT,
    FRONT_PROPERTY,
    PREFIX,
    PROPERTY,
    Outcome,
    PlannedCase,
    WrittenFront,
    choose,
    plan_cases,
    plan_fronts,
    resolve_models,
)
from pytest_magis.strategies import Strategy

T = TypeVar("T")
BUILT_IN = "magis-builtin"


@dataclass(frozen=True)
class Run:
    """Finished run, as input of the HTML report."""

    outcomes: tuple[Outcome, ...]
    planned: int
    """Number of selected cases; fewer outcomes mean that the run ended early."""
    settings: Settings
    interrupted: bool
    fronts: tuple[tuple[str, Path], ...]
    """Model and picture file of each Pareto front that the run wrote."""
    baselines: Mapping[Path, ModelBaseline | None]
    """Baselines by file, as they were at the start of the run."""
    command: str = ""
    """Command line of the run."""


@dataclass
class Gate:
    """State of one run of the gate.

    Workers of pytest-xdist only run cases; the main process collects outcomes and writes files.
    """

    settings: Settings
    cases: tuple[PlannedCase, ...]
    fronts: tuple[PlannedCase, ...]
    columns: Mapping[str, Callable[[CaseResult], Cell]]
    is_worker: bool
    baselines: dict[Path, ModelBaseline | None] = field(default_factory=dict)
    """Baselines by file, as they were before the run; files of users' tests are read when the tests run."""
    benchmarks: Any = None
    """Rows for pytest-benchmark (`BenchmarkRows`); None if no option of pytest-benchmark needs them."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes by case name; for a case that was rerun, the last outcome."""
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)
    """Csv rows by case name, cached."""
    written: dict[str, WrittenFront] = field(default_factory=dict)
    """Written Pareto fronts by model."""
    lines: list[str] = field(default_factory=list)
    """Lines for the terminal summary: files written, and errors."""
    workers_ready: int = 0
    """Number of workers of pytest-xdist that have finished collecting."""
    command: str = ""
    """Command line of the run."""

    def baseline(self, model: str, case: Case) -> ModelBaseline | None:
        """Return the baseline of a case's model at the start of the run; None without a file. Raises BaselineError."""
        path = self.path(model, case)
        if path not in self.baselines:
            self.baselines[path] = read_baseline(path, model, case.device)
        return self.baselines[path]

    def path(self, model: str, case: Case) -> Path:
        """Return the baseline file of a model on a case's device."""
        return baseline_path(self.settings.baselines, case.device, model)

    def record(self, report: pytest.TestReport) -> None:
        """Record a case's outcome, or a written Pareto front, from a test report."""
        if report.when != "call":
            return
        for key, value in report.user_properties:
            if key == PROPERTY and isinstance(value, str):
                outcome = Outcome.from_text(value)
                self.outcomes[outcome.name] = outcome
                self.rows.pop(outcome.name, None)
                if self.settings.csv is not None and not self.is_worker:
                    with suppress(Exception):  # for jobs that are killed; `finish` reports errors
                        self._write_rows(self.settings.csv)
                if self.benchmarks is not None:
                    self.benchmarks.put(outcome)
            elif key == FRONT_PROPERTY:
                front = from_plain(WrittenFront, json.loads(str(value)), "front")
                self.written[front.model] = front

    def _write_rows(self, path: Path) -> str:
        """Replace the csv with this run's rows, and return a line for the summary. Raises UsageError on failure."""
        outcomes = self.ordered()
        for outcome in outcomes:
            if outcome.name not in self.rows:
                self.rows[outcome.name] = row(outcome, self.columns)
        write_csv(path, [self.rows[outcome.name] for outcome in outcomes], full=self.settings.csv_full)
        return f"results: {path} ({len(outcomes)} row{'s' if len(outcomes) != 1 else ''})"

    def ordered(self) -> list[Outcome]:
        """Return outcomes in planned order, followed by those of users' tests sorted by model."""
        planned = [self.outcomes[each.name] for each in self.cases if each.name in self.outcomes]
        return planned + sorted((each for each in self.outcomes.values() if each.where), key=lambda each: each.model)

    @property
    def is_empty_shard(self) -> bool:
        """Return True if this run's shard has no models because there are fewer models than shards."""
        return self.settings.shard is not None and not self.cases and not self.fronts

    def finish(self, *, interrupted: bool) -> bool:
        """Write results and accepted baselines; return False if a file could not be written.

        An interrupted run writes the rows that it has, and updates no baseline.
        """
        written = True
        outcomes = self.ordered()
        # an empty shard, too, writes its csv: `magis merge` then knows that it ran
        if (outcomes or self.is_empty_shard) and self.settings.csv is not None:
            written &= self._try(partial(self._write_rows, self.settings.csv))
        if outcomes and self.settings.markdown is not None:
            written &= self._try(lambda: registry.load("output", "markdown")(outcomes, self.settings))
        self.lines += [front.line for front in self._fronts()]
        traced = sum(bool(outcome.trace) for outcome in outcomes)
        if traced:
            self.lines.append(f"traces: {self.settings.trace} ({traced} files)")
        snapshots = sum(len(outcome.snapshots) for outcome in outcomes)
        if snapshots:
            self.lines.append(f"snapshots: {self.settings.snapshot} ({snapshots} files)")
        if outcomes and self.settings.report is not None:
            fronts = [(front.model, Path(front.picture)) for front in self._fronts()]
            planned = len(self.cases) + sum(bool(outcome.where) for outcome in outcomes)
            told = planned, self.settings, interrupted, tuple(fronts), self.baselines, self.command
            run = Run(tuple(outcomes), *told)
            written &= self._try(lambda: registry.load("output", "page")(self.settings.report, run))
        accepted = [outcome for outcome in outcomes if outcome.verdict.store]
        if accepted and interrupted:
            self.lines.append("baselines are not updated: the run was interrupted")
            return written
        files: dict[Path, list[Outcome]] = {}
        for outcome in accepted:
            files.setdefault(self.path(outcome.model, outcome.case), []).append(outcome)
        for path, of_file in files.items():
            written &= self._try(partial(store, path, of_file))
        return written

    def _fronts(self) -> list[WrittenFront]:
        """Return written Pareto fronts in planned order, followed by those of users' tests sorted by model."""
        planned = [self.written[each.model] for each in self.fronts if each.model in self.written]
        return planned + sorted(set(self.written.values()) - set(planned), key=lambda front: front.model)

    def _try(self, write: Callable[[], str]) -> bool:
        try:
            self.lines.append(write())
        except MagisError as error:
            self.lines.append(f"ERROR: {error}")
            return False
        except Exception as error:  # noqa: BLE001  (of a plugin's column, say: the other files are still written)
            self.lines.append(f"ERROR: {type(error).__name__}: {error}")
            return False
        return True


def prepare(config: pytest.Config) -> Gate:
    """Check options, models, baselines and output files before any case runs. Raises UsageError.

    Removes the gate's node ids from `config.args`, and the default paths if only the gate was asked for.
    """
    is_worker = hasattr(config, "workerinput")
    hook = config.hook
    strategies = all_strategies(config)
    command = f"pytest {shlex.join(map(str, config.invocation_params.args))}"
    settings = read_settings(config, devices=lambda: hook.pytest_magis_devices(config=config))
    models = resolve_models(settings.models, _merged("models", hook.pytest_magis_models(config=config)))
    known = (*plan_cases(settings, models, strategies), *plan_fronts(settings, models)) if models else ()
    chosen = choose(known, _take_node_ids(config, only_gate=settings.only_gate))
    if settings.shard is not None:
        ours = settings.shard.of(model.name for model in models)
        chosen = tuple(each for each in chosen if each.model in ours)
    cases = tuple(each for each in chosen if each.label != FRONT)
    fronts = tuple(each for each in chosen if each.label == FRONT)
    columns = _merged("columns", hook.pytest_magis_columns(config=config))
    gate = Gate(settings, cases, fronts, columns, is_worker, command=command)
    for planned in cases:
        check_installed(planned.case.strategy, planned.case.search)
        gate.baseline(planned.model, planned.case)
    written = {"page": settings.report, "markdown": settings.markdown}
    for output in (name for name, place in written.items() if place is not None):
        registry.check("output", output)
    for place in (settings.csv, settings.markdown, settings.report):
        if place is not None:
            check_writable(place)
    pictures = [front_name(front, kind) for front in fronts for kind in ("json", "svg")]
    if settings.snapshot is not None and settings.snapshot.suffix in (".pickle", ".pkl"):
        raise UsageError(
            f"--magis-snapshot: each case gets files of its own, not one {settings.snapshot.name}",
            hint="name a directory",
        )
    if settings.snapshot is not None:
        registry.check("snapshot", "step")
    if settings.update:
        files = [gate.path(each.model, each.case) for each in cases]
        folder = baseline_path(settings.baselines, settings.device, "").parent
        _check_directory("--magis-baselines", folder, [path.name for path in files] or ["any.json"])
    names = [snapshot_name(planned, step) for planned in cases for step in ("original", "optimized")]
    _check_directory("--magis-snapshot", settings.snapshot, names)
    _check_directory("--magis-trace", settings.trace, [trace_name(planned) for planned in cases])
    _check_directory("--magis-pareto", settings.pareto, pictures)
    _check_directory("--magis-resume", settings.resume, ["place.txt"])
    if not is_worker:
        rows = registry.optional("output", "benchmark")
        gate.benchmarks = None if rows is None else rows(config)
    return gate


def all_strategies(config: pytest.Config) -> list[Strategy]:
    """Return the strategies of all plugins, beginning with the built-in ones."""
    if not config.pluginmanager.has_plugin(BUILT_IN):
        config.pluginmanager.register(harness, BUILT_IN)
    return [item for given in reversed(config.hook.pytest_magis_strategies(config=config)) for item in given]


def _check_directory(flag: str, directory: Path | None, names: Iterable[str]) -> None:
    """Raise UsageError unless files of these names can be written in a directory, which need not exist yet."""
    if directory is None:
        return
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        for name in names:
            check_writable(there / (name if there == directory else f".{name}"))
    except (OSError, UsageError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition(": ")[2]
        raise UsageError(f"{flag}: cannot write to {directory}: {reason}", hint="name another directory") from error


def _take_node_ids(config: pytest.Config, *, only_gate: bool) -> list[str]:
    """Remove the gate's node ids from `config.args` and return them; pytest collects the rest."""
    given = config.args_source is pytest.Config.ArgsSource.ARGS
    node_ids = [arg for arg in config.args if arg.startswith(PREFIX)] if given else []
    if node_ids:
        config.args[:] = [arg for arg in config.args if not arg.startswith(PREFIX)]
    elif only_gate and not given:
        config.args.clear()
    return node_ids


def _merged(what: str, given: Iterable[Mapping[str, T] | None]) -> dict[str, T]:
    """Merge what several plugins contribute. Raises UsageError for a name that two plugins use."""
    parts = [part for part in given if part]
    counts = Counter(name for part in parts for name in part)
    for name in (name for name, count in counts.items() if count > 1):
        raise UsageError(f"two plugins add {what} called {name!r}")
    return {name: value for part in parts for name, value in part.items()}


def store(path: Path, outcomes: list[Outcome]) -> str:
    """Write accepted results into a baseline file, re-read under a lock, and return a line for the summary."""
    first = outcomes[0]
    with locked(path.parent):
        baseline = read_baseline(path, first.model, first.case.device)
        for outcome in outcomes:
            if outcome.result is not None:
                baseline = updated(baseline, outcome.model, outcome.label, outcome.case, outcome.result)
        if baseline is not None:
            write_baseline(path, baseline)
    return f"baseline updated: {path} ({', '.join(outcome.label for outcome in outcomes)})"


def row(outcome: Outcome, columns: Mapping[str, Callable[[CaseResult], Cell]]) -> dict[str, Cell]:
    """Return the csv row of a case; without a result, only the case and its error."""
    if outcome.result is None:
        return {
            "name": outcome.model,
            "memory limit ratio": outcome.case.memory_ratio,
            "memory limit of": outcome.case.memory_limit_of if outcome.case.limits_memory else None,
            "latency limit ratio": outcome.case.latency_ratio,
            "device": outcome.case.device,
            "preset": outcome.case.preset,
            "dtype": outcome.case.dtype,
            "strategy": outcome.case.strategy,
            "search": outcome.case.search,
            "ranks": outcome.case.ranks,
            "memory limit bytes": outcome.case.memory_limit,
            "verdict": outcome.verdict.label,
            "note": outcome.error,
        }
    found = [text for finding in outcome.verdict.findings for text in (finding.text, finding.why) if text]
    said = [*found, *outcome.verdict.notes]
    cells = row_from_result(outcome.result, verdict=outcome.verdict.label, note="; ".join(said))
    return cells | {name: compute(outcome.result) for name, compute in columns.items()}


def front_name(planned: PlannedCase, kind: str) -> str:
    """Return the file name of a model's Pareto front; `kind` is "json" or "svg"."""
    return f"{file_name(planned.model)}.{kind}"


def write_front(directory: Path, planned: PlannedCase, front: ParetoFront) -> WrittenFront:
    """Write a model's Pareto front as JSON and SVG. Raises UsageError on failure."""
    _make_directory("--magis-pareto", directory)
    for kind, text in (("json", front_text(front)), ("svg", front_svg(front))):
        write_text_atomically(directory / front_name(planned, kind), text)
    picture = directory / front_name(planned, "svg")
    line = f"front: {picture} ({len(front.points)} plans, {front.states} judged)"
    return WrittenFront(planned.model, str(picture), line)


def trace_name(planned: PlannedCase) -> str:
    """Return the name of a case's trace file, unique since "@" occurs in neither part."""
    return f"{file_name(planned.model)}@{file_name(planned.label)}.json"


def write_trace(directory: Path, planned: PlannedCase, result: CaseResult) -> Path:
    """Write the simulated time lines of a case, and return the file. Raises UsageError on failure."""
    _make_directory("--magis-trace", directory)
    path = directory / trace_name(planned)
    write_text_atomically(path, trace_text(result))
    return path


def snapshot_name(planned: PlannedCase, step: str) -> str:
    """Return the name of a case's file with a memory snapshot; `step` is "original" or "optimized"."""
    return trace_name(planned).removesuffix("json") + f"{step}.pickle"


def snapshot_file(directory: Path, planned: PlannedCase, step: str) -> Path:
    """Return the file for a memory snapshot of a case, and make its directory. Raises UsageError on failure."""
    _make_directory("--magis-snapshot", directory)
    return directory / snapshot_name(planned, step)


def _make_directory(flag: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{flag}: cannot make {directory}: {error.strerror}") from error
