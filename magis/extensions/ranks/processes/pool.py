"""Pool of rank processes that run jobs one after another, and the choice of the rank to blame for a failure.

A rank fails if it raises, dies or hangs. The job then ends with one line, within a bounded time, and all ranks are
killed with everything that they started; the next job gets new ranks.
"""

from __future__ import annotations

import platform
import select
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from magis.child_process import cores
from magis.errors import MagisError, UsageError
from magis.extensions.ranks.processes.rank_hosts import RankHost, local_host
from magis.extensions.ranks.processes.records import RankError, RankJob, RankReport
from magis.plain_records import from_plain, to_plain

if TYPE_CHECKING:
    from magis.extensions.ranks.processes.agents import Agents

_OF_A_PEER = ("connection", "broken pipe", "peer", "remote process", "nccl", "socket", "recvvalue", "store")
"""Substrings of errors that a rank raises because another rank is gone."""
_WAITING = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/graph.py")
"""Path parts on the stack of a rank that waits for others, in a collective or in a backward with collectives."""
_WATCHER = "magis/extensions/ranks/prediction/live_storage.py"
"""Path part on the stack between an operator and its caller."""
_OWN = str(Path(__file__).resolve().parent)


@dataclass
class Rank:
    """State of one rank, as the pool knows it."""

    number: int
    pid: int = 0
    phase: str = "start"
    progress: int = 0
    """Number of phases that the rank has begun in this job."""
    answers: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    """Error that the rank raised; None if it raised none."""
    death: str = ""
    """Cause of the death of the rank's process, in words; "" while it runs."""
    words: str = ""
    """Last line that the rank printed before it died."""
    frames: tuple[str, ...] | None = None
    """Stack of the rank when requested, innermost frame first; None if it did not answer."""

    def begin(self) -> None:
        """Clear the messages of the last job."""
        self.progress, self.phase = 0, "start of the job"
        self.answers, self.error, self.frames = {}, None, None

    def hear(self, event: dict[str, Any]) -> None:
        """Update the state from an event of the fork server."""
        match event["event"]:
            case "died":
                self.death, self.words = event["how"], event["said"]
            case "where":
                self.frames = tuple(event["frames"])
            case "says":
                line = event["line"]
                if "hello" in line:
                    self.pid = line["hello"]
                elif "error" in line:
                    self.error = line
                elif "phase" in line:
                    self.phase, self.progress = line["phase"], self.progress + 1
                else:
                    self.answers |= line

    @property
    def failed(self) -> bool:
        return bool(self.death or self.error)

    @property
    def refused(self) -> bool:
        """True if the rank only raised UsageError, so that the job cannot run."""
        return not self.death and self.error is not None and self.error["usage"]

    @property
    def said(self) -> str:
        return str(self.error["error"]) if self.error is not None else self.words

    @property
    def hit_by_another(self) -> bool:
        """True if the rank's error only says that another rank is gone."""
        return not self.death and any(text in self.said.casefold() for text in _OF_A_PEER)


def failure(ranks: Sequence[Rank]) -> MagisError:
    """Return the error of a failed job: that of the rank that probably failed first."""

    def blame_order(rank: Rank) -> tuple[bool, bool, int]:
        raised = rank.error is not None and not rank.hit_by_another
        return not rank.death and not raised, rank.hit_by_another, rank.progress

    first = min((rank for rank in ranks if rank.failed), key=blame_order)
    if first.refused:
        return UsageError(first.said)
    who = f"rank {first.number} of {len(ranks)}"
    if first.death:
        said = f": {first.words}" if first.words else ""
        hint = "the system kills a process so when memory runs out" if "SIGKILL" in first.death else ""
        return RankError(f"{who} {first.death} during {first.phase}{said}", rank=first.number, hint=hint)
    error = first.error or {}
    place = _user_frame(error.get("frames", ()))
    return RankError(
        f"{who} failed during {error['phase']}: {first.said}{f' (in {place})' if place else ''}",
        rank=first.number,
        out_of_memory=bool(error.get("exhausted")),
    )


