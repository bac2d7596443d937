"""Hosts of ranks: fork servers on this machine, or in the processes of a job that torchrun or srun started.

The process with rank 0 leads (`agents.lead`), the others serve (`agents.serve`). This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from magis.errors import MagisError, UsageError
from magis.extensions.ranks.processes.records import JsonLines, last_words

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20000, 20000
"""First port, and number of ports, over which Slurm jobs are spread by job number, known to all processes of a job."""


@dataclass(frozen=True)
class Attachment:
    """Place of this process in its multi-process job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Number of the job's processes on this machine."""
    address: str
    """Address of rank 0."""
    port: int
    """Port of rank 0's machine at which the job's processes connect."""
    kept_elsewhere: bool = False
    """True if torchrun already hosts a store at that port; else rank 0 must host it."""

    @property
    def one_machine(self) -> bool:
        return self.local_size == self.size


def attached(environment: Mapping[str, str] | None = None) -> Attachment | None:
    """Return this process's place in a multi-process job, from environment variables; None if there is no such job.

    Torchrun's variables come first: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Else those of a Slurm job step with
    several tasks; a batch script or an allocated shell is not such a step. Raises UsageError if a variable is missing
    or not a number. A job of one process counts as none.
    """
    given = os.environ if environment is None else environment
    if "RANK" in given or "WORLD_SIZE" in given:
        return _by_torch(given)
    if "SLURM_PROCID" in given and ("SLURM_STEP_ID" in given or "SLURM_STEPID" in given):
        return _by_slurm(given)
    return None


def _by_torch(given: Mapping[str, str]) -> Attachment | None:
    missing = [name for name in _TORCH if not given.get(name)]
    if missing:
        present = ", ".join(f"{name}={given[name]}" for name in _TORCH if given.get(name))
        raise UsageError(
            f"the environment has {present}, but no {', '.join(missing)}",
            hint="start with torchrun, which sets all of them, or unset RANK and WORLD_SIZE",
        )
    rank, size, port = (_number(given, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    return _check_rank(
        "RANK",
        Attachment(
            rank=rank,
            size=size,
            local_rank=_number(given, "LOCAL_RANK", rank),
            local_size=_number(given, "LOCAL_WORLD_SIZE", size),
            address=given["MASTER_ADDR"],
            port=port,
            kept_elsewhere=given.get("TORCHELASTIC_USE_AGENT_STORE", "").casefold() == "true",
        ),
    )


def _by_slurm(given: Mapping[str, str]) -> Attachment | None:
    rank = _number(given, "SLURM_PROCID")
    tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if given.get(name)), None)
    if tasks is None:
        raise UsageError("the environment has SLURM_PROCID, but no SLURM_NTASKS", hint="start with srun")
    size = _number(given, tasks)
    if size == 1:
        return None
    machines = _number(given, "SLURM_STEP_NUM_NODES", _number(given, "SLURM_NNODES", 1))
    address = given.get("MASTER_ADDR") or _first_machine(given, machines)
    if given.get("MASTER_PORT"):
        port = _number(given, "MASTER_PORT")
    else:
        step = given.get("SLURM_STEP_ID") or given.get("SLURM_STEPID", "0")
        step_number = int(step) if step.isdecimal() else 0
        port = _FIRST_PORT + (31 * _number(given, "SLURM_JOB_ID") + step_number) % _PORTS
    return _check_rank(
        "SLURM_PROCID",
        Attachment(
            rank=rank,
            size=size,
            local_rank=_number(given, "SLURM_LOCALID", rank),
            local_size=_tasks_here(given, size, machines),
            address=address,
            port=port,
        ),
    )


def _check_rank(name: str, found: Attachment) -> Attachment | None:
    if not 0 <= found.rank < found.size:
        raise UsageError(f"{name} is {found.rank} in a job of {found.size}", hint=f"it is 0 to {found.size - 1}")
    return None if found.size == 1 else found


