"""Fork server for a machine's ranks: imports torch once, forks ranks, and leaves none of their processes behind.

Run as ``python -m``. Commands are lines of JSON on standard input, events lines on standard output. Forking a process
that has imported but not used torch takes milliseconds instead of seconds, so ranks can be discarded after every
failure. The server runs no user code, so it survives whatever a rank does. It ends, with everything below it, when its
input closes or its parent exits, for whatever reason:

* every rank leads its own process group, which is killed as one;
* a process that leaves that group is reparented to the server when its parent dies (PR_SET_CHILD_SUBREAPER), and is
  killed too;
* a rank dies with the server (PR_SET_PDEATHSIG), should the server be killed.

Commands: start (generation, size, ranks, device, env), tell (rank, line), where, kill. Events, each with its
generation: says (rank, line), died (rank, how, said), where (rank, frames), killed, ready.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from magis.extensions.ranks.processes.records import JsonLines, last_words, stack, write_line
from magis.quiet import before_torch

_PRELOADED = (
    "magis.extensions.ranks.processes.worker",
    # loaded by most strategies when they are first used; seconds in each rank
    "torch._dynamo.convert_frame",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ASK = signal.SIGUSR1
_LOOK_SECONDS = 1.0
_STACK_SECONDS = 0.5
"""Seconds for a rank to write its stack after the signal that requests it."""
_SWEEP_SECONDS = 5.0
_TAIL_BYTES = 16384


@dataclass
class _Child:
    rank: int
    pid: int
    commands: int
    events: int
    log: int
    """Descriptor of an unnamed file for the rank's standard output and error."""
    lines: JsonLines = field(default_factory=JsonLines)


class _Keeper:
    """Event loop of the fork server, with one machine's ranks."""

    def __init__(self, commands: int, events: int, parent: int) -> None:
        self._commands, self._events, self._parent = commands, events, parent
        self._prctl: Callable[..., int] = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)
        self._children: dict[int, _Child] = {}
        self._generation = 0
        self._input = JsonLines()
        self._selector = selectors.DefaultSelector()
        self._wake, waker = os.pipe()
        for end in (self._wake, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(commands, selectors.EVENT_READ)

    def serve(self) -> None:
        """Run ranks until the input closes or the parent exits."""
        try:
            self._emit("ready")
            while os.getppid() == self._parent:
                ready = {key.fd for key, _ in self._selector.select(_LOOK_SECONDS)}
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                for child in [child for child in self._children.values() if child.events in ready]:
                    self._hear(child)
                self._reap()
                if self._commands in ready:
                    data = os.read(self._commands, 65536)
                    if not data:
                        return
                    for message in self._input.feed(data):
                        self._obey(message)
        except BrokenPipeError:
            pass  # the reader is gone
        finally:
            self._kill()

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "start":
                self._kill()
                self._generation = message["generation"]
                for rank in message["ranks"]:
                    self._start(rank, message)
            case "tell":
                self._tell(message)
            case "where":
                self._send_stacks()
            case "kill":
                self._kill()
                self._emit("killed")

    def _emit(self, event: str, **fields: object) -> None:
        write_line(self._events, {"event": event, "generation": self._generation, **fields})

    def _tell(self, message: dict[str, Any]) -> None:
        child = self._children.get(message["rank"])
        if child is None or message["generation"] != self._generation:
            return
        os.ftruncate(child.log, 0)  # what it prints from now on belongs to this command
        with contextlib.suppress(BrokenPipeError):  # the rank died, which `_reap` reports
            write_line(child.commands, message["line"])

    def _hear(self, child: _Child) -> None:
        """Pass on the messages of a rank."""
        while True:
            try:
                data = os.read(child.events, 65536)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(child.events)
                return
            for line in child.lines.feed(data):
                self._emit("says", rank=child.rank, line=line)

    def _reap(self) -> None:
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._hear(child)
                said = last_words(_tail(child.log))
                self._drop(child)
                _kill_group(child.pid)
                code = os.waitstatus_to_exitcode(status)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
                self._emit("died", rank=child.rank, how=how, said=said)

    def _drop(self, child: _Child) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.events)
        for descriptor in (child.commands, child.events, child.log):
            os.close(descriptor)
        del self._children[child.rank]

    def _send_stacks(self) -> None:
        """Request every rank's stack by a signal, and pass the stacks on."""
        asked = list(self._children.values())
        for child in asked:
            os.ftruncate(child.log, 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, _ASK)
        time.sleep(_STACK_SECONDS)
        for child in asked:
            self._emit("where", rank=child.rank, frames=stack(_tail(child.log)))

    def _kill(self) -> None:
        """Kill all ranks and all processes that they started."""
        for child in list(self._children.values()):
            _kill_group(child.pid)
            os.waitpid(child.pid, 0)
            self._drop(child)
        until = time.monotonic() + _SWEEP_SECONDS
        while (left := _children_of(os.getpid())) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _start(self, rank: int, message: dict[str, Any]) -> None:
        command_read, command_write = os.pipe()
        event_read, event_write = os.pipe()
        log = _unnamed_file()
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, message, command_read, event_write, log)
        os.close(command_read)
        os.close(event_write)
        os.set_blocking(event_read, False)
        self._children[rank] = _Child(rank, pid, command_write, event_read, log)
        self._selector.register(event_read, selectors.EVENT_READ)

    def _be_rank(self, rank: int, message: dict[str, Any], commands: int, events: int, log: int) -> None:
        """Run a rank in the forked process; never returns."""
        status = 70
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for each in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            # mainly other ranks' pipes, which stay open while a copy is open
            for entry in list(Path("/proc/self/fd").iterdir()):
                descriptor = int(entry.name)
                if descriptor > 2 and descriptor not in (commands, events, log):
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            faulthandler.register(_ASK, file=log, all_threads=False)
            os.environ.update(message["env"])
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(message["local"] + message["ranks"].index(rank)))

            from magis.extensions.ranks.processes.worker import serve

            serve(rank, message, commands, events)
            status = 0
        except BaseException:  # noqa: BLE001 (the last frame of a process)
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _unnamed_file() -> int:
    """Open an unlinked temporary file in append mode, which also holds after truncation."""
    with tempfile.TemporaryFile() as made:
        descriptor = os.dup(made.fileno())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def _tail(log: int) -> str:
    """Return the end of a rank's output."""
    return os.pread(log, _TAIL_BYTES, max(0, os.fstat(log).st_size - _TAIL_BYTES)).decode(errors="replace")


def _kill_group(leader: int) -> None:
    """Kill a rank's process group, and the rank itself in case it has no group yet."""
    for kill in (partial(os.killpg, leader), partial(os.kill, leader)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(signal.SIGKILL)


def _children_of(parent: int) -> list[int]:
    """Return the pids of the processes whose parent is ``parent``, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:  # gone meanwhile
                continue
            if int(fields.rpartition(")")[2].split()[1]) == parent:  # after the name, which may hold anything
                found.append(int(entry.name))
    return found


def main() -> None:
    """Run the fork server until its input closes. The first argument of the command is the parent's pid."""
    commands, events = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # redirects what libraries print at import
    parent = int(sys.argv[1])
    before_torch()
    for name in _PRELOADED:
        if os.getppid() != parent:
            return
        import_module(name)

    gc.collect()
    gc.freeze()  # pages that the collector does not write to stay shared
    _Keeper(commands, events, parent).serve()


if __name__ == "__main__":
    main()
