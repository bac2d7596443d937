"""Requests to ranks and their answers: records that travel as lines of JSON."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from magis.errors import MagisError
from magis.results import Memory, Term
from magis.strategies.distributed_names import check_world, distributed_strategy


class RankError(MagisError):
    """A rank died, raised or hung: one line names the rank, the phase and its own message.

    The ranks of that job are gone by the time this is raised; the pool starts new ones for the next job.
    """

    def __init__(self, message: str, *, rank: int, out_of_memory: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.out_of_memory = out_of_memory
        """True if it reported that memory ran out (a process that the system killed reports nothing)."""


@dataclass(frozen=True)
class RankJob:
    """One model under one strategy, to be run by all ranks of a pool together."""

    model: str
    """A registered model's name or "package.module:factory"; every rank builds it from the same seed."""
    strategy: str
    """A strategy's name, or "package.module:factory" for a callable that returns a RankStrategy."""
    preset: str = "small"
    dtype: str | None = None
    """Data type of floating-point tensors; None: the model's own at this preset."""
    seed: int = 0
    rounds: int = 10
    """Number of timed steps."""
    losses: bool = True
    """True to report the losses of three steps from fresh weights, dropout off; networks with dropout run them anew."""
    weights: bool = False
    """True to report a digest of the weights after these steps, which then run with dropout."""
    memory_limits: tuple[int, ...] = ()
    """Limits in bytes of tensors for a strategy that plans: one for each rank of a group, or one for all; empty: its
    own default."""
    budget: int | None = None
    """Number of plans evaluated by such a strategy; None: its default."""


@dataclass(frozen=True)
class RankReport:
    """The measurements of one rank in a job."""

    rank: int
    memory: Memory
    """Peak of the measured step (the second or third), everything that the job keeps included."""
    times_ms: tuple[float, ...]
    """Milliseconds of each timed step, from a barrier before it to its end on this rank."""
    losses: tuple[float | None, ...] = ()
    """Mean losses of this rank's share of the batch in the first three steps from fresh weights, dropout off; None if
    the rank sees none. Empty if they were not asked for."""
    weights: str = ""
    """Digest of this rank's parts of the weights after these steps, in the order of their names."""
    samples: int = 0
    """Number of samples in the global batch of one step."""
    terms: tuple[Term, ...] = ()
    """Bytes of tensors at the peak by purpose, which sum up to ``memory.tensor_bytes``."""
    identity: dict[str, str] = field(default_factory=dict)
    """Identity of the device as this rank used it (threads: its share of the cores)."""


def slowest_ms(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the milliseconds of each timed step of the whole world: those of the slowest rank in it."""
    return tuple(max(times) for times in zip(*(report.times_ms for report in reports), strict=True))


def mean_losses(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the global batch's mean loss in each of the first steps; all ranks have equal shares of it."""
    seen = [report.losses for report in reports if report.losses and None not in report.losses]
    return tuple(statistics.fmean(each) for each in zip(*seen, strict=True))


def check_ranks(name: str, size: int) -> None:
    """Raise UsageError, naming the number needed, unless ``size`` ranks hold whole groups of the strategy.

    Also raised for a name of no strategy. Loads torch.
    """
    check_world(distributed_strategy(name), size)


# Lines of JSON from pieces of bytes, and one line from the output of a dying process.

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_LONGEST = 300
_NOISE = "USDT:"
"""Prefix of the profiler's own lines."""


@dataclass
class JsonLines:
    """Buffer that turns bytes into the messages of complete lines."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the messages that ``data`` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole if line]


def write_line(descriptor: int, message: object) -> None:
    """Write a message as one line of JSON, all of it."""
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


def last_words(text: str) -> str:
    """Return the last line that a process printed before it died, which tells most; "" if it printed none."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return lines[-1][:_LONGEST] if lines else ""


def stack(text: str) -> list[str]:
    """Return the frames ("/path/file.py:12 in name", innermost first) in the output of `faulthandler`."""
    _, _, last = text.rpartition("Current thread")
    return [f"{found['file']}:{found['line']} in {found['name']}" for found in _FRAME.finditer(last)]
