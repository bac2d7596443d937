"""Jobs of ranks that plan, ended at random moments: from outside as a whole, or one rank of them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ranks.processes import alive, gone_within
from tests.ranks.test_processes import environment, sign, started

__all__ = ["sign"]
LASTS = 20.0
"""Seconds that the job below takes on two quiet cores at least."""
SECONDS = 120.0
"""Bound of what a job may take after one of its ranks was killed."""
JOB = [
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "--magis-models=tests.api.cut_nets:two_heads",
    "--magis-memory-ratios=0.8", "--magis-ranks=2", "--magis-budget=200",
]  # fmt: skip
STRATEGIES = ("magis+fsdp", "magis+tp2", "magis+pp2")


def moments(seed: int, count: int) -> Iterator[tuple[str, float]]:
    """Strategies in turns, each with a moment."""
    drawn = random.Random(seed)
    return ((STRATEGIES[number % len(STRATEGIES)], drawn.uniform(2.0, LASTS)) for number in range(count))


@pytest.fixture
def begun(repository: Path, sign: Path, tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    def begin(strategy: str) -> subprocess.Popen[str]:
        given = [f"--magis-strategies={strategy}", f"--magis-csv={tmp_path}/results.csv"]
        return started([*JOB, *given], repository, environment(repository, sign))

    return begin


Begin = Callable[[str], "subprocess.Popen[str]"]


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "moment"), [*moments(0, 20)])
def test_no_process_outlives_a_job_that_is_killed(begun: Begin, sign: Path, strategy: str, moment: float) -> None:
    job = begun(strategy)
    time.sleep(moment)
    assert job.poll() is None, "it ended before the moment"
    job.kill()
    job.communicate(timeout=SECONDS)
    assert gone_within(sign) == {}


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "moment"), [*moments(1, 20)])
def test_a_job_one_of_whose_ranks_is_killed_ends_with_a_line(
    begun: Begin, sign: Path, strategy: str, moment: float
) -> None:
    job = begun(strategy)
    until, ranks = time.monotonic() + moment, list[int]()
    while job.poll() is None and (time.monotonic() < until or not ranks):
        ranks = [pid for pid, line in alive(sign).items() if "magis.extensions.ranks" in line]
        time.sleep(0.2)
    assert job.poll() is None, "it ended before the moment"
    with suppress(ProcessLookupError):
        os.kill(random.Random(moment).choice(ranks), signal.SIGKILL)
    printed, _ = job.communicate(timeout=SECONDS)
    assert "Traceback" not in printed
    assert "results:" in printed
    assert gone_within(sign) == {}
