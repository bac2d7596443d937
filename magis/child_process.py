"""Commands run in a child process without a terminal, which ends when this process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["cores", "run_bound", "run_captured", "terminated_in_order"]

PATIENCE = 5
"""Seconds to wait for a command to exit after Ctrl-C, and after each further signal."""
BOUND = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"  # killed before that
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Python program that executes the command in its arguments; the kernel sends it SIGTERM when its parent dies."""


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Terminated(KeyboardInterrupt):
    """Exception raised for SIGTERM."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Make SIGTERM raise an exception inside the block, as Ctrl-C does, so that `finally` clauses run.

    Has no effect outside of the main thread, and where another handler for SIGTERM is installed.
    """

    def terminate(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut off the clean-up
        raise Terminated

    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == 0
    if is_ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_captured(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit code and output.

    An interrupt is passed on to the command and raised again when the command has exited: SIGTERM is passed on at once,
    Ctrl-C after `PATIENCE` seconds, since a terminal has already sent it to the command.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as process:
        try:
            out, err = process.communicate()
        except BaseException as error:
            if isinstance(error, Terminated):
                process.terminate()
            for end in (partial(process.send_signal, signal.SIGINT), process.terminate, process.kill):
                try:
                    process.wait(1 if isinstance(error, Terminated) else PATIENCE)
                except subprocess.TimeoutExpired:
                    end()
            process.wait()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_bound(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit code and output; kill it even if this process dies by SIGKILL."""
    return run_captured([sys.executable, "-ISc", BOUND, str(os.getpid()), *command], cwd=cwd, env=env)
