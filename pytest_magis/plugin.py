"""The plugin's hooks; what they do is in the modules beside. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from magis.errors import MagisError
from magis.quiet import before_torch
from pytest_magis import hookspecs, options
from pytest_magis.gate import Gate, prepare
from pytest_magis.measure import devices, run_with_magis
from pytest_magis.outputs.terminal import summary
from pytest_magis.precheck import check_factories
from pytest_magis.strategies import BUILT_IN, Strategy
from pytest_magis.suite import Suite
from pytest_magis.workers import group_by_model

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from magis.results import Case, CaseResult


class Recorder:
    """Takes outcomes from reports: a plugin of its own, since that hook is not told which run it belongs to."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.gate.record(report)


_GATE = pytest.StashKey[Gate]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the gate."""
    options.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that other projects implement."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(trylast=True)  # after other plugins had the chance to register theirs
def pytest_configure(config: pytest.Config) -> None:
    """Check everything that can be checked before a case runs; without models, change nothing."""
    config.addinivalue_line("markers", "magis: a case of the memory-regression gate (--magis-models)")
    if not options.is_active(config):
        return
    config.addinivalue_line("markers", "xdist_group(name): tests of one group run on one worker (pytest-xdist)")
    before_torch()
    try:
        gate = prepare(config)
    except MagisError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_GATE] = gate
    config.pluginmanager.register(Recorder(gate), "magis-recorder")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The gate's cases come after whatever the session's paths hold; that works in an empty directory too."""
    report = yield
    gate = collector.config.stash.get(_GATE, None)
    if gate is not None and isinstance(collector, pytest.Session) and report.passed:
        report.result = [*report.result, Suite.build(collector, gate)]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Refuse users' own models that no case could run; workers leave that to the process that has the terminal."""
    gate = session.config.stash.get(_GATE, None)
    option = session.config.option
    # after errors of collection pytest runs nothing, unless told to
    stops = session.testsfailed and not option.continue_on_collection_errors
    if gate is None or gate.is_worker or option.collectonly or stops:
        return
    check_factories(session.config, gate, [item.nodeid for item in session.items], keep=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: Sequence[str]) -> None:
    """The same under pytest-xdist, where the process that has the terminal learns here which cases were chosen.

    Only once all workers are idle: ending one that still collects takes ten seconds.
    """
    gate = node.config.stash.get(_GATE, None)
    if gate is None:
        return
    gate.workers_ready += 1
    if gate.workers_ready == node.workerinput["workercount"]:
        check_factories(node.config, gate, ids, keep=False)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write results and baselines, in the process that has the terminal."""
    gate = session.config.stash.get(_GATE, None)
    if gate is None or gate.is_worker:
        return
    interrupted = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    if not gate.finish(interrupted=interrupted) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.USAGE_ERROR


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Show the table; whatever is wrong was decided before, so that JUnit and exit code agree with it."""
    gate = config.stash.get(_GATE, None)
    if gate is None:
        return
    lines = list(summary(gate.ordered(), gate.settings.given, gate.lines))
    if lines:
        terminalreporter.write_sep("=", "magis")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Keep the cases of a model together."""
    return group_by_model(config, log) if _GATE in config.stash else None


@pytest.hookimpl(trylast=True)
def pytest_magis_strategies() -> Iterable[Strategy]:
    """The strategies that come with the plugin."""
    return BUILT_IN


@pytest.hookimpl(trylast=True)
def pytest_magis_devices() -> tuple[str, ...]:
    """The devices that magis finds here."""
    return devices()


@pytest.hookimpl(trylast=True)
def pytest_magis_run_case(
    case: Case,
    config: pytest.Config,
    planning_workspaces: Mapping[str, int] | None,
    expected_graph: str | None,
    latency_bounds: tuple[float, ...],
    progress: Callable[[str], None] | None,
) -> CaseResult:
    """Run a case that no other plugin wanted to run."""
    return run_with_magis(case, config, planning_workspaces, expected_graph, progress, latency_bounds)
