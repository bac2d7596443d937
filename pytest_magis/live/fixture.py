"""The fixture `magis`, which gates networks that a test builds, and the gate of blocks (`with magis.peak():`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from magis.errors import UsageError
from magis.results import CaseResult
from magis.strategies.strategy_names import BLOCK
from pytest_magis.findings import Tolerances
from pytest_magis.gate import Gate, snapshot_file
from pytest_magis.harness import forget
from pytest_magis.judged_case import (
    failure,
    refused_in_one_line,
    report_lines,
    run_and_judge,
    search_and_write_front,
    verdict_on,
)
from pytest_magis.live.asked_options import (
    cases_here,
    check_claim,
    check_name,
    read_asked,
    started_gate,
)
from pytest_magis.live.gated_tests import claim_name, name_of, node_id
from pytest_magis.option_values import SHARE
from pytest_magis.options import tolerances_of
from pytest_magis.run_plan import FRONT, Outcome, PlannedCase, add, forget_outcomes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from magis.api import BlockPeak, Workload

PEAK = "magis.peak: gate"


class MagisFixture:
    """Value of the fixture `magis`, created for each test."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._names: list[str] = []
        forget_outcomes(item.user_properties)  # of an earlier run

    def check(
        self,
        module: nn.Module | Workload | tuple[Any, ...] | Callable[[], object],
        batch: Any = None,
        loss: Callable[..., Tensor] | None = None,
        optimizer: Any = None,
        **asked: Any,
    ) -> Mapping[str, CaseResult]:
        """Gate a network: run its cases, compare them with its baselines, and fail the test if one is red.

        `batch` is `(inputs, targets)`, each one tensor or several, or a dictionary of keyword arguments of the module;
        `loss` maps the module's output and the targets to a scalar (optional if the module returns its loss);
        `optimizer` is a torch optimizer over the module's parameters, or "sgd", "momentum", "adam", "adamw", "none".
        Instead of all four: a tuple of them, a Workload, or a function without arguments that returns what a marked
        test may return; the function is first called under fake tensors, so that a simulated device can gate a network
        too large for this machine. Keywords are those of the mark: limits (`memory_ratios`, `memory_limit="2 GiB"`,
        `latency_ratios`, `memory_limit_of`, `required`), `strategies`, `device`, `dtype`, `budget`, `seconds`, `seed`,
        `slack`, `host_limit`, `memory_tolerance`, `latency_tolerance`, and the `name` of the baselines. Returns the
        results by label ("eager", "magis-mem0.8"). Strategies of several ranks and "magis+compile" take ratios, not
        `memory_limit`.
        """
        from magis.models.step_parts import recipe_of

        __tracebackhide__ = True
        outcomes = []
        item = self._item
        gate = started_gate(item.config)
        with refused_in_one_line():
            wanted = read_asked("magis.check", {**asked, **({} if optimizer is None else {"optimizer": optimizer})})
            name = self._claim_name(wanted.name)
            settings = wanted.over(gate.settings)
            planned = cases_here(item.config, name, settings)
            _, make = recipe_of("magis.check", module, batch, loss, wanted.optimizer, name=name)
            if make is None:
                raise UsageError("magis.check: a name is no module", hint="--magis-models takes names")
        try:
            for each in (replace(case, make=make, where=node_id(item)) for case in planned):
                if each.label == FRONT:
                    with refused_in_one_line():
                        add(search_and_write_front(item.config, gate, each), item.user_properties)
                    continue
                with suppress(pytest.skip.Exception):  # a strategy of a pattern that does not fit this network
                    for outcome in run_and_judge(item.config, gate, each):
                        add(outcome, item.user_properties)
                        outcomes.append(outcome)
        finally:
            forget(item.config)  # frees tensors of the test
        _fail_if_red(outcomes, gate, item.config)
        return {outcome.label: outcome.result for outcome in outcomes if outcome.result is not None}

    def _claim_name(self, given: str | None) -> str:
        """Return a unique name for a network of this test, numbered from the second one on unless a name is given."""
        name = name_of(self._item, given)
        if name in self._names:
            if given is not None:
                raise UsageError(f"magis.check: this test has gated a network called {given!r} already")
            name = f"{name}.{len(self._names) + 1}"
        check_claim("magis.check", self._item, name)
        self._names.append(name)
        return name


class PeakGate:
    """Gate of the blocks in one test: compares their peak memory with baselines under the test's name."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._labels: set[str] = set()

    def __call__(self, peaks: Mapping[str, BlockPeak], tolerance: float) -> None:
        """Fail the test if a block is red. Raises a failure for invalid names and baselines, too."""
        __tracebackhide__ = True
        gate = started_gate(self._item.config)
        with refused_in_one_line():
            allowed = SHARE.read(f"{PEAK}: tolerance", str(tolerance))
            tolerances = tolerances_of(gate.settings)
            tolerances = replace(tolerances, memory=max(allowed, tolerances.memory))
            outcomes = [self._judge(peak, name, gate, tolerances) for name, peak in peaks.items()]
        _fail_if_red(outcomes, gate, self._item.config)

    def _judge(self, peak: BlockPeak, name: str, gate: Gate, tolerances: Tolerances) -> Outcome:
        item = self._item
        test = name_of(item)
        label = f"{BLOCK}-{check_name(f'{PEAK}: name', name)}" if name else BLOCK
        if label in self._labels:
            raise UsageError(f"{PEAK}: this test has gated a block called {name!r} already", hint="give each its name")
        self._labels.add(label)
        other = claim_name(item, test)
        if other is not None:
            raise UsageError(f"{PEAK}: the baselines of {other} are called {test!r} too")
        result = peak.result(test)
        planned, folder = PlannedCase(test, label, result.case, tolerances), gate.settings.snapshot
        verdict = verdict_on(gate, planned, result)
        snapshots = tuple[str, ...]()
        # a phase of a block has no such bytes; on a GPU, and where another profiler ran, no event is logged
        if folder is not None and peak.device == "cpu" and getattr(peak, "allocated_bytes", None) is not None:
            snapshots = (str(snapshot_file(folder, planned, "original")),)
            peak.save_snapshot(snapshots[0])
        outcome = Outcome(test, label, result.case, verdict, result, where=node_id(item), snapshots=snapshots)
        add(outcome, item.user_properties)
        return outcome


def _fail_if_red(outcomes: Iterable[Outcome], gate: Gate, config: pytest.Config) -> None:
    __tracebackhide__ = True
    failed = [outcome for outcome in outcomes if not outcome.verdict.passed]
    if failed:
        raise failure(
            "\n".join(line for each in failed for line in (f"{each.name}:", *report_lines(each, gate, config)))
        )
