"""Processes of one job that lend their ranks to the one with rank 0.

Every process starts its own keeper (`fork_server.py`), so that a crash of a rank harms none of them. Rank 0 keeps a
store, through which commands and events travel as numbered messages: "to/<rank>/<n>", "from/<rank>/<n>". When rank 0
is gone, so is its store, which ends the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from magis.child_process import cores
from magis.errors import MagisError, UsageError
from magis.extensions.ranks.processes.rank_hosts import Attachment, LocalHost, RankHost

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import Store

_MEET_SECONDS = 300.0
"""Time for all processes of a job to start."""
_LOOK_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_LOST_SECONDS = 30.0
"""Time without a sign of life after which a process is given up."""
_OVER_SECONDS = 10.0
_WHERE = "magis/address"


class Agents:
    """The processes of a job, led by this one: a context manager; at its end they are told that all is over."""

    def __init__(self, attachment: Attachment, store: Store) -> None:
        self._attachment = attachment
        self._hosts = {rank: _RemoteHost(rank, store) for rank in range(1, attachment.size)}

    @property
    def size(self) -> int:
        return self._attachment.size

    @property
    def local_size(self) -> int:
        return self._attachment.local_size

    @property
    def one_machine(self) -> bool:
        return self._attachment.one_machine

    @property
    def address(self) -> str:
        """Address at which the others reach this machine."""
        return "127.0.0.1" if self.one_machine else self._attachment.address

    def are_there(self) -> bool:
        """Return True if all processes of the job serve by now."""
        return all(host.is_there() for host in self._hosts.values())

    def hosts(self, size: int) -> dict[int, RankHost]:
        """Return the hosts of the first ``size`` ranks; this process's is a keeper of its own, made here."""
        threads = max(1, cores() // min(size, self.local_size))
        own: dict[int, RankHost] = {0: LocalHost(threads, self._attachment.local_rank)}
        return own | {rank: self._hosts[rank] for rank in range(1, size)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Dismiss all processes, and wait until they know: the store ends with this process."""
        for host in self._hosts.values():
            host.dismiss()
        until = time.monotonic() + _OVER_SECONDS
        waiting = list(self._hosts.values())
        while waiting and time.monotonic() < until:
            waiting = [host for host in waiting if not host.has_left()]
            time.sleep(_LOOK_SECONDS if waiting else 0)


class _RemoteHost:
    """Another process of the job, through the store."""

    def __init__(self, rank: int, store: Store) -> None:
        self._rank, self._store = rank, store
        self._sent = self._heard = 0
        self._beat, self._beat_at = b"", time.monotonic()

    def send(self, message: Mapping[str, object]) -> None:
        self._store.set(f"to/{self._rank}/{self._sent}", json.dumps(message))
        self._sent += 1

    def events(self, timeout_s: float) -> list[dict[str, Any]]:
        until = time.monotonic() + timeout_s
        while not (found := self._new_events()):
            self._check_beat()
            if time.monotonic() > until:
                break
            time.sleep(min(_LOOK_SECONDS, timeout_s))
        for event in found:
            if event["event"] == "lost":
                raise MagisError(f"the process of rank {self._rank} has no ranks to lend: {event['said']}")
        return found

    def close(self) -> None:
        self.send({"do": "close"})

    def is_there(self) -> bool:
        """Return True if the process has given a sign of life."""
        return self._store.check([f"beat/{self._rank}"])

    def dismiss(self) -> None:
        """Let the process go."""
        self.send({"do": "over"})

    def has_left(self) -> bool:
        return self._store.check([f"left/{self._rank}"])

    def _new_events(self) -> list[dict[str, Any]]:
        found = []
        while self._store.check([key := f"from/{self._rank}/{self._heard}"]):
            found.append(json.loads(self._store.get(key)))
            self._store.delete_key(key)
            self._heard += 1
        return found

    def _check_beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at < _BEAT_SECONDS:
            return
        key = f"beat/{self._rank}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
        elif now - self._beat_at > (limit := _LOST_SECONDS if self._beat else _MEET_SECONDS):
            raise MagisError(
                f"the process of rank {self._rank} has given no sign of life for {limit:g} s",
                hint="every process of the job has to run until rank 0 ends",
            )


def lead(attachment: Attachment) -> Agents:
    """Lead the other processes of the job, as its rank 0."""
    if attachment.kept_elsewhere:  # by torchrun, which outlives this process: that would not end the others
        store = _store(attachment, 0, keep=True)
        _store(attachment, attachment.port).set(_WHERE, str(store.port))
    else:
        try:
            store = _store(attachment, attachment.port, keep=True)
        except RuntimeError as error:
            raise UsageError(
                f"port {attachment.port} of {attachment.address}, where the processes of the job are to meet, "
                f"cannot be used: {str(error).splitlines()[0]}",
                hint="set MASTER_ADDR to this machine and MASTER_PORT to a free port of it, for all of them",
            ) from error
    return Agents(attachment, _prefixed(store))


def _store(attachment: Attachment, port: int, *, keep: bool = False) -> TCPStore:
    """Connect to the store at a port of rank 0's machine; ``keep``: host it in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=_MEET_SECONDS)
    return TCPStore(attachment.address, port, None, keep, wait, wait_for_workers=False)


def _prefixed(store: Store) -> Store:
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore("magis", store)


def serve(attachment: Attachment) -> int:
    """Lend this process's rank to rank 0 until that dismisses it; return the number of commands obeyed.

    Raises MagisError if rank 0 cannot be found within minutes, or disappears. No process is left in any case.
    """
    agent = _Agent(attachment, _find_store(attachment))
    try:
        return agent.serve()
    except (RuntimeError, OSError) as error:  # torch's errors of a store: its server is gone
        raise MagisError(
            f"rank 0 of the job has disappeared: {str(error).splitlines()[0]}", hint="see what it has printed"
        ) from error
    finally:
        agent.close()


def _find_store(attachment: Attachment) -> Store:
    try:
        port = attachment.port
        if attachment.kept_elsewhere:
            port = int(_store(attachment, port).get(_WHERE))
        return _prefixed(_store(attachment, port))
    except RuntimeError as error:
        raise MagisError(
            f"rank 0 of the job was not found at {attachment.address} within {_MEET_SECONDS:g} s: "
            f"{str(error).splitlines()[0]}",
            hint="see what it has printed",
        ) from error


class _Agent:
    """Passes commands of the store on to a keeper, and its events back."""

    def __init__(self, attachment: Attachment, store: Store) -> None:
        self._attachment, self._store = attachment, store
        self._host: LocalHost | None = None
        self._obeyed = self._told = 0
        self._beats, self._beat_at = 0, 0.0

    def serve(self) -> int:
        """Pass commands and events on until rank 0 dismisses this process; return the number of commands."""
        own = self._attachment.rank
        while True:
            self._beat()
            while self._store.check([key := f"to/{own}/{self._obeyed}"]):
                message = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._obeyed += 1
                if message["do"] == "over":
                    self.close()
                    self._store.set(f"left/{own}", "1")
                    return self._obeyed
                self._obey(message)
            if self._host is None:
                time.sleep(_LOOK_SECONDS)
            else:
                try:
                    for event in self._host.events(_LOOK_SECONDS):
                        self._tell(event)
                except MagisError as error:
                    self._lose(error)

    def close(self) -> None:
        """End the keeper, if there is one."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _obey(self, message: dict[str, Any]) -> None:
        if message["do"] == "close":
            self.close()
            return
        if self._host is None:
            if message["do"] == "kill":
                self._tell({"event": "killed", "generation": message["generation"]})
                return
            self._host = LocalHost(message.get("threads", 1), self._attachment.local_rank)
        try:
            self._host.send(message)
        except MagisError as error:
            self._lose(error)

    def _lose(self, error: MagisError) -> None:
        """Report that the keeper is gone; a new one comes with the next command."""
        self.close()
        self._tell({"event": "lost", "said": str(error)})

    def _tell(self, event: Mapping[str, object]) -> None:
        self._store.set(f"from/{self._attachment.rank}/{self._told}", json.dumps(event))
        self._told += 1

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= _BEAT_SECONDS:
            self._beats, self._beat_at = self._beats + 1, now
            self._store.set(f"beat/{self._attachment.rank}", str(self._beats))
