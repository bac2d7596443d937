"""Wakes the gate for users' tests: a run without `--magis-models` starts it with the first of them."""

from __future__ import annotations

from typing import Any

import pytest

from magis.errors import UsageError, nearest
from pytest_magis.gate import Gate
from pytest_magis.options import Settings

__all__ = ["awake", "check_device", "red"]

WAITING = "magis-dormant"


def awake(config: pytest.Config) -> Gate:
    """The gate of the run, started now if it has not been. Raises pytest.UsageError in one line where options are of no
    use on this machine."""
    waiting: Any = config.pluginmanager.get_plugin(WAITING)
    gate: Gate = waiting.awake()
    return gate


def red(text: str) -> BaseException:
    """What to raise for a test that fails with these lines and nothing else."""
    return pytest.fail.Exception(text, pytrace=False)


def check_device(config: pytest.Config, settings: Settings) -> None:
    """Raise UsageError unless the device that a test names is here; the options' own has been checked."""
    device = settings.grid.device
    found = config.hook.pytest_magis_devices(config=config)
    if device not in found:
        why = "needs a GPU and none was found" if device == "cuda" else "is unknown"
        raise UsageError(f"device {device!r} {why}", hint=nearest(device, found))
