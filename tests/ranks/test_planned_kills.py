"""Jobs of ranks that plan, ended at random moments: from outside as a whole, or one rank of them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.processes import alive, gone_within
from tests.ranks.test_processes import environment, sign, started

__all__ = ["sign"]
LASTS = 45.0
"""Seconds that the job below takes on two cores, about."""
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


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "moment"), [*moments(0, 20)])
def test_no_process_outlives_a_job_that_is_killed(
    repository: Path, sign: Path, strategy: str, moment: float, tmp_path: Path
) -> None:
    job = started([*JOB, f"--magis-strategies={strategy}", f"--magis-csv={tmp_path}/results.csv"], repository,
                  environment(repository, sign))  # fmt: skip
    time.sleep(moment)
    job.kill()
    job.communicate(timeout=SECONDS)
    assert gone_within(sign, 10.0) == {}


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "moment"), [*moments(1, 20)])
def test_a_job_one_of_whose_ranks_is_killed_ends_with_a_line(
    repository: Path, sign: Path, strategy: str, moment: float, tmp_path: Path
) -> None:
    job = started([*JOB, f"--magis-strategies={strategy}", f"--magis-csv={tmp_path}/results.csv"], repository,
                  environment(repository, sign))  # fmt: skip
    until, ranks = time.monotonic() + moment, list[int]()
    while job.poll() is None and (time.monotonic() < until or not ranks):
        ranks = [pid for pid, line in alive(sign).items() if "rank" in line and pid != job.pid]
        time.sleep(0.2)
    if ranks and job.poll() is None:
        os.kill(random.Random(moment).choice(ranks), signal.SIGKILL)
    printed, _ = job.communicate(timeout=SECONDS)
    assert "Traceback" not in printed
    assert "results:" in printed
    assert gone_within(sign, 10.0) == {}
