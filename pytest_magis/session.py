"""The gate in a pytest session: collector, items, scheduling and reports.

In a job with one process per rank (torchrun, srun), rank 0 runs the session and the other ranks serve its commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from magis import registry
from magis.errors import MagisError, UsageError
from magis.printable import printable
from magis.quiet import before_torch
from magis.strategies.strategy_names import LISTED, family
from pytest_magis.flags import COMPARED_WITH, on_command_line
from pytest_magis.gate import Gate, prepare
from pytest_magis.gone_baselines import gone_baselines
from pytest_magis.harness import AGENTS
from pytest_magis.judged_case import check_factories, run_item
from pytest_magis.live.gated_tests import benchmarks_count, subject_of
from pytest_magis.live.marked import free_network
from pytest_magis.options import anywhere
from pytest_magis.run_plan import ALL, PREFIX, PROPERTY, PlannedCase
from pytest_magis.terminal_table import summary

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

# The gate's place in pytest's collection tree: a collector beside the session's paths, and one item per case.

NAME = PREFIX.removesuffix("::")


class Suite(pytest.Collector):
    """Collector of all cases of the run, added to the session independently of the paths that pytest collects."""

    gate: Gate

    @classmethod
    def build(cls, parent: pytest.Session, gate: Gate) -> Suite:
        # --lf and xdist find a case by its node id
        suite = cls.from_parent(parent, name=NAME, nodeid=NAME)
        suite.gate = gate
        return suite

    def collect(self) -> Iterator[GateItem]:
        for planned in (*self.gate.cases, *self.gate.fronts):
            yield GateItem.build(self, self.gate, planned)


class GateItem(pytest.Item):
    """Pytest item of one case, or of the Pareto front, of a model selected by name."""

    gate: Gate
    planned: PlannedCase
    fixturenames: tuple[str, ...] = ()

    @classmethod
    def build(cls, parent: Suite, gate: Gate, planned: PlannedCase) -> Self:
        item = cls.from_parent(parent, name=planned.name, nodeid=f"{PREFIX}{planned.name}")
        item.gate = gate
        item.planned = planned
        item.add_marker(pytest.mark.magis)
        item.add_marker(pytest.mark.xdist_group(f"magis-{planned.model}"))
        if benchmarks_count(parent.config):
            item.fixturenames = ("benchmark",)  # by which pytest-benchmark tells benchmarks from other tests
        return item

    def runtest(self) -> None:
        run_item(self, self.gate, self.planned)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        """Show only the lines of the failure for a red case; show a traceback for any other exception."""
        red = isinstance(excinfo.value, pytest.fail.Exception)
        return str(excinfo.value) if red else super().repr_failure(excinfo, *args, **kwargs)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.config.rootpath / NAME, 0, self.nodeid  # a line: pytest wants one of an item that is skipped


def group_by_model(config: pytest.Config, log: Any) -> object | None:
    """Return an xdist scheduler that keeps a model's cases on one worker; None unless `--dist` is load or loadgroup.

    Other tests are scheduled as `loadgroup` does: by their mark, else independently.
    """
    if config.getoption("dist") not in ("load", "loadgroup"):
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class ModelScheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(PREFIX):
                return nodeid.partition("[")[0]
            return str(super()._split_scope(nodeid))

    return ModelScheduling(config, log)


LATE = (
    "note: torch was loaded before the gate (by a conftest.py, say): its threads spin while they wait, and timings "
    "vary more; set OMP_WAIT_POLICY=PASSIVE"
)


def start(config: pytest.Config) -> None:
    """Check the options and register the gate's hooks. Raises pytest.UsageError in one line."""
    config.addinivalue_line("markers", "xdist_group(name): tests of one group run on one worker (pytest-xdist)")
    late = "torch" in sys.modules and os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE"
    before_torch()
    try:
        gate = prepare(config)
    except MagisError as error:
        raise pytest.UsageError(str(error)) from error
    if late and gate.settings.device == "cpu" and not gate.is_worker:
        gate.lines.append(LATE)
    config.pluginmanager.register(GateSession(gate), "magis-gate")


def check_options(config: pytest.Config) -> None:
    """Check the options of a session whose tests may start the gate later. Raises pytest.UsageError in one line."""
    try:
        anywhere(config)
    except MagisError as error:
        raise pytest.UsageError(str(error)) from error


