"""What the environment says of a job with one process per rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magis.errors import UsageError
from magis.extensions.ranks import Attachment, attached, check_ranks
from tests.ranks.test_processes import environment, free_port

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "gpu[03-04,11],other2",
    "SLURM_TASKS_PER_NODE": "2(x2),4",
}


def test_a_process_by_itself() -> None:
    assert attached({}) is None
    assert attached({"MASTER_ADDR": "node7", "MASTER_PORT": "29400"}) is None, "some clusters set that everywhere"
    assert attached(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert attached(SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


def test_torchrun() -> None:
    assert attached(TORCHRUN) == Attachment(3, 4, 1, 2, "node7", 29400, kept_elsewhere=True)
    alone = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = attached(alone)
    assert found == Attachment(3, 4, 3, 4, "node7", 29400)
    assert found is not None
    assert found.one_machine


def test_slurm() -> None:
    found = attached(SRUN)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (3, 8, 1, 2)
    assert found.address == "gpu03"
    assert 20000 <= found.port < 40000
    assert not found.one_machine
    other_job = attached(SRUN | {"SLURM_JOB_ID": "813"})
    assert other_job is not None
    assert other_job.port != found.port
    given = attached(SRUN | {"MASTER_ADDR": "node1", "MASTER_PORT": "1234", "SLURM_NODEID": "2"})
    assert given is not None
    assert (given.address, given.port, given.local_size) == ("node1", 1234, 4)


def test_one_machine_of_slurm_needs_no_name() -> None:
    found = attached(SRUN | {"SLURM_NNODES": "1"})
    assert found is not None
    assert found.address == "127.0.0.1"
    assert found.one_machine


def test_a_batch_script_is_not_one_of_several_processes() -> None:
    """It has the variables of the job's tasks, but none of them has been started."""
    assert attached({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) is None


NO_PORT = "the environment has RANK=3, WORLD_SIZE=4, MASTER_ADDR=node7, but no MASTER_PORT; start"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MASTER_PORT": None}, NO_PORT),
        ({"RANK": None}, "but no RANK"),
        ({"WORLD_SIZE": ""}, "but no WORLD_SIZE"),
        ({"RANK": "4"}, "RANK is 4 in a job of 4; it is 0 to 3"),
        ({"RANK": "-1"}, "RANK is '-1', not a number"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', not a number"),
    ],
)
def test_half_an_environment_is_refused(changes: dict[str, str | None], says: str) -> None:
    given = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(UsageError) as caught:
        attached(given)
    assert says in str(caught.value)


def test_slurm_without_a_number_of_tasks() -> None:
    with pytest.raises(UsageError, match="no SLURM_NTASKS"):
        attached({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"})


def test_ranks_that_do_not_fit_a_strategy() -> None:
    with pytest.raises(UsageError, match="needs a multiple of 16 ranks, there are 4; start 16 ranks"):
        check_ranks("tp4+pp4", 4)
    check_ranks("tp4+pp4", 16)
    check_ranks("ddp", 3)


def test_only_rank_0_of_pytest_has_a_session(repository: Path, tmp_path: Path) -> None:
    """Two processes of one job, started as `torchrun --no-python pytest --magis-models=mlp` does."""
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    gate = ("--magis-models=mlp", "--magis-device=cpu", "--magis-strategies=eager,ddp")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *gate, "--collect-only", "-q"]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    processes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(repository, tmp_path / "sign", **place, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert "mlp" in printed[0]
    assert printed[1] == "magis: rank 1 of 2 served rank 0, which ran the tests (1 commands)\n"


def collected(repository: Path, tmp_path: Path, *asked: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest in half an environment of a job."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--magis-models=mlp", *asked, "--collect-only", "-q"],
        cwd=tmp_path,
        env=environment(repository, tmp_path / "sign", RANK="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "asked", [(), ("--magis-strategies=amp*",), ("--magis-strategies=ddp", "--magis-device=sim:v100")]
)
def test_a_run_without_ranks_of_its_own_is_no_part_of_any_job(
    repository: Path, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmagis_strategies = ddp\n")
    done = collected(repository, tmp_path, *asked)
    assert done.returncode == 0, done.stderr
    assert "magis::mlp[" in done.stdout


def test_half_an_environment_ends_pytest_with_its_exit_code(repository: Path, tmp_path: Path) -> None:
    done = collected(repository, tmp_path, "--magis-strategies=d*")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no WORLD_SIZE, MASTER_ADDR, MASTER_PORT" in done.stderr
    assert os.linesep * 2 not in done.stderr.strip()
