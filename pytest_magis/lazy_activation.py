"""Hooks of every pytest session: they wait for a test that is gated, and load the gate for the first one."""

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
"""Key of a refusal in the output of a worker of pytest-xdist."""
OUTCOMES = ("magis", "magis-front")
"""`PROPERTY` and `FRONT_PROPERTY` of `pytest_magis.run_plan`, whose import would load the gate."""


class LazyActivation:
    """Hooks of a session; an object, since some hooks do not get the config of their session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Prepare the process before a module that names the mark or the fixture loads torch."""
        if "torch" in sys.modules or not isinstance(collector, pytest.Module):
            return
        with suppress(OSError):  # the collector itself reports it
            if MARK.encode() in collector.path.read_bytes():
                from magis.quiet import before_torch

                before_torch()

    @pytest.hookimpl(trylast=True)  # the test's own parameters come first in its node id
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make an item of each case of a marked test."""
        if metafunc.definition.get_closest_marker(MARK) is not None:
            from pytest_magis.live.marked import parametrize

            parametrize(metafunc)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Note a test and the name of its network; keep its cases on one worker under --dist=loadgroup."""
        self._config.stash.setdefault(COLLECTED, (set(), []))[1].append(item)
        if is_marked(item):
            claim_name(item, name_of(item, given_name(item)))
        if is_marked(item) and self._config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group(f"magis-{name_of(item)}"))

    @pytest.hookimpl(wrapper=True, specname="pytest_collection_modifyitems")
    def pytest_gated_tests_are_benchmarks(self, items: list[pytest.Item]) -> Generator[None]:
        """Mark gated tests as benchmarks for pytest-benchmark, which goes by the names of fixtures."""
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
        """Deselect networks of other shards; tests that are not gated are in every shard."""
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
        """Note that only a part of the tests runs: such a run cannot tell which are gone."""
        self._config.stash[PARTLY] = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that could not be collected or skips itself, for the same reason."""
        self._config.stash.setdefault(COLLECTED, (set(), []))[0].add(report.nodeid)
        if not report.passed:
            self._config.stash[PARTLY] = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of pytest-xdist the folder of the results to compare with."""
        if given(self._config, "against") is not None:
            from pytest_magis.options import AGAINST, WORKER_AGAINST

            node.workerinput[WORKER_AGAINST] = str(self._config.stash[AGAINST])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Start the gate if any test is gated, so that wrong options end the run before its first test."""
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
        """End the run, in the process that has the terminal, if a worker refused its options."""
        refused = getattr(node, "workeroutput", {}).get(REFUSED)
        if refused is not None:
            raise pytest.UsageError(refused)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a test whose mark made no cases: it would pass ungated."""
        if isinstance(item, pytest.Function) and is_marked(item) and not label_of(item):
            pytest.fail(f"{item.nodeid}: {NO_CASES}", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Let `magis.peak` gate the blocks that it measures in a test."""
        from magis.current_gate import BLOCK_GATE

        token = BLOCK_GATE.set(_BlocksOf(item))
        try:
            yield
        finally:
            BLOCK_GATE.reset(token)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Gate the network that a marked test returns."""
        if not is_marked(pyfuncitem):
            return None
        from pytest_magis.live.marked import run_marked

        run_marked(pyfuncitem)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Start the gate, in the process that has the terminal, at a worker's first report of a gated test."""
        if report.when == "call" and self._sleeps() and any(name in OUTCOMES for name, _ in report.user_properties):
            self.start_gate()
            session: Any = self._config.pluginmanager.get_plugin(GATE)  # too new to get this report
            session.pytest_runtest_logreport(report)

    def _sleeps(self) -> bool:
        return not self._config.pluginmanager.has_plugin(GATE)

    def start_gate(self) -> Any:
        """Return the gate of the session; start it first if need be."""
        if self._sleeps():
            from pytest_magis.session import start

            start(self._config)
        session: Any = self._config.pluginmanager.get_plugin(GATE)
        return session.gate


class _BlocksOf:
    """Gates blocks of code in one run of a test; loads `PeakGate` with the first."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._gate: Any = None

    def __call__(self, peaks: Mapping[str, Any], tolerance: float) -> None:
        __tracebackhide__ = True
        if self._gate is None:
            from pytest_magis.live.fixture import PeakGate

            self._gate = PeakGate(self._item)
        self._gate(peaks, tolerance)
