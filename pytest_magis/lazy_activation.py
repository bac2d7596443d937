"""Hooks of every pytest session; they load the gate when the first gated test is found."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from pytest_magis.flags import COLLECTED, PARTLY, given
from pytest_magis.live.gated_tests import (
    MARK,
    benchmarks_count,
    claim_name,
    given_name,
    is_live,
    is_marked,
    label_of,
    name_of,
)

GATE = "magis-gate"
NO_CASES = (
    f"its mark {MARK!r} made no cases; put it on the function, its class or module, not on a parameter, by a hook, or "
    "on tests of unittest"
)
REFUSED = "magis_refused"
"""Key in the output of a pytest-xdist worker: the message of a refused option."""
OUTCOMES = ("magis", "magis-front")
"""`PROPERTY` and `FRONT_PROPERTY` of `pytest_magis.run_plan`, repeated since its import loads the gate."""


class LazyActivation:
    """Hooks of a session, as methods of an object that holds the config, which some hooks do not receive."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Set threads and allocator options before a test module that contains "magis" imports torch."""
        if "torch" in sys.modules or not isinstance(collector, pytest.Module):
            return
        with suppress(OSError):  # the collector itself reports it
            if MARK.encode() in collector.path.read_bytes():
                from magis.quiet import before_torch

                before_torch()

    @pytest.hookimpl(trylast=True)  # the test's own parameters come first in its node id
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize a marked test with one item per case."""
        if metafunc.definition.get_closest_marker(MARK) is not None:
            from pytest_magis.live.marked import parametrize

            parametrize(metafunc)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Record a collected test and its network's name; put all cases of a network into one xdist group."""
        self._config.stash.setdefault(COLLECTED, (set(), []))[1].append(item)
        if is_marked(item):
            claim_name(item, name_of(item, given_name(item)))
        if is_marked(item) and self._config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(f"magis-{name_of(item)}"))

    @pytest.hookimpl(wrapper=True, specname="pytest_collection_modifyitems")
    def pytest_gated_tests_are_benchmarks(self, items: list[pytest.Item]) -> Generator[None]:
        """Make pytest-benchmark treat gated tests as benchmarks, by adding its fixture name while it filters items."""
        counted = items if benchmarks_count(self._config) else []
        gated = [item for item in counted if isinstance(item, pytest.Function) and is_live(item)]
        for item in gated:
            item.fixturenames.append("benchmark")
        try:
            yield
        finally:
            for item in gated:
                item.fixturenames.remove("benchmark")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect networks of other shards; tests that are not gated run in every shard."""
        if given(self._config, "shard") is None:
            return
        from pytest_magis.options import anywhere

        shard = anywhere(self._config).shard
        names = {item: name_of(item) for item in items if is_live(item)}
        ours = shard.of(names.values()) if shard is not None else set(names.values())
        others = [item for item, name in names.items() if name not in ours]
        if others:
            self._config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if names.get(item) in (None, *ours)]

    def pytest_deselected(self) -> None:
        """Record that the run is partial, so that it cannot tell which tests were deleted."""
        self._config.stash[PARTLY] = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record collected nodes, and mark the run as partial if a module failed to import or was skipped."""
        self._config.stash.setdefault(COLLECTED, (set(), []))[0].add(report.nodeid)
        if not report.passed:
            self._config.stash[PARTLY] = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send the folder of results to compare with to a worker of pytest-xdist."""
        if given(self._config, "against") is not None:
            from pytest_magis.options import AGAINST, WORKER_AGAINST

            node.workerinput[WORKER_AGAINST] = str(self._config.stash[AGAINST])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Start the gate if any test is gated, so that invalid options end the run before its first test."""
        gated = given(self._config, "prune") is not None or any(is_live(item) for item in session.items)
        if session.config.option.collectonly or not gated:
            return None
        try:
            self.start_gate()
        except pytest.UsageError as error:
            of_worker: dict[str, object] | None = getattr(self._config, "workeroutput", None)
            if of_worker is None:
                raise
            of_worker[REFUSED] = str(error)
            return True  # a worker of pytest-xdist runs nothing
        return None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """End the run in the main process if a pytest-xdist worker refused its options."""
        refused = getattr(node, "workeroutput", {}).get(REFUSED)
        if refused is not None:
            raise pytest.UsageError(refused)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a marked test that was not parametrized with cases: it would pass without being gated."""
        if isinstance(item, pytest.Function) and is_marked(item) and not label_of(item):
            pytest.fail(f"{item.nodeid}: {NO_CASES}", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Install the gate for blocks measured by `magis.peak` while a test runs."""
        from magis.current_gate import BLOCK_GATE

        token = BLOCK_GATE.set(_BlocksOf(item))
        try:
            yield
        finally:
            BLOCK_GATE.reset(token)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run and gate the network that a marked test returns."""
        if not is_marked(pyfuncitem):
            return None
        from pytest_magis.live.marked import run_marked

        run_marked(pyfuncitem)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Start the gate in the main process at a worker's first report of a gated test."""
        if report.when == "call" and self._sleeps() and any(name in OUTCOMES for name, _ in report.user_properties):
            self.start_gate()
            session: Any = self._config.pluginmanager.get_plugin(GATE)  # too new to get this report
            session.pytest_runtest_logreport(report)

    def _sleeps(self) -> bool:
        return not self._config.pluginmanager.has_plugin(GATE)

    def start_gate(self) -> Any:
        """Return the gate of the session, starting it if necessary."""
        if self._sleeps():
            from pytest_magis.session import start

            start(self._config)
        session: Any = self._config.pluginmanager.get_plugin(GATE)
        return session.gate


class _BlocksOf:
    """Gate for blocks of code in one run of a test; creates `PeakGate` at the first block."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._gate: Any = None

    def __call__(self, peaks: Mapping[str, Any], tolerance: float) -> None:
        __tracebackhide__ = True
        if self._gate is None:
            from pytest_magis.live.fixture import PeakGate

            self._gate = PeakGate(self._item)
        self._gate(peaks, tolerance)
