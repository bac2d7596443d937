"""Fork server for a machine's ranks: imports torch once, forks ranks, and leaves none of their processes behind.

Run as ``python -m``. Its standard input is a connection to a pool of the same machine, or to rank 0 of a job of several
processes. Forking a process that has imported but not used torch takes milliseconds instead of seconds, so ranks can be
discarded after every failure. The server runs no user code, so it survives whatever a rank does. It ends, with
everything below it, when its connection closes or its parent exits, for whatever reason:

* every rank leads its own process group, which is killed as one;
* a process that leaves that group is reparented to the server when its parent dies (PR_SET_CHILD_SUBREAPER), and is
  killed too;
* a rank dies with the server (PR_SET_PDEATHSIG), should the server be killed.

Commands: start (generation, size, ranks, device, env), tell (rank, line), where, kill, over. Events, each with its
generation: says (rank, line), died (rank, how, said), where (rank, frames), killed.

multiprocessing's fork server forks as fast. But it runs a script without ``if __name__ == "__main__"`` again in every
rank; when its parent is killed, it lives on with all ranks; and so do processes that a dead rank has started. torch
elastic's agent starts Python and torch anew, which takes seconds, and also leaves such processes behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from magis.extensions.ranks.processes.rank_hosts import PARENT, exit_in_words, processes_with
from magis.extensions.ranks.processes.records import last_words, read_message, stack, write_message
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
_SOON_SECONDS = 0.02
"""Seconds until the next look at a rank whose connection is closed, which is about to end."""
_STACK_SECONDS = 0.5
"""Seconds for a rank to write its stack after the signal that requests it."""
_SWEEP_SECONDS = 5.0
_TAIL_BYTES = 16384


@dataclass
class _Child:
    rank: int
    pid: int
    connection: Connection
    log: int
    """Descriptor of an unnamed file for the rank's standard output and error."""

    def tail(self) -> str:
        """Return the end of the rank's output."""
        return os.pread(self.log, _TAIL_BYTES, max(0, os.fstat(self.log).st_size - _TAIL_BYTES)).decode(
            errors="replace"
        )


