"""No process outlives the one that started it, however that ends; jobs of torchrun and Slurm."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from magis.errors import MagisError
from magis.extensions.ranks import RankJob, RankPool, attached, lead
from magis.extensions.ranks.processes.rank_hosts import PARENT, processes_with
from tests.ranks.processes import SIGN, alive, gone_within, wait_for

SECONDS = 300.0
"""Bound of each of these tests; they take a few, on a busy machine many."""


@pytest.fixture
def sign(tmp_path: Path) -> Iterator[Path]:
    """The sign of all processes of a test, which are killed at its end, should there be any."""
    path = tmp_path / "sign"
    yield path
    left = alive(path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}


def environment(repository: Path, sign: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {**clean, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", SIGN: str(sign), **more}


def started(command: list[str], repository: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=repository,
        env=dict(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("kind", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_nothing_outlives_the_harness(repository: Path, sign: Path, kind: signal.Signals) -> None:
    harness = started(["-m", "tests.ranks.scripts", "hang"], repository, environment(repository, sign))
    wait_for(sign)
    assert sum("sleep" in line for line in alive(sign).values()) == 3, "two children and a grandchild"
    harness.send_signal(kind)
    printed, _ = harness.communicate(timeout=SECONDS)
    assert gone_within(sign) == {}
    if kind is signal.SIGINT:
        assert printed.rstrip().endswith("KeyboardInterrupt")


TOGETHER = (
    "reports of [0, 1]",
    "rank 1 of 2 was killed by SIGKILL during step 3; the system kills a process so when memory runs out",
    "again [0, 1]",
    "3 ranks are needed, and the job that this run belongs to has 2; start it with 3 processes",
    "rank 1 served True",
)


def test_a_job_of_torchrun(repository: Path, sign: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    job = started([*torchrun, "-m", "tests.ranks.scripts", "together"], repository, environment(repository, sign))
    printed, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, printed
    for line in TOGETHER:
        assert line in printed.splitlines()
    assert gone_within(sign) == {}


def slurm(rank: int, port: int) -> dict[str, str]:
    """The variables of a step with two tasks on one machine."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Below those that the system hands out: no connection of another test takes it before it is used."""
    while True:
        port = 20000 + secrets.randbelow(10000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def tasks_of_slurm(script: str, repository: Path, sign: Path) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [
        started(["-m", "tests.ranks.scripts", script], repository, environment(repository, sign, **slurm(rank, port)))
        for rank in range(2)
    ]


@pytest.mark.parametrize("script", ["wait_together", pytest.param("hang_together", marks=pytest.mark.soak)])
def test_a_job_of_slurm_whose_rank_0_is_killed(repository: Path, sign: Path, script: str) -> None:
    """Between cases, and in the middle of one."""
    tasks = tasks_of_slurm(script, repository, sign)
    wait_for(sign)
    tasks[0].kill()
    printed, _ = tasks[1].communicate(timeout=SECONDS)
    assert "rank 1: rank 0 of the job has disappeared" in printed  # after torch's own, longer words
    assert tasks[1].returncode == 0
    tasks[0].communicate(timeout=SECONDS)
    assert gone_within(sign) == {}


def test_a_fork_server_of_the_job_that_is_killed_is_replaced(repository: Path, sign: Path) -> None:
    """The job that it belonged to fails; the next one runs. Strangers at the port of the job change nothing."""
    port = free_port()
    place = attached(slurm(0, port))
    assert place is not None
    variables = environment(repository, sign, **slurm(1, port))
    task = started(["-m", "tests.ranks.scripts", "together"], repository, variables)
    job = RankJob("tests.ranks.own_strategies:small_net", "ddp", rounds=1)
    with lead(place) as agents, RankPool(2, timeout_s=60, agents=agents) as pool:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert len(pool.run(job)) == 2
        (server,) = processes_with(PARENT, task.pid)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(MagisError, match=r"^the process of rank 1 has ended, or cannot be reached; every process"):
            pool.run(job)
        assert len(pool.run(job)) == 2
    printed, _ = task.communicate(timeout=SECONDS)
    assert printed == "rank 1 served True\n"
    assert gone_within(sign) == {}


@pytest.mark.soak
def test_a_process_of_the_job_that_is_killed(repository: Path, sign: Path) -> None:
    """Rank 0 says so and ends the job."""
    tasks = tasks_of_slurm("hang_together", repository, sign)
    wait_for(sign)
    tasks[1].kill()
    printed, _ = tasks[0].communicate(timeout=SECONDS)
    assert "the process of rank 1 has ended, or cannot be reached" in printed
    tasks[1].communicate(timeout=SECONDS)
    assert gone_within(sign) == {}
