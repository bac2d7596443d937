"""What makes runs of whole cases quick and leaves what they find alone; a pytest plugin, too, for runs inside tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest

__all__ = ["SECONDS", "pytest_sessionstart", "short_looks"]

SECONDS = 0.1
"""A look at a latency ratio ends when it has its rounds and took that long; it may take twenty seconds otherwise."""


@contextmanager
def short_looks() -> Iterator[None]:
    """Time in as few pairs as are asked for. How long looks go on is what tests/runtime/test_timing.py tests."""
    from magis.cases import comparison

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "StoppingRule", partial(comparison.StoppingRule, seconds=SECONDS))
        patch.setattr(comparison, "ROUGHLY", replace(comparison.ROUGHLY, seconds=SECONDS))
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before a run in a process of its own: short looks, and a torch that collections do not look through each time."""
    options = session.config.option
    runs_nothing = getattr(options, "numprocesses", None) and not hasattr(session.config, "workerinput")
    if options.collectonly or runs_nothing:
        return
    looks = ExitStack()
    looks.enter_context(short_looks())
    session.config.add_cleanup(looks.close)
    gc.collect()
    gc.freeze()
