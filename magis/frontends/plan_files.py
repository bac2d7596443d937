"""Plans as files, of which nothing runs that is not known from the step that they are for."""

from __future__ import annotations

import json
from pathlib import Path

from magis.errors import MagisError, UsageError
from magis.graph import Graph, Value, dump, parse, verify
from magis.planner.kept_plans import foreign_operator
from magis.report import write_text_atomically

# A plan as a file: readable text, no pickle. Two lines of header, then the graph in its text form.
#
#     magis plan 1
#     {"digest": "..."}
#     magis graph 1
#     ...
#
# Reading one runs no code. What it may make a step do is bounded (`check_fits`): every operator must be
# one of the step that it is for, which must have the digest that the file names, or one that plans are made of.

HEADER = "magis plan 1"


def write_plan(path: Path, graph: Graph, of_step: str) -> None:
    """Write the file in one step: a plan, and the digest of its step."""
    head = json.dumps({"digest": of_step}, sort_keys=True)
    write_text_atomically(path, f"{HEADER}\n{head}\n{dump(graph)}")


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


def check_fits(graph: Graph, step: Graph) -> None:
    """A graph from a file may hold operators and tensors of the step that it is for, and what plans make of them;
    UsageError."""
    target = foreign_operator(graph, step)
    if target is not None:
        raise UsageError(f"the saved plan holds {target}, which its step has not", hint="optimize again")
    known = {_looks(step.values[value]) for value in step.inputs}
    for value in (graph.values[value] for value in graph.inputs):
        if value.name and _looks(value) not in known:
            looks = f"{value.dtype}{list(value.shape)}"
            raise UsageError(
                f"the saved plan works on {value.name} as {looks}, its step does not", hint="optimize again"
            )


def _looks(value: Value) -> tuple[str, str, tuple[int, ...]]:
    return value.name, value.dtype, value.shape
