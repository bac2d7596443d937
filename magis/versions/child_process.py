"""Commands that run beside this process, without a terminal, and end with it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

PATIENCE = 5
"""Seconds that a command may take to end after Ctrl-C, which a terminal sends to it as well, and after each signal that
follows."""


def run_captured(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its exit code, and what it printed.

    An interrupt is raised once the command has ended, too: it may clean up, and nothing goes on behind the caller. One
    that was sent to this process alone is passed on.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            for end in (partial(process.send_signal, signal.SIGINT), process.terminate, process.kill):
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    end()
            process.wait()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
