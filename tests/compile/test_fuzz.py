"""The nets of random training loops through the backend: eager's numbers, and bytes that are measured as planned."""

from __future__ import annotations

import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn, optim

from tests.compile.nets import Twins, fresh_dynamo
from tests.fuzz.child import drawn
from tests.fuzz.script import namespace

SAMPLE = (2, 3)
ALL = range(120)
TROUBLE = re.compile(r"Counted|Checkpointed|momentum=None")
"""Layers that dynamo does not take, or whose numbers hang on how often they were called."""


SETTINGS: dict[str, dict[str, Any]] = {"plain": {"memory_ratio": 0.7}, "swaps": {"memory_ratio": 0.5, "link": 100e9}}


def _run(seed: int, settings: str) -> str:
    """ "exact", "inexact" (bytes), or "none" for a net with trouble enough."""
    script, _ = drawn("loops", seed)
    if TROUBLE.search("\n".join(script.setup)):
        return "none"
    found = namespace(script)
    inputs, targets = found["batch"](0)
    batch = (*inputs, *targets)

    def made(module: nn.Module) -> optim.Optimizer:
        space = {**found, "model": module}
        exec("\n".join(script.optimizer), space)
        return space["updater"]

    with fresh_dynamo(), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        found["__name__"] = f"script{seed}"
        patch.setitem(sys.modules, found["__name__"], SimpleNamespace(**found))  # where dynamo looks for globals
        warnings.filterwarnings("ignore", message="magis: no plan found")
        twins = Twins(found["model"], found["loss_fn"], made, **SETTINGS[settings])
        for number in range(3):
            twins.step(number, *batch)
        (report,) = twins.reports
        assert not report.fallback, script.setup
        peak = twins.peak(*batch)
        assert peak <= report.planned_bytes, script.setup
        return "exact" if peak == report.planned_bytes else "inexact"


@pytest.mark.parametrize(("seed", "settings"), [*((seed, "plain") for seed in SAMPLE), (SAMPLE[0], "swaps")])
def test_a_sample(seed: int, settings: str) -> None:
    assert _run(seed, settings) == "exact"


@pytest.mark.soak
@pytest.mark.parametrize("settings", SETTINGS)
def test_all(settings: str) -> None:
    found = [_run(seed, settings) for seed in ALL]
    assert found.count("exact") >= 0.9 * (len(found) - found.count("none"))
