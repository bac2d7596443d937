"""Shared by all tests: what runs by default, how Hypothesis draws, and a fresh interpreter."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.brisk import short_looks
from tests.sampled import left_to_soak

REPOSITORY = Path(__file__).resolve().parent.parent

# A test run must not depend on luck: examples come from a fixed seed. `make soak` draws fresh ones, and more.
# Nor on how quickly a busy machine draws them.
ANY_TIME: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, **ANY_TIME)
hypothesis.settings.register_profile("soak", max_examples=2000, print_blob=True, **ANY_TIME)
hypothesis.settings.load_profile("fixed")

# A shell that runs the tests in the background has SIGINT ignored, in them and in all their children: those that wait
# to be interrupted would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One thread of torch for the tests, before it is loaded here and in all children: workers share the cores, and a
    second thread only waits for another worker's. A run of the gate, which loads this file, too, has a user's threads.
    """
    if config.getoption("magis_models", default=None) is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `soak` tests out unless the marker expression names them; skip `cuda` tests without a GPU.

    Property tests are soak tests, too, under the profile that gives them many examples.
    """
    if hypothesis.settings.get_current_profile_name() == "soak":
        for item in items:
            if getattr(getattr(item, "function", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.soak)
    left = left_to_soak(item.nodeid for item in items)
    for item in items:
        if item.nodeid in left:
            item.add_marker(pytest.mark.soak)
    if "soak" not in config.option.markexpr:
        soak = [item for item in items if item.get_closest_marker("soak")]
        if soak:
            config.hook.pytest_deselected(items=soak)
            items[:] = [item for item in items if not item.get_closest_marker("soak")]
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if needs_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in needs_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _brisk() -> Iterator[None]:
    """Cases are timed in the fewest pairs: tests of whole cases ask what a ratio is used for, not how certain it is."""
    with short_looks():
        yield


@pytest.fixture(scope="module", autouse=True)
def _spared_collector(_brisk: None) -> None:
    """Collections pass over what exists by now: a case collects a dozen times, and all of torch takes 0.2 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def fresh_python() -> Callable[[str], str]:
    """Run a program in a fresh interpreter, at the root of the working tree, and return what it printed."""

    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"exit {done.returncode} of {program!r}:\n{done.stderr}", pytrace=False)
        return done.stdout

    return run