class GateSession:
    """Hooks of a run, as methods of an object that holds the gate, since some hooks do not receive the config."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._unfinished: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
        collector: pytest.Collector,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Append the gate's cases to the collected paths, even in an empty directory."""
        report = yield
        gated = self.gate.cases or self.gate.fronts
        if isinstance(collector, pytest.Session) and report.passed and gated:
            report.result = [*report.result, Suite.build(collector, self.gate)]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Refuse users' models that magis cannot capture, in the main process before any test runs."""
        option = session.config.option
        # after errors of collection pytest runs nothing without this option
        stops = session.testsfailed and not option.continue_on_collection_errors
        if self.gate.is_worker or option.collectonly or stops:
            return
        check_factories(session.config, self.gate, [item.nodeid for item in session.items], keep=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Refuse users' models that magis cannot capture, under pytest-xdist, once all workers have collected.

        It waits until all workers are idle, since ending a worker that still collects takes ten seconds.
        """
        self.gate.workers_ready += 1
        if self.gate.workers_ready == node.workerinput["workercount"]:
            check_factories(node.config, self.gate, ids, keep=False)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> object | None:
        """Keep the cases of a model on one worker."""
        return group_by_model(config, log)

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Free a network when the next item gates another one."""
        if subject_of(item) is not None and (nextitem is None or subject_of(nextitem) != subject_of(item)):
            free_network(item.config)

    @pytest.hookimpl(tryfirst=True)  # before JUnit files take the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a case's outcome, from any process, and add readable figures to the report's properties."""
        self.gate.record(report)
        if not report.passed:
            self._unfinished.add(report.nodeid)
        if not self.gate.is_worker and any(name == PROPERTY for name, _ in report.user_properties):
            readable = registry.optional("output", "properties")
            if readable is not None:
                report.user_properties[:] = readable(report.user_properties)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Generator[None, Any, Any]:
        """Escape surrogates in a report, since they would crash the pytest-xdist worker that sends it."""
        return _escape_surrogates((yield))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write results and baselines in the main process."""
        if self.gate.is_worker:
            return
        interrupted = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        if self.gate.is_empty_shard and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            # a matrix of jobs may be wider than the list of models
            self.gate.lines.append(f"shard {self.gate.settings.shard} has no case of this run")
            session.exitstatus = exitstatus = pytest.ExitCode.OK
        written = self.gate.finish(interrupted=interrupted)
        if not (interrupted or self.gate.settings.against or COMPARED_WITH in os.environ):
            try:
                self.gate.lines += gone_baselines(session, self.gate, self._unfinished, prune=self.gate.settings.prune)
            except (MagisError, OSError) as error:
                self.gate.lines.append(f"ERROR: {error}")
                written = False
        if not written and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        """Print the table. Verdicts were made earlier, so JUnit files and the exit code agree with it."""
        # a log has no width
        bounded = terminalreporter.isatty or "COLUMNS" in os.environ
        width = terminalreporter.config.get_terminal_writer().fullwidth if bounded else None
        lines = list(summary(self.gate.ordered(), self.gate.settings.given, self.gate.lines, width))
        if lines:
            terminalreporter.write_sep("=", "magis")
            for line in lines:
                terminalreporter.write_line(printable(line))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in registry.load("output", "annotations")(self.gate.ordered()):
                terminalreporter.write_line(line)


def _escape_surrogates(data: Any) -> Any:
    """Escape surrogates in all strings of nested dictionaries, lists and tuples."""
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {_escape_surrogates(key): _escape_surrogates(value) for key, value in data.items()}
    return [_escape_surrogates(each) for each in data] if isinstance(data, (list, tuple)) else data


def take_place(config: pytest.Config) -> pytest.ExitCode | None:
    """Join the multi-process job of this process, for `pytest_cmdline_main`; None lets pytest run the session.

    Rank 0 runs the session and connects to the other ranks. Another rank collects nothing: it serves commands until
    rank 0 is done, and returns OK, or INTERRUPTED if rank 0 disappears. A run without distributed strategies joins no
    job. Raises pytest.UsageError for an incomplete environment of a job.
    """
    ranks = partial(registry.load, "ranks")
    try:
        found = ranks("attached")() if _wants_ranks(config) else None
        if found is None:
            return None
        if found.rank == 0:
            agents = ranks("lead")(found)
            config.add_cleanup(agents.close)
            config.stash[AGENTS] = agents
            return None
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    who = f"magis: rank {found.rank} of {found.size}"
    try:
        served = ranks("serve")(found)
    except MagisError as error:
        sys.stdout.write(f"{who} ends: {error}\n")
        return pytest.ExitCode.INTERRUPTED
    sys.stdout.write(f"{who} served rank 0, which ran the tests ({served} commands)\n")
    return pytest.ExitCode.OK


def _wants_ranks(config: pytest.Config) -> bool:
    """Return True if this command line selects a distributed strategy, by name or pattern, on a device with ranks.

    The ini file does not count, so that a user's own distributed tests do not become ranks of the gate.
    """
    settings = anywhere(config)
    if on_command_line(config, "strategies") is None or settings.device.startswith("sim:"):
        return False
    names = [
        name
        for text in settings.strategies
        for name in ((text,) if family(text) else (each for each in LISTED if text == ALL or fnmatchcase(each, text)))
    ]
    return any(family(name) == "distributed" for name in names)
