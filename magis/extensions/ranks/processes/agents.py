"""Processes of a multi-process job that run ranks for the process with rank 0.

Every process starts its own fork server (`fork_server.py`), so that a crash of a rank harms none of them. Rank 0 hosts
a TCPStore that carries commands and events as numbered messages: "to/<rank>/<n>", "from/<rank>/<n>". When rank 0 exits,
the store disappears, which ends the others.
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
"""Timeout in seconds for all processes of a job to start."""
_LOOK_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_LOST_SECONDS = 30.0
"""Seconds without a heartbeat after which a process counts as lost."""
_OVER_SECONDS = 10.0
_WHERE = "magis/address"


class Agents:
    """Connections of rank 0 to all processes of its job; as a context manager, it dismisses them at the end."""

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
        """Address at which the other processes reach this machine."""
        return "127.0.0.1" if self.one_machine else self._attachment.address

    def are_there(self) -> bool:
        """Return True if all processes of the job are serving."""
        return all(host.is_there() for host in self._hosts.values())

    def hosts(self, size: int) -> dict[int, RankHost]:
        """Return the hosts of the first ``size`` ranks; rank 0's host is a fork server created by this call."""
        threads = max(1, cores() // min(size, self.local_size))
        own: dict[int, RankHost] = {0: LocalHost(threads, self._attachment.local_rank)}
        return own | {rank: self._hosts[rank] for rank in range(1, size)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Dismiss all processes, and wait until they have left, since the store ends with this process."""
        for host in self._hosts.values():
            host.dismiss()
        until = time.monotonic() + _OVER_SECONDS
        waiting = list(self._hosts.values())
        while waiting and time.monotonic() < until:
            waiting = [host for host in waiting if not host.has_left()]
            time.sleep(_LOOK_SECONDS if waiting else 0)


class _RemoteHost:
    """Host in another process of the job, reached through the store."""

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
        """Return True if the process has sent a heartbeat."""
        return self._store.check([f"beat/{self._rank}"])

    def dismiss(self) -> None:
        """Tell the process to exit."""
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
    """Return the connections to the other processes of the job; called on rank 0."""
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
    """Connect to the store at a port of rank 0's machine; ``keep``: host the store in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=_MEET_SECONDS)
    return TCPStore(attachment.address, port, None, keep, wait, wait_for_workers=False)


def _prefixed(store: Store) -> Store:
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore("magis", store)


def serve(attachment: Attachment) -> int:
    """Run this process's rank for rank 0 until dismissed, and return the number of executed commands.

    Raises MagisError if rank 0 cannot be found within minutes, or disappears. Started processes always end.
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
    """Relay between the store and a fork server: passes commands on, and events back."""

    def __init__(self, attachment: Attachment, store: Store) -> None:
        self._attachment, self._store = attachment, store
        self._host: LocalHost | None = None
        self._obeyed = self._told = 0
        self._beats, self._beat_at = 0, 0.0

    def serve(self) -> int:
        """Relay commands and events until rank 0 dismisses this process, and return the number of commands."""
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
        """End the fork server, if there is one."""
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
        """Report that the fork server died; the next command starts a new one."""
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
