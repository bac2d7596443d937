"""A plan as a file: readable text, no pickle. Two lines of header, then the graph in its text form.

    magis plan 1
    {"digest": "..."}
    magis graph 1
    ...

Reading one runs no code. What it may make a step do is bounded (`magis.training.planned`): every operator must be one
of the step that it is for, which must have the digest that the file names, or one that plans are made of.
"""

from __future__ import annotations

import json
from pathlib import Path

from magis.errors import MagisError, UsageError
from magis.ir import Graph, dump, parse, verify
from magis.report import write_text_atomically
from magis.training.planned import Planned

__all__ = ["read_plan", "write_plan"]

HEADER = "magis plan 1"


def write_plan(path: Path, plan: Planned) -> None:
    """Write the file in one step."""
    head = json.dumps({"digest": plan.digest}, sort_keys=True)
    write_text_atomically(path, f"{HEADER}\n{head}\n{dump(plan.graph)}")


def read_plan(path: Path) -> tuple[Graph, str]:
    """The graph of a file, verified, and the digest of the step that it is for. Raises UsageError in one line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the plan {path}: {reason}") from None
    header, _, rest = text.partition("\n")
    head, _, body = rest.partition("\n")
    if header != HEADER:
        raise UsageError(f"{path} is no plan of this version: it begins with {header[:40]!r}", hint="save it again")
    try:
        digest = json.loads(head)["digest"]
        graph = parse(body)
        verify(graph)
    except (MagisError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"the plan {path} is corrupt: {error}", hint="save it again") from None
    return graph, str(digest)