class _ForkServer:
    """Event loop of the fork server, with one machine's ranks."""

    def __init__(self, connection: Connection, parent: int, local_rank: int) -> None:
        self._connection, self._parent, self._local_rank = connection, parent, local_rank
        self._prctl: Callable[..., int] = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._children: dict[int, _Child] = {}
        self._generation = 0

    def serve(self) -> int:
        """Run ranks until the connection closes or the parent exits.

        Returns:
            The number of executed commands after the command "over", else 0.
        """
        obeyed = 0
        try:
            while os.getppid() == self._parent:
                talking = [child for child in self._children.values() if not child.connection.closed]
                # the kernel closes a rank's connection just before the rank can be waited for
                wait = _LOOK_SECONDS if len(talking) == len(self._children) else _SOON_SECONDS
                ready = select.select([self._connection, *(child.connection for child in talking)], [], [], wait)[0]
                for child in talking:
                    self._hear(child)
                self._reap()
                if self._connection in ready:
                    obeyed += 1
                    message = read_message(self._connection)
                    if message["do"] == "over":
                        return obeyed
                    self._obey(message)
        except (EOFError, ConnectionError, TimeoutError):
            pass  # the other end is gone
        finally:
            self._kill()
        return 0

    def _obey(self, message: dict[str, Any]) -> None:
        match message["do"]:
            case "start":
                self._kill()
                self._generation = message["generation"]
                os.environ.update(message["env"])
                if "torch" not in sys.modules:
                    self._load_torch()
                for rank in message["ranks"]:
                    self._start(rank, message)
            case "tell":
                told = self._children.get(message["rank"])
                if told is not None and message["generation"] == self._generation:
                    os.ftruncate(told.log, 0)  # what it prints from now on belongs to this command
                    with contextlib.suppress(OSError):  # the rank died, which `_reap` reports
                        write_message(told.connection, message["line"])
            case "where":
                # a signal makes every rank write its stack to its log
                asked = list(self._children.values())
                for child in asked:
                    os.ftruncate(child.log, 0)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, _ASK)
                time.sleep(_STACK_SECONDS)
                for child in asked:
                    self._emit("where", rank=child.rank, frames=stack(child.tail()))
            case "kill":
                self._kill()
                self._emit("killed")

    def _load_torch(self) -> None:
        """Import what ranks need. SIGTERM ends the process at once until then, and in order afterwards."""
        before_torch()
        for name in _PRELOADED:
            if os.getppid() != self._parent:
                sys.exit()
            import_module(name)
        gc.collect()
        gc.freeze()  # pages that the collector does not write to stay shared

        def end(*_: object) -> NoReturn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut off the end of the ranks
            sys.exit()

        signal.signal(signal.SIGTERM, end)

    def _emit(self, event: str, **fields: object) -> None:
        write_message(self._connection, {"event": event, "generation": self._generation, **fields})

    def _hear(self, child: _Child) -> None:
        """Pass on the messages of a rank."""
        while not child.connection.closed and child.connection.poll():
            try:
                line = read_message(child.connection)
            except (EOFError, OSError):
                child.connection.close()
            else:
                self._emit("says", rank=child.rank, line=line)

    def _reap(self) -> None:
        for child in list(self._children.values()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._hear(child)
                del self._children[child.rank]
                child.connection.close()
                said = last_words(child.tail())
                os.close(child.log)
                _kill_group(child.pid)
                how = exit_in_words(os.waitstatus_to_exitcode(status))
                self._emit("died", rank=child.rank, how=how, said=said)

    def _kill(self) -> None:
        """Kill all ranks and all processes that they started."""
        for child in self._children.values():
            _kill_group(child.pid)
        until = time.monotonic() + _SWEEP_SECONDS
        while (left := processes_with(PARENT, os.getpid())) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        while self._children:
            _, child = self._children.popitem()
            child.connection.close()
            os.close(child.log)

    def _start(self, rank: int, message: dict[str, Any]) -> None:
        connection, its_end = Pipe()
        # unlinked, in append mode, which also holds after truncation
        with tempfile.TemporaryFile() as made:
            log = os.dup(made.fileno())
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
        pid = os.fork()
        if pid == 0:
            self._be_rank(rank, message, its_end, log)
        its_end.close()
        self._children[rank] = _Child(rank, pid, connection, log)

    def _be_rank(self, rank: int, message: dict[str, Any], connection: Connection, log: int) -> NoReturn:
        """Run a rank in the forked process."""
        status = 70
        try:
            os.setpgid(0, 0)
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            # mainly other ranks' connections, which stay open while a copy is open
            for entry in list(Path("/proc/self/fd").iterdir()):
                descriptor = int(entry.name)
                if descriptor > 2 and descriptor not in (connection.fileno(), log):
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            faulthandler.register(_ASK, file=log, all_threads=False)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(self._local_rank + message["ranks"].index(rank)))

            from magis.extensions.ranks.processes.worker import serve

            serve(rank, message, connection)
            status = 0
        except BaseException:  # noqa: BLE001 (the last frame of a process)
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _kill_group(leader: int) -> None:
    """Kill a rank's process group, and the rank itself in case it has no group yet."""
    for kill in (partial(os.killpg, leader), partial(os.kill, leader)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(signal.SIGKILL)


def main() -> None:
    """Run the fork server; the command's arguments are the parent's pid and the LOCAL_RANK of the first rank.

    Prints the number of executed commands if the last one was "over".
    """
    connection, answers = Connection(os.dup(0)), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # redirects what libraries print at import
    obeyed = _ForkServer(connection, int(sys.argv[1]), int(sys.argv[2])).serve()
    if obeyed:
        os.write(answers, str(obeyed).encode())


if __name__ == "__main__":
    main()
