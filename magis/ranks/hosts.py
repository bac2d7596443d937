"""Where ranks live, seen from whoever leads them: a keeper process on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

from magis.errors import MagisError
from magis.ranks.records import JsonLines, last_words

_END_SECONDS = 10.0
"""For a keeper to kill its ranks and go; it takes a small part of a second."""
_OF_OTHER_JOBS = ("TORCHELASTIC_", "PYTEST_", "COV_CORE_")
"""Variables of the job that this process belongs to, which its ranks are not part of."""


class RankHost(Protocol):
    """Takes commands for ranks and gives their events (magis/ranks/fork_server.py says which)."""

    def send(self, message: Mapping[str, object]) -> None:
        """Pass a command on. Does not wait for its effect."""

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has happened since the last call; waits up to ``timeout_s`` seconds where nothing has.

        Raises MagisError when the host itself is gone.
        """

    def close(self) -> None:
        """End all ranks and what belongs to them; returns when they are gone."""


class LocalHost:
    """A keeper process, and the pipes to it. Its first rank has the number ``local_rank`` on this machine."""

    def __init__(self, threads: int, local_rank: int = 0) -> None:
        self._local_rank = local_rank
        paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (an empty one stands for this folder)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHER_JOBS)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the host)
        self._lines = JsonLines()
        # a session of its own: Ctrl-C reaches this process, which then ends the ranks
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "magis.ranks.fork_server", str(os.getpid())],
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


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
