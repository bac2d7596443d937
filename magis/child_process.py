"""Commands that run beside this process, without a terminal, and end with it."""

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
"""Seconds that a command may take to end after Ctrl-C, which a terminal sends to it as well, and after each signal that
follows."""
BOUND = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)\n"  # PR_SET_PDEATHSIG
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"  # killed before that
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""A program that becomes another one, to which the kernel sends SIGTERM when its parent dies, however that ends."""


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Inside, SIGTERM ends this process as Ctrl-C does: nothing is left behind.

    Does nothing outside of the main thread, and where somebody else handles that signal.
    """
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == 0
    if is_ours:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what is cleaned up is not to be cut off
    raise Terminated


def run_captured(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its exit code, and what it printed.

    An interrupt is raised once the command has ended, too: it may clean up, and nothing goes on behind the caller. One
    that was sent to this process alone is passed on; so is SIGTERM, at once.
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
    """The same for a command that takes long: it ends, too, where this process is killed and can clean up nothing."""
    return run_captured([sys.executable, "-ISc", BOUND, str(os.getpid()), *command], cwd=cwd, env=env)
