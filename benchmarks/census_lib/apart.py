"""Runs each network in a process of its own, bounded in seconds and bytes, so that a death costs one row."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Work = Callable[[Callable[[dict[str, Any]], None]], None]
"""Does everything for one row; is given what to call with what is known so far."""

POLL_S = 0.05
PATIENCE = 8
"""A busy machine gives a process a part of a core: seconds are counted as processor time, up to so many times that."""


@dataclass(frozen=True)
class Limits:
    """What one network may use."""

    seconds: float = 60.0
    """Of processor time, for each of building, the gate and `magis.optimize`."""
    memory: int = 6 * 2**30


@dataclass
class _Child:
    key: str
    pid: int
    folder: Path
    started: float


def rows(work: Iterable[tuple[str, Work]], limits: Limits, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What became of each work, as they end: what it told last, and how it died, if it did."""
    waiting, running = iter(work), list[_Child]()
    with tempfile.TemporaryDirectory() as top:
        number = 0
        while True:
            while len(running) < jobs:
                item = next(waiting, None)
                if item is None:
                    break
                number += 1
                running.append(_start(*item, Path(top) / str(number), limits))
            if not running:
                return
            time.sleep(POLL_S)
            for child in list(running):
                ended = _ended(child, limits)
                if ended is not None:
                    running.remove(child)
                    yield child.key, ended


def _start(key: str, work: Work, folder: Path, limits: Limits) -> _Child:
    folder.mkdir()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _in_child(work, folder, limits)
    return _Child(key, pid, folder, time.monotonic())


def _in_child(work: Work, folder: Path, limits: Limits) -> None:
    code = 1
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("ignore")
        allow(limits.seconds)

        def tell(known: dict[str, Any]) -> None:
            known = {**known, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
            (folder / "new").write_text(json.dumps(known), encoding="utf-8")
            (folder / "new").replace(folder / "known")
            allow(limits.seconds)

        work(tell)
        code = 0
    except BaseException:  # noqa: BLE001  (the end of this process: nothing may return into the parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def allow(seconds: float) -> None:
    """So many seconds of processor time from now on; then the system ends this process."""
    used = time.process_time()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, hard))


def _ended(child: _Child, limits: Limits) -> dict[str, Any] | None:
    pid, status, _ = os.wait4(child.pid, os.WNOHANG)
    late = time.monotonic() - child.started > PATIENCE * limits.seconds
    if not pid and not late:
        return None
    with_group(child.pid, signal.SIGKILL)
    if not pid:
        _, status, _ = os.wait4(child.pid, 0)
    try:
        known: dict[str, Any] = json.loads((child.folder / "known").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if status:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        slow = late or number == signal.SIGXCPU
        said = (child.folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        how = "time limit" if slow else signal.Signals(number).name if number else "exit 1"
        known["died"] = how
        known["last_words"] = said[-1][:300] if said else ""
    known["wall_s"] = round(time.monotonic() - child.started, 1)
    return known


def with_group(pid: int, number: int) -> None:
    """A signal to a child and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
