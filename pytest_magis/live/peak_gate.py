"""Gates what a block of code needs, `with magis.peak() as p:`, in the test that runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from magis.errors import MagisError, UsageError
from magis.strategies.strategy_names import BLOCK
from pytest_magis.judged_case import lines_of, verdict_on
from pytest_magis.live.asked_options import awake, check_name, red
from pytest_magis.live.gated_tests import claimed, name_of, node_id
from pytest_magis.option_values import share
from pytest_magis.outcome import PROPERTY, Outcome
from pytest_magis.run_plan import PlannedCase

if TYPE_CHECKING:
    from magis.api import BlockPeak

SHOWN = "magis.peak: gate"


class PeakGate:
    """Compares the blocks of one test with their baselines, which are kept under the test's name."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._labels: set[str] = set()

    def __call__(self, peak: BlockPeak, name: str, tolerance: float) -> None:
        """Fail the test if the block is red, or cannot be compared."""
        __tracebackhide__ = True
        item = self._item
        gate = awake(item.config)
        try:
            test, label = name_of(item), self._label(name)
            other = claimed(item, test)
            if other is not None:
                raise UsageError(f"{SHOWN}: the baselines of {other} are called {test!r} too")
            allowed = share(f"{SHOWN}: tolerance", str(tolerance))
            tolerances = replace(gate.settings.tolerances, memory=max(allowed, gate.settings.tolerances.memory))
            result = peak.result(test)
            planned = PlannedCase(test, label, result.case)
            verdict = verdict_on(gate, planned, result, tolerances)
        except MagisError as error:
            raise red(str(error)) from None
        outcome = Outcome(test, label, result.case, verdict, result, where=node_id(item))
        item.user_properties.append((PROPERTY, outcome.to_text()))
        if not verdict.passed:
            raise red("\n".join((f"{outcome.name}:", *lines_of(outcome, gate, item.config))))

    def _label(self, name: str) -> str:
        label = f"{BLOCK}-{check_name(f'{SHOWN}: name', name)}" if name else BLOCK
        if label in self._labels:
            raise UsageError(f"{SHOWN}: this test has gated a block called {name!r} already", hint="give each its name")
        self._labels.add(label)
        return label
