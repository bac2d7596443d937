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
    """A rank died, raised or hung: one line says which one, during what, and what it said.

    The ranks of that job are gone by the time this is raised; the pool starts new ones for the next job.
    """

    def __init__(self, message: str, *, rank: int, out_of_memory: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.out_of_memory = out_of_memory
        """Whether it said that memory ran out (a process that the system killed says nothing)."""


@dataclass(frozen=True)
class RankJob:
    """One model under one strategy, to be run by all ranks of a pool together."""

    model: str
    """A registered model's name or "package.module:factory"; every rank builds it from the same seed."""
    strategy: str
    """A strategy's name, or "package.module:factory" for a callable that returns a RankStrategy."""
    preset: str = "small"
    dtype: str | None = None
    """What floating-point tensors are converted to; None: the model's own at this preset."""
    seed: int = 0
    rounds: int = 10
    """Timed steps."""
    losses: bool = True
    """Whether to report the losses of three steps from fresh weights, dropout off: further ones where there is some."""
    weights: bool = False
    """Whether to report a digest of the weights behind these steps, which then are the job's own, with dropout."""
    memory_limits: tuple[int, ...] = ()
    """Bytes of tensors for a strategy that plans: on each rank of a group, or on all; empty: its own share of what the
    step needs."""
    budget: int | None = None
    """Plans evaluated, for such a strategy; None: its default."""


@dataclass(frozen=True)
class RankReport:
    """What one rank measured in a job."""

    rank: int
    memory: Memory
    """Peak of the measured step (the second or third), everything that the job keeps included."""
    times_ms: tuple[float, ...]
    """Of each timed step, from a barrier before it to this rank's end of it."""
    losses: tuple[float | None, ...] = ()
    """Mean loss of this rank's share of the batch in the first three steps from fresh weights, dropout off; None where
    the rank sees none. Empty where they were not asked for."""
    weights: str = ""
    """Digest of what this rank holds of the weights behind these steps, in the order of their names."""
    samples: int = 0
    """In the global batch of one step."""
    terms: tuple[Term, ...] = ()
    """What the tensors at the peak are for; they sum up to ``memory.tensor_bytes``."""
    identity: dict[str, str] = field(default_factory=dict)
    """The device's, as this rank ran on it (threads: its share of the cores)."""


def slowest_ms(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Milliseconds of each timed step of the whole world: of the slowest rank in it."""
    return tuple(max(times) for times in zip(*(report.times_ms for report in reports), strict=True))


def mean_losses(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """The global batch's mean loss in each of the first steps: the shares are equal, so are the ranks' votes."""
    seen = [report.losses for report in reports if report.losses and None not in report.losses]
    return tuple(statistics.fmean(each) for each in zip(*seen, strict=True))


# Whether ranks are enough for a strategy, before any of them starts.


def check_ranks(name: str, size: int) -> None:
    """Raise UsageError unless ``size`` ranks hold whole groups of the strategy; it names the number needed.

    For a name that is no strategy's, too. Loads torch.
    """
    check_world(distributed_strategy(name), size)


# Lines of JSON out of pieces of bytes, and one line out of what a dying process printed.

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_LONGEST = 300
_NOISE = "USDT:"
"""The profiler's own lines."""


@dataclass
class JsonLines:
    """Collects bytes as they come and gives the messages of the lines that are whole."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that ``data`` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole if line]


def write_line(descriptor: int, message: object) -> None:
    """The message as a line, all of it."""
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


def last_words(text: str) -> str:
    """The line that says most of what a process printed before it died: the last one; empty where it printed none."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return lines[-1][:_LONGEST] if lines else ""


def stack(text: str) -> list[str]:
    """The frames ("/path/file.py:12 in name", innermost first) in what `faulthandler` wrote."""
    _, _, last = text.rpartition("Current thread")
    return [f"{found['file']}:{found['line']} in {found['name']}" for found in _FRAME.finditer(last)]
