"""Plan files: a plan is proven to compute the step at hand before it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from magis.errors import UsageError
from magis.graph import Graph, dump, parse, verify
from magis.report import read_regular, write_text_atomically
from magis.report.text_store import UNSOUND

# A plan as a file: readable text, no pickle. Two lines of header, then the graph in its text form.
#
#     magis plan 2
#     {"checksum": "...", "digest": "...", "limit": {"memory_ratio": 0.8}}
#     magis graph 1
#     ...
#
# Reading a file runs no code, and the file is not trusted: the checksum detects damage, the digest another step, and
# `magis.planner.plan_proof` proves that the graph computes the step at hand.

HEADER = "magis plan 2"


@dataclass(frozen=True)
class SavedPlan:
    """A plan, the digest of its step, and the limit for which it was made, by the name of the argument."""

    graph: Graph
    digest: str
    limit: Mapping[str, float]

    def check_limit(self, asked: Mapping[str, float]) -> None:
        """Raise UsageError if the plan was made for another limit."""
        if self.limit != asked:
            raise UsageError(
                f"the saved plan was made for {in_words(self.limit)}, asked for is {in_words(asked)}",
                hint=f"pass {in_words(self.limit)}, or leave out plan= to search anew",
            )


def in_words(limit: Mapping[str, float]) -> str:
    """Return a limit as a caller writes it."""
    return ", ".join(f"{name}={number}" for name, number in limit.items()) or "no limit"


def write_plan(path: Path, plan: SavedPlan) -> None:
    """Write a plan file atomically."""
    body = dump(plan.graph)
    head = {"checksum": _checksum(body), "digest": plan.digest, "limit": dict(plan.limit)}
    write_text_atomically(path, f"{HEADER}\n{json.dumps(head, sort_keys=True)}\n{body}")


def read_plan(path: Path) -> SavedPlan:
    """Read a plan file and verify its graph. Raises UsageError for files that cannot be read, or that are corrupt."""
    try:
        text = read_regular(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the plan {path}: {reason}") from None
    header, _, rest = text.partition("\n")
    head, _, body = rest.partition("\n")
    if header != HEADER:
        raise UsageError(f"{path} is no plan of this version: it begins with {header[:40]!r}", hint="save it again")
    try:
        said = json.loads(head)
        digest, limit = said["digest"], said["limit"]
        if said["checksum"] != _checksum(body):
            raise ValueError("it was changed since it was saved: its checksum is another one")
        if not isinstance(digest, str) or any(type(number) not in (int, float) for number in limit.values()):
            raise ValueError("its second line is another one than plans have")
        graph = parse(body)
        verify(graph)
    except UNSOUND as error:
        raise corrupt(path, error) from None
    return SavedPlan(graph, digest, limit)


def corrupt(path: Path | str, error: BaseException) -> UsageError:
    """Return the error for a corrupt plan file."""
    said = str(error) if not isinstance(error, (KeyError, RecursionError)) else type(error).__name__
    return UsageError(f"the plan {path} is corrupt: {' '.join(said.split())[:300]}", hint="save it again")


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
