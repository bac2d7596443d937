"""Hosts of ranks: fork servers on this machine, or in the processes of a job that torchrun or srun started.

The process with rank 0 leads (`agents.lead`), the others serve (`agents.serve`). This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from magis.errors import MagisError, UsageError
from magis.extensions.ranks.processes.records import last_words, read_message, write_message

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

    @property
    def meeting_address(self) -> str:
        """Address at which the job's processes reach the machine of rank 0."""
        return _LOOPBACK if self.one_machine else self.address


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
    address, local_size = given.get("MASTER_ADDR") or _LOOPBACK, size
    if machines > 1 and not given.get("MASTER_ADDR"):
        # rank 0 runs on the first machine unless tasks are distributed by hand; "node[03-07,11],other2": on node03
        names = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST", "")
        found = re.match(r"(?P<stem>[^\[,]+)(?:\[(?P<first>\d+)[^\]]*\](?P<rest>[^,]*))?", names)
        if found is None:
            raise UsageError("the Slurm job's machines are not named in SLURM_JOB_NODELIST", hint="set MASTER_ADDR")
        address = found["stem"] + (found["first"] or "") + (found["rest"] or "")
    if machines > 1:
        # "2(x3),1": the machine of SLURM_NODEID 3 has 1 task
        text = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE", "")
        pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        counts = [int(count) for count, times in pairs for _ in range(int(times or 1))]
        node = _number(given, "SLURM_NODEID", 0)
        local_size = counts[node] if node < len(counts) else max(1, size // machines)
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
            local_size=local_size,
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


_END_SECONDS = 10.0
"""Timeout in seconds for a fork server to kill its ranks and exit, which normally takes a fraction of a second."""
_OF_OTHER_JOBS = ("TORCHELASTIC_", "PYTEST_", "COV_CORE_")
"""Prefixes of environment variables that belong to this process's own job and must not reach its ranks."""


class ForkServer:
    """Process on this machine that forks ranks (`fork_server.py`) for whoever has the other end of ``connection``."""

    def __init__(self, connection: Connection, local_rank: int) -> None:
        paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (an empty one stands for this folder)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHER_JOBS)}
        module = "magis.extensions.ranks.processes.fork_server"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end)
        # a session of its own: Ctrl-C reaches this process, which then ends the ranks
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid()), str(local_rank)],
            stdin=connection.fileno(),
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={
                **kept,
                "PYTHONPATH": os.pathsep.join(paths),
                "OPENBLAS_NUM_THREADS": "1",  # its threads would start with numpy, before the ranks are forked
            },
        )
        connection.close()

    def wait(self) -> int | None:
        """Wait for the process to exit; return the number of commands if it was dismissed, None if it was killed.

        Raises MagisError if its connection was closed, or if it failed.
        """
        printed = self._process.communicate()[0]
        if self._process.returncode > 0:
            raise MagisError(self.fate())
        if self._process.returncode < 0:
            return None
        if not printed:
            raise MagisError("rank 0 of the job has disappeared", hint="see what it has printed")
        return int(printed)

    def end(self) -> None:
        """End the process and everything below it, also if it was killed."""
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            for pid in processes_with(_SESSION, self._process.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        for file in (self._process.stdout, self._log):
            if file is not None:
                file.close()

    def fate(self) -> str:
        """Return one line on the end of the process, with the last line that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._log.seek(0)
        said = last_words(self._log.read().decode(errors="replace"))
        code = self._process.returncode
        how = "does not answer" if code is None else exit_in_words(code)
        return f"the process that keeps the ranks {how}{f': {said}' if said else ''}"


class RankHost:
    """Connection of a pool to a fork server: of this machine (``server``), or of the job's process with ``rank``."""

    def __init__(self, connection: Connection, rank: int, server: ForkServer | None = None) -> None:
        self._connection, self._rank, self._server = connection, rank, server
        self.is_lost = False
        """True after the fork server has ended by itself."""

    def fileno(self) -> int:
        """Return the descriptor that is ready when there are events."""
        return self._connection.fileno()

    def send(self, message: Mapping[str, object]) -> None:
        """Send a command without waiting for its effect. Raises MagisError if the fork server is gone."""
        try:
            write_message(self._connection, message)
        except OSError:
            raise self._gone() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next event. Raises MagisError if the fork server is gone."""
        try:
            return read_message(self._connection)
        except (EOFError, OSError):
            raise self._gone() from None

    def close(self) -> None:
        """End all ranks and their processes; on this machine, return when they are gone."""
        if self._server is not None:
            self._server.end()
            self._connection.close()
        elif not self.is_lost:
            with contextlib.suppress(MagisError):
                self.send({"do": "kill"})

    def _gone(self) -> MagisError:
        self.is_lost = True
        if self._server is not None:
            return MagisError(self._server.fate())
        return MagisError(
            f"the process of rank {self._rank} has ended, or cannot be reached",
            hint="every process of the job has to run until rank 0 ends",
        )


def local_host(local_rank: int = 0) -> RankHost:
    """Start a fork server on this machine; ``local_rank`` is the LOCAL_RANK of its first rank."""
    connection, its_end = Pipe()
    return RankHost(connection, 0, ForkServer(its_end, local_rank))


PARENT, _SESSION = 1, 3


def processes_with(field: int, value: int) -> list[int]:
    """Return the pids of the processes whose parent (field 1) or session (field 3) is ``value``, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:  # gone meanwhile
                continue
            if int(fields.rpartition(")")[2].split()[field]) == value:  # after the name, which may hold anything
                found.append(int(entry.name))
    return found


def exit_in_words(code: int) -> str:
    """Return an exit code in words; a negative one stands for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
