"""What a rank has said so far, and which of several ranks is to blame when they do not all answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magis.errors import MagisError, UsageError
from magis.ranks.records import RankError

_OF_A_PEER = ("connection", "broken pipe", "peer", "remote process", "nccl", "socket", "recvvalue", "store")
"""In what ranks say when another one is gone."""
_WAITING = ("torch/distributed/", "torch/nn/parallel/distributed.py", "torch/autograd/graph.py")
"""Where ranks are that wait for others: in a collective, or in a backward pass that has some."""
_WATCHER = "magis/predict/live_storage.py"
"""Stands between an operator and whoever called it."""
_OWN = str(Path(__file__).resolve().parent)


@dataclass
class Rank:
    """One rank, as far as it is known."""

    number: int
    pid: int = 0
    phase: str = "start"
    progress: int = 0
    """Phases that it has begun in this job."""
    answers: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    """What it raised."""
    death: str = ""
    """How it died, in words."""
    words: str = ""
    """The last line that it printed before."""
    frames: tuple[str, ...] | None = None
    """Where it was when it was asked, innermost first; None: it did not say."""

    def begin(self) -> None:
        """A new job: whatever was said belongs to the last one."""
        self.progress, self.phase = 0, "start of the job"
        self.answers, self.error, self.frames = {}, None, None

    def hear(self, event: dict[str, Any]) -> None:
        """Take in an event of the keeper's."""
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
        """Whether it said, and said nothing else, that what was asked for cannot be."""
        return not self.death and self.error is not None and self.error["usage"]

    @property
    def said(self) -> str:
        return str(self.error["error"]) if self.error is not None else self.words

    @property
    def hit_by_another(self) -> bool:
        """Whether it merely noticed that another rank is gone."""
        return not self.death and any(text in self.said.casefold() for text in _OF_A_PEER)


def failure(ranks: Sequence[Rank]) -> MagisError:
    """The error for a job in which ranks failed: of the one that failed first as far as one can tell."""
    failed = [rank for rank in ranks if rank.failed]
    first = min(failed, key=lambda rank: (not rank.death and not _raised(rank), rank.hit_by_another, rank.progress))
    if first.refused:
        return UsageError(first.said)
    who = f"rank {first.number} of {len(ranks)}"
    if first.death:
        said = f": {first.words}" if first.words else ""
        hint = "the system kills a process so when memory runs out" if "SIGKILL" in first.death else ""
        return RankError(f"{who} {first.death} during {first.phase}{said}", rank=first.number, hint=hint)
    error = first.error or {}
    place = _place(error.get("frames", ()))
    return RankError(
        f"{who} failed during {error['phase']}: {first.said}{f' (in {place})' if place else ''}",
        rank=first.number,
        out_of_memory=bool(error.get("exhausted")),
    )


def _raised(rank: Rank) -> bool:
    return rank.error is not None and not rank.hit_by_another


def silence(ranks: Sequence[Rank], wanted: str, timeout_s: float) -> RankError:
    """The error for a job in which no rank said anything for a time: of the one that the others wait for."""
    silent = [rank for rank in ranks if wanted not in rank.answers]
    last = min(silent, key=lambda rank: (rank.progress, _waits(rank.frames or ()), rank.number))
    place = _place(last.frames or ())
    return RankError(
        f"rank {last.number} of {len(ranks)} did not answer within {timeout_s:g} s during {last.phase}"
        f"{f' (in {place})' if place else ''}",
        rank=last.number,
    )


def _waits(frames: Sequence[str]) -> int:
    """How likely a rank merely waits for others, by the innermost part of its stack: 0 (its own code) to 2."""
    inner = [frame for frame in frames if _WATCHER not in frame][:3]
    if any(text in frame for frame in inner for text in _WAITING):
        return 2
    return int(any("/torch/" in frame for frame in inner[:1]))


def _place(frames: Sequence[str]) -> str:
    """The innermost frame of the technique or the network: neither torch's nor of this package."""
    for frame in frames:
        path, _, rest = frame.rpartition(":")
        if "site-packages" not in path and not path.startswith((_OWN, "<frozen")) and "/lib/python" not in path:
            return f"{Path(path).name}:{rest}"
    return ""