def _number(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = given.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise UsageError(f"the environment's {name} is {text!r}, not a number", hint="start with torchrun or srun")
    return int(text)


def _first_machine(given: Mapping[str, str], machines: int) -> str:
    """Return the first machine of a Slurm job, which runs rank 0 unless tasks are distributed manually.

    "node[03-07,11],other2" begins with node03.
    """
    if machines == 1:
        return _LOOPBACK
    names = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST", "")
    found = re.match(r"(?P<stem>[^\[,]+)(?:\[(?P<first>\d+)[^\]]*\](?P<rest>[^,]*))?", names)
    if found is None:
        raise UsageError("the Slurm job's machines are not named in SLURM_JOB_NODELIST", hint="set MASTER_ADDR")
    return found["stem"] + (found["first"] or "") + (found["rest"] or "")


def _tasks_here(given: Mapping[str, str], size: int, machines: int) -> int:
    """Return the number of a Slurm job's tasks on this machine; "2(x3),1" gives 1 for SLURM_NODEID 3."""
    if machines == 1:
        return size
    text = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE", "")
    counts = [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    node = _number(given, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else max(1, size // machines)


_END_SECONDS = 10.0
"""Timeout in seconds for a fork server to kill its ranks and exit, which normally takes a fraction of a second."""
_OF_OTHER_JOBS = ("TORCHELASTIC_", "PYTEST_", "COV_CORE_")
"""Prefixes of environment variables that belong to this process's own job and must not reach its ranks."""


class RankHost(Protocol):
    """Host that executes commands for ranks and returns their events; `fork_server.py` defines both."""

    def send(self, message: Mapping[str, object]) -> None:
        """Send a command without waiting for its effect."""

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events since the last call; wait up to ``timeout_s`` seconds if there are none.

        Raises MagisError if the host itself is gone.
        """

    def close(self) -> None:
        """End all ranks and their processes, and return when they are gone."""


class LocalHost:
    """Fork server on this machine, reached through pipes; ``local_rank`` is the LOCAL_RANK of its first rank."""

    def __init__(self, threads: int, local_rank: int = 0) -> None:
        self._local_rank = local_rank
        paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (an empty one stands for this folder)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHER_JOBS)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the host)
        self._lines = JsonLines()
        # a session of its own: Ctrl-C reaches this process, which then ends the ranks
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "magis.extensions.ranks.processes.fork_server", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={
                **kept,
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": str(threads),
                "OPENBLAS_NUM_THREADS": "1",  # its threads would start with numpy, before the ranks are forked
            },
        )
        self._pids: dict[int, int] = {}
        self._is_ready = False

    def send(self, message: Mapping[str, object]) -> None:
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise MagisError("the process that keeps the ranks has ended")
        if message["do"] == "kill" and not self._is_ready:  # it still loads torch, and has no ranks
            self._process.kill()
        try:
            stdin.write((json.dumps({"local": self._local_rank, **message}) + "\n").encode())
            stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        stdout = self._process.stdout
        if stdout is None or stdout.closed:
            raise MagisError("the process that keeps the ranks has ended")
        ready, _, _ = select.select([stdout], [], [], timeout_s)
        if not ready:
            return []
        data = os.read(stdout.fileno(), 65536)
        if not data:
            raise self._gone()
        found = self._lines.feed(data)
        self._is_ready = self._is_ready or bool(found)
        for event in found:
            if event["event"] == "says" and "hello" in event["line"]:
                self._pids[event["rank"]] = event["line"]["hello"]
        return found

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if not self._is_ready:
            self._process.kill()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # the keeper has killed these groups; unless it was killed itself
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._process.returncode != 0:
                    os.killpg(pid, signal.SIGKILL)
        self._log.close()

    def _gone(self) -> MagisError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._log.seek(0)
        said = last_words(self._log.read().decode(errors="replace"))
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return MagisError(f"the process that keeps the ranks {how}{f': {said}' if said else ''}")
