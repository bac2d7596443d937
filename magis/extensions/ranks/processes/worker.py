"""Main loop of a rank: waits for jobs, and runs each with the other ranks in a fresh process group.

Messages to the pool: hello (pid), port (of the store, if hosted here), phase, report, error (phase, kind, text).
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from magis.errors import MagisError, UsageError
from magis.extensions.ranks.processes.job import run_job
from magis.extensions.ranks.processes.records import RankJob, read_message, write_message
from magis.plain_records import from_plain, to_plain
from magis.runtime.measure import is_out_of_memory
from magis.strategies.rank_step import World

_LOOPBACK = "127.0.0.1"
_COLLECTIVE = timedelta(hours=1)
"""Timeout of a collective; the pool's own timeout is much shorter."""


@dataclass
class _Place:
    """State of this rank in the pool."""

    rank: int
    size: int
    device: str
    alone: bool
    """True if its fork server has no other rank: each process of a Slurm job may see only its own GPU."""
    say: Callable[[dict[str, Any]], None]
    phase: str = "start"
    store: Store | None = None

    def enter(self, phase: str) -> None:
        """Report the next phase."""
        self.phase = phase
        self.say({"phase": phase})


def serve(rank: int, start: Mapping[str, Any], connection: Connection) -> None:
    """Execute commands until the connection closes; ``start`` is the command that started this rank."""
    place = _Place(rank, start["size"], start["device"], len(start["ranks"]) == 1, partial(write_message, connection))
    place.say({"hello": os.getpid()})
    torch.set_num_threads(start["threads"])
    with contextlib.suppress(EOFError):
        while True:
            _obey(place, read_message(connection))


def _obey(place: _Place, message: dict[str, Any]) -> None:
    try:
        match message["do"]:
            case "host":
                place.enter("start of the store")
                place.store, port = _host_store(message["address"], place.size)
                place.say({"port": port})
            case "join":
                place.enter("start")
                if place.store is None:
                    where = message["address"], message["port"]
                    place.store = TCPStore(*where, place.size, False, _COLLECTIVE, wait_for_workers=False)
                _take_device(place)
                place.say({"joined": True})
            case "run":
                sys.path.extend(path for path in message["path"] if path not in sys.path)
                place.enter("setting up the process group")
                if place.store is None:
                    raise MagisError("the rank has not joined the others")
                dist.init_process_group(  # a fresh one, which has no unfinished collectives of the last job
                    "nccl" if place.device == "cuda" else "gloo",
                    store=PrefixStore(f"job {message['number']}", place.store),
                    rank=place.rank,
                    world_size=place.size,
                    timeout=_COLLECTIVE,
                )
                world = World(place.size, place.rank, place.device)
                report = run_job(from_plain(RankJob, message["job"]), world, place.enter)
                _leave()
                place.say({"report": to_plain(report)})
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's network may raise anything, and call exit)
        # first of all: the others may be waiting for this rank, and leaving the process group would wait for them
        place.say({"phase": place.phase, **_described(error)})
        refused = isinstance(error, UsageError)
    else:
        return
    if refused and dist.is_initialized():  # if all ranks refuse, the same ranks run the next job
        _leave()


def _leave() -> None:
    """Drop torch's state that would outlive a job: compiled code, process groups, a GPU's cache."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    dist.destroy_process_group()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _host_store(address: str, size: int) -> tuple[Store, int]:
    """Host the ranks' store at a free port; on the loopback address, only this machine can connect."""
    if address != _LOOPBACK:
        store = TCPStore(address, 0, size, True, _COLLECTIVE, wait_for_workers=False)
        return store, store.port
    with socket.create_server((_LOOPBACK, 0)) as server:
        port = int(server.getsockname()[1])
        listening = os.dup(server.fileno())  # the store closes its own
    return TCPStore(address, port, size, True, _COLLECTIVE, wait_for_workers=False, master_listen_fd=listening), port


def _take_device(place: _Place) -> None:
    if place.device != "cuda":
        return
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if place.alone and there == 1:
        local = 0
    if local >= there:
        raise UsageError(
            f"rank {place.rank} of {place.size} needs GPU {local} of its machine, which has {there}",
            hint="use at most one rank per GPU",
        )
    torch.cuda.set_device(local)


def _described(error: BaseException) -> dict[str, Any]:
    """Return an error's message in one line, its kind, and its stack, innermost frame first."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    if not isinstance(error, MagisError):
        text = f"{kind}: {text}" if text else kind
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{Path(code.co_filename)}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return {
        "error": text,
        "usage": isinstance(error, UsageError),
        "exhausted": is_out_of_memory(error),
        "frames": frames[::-1],
    }
