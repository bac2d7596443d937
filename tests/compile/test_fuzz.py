"""Random small modules through the backend: eager's numbers, and bytes that are measured as planned."""

from __future__ import annotations

import copy
import warnings

import pytest

from tests.compile.nets import Twins, fresh_dynamo
from tests.training.random_modules import Drawn, draw

SAMPLE = (2, 16)
ALL = range(120)


def _trains(drawn: Drawn) -> bool:
    """Some in-place operators overwrite what the backward needs."""
    try:
        drawn.loss_fn(copy.deepcopy(drawn.module)(*drawn.inputs), *drawn.targets).backward()
    except RuntimeError:
        return False
    return True


def _run(seed: int) -> str:
    """ "exact", "inexact" (bytes), or "none" for a module that eager cannot train either."""
    drawn = draw(seed)
    if not _trains(drawn):
        return "none"
    batch = (*drawn.inputs, *drawn.targets)
    with fresh_dynamo(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="magis: no plan found")
        twins = Twins(drawn.module, drawn.loss_fn, drawn.optimizer, memory_ratio=0.7)
        for number in range(3):
            twins.step(number, *batch)
        (report,) = twins.reports
        assert not report.fallback, drawn.parts
        peak = twins.peak(*batch)
        assert peak <= report.planned_bytes, drawn.parts
        return "exact" if peak == report.planned_bytes else "inexact"


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_sample(seed: int) -> None:
    assert _run(seed) == "exact"


@pytest.mark.soak
def test_all() -> None:
    found = [_run(seed) for seed in ALL]
    assert found.count("exact") >= 0.9 * (len(found) - found.count("none"))
