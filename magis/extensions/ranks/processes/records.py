"""Jobs for ranks and their reports: records that are sent as JSON."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from magis.errors import MagisError
from magis.results import Memory, Term
from magis.strategies.distributed_names import check_world, distributed_strategy


class RankError(MagisError):
    """Error of a rank that died, raised or hung; one line names the rank, the phase and the rank's own message.

    All ranks of the job are ended before this is raised; the pool starts new ones for the next job.
    """

    def __init__(self, message: str, *, rank: int, out_of_memory: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank
        self.out_of_memory = out_of_memory
        """True if the rank raised an out-of-memory error (a process killed by the system reports nothing)."""


@dataclass(frozen=True)
class RankJob:
    """One model under one strategy, run by all ranks of a pool together."""

    model: str
    """Registered model name or "package.module:factory"; every rank builds the model from the same seed."""
    strategy: str
    """Strategy name, or "package.module:factory" for a callable that returns a RankStrategy."""
    preset: str = "small"
    dtype: str | None = None
    """Data type of floating-point tensors; None: the model's default at this preset."""
    seed: int = 0
    rounds: int = 10
    """Number of timed steps."""
    losses: bool = True
    """True: report the losses of three steps from fresh weights without dropout (run separately if needed)."""
    weights: bool = False
    """True: report a digest of the weights after the three steps, which then run with dropout."""
    memory_limits: tuple[int, ...] = ()
    """Limits in bytes of tensors for a strategy that plans: one per rank of a group, or one; empty: its default."""
    budget: int | None = None
    """Search budget in plans evaluated, for a strategy that plans; None: the strategy's default."""


@dataclass(frozen=True)
class RankReport:
    """Measurements of one rank in a job."""

    rank: int
    memory: Memory
    """Peak memory of the measured step (the second or third), including everything that the job keeps alive."""
    times_ms: tuple[float, ...]
    """Milliseconds of each timed step on this rank, measured from a barrier."""
    losses: tuple[float | None, ...] = ()
    """Mean losses of this rank's share of the batch in the first three steps from fresh weights, without dropout; None
    on a rank without the loss. Empty if not requested."""
    weights: str = ""
    """Digest of this rank's parts of the weights after the three steps, ordered by name; "" if not requested."""
    samples: int = 0
    """Number of samples in the global batch of one step."""
    terms: tuple[Term, ...] = ()
    """Bytes of tensors at the peak by kind, which sum up to ``memory.tensor_bytes``."""
    identity: dict[str, str] = field(default_factory=dict)
    """Identity of the device as this rank used it (its share of the CPU threads, for example)."""


def slowest_ms(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the milliseconds of each timed step for all ranks together: the time of the slowest rank."""
    return tuple(max(times) for times in zip(*(report.times_ms for report in reports), strict=True))


def mean_losses(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the mean loss of the global batch in each of the first steps; all ranks have equal shares of the batch."""
    seen = [report.losses for report in reports if report.losses and None not in report.losses]
    return tuple(statistics.fmean(each) for each in zip(*seen, strict=True))


def check_ranks(name: str, size: int) -> None:
    """Raise UsageError unless ``size`` is a multiple of the strategy's group size, or if the strategy is unknown.

    Imports torch.
    """
    check_world(distributed_strategy(name), size)


# Messages between processes, and one line from the output of a dying process.

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_LONGEST = 300
_NOISE = "USDT:"
"""Prefix of log lines that the profiler prints."""


def write_message(connection: Connection, message: object) -> None:
    """Send a message as JSON; nothing is pickled."""
    connection.send_bytes(json.dumps(message).encode())


def read_message(connection: Connection, most_bytes: int | None = None) -> dict[str, Any]:
    """Wait for the next message. Raises EOFError or OSError if the other end is gone, or sends more than that."""
    message: dict[str, Any] = json.loads(connection.recv_bytes(most_bytes))
    return message


def last_words(text: str) -> str:
    """Return the last line that a process printed, shortened; "" if it printed none."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    return lines[-1][:_LONGEST] if lines else ""


def stack(text: str) -> list[str]:
    """Return the frames ("/path/file.py:12 in name", innermost first) in the output of `faulthandler`."""
    _, _, last = text.rpartition("Current thread")
    return [f"{found['file']}:{found['line']} in {found['name']}" for found in _FRAME.finditer(last)]