def silence(ranks: Sequence[Rank], wanted: str, timeout_s: float) -> RankError:
    """Return the error of a job in which all ranks were silent: it names the rank that the others probably wait for."""
    silent = [rank for rank in ranks if wanted not in rank.answers]

    def wait_order(rank: Rank) -> tuple[int, int, int]:
        # last comes a rank that waits for others, then one in an operator: the first one runs code of its own
        inner = [frame for frame in rank.frames or () if _WATCHER not in frame][:3]
        waits = any(text in frame for frame in inner for text in _WAITING)
        return rank.progress, 2 if waits else int(any("/torch/" in frame for frame in inner[:1])), rank.number

    last = min(silent, key=wait_order)
    place = _user_frame(last.frames or ())
    return RankError(
        f"rank {last.number} of {len(ranks)} did not answer within {timeout_s:g} s during {last.phase}"
        f"{f' (in {place})' if place else ''}",
        rank=last.number,
    )


def _user_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame outside torch and this package, in the strategy or the network; else ""."""
    for frame in frames:
        path, _, rest = frame.rpartition(":")
        if "site-packages" not in path and not path.startswith((_OWN, "<frozen")) and "/lib/python" not in path:
            return f"{Path(path).name}:{rest}"
    return ""


_START_SECONDS = 300.0
"""Timeout in seconds for processes to import torch and connect, on a busy machine."""
_GRACE_SECONDS = 1.5
"""Seconds to collect other ranks' events after a failure, since a rank's death is often first noticed by the others."""
_STACK_SECONDS = 5.0
_KILL_SECONDS = 20.0
_SLICE_SECONDS = 0.2


class RankPool:
    """Pool of ``size`` ranks on "cpu" (gloo) or "cuda" (nccl, one GPU each), started by the first job.

    With ``agents``, ranks run in the processes of the multi-process job, else all on this machine. ``timeout_s`` is the
    longest time in seconds without any message from any rank; ranks report every step and phase, so a job may take any
    time, but a hanging job ends after the timeout.
    """

    def __init__(
        self, size: int, device: str = "cpu", *, timeout_s: float = 300.0, agents: Agents | None = None
    ) -> None:
        if platform.system() != "Linux":
            raise UsageError(
                f"ranks run on Linux only, this is {platform.system()}",
                hint="leave the distributed strategies out, or have them predicted: --magis-device=sim:h100",
            )
        if size < 1:
            raise UsageError(f"{size} ranks are too few", hint="use 1 or more")
        if agents is not None and size > agents.attachment.size:
            raise UsageError(
                f"{size} ranks are needed, and the job that this run belongs to has {agents.attachment.size}",
                hint=f"start it with {size} processes",
            )
        self.size = size
        self.device = device
        self._timeout_s = timeout_s
        self._agents = agents
        self._hosts: dict[int, RankHost] = {}
        """Host of each rank; ranks on one machine share a host."""
        self._ranks: list[Rank] = []
        """Running ranks; empty before the first job and after a failure."""
        self._generation = 0
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks on their machines; empty while none run."""
        return tuple(rank.pid for rank in self._ranks)

    def run(self, job: RankJob) -> tuple[RankReport, ...]:
        """Run a job and return each rank's report. Raises RankError if a rank fails, UsageError if all refuse the
        job."""
        try:
            if not self._ranks:
                self._start()
            self._jobs += 1
            for rank in self._ranks:
                rank.begin()
                self._tell(rank, {"do": "run", "job": to_plain(job), "number": self._jobs, "path": sys.path})
            answers = self._gather("report", self._timeout_s)
        except BaseException as error:
            # ranks that have all refused this job can run the next one
            if not isinstance(error, UsageError) or not all(rank.refused for rank in self._ranks):
                self._kill()
            raise
        return tuple(from_plain(RankReport, answer) for answer in answers)

    def close(self) -> None:
        """End all ranks, and return when they are gone. A later job starts new ranks."""
        self._ranks = []
        for host in self._each_host():
            host.close()
        self._hosts = {}

    def _start(self) -> None:
        agents = self._agents
        if not self._hosts:
            self._hosts = agents.hosts(self.size) if agents else dict.fromkeys(range(self.size), local_host())
        on_machine = min(self.size, agents.attachment.local_size) if agents else self.size
        threads = max(1, cores() // on_machine)
        env = {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(on_machine),
            "OMP_NUM_THREADS": str(threads),
        }
        if agents is None or agents.attachment.one_machine:
            # gloo asks for the address of the machine's name, which may not resolve
            env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        self._generation = time.monotonic_ns()  # unique among pools that share the agents
        self._ranks = [Rank(number) for number in range(self.size)]
        start = {"do": "start", "size": self.size, "device": self.device, "threads": threads, "env": env}
        for host in self._each_host():
            self._send(host, {**start, "ranks": [number for number, its in self._hosts.items() if its is host]})
        # rank 0 hosts the store at which all ranks meet
        address = agents.attachment.meeting_address if agents else "127.0.0.1"
        self._tell(self._ranks[0], {"do": "host", "address": address})
        (port,) = self._gather("port", _START_SECONDS, self._ranks[:1])
        for rank in self._ranks:
            self._tell(rank, {"do": "join", "address": address, "port": port})
        self._gather("joined", _START_SECONDS)

    def _each_host(self) -> list[RankHost]:
        return list({id(host): host for host in self._hosts.values()}.values())

    def _send(self, host: RankHost, message: dict[str, object]) -> None:
        host.send({"generation": self._generation, **message})

    def _tell(self, rank: Rank, line: dict[str, object]) -> None:
        self._send(self._hosts[rank.number], {"do": "tell", "rank": rank.number, "line": line})

    def _events(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the events of this generation; wait at most ``timeout_s`` seconds for the first one."""
        for host in select.select(self._each_host(), [], [], timeout_s)[0]:
            event = host.receive()
            if event["generation"] == self._generation:
                yield event

    def _hear(self) -> int:
        """Process new events of ranks, and return their number."""
        count = 0
        for event in self._events(_SLICE_SECONDS):
            if "rank" in event:
                self._ranks[event["rank"]].hear(event)
                count += 1
        return count

    def _gather(self, wanted: str, timeout_s: float, ranks: Sequence[Rank] | None = None) -> list[Any]:
        """Wait for an answer from each rank, and return the answers."""
        asked = self._ranks if ranks is None else ranks
        last = time.monotonic()
        while any(wanted not in rank.answers for rank in asked):
            if self._hear():
                last = time.monotonic()
            if any(rank.failed for rank in self._ranks):
                # hear what the others say of it, which tells the first failure from those that follow from it
                clear = any(rank.failed and not rank.refused and not rank.hit_by_another for rank in self._ranks)
                until = time.monotonic() + (_GRACE_SECONDS / 5 if clear else _GRACE_SECONDS)
                while time.monotonic() < until and not all(rank.failed for rank in self._ranks):
                    self._hear()
                raise failure(self._ranks)
            if time.monotonic() - last > timeout_s:
                for host in self._each_host():
                    self._send(host, {"do": "where"})
                until = time.monotonic() + _STACK_SECONDS
                while time.monotonic() < until and any(rank.frames is None for rank in self._ranks):
                    self._hear()
                raise silence(asked, wanted, timeout_s)
        return [rank.answers.pop(wanted) for rank in asked]

    def _kill(self) -> None:
        """Kill the ranks but keep their fork servers; if that fails, end the fork servers, too."""
        loaded = all(rank.pid for rank in self._ranks)
        self._ranks = []
        if not loaded:  # a fork server that still loads torch does not listen
            self.close()
            return
        hosts = self._each_host()
        try:
            for host in hosts:
                self._send(host, {"do": "kill"})
            until = time.monotonic() + _KILL_SECONDS
            killed = 0
            while killed < len(hosts) and time.monotonic() < until:
                killed += sum(event["event"] == "killed" for event in self._events(_SLICE_SECONDS))
        except MagisError:  # the keeper itself is gone
            self.close()
            return
        except BaseException:  # Ctrl-C once more
            self.close()
            raise
        if killed < len(hosts):
            self.close()
