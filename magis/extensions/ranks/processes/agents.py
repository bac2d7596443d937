"""Processes of a multi-process job that run ranks for the process with rank 0.

Every process has its own fork server (`fork_server.py`), so that a crash of a rank harms none of them. Rank 0 listens
at a port; another process connects to it, and its fork server uses that connection. When rank 0 exits, the connections
close, which ends the others.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Self

from magis.errors import MagisError, UsageError
from magis.extensions.ranks.processes.rank_hosts import Attachment, ForkServer, RankHost, local_host
from magis.extensions.ranks.processes.records import read_message, write_message

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_MEET_SECONDS = 300.0
"""Timeout in seconds for all processes of a job to start."""
_LOOK_SECONDS = 0.2
_LOST_SECONDS = 30
"""Seconds of an unreachable machine after which its process counts as lost."""
_OVER_SECONDS = 10.0
_HELLO_SECONDS, _HELLO_BYTES = 5.0, 100
_WHERE = "magis/address"


class Agents:
    """Connections of rank 0 to all processes of its job; as a context manager, it dismisses them at the end."""

    def __init__(self, attachment: Attachment, listener: socket.socket) -> None:
        self.attachment, self._listener = attachment, listener
        self._hosts: dict[int, RankHost] = {}

    def hosts(self, size: int) -> dict[int, RankHost]:
        """Return the hosts of the first ``size`` ranks; rank 0's host is a fork server created by this call."""
        lost = any(host.is_lost for host in self._hosts.values())
        limit = _LOST_SECONDS if lost else _MEET_SECONDS
        until = time.monotonic() + limit
        while missing := self._missing(size):
            if time.monotonic() > until:
                raise MagisError(
                    f"the process of rank {missing[0]} has given no sign of life for {limit:g} s",
                    hint="every process of the job has to run until rank 0 ends",
                )
            self._accept()
        return {0: local_host(self.attachment.local_rank)} | {rank: self._hosts[rank] for rank in range(1, size)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Dismiss all processes, and wait a few seconds until they have left."""
        until = time.monotonic() + _OVER_SECONDS
        while self._missing(self.attachment.size) and time.monotonic() < until:
            self._accept()
        for host in self._hosts.values():
            with suppress(MagisError):
                host.send({"do": "over"})
        while time.monotonic() < until and (left := [host for host in self._hosts.values() if not host.is_lost]):
            for host in select.select(left, [], [], _LOOK_SECONDS)[0]:
                with suppress(MagisError):
                    host.receive()
        self._listener.close()

    def _missing(self, size: int) -> list[int]:
        """Return those of the first ``size`` ranks that have not connected, or not again after the end of their fork
        server."""
        return [rank for rank in range(1, size) if rank not in self._hosts or self._hosts[rank].is_lost]

    def _accept(self) -> None:
        """Take the next connection of a process of the job, if there is one in the next moment."""
        if not select.select([self._listener], [], [], _LOOK_SECONDS)[0]:
            return
        connection = _connection(self._listener.accept()[0])
        rank: object = None
        with suppress(OSError, EOFError, ValueError, AttributeError):  # anything may connect to a port
            if connection.poll(_HELLO_SECONDS):
                rank = read_message(connection, _HELLO_BYTES).get("rank")
        if isinstance(rank, int) and 0 < rank < self.attachment.size:
            self._hosts[rank] = RankHost(connection, rank)
        else:
            connection.close()


def lead(attachment: Attachment) -> Agents:
    """Return the connections to the other processes of the job; called on rank 0."""
    port = 0 if attachment.kept_elsewhere else attachment.port
    try:
        if attachment.one_machine:
            listener = socket.create_server((attachment.meeting_address, port), backlog=attachment.size)
        else:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(("", port), family=family, backlog=attachment.size, dualstack_ipv6=both)
    except OSError as error:
        raise UsageError(
            f"port {port} of {attachment.address}, where the processes of the job are to meet, cannot be used: {error}",
            hint="set MASTER_ADDR to this machine and MASTER_PORT to a free port of it, for all of them",
        ) from error
    if attachment.kept_elsewhere:  # torchrun's store tells the others the port
        _store(attachment).set(_WHERE, str(listener.getsockname()[1]))
    return Agents(attachment, listener)


def serve(attachment: Attachment) -> int:
    """Run this process's rank for rank 0 until dismissed, and return the number of executed commands.

    Raises MagisError if rank 0 cannot be found within minutes, or disappears. Started processes always end.
    """
    seconds = _MEET_SECONDS
    while True:
        server = ForkServer(_connect(attachment, seconds), attachment.local_rank)
        try:
            obeyed = server.wait()
        finally:
            server.end()
        if obeyed is not None:
            return obeyed
        seconds = _LOST_SECONDS  # the fork server was killed: rank 0 is there, and gets another one


def _connect(attachment: Attachment, seconds: float) -> Connection:
    """Connect to rank 0, which may not listen yet, and tell it this process's rank."""
    until = time.monotonic() + seconds
    port = attachment.port
    while True:
        try:
            if attachment.kept_elsewhere:
                port = int(_store(attachment).get(_WHERE))
            found = socket.create_connection((attachment.meeting_address, port), _MEET_SECONDS)
            if found.getsockname() != found.getpeername():  # on one machine, a free port may connect to itself
                connection = _connection(found)
                write_message(connection, {"rank": attachment.rank})
                return connection
            found.close()
        except (RuntimeError, OSError) as error:  # RuntimeError: torch's of a store
            if time.monotonic() > until:
                raise MagisError(
                    f"rank 0 of the job was not found at {attachment.address} within {seconds:g} s: "
                    f"{str(error).splitlines()[0]}",
                    hint="see what it has printed",
                ) from error
        time.sleep(_LOOK_SECONDS)


def _connection(taken: socket.socket) -> Connection:
    """Return a connection over a socket, which fails soon after the other machine has vanished."""
    taken.settimeout(None)
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_SECONDS // 3)
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _LOST_SECONDS // 6)
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_SECONDS * 1000)
    return Connection(taken.detach())


def _store(attachment: Attachment) -> TCPStore:
    """Connect to torchrun's store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=_MEET_SECONDS)
    return TCPStore(attachment.address, attachment.port, None, False, wait, wait_for_workers=False)
