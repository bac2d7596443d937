"""Where operators stand in a user's code, beside a graph's text, which leaves that out.

A plan that is kept outlives edits that move the model's lines: it is kept with the lines of the step that it was made
of, operator by operator, and where these have moved since, the plan's move with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from magis.errors import MagisError
from magis.ir import Graph, every_op

__all__ = ["lines_of", "packed", "with_lines"]

LONGEST = 300


def lines_of(graph: Graph) -> list[str]:
    """The line of every operator, a loop's before its body's."""
    return [op.line for op, _ in every_op(graph)]


def packed(plan: Graph, step: Graph) -> dict[str, Any]:
    """The lines of a plan and of its step as JSON can hold them: each text once."""
    of_plan, of_step = lines_of(plan), lines_of(step)
    names = sorted({*of_plan, *of_step})
    at = {name: number for number, name in enumerate(names)}
    return {"names": names, "plan": [at[line] for line in of_plan], "step": [at[line] for line in of_step]}


def with_lines(plan: Graph, step: Graph, kept: Any) -> Graph:
    """The plan, read from a text, with lines as `packed` kept them, moved as the step's have been since.

    Raises MagisError, or what reading a wrong structure raises, for lines that are not of this plan and step.
    """
    names, now = kept["names"], lines_of(step)
    if any(type(name) is not str or len(name) > LONGEST for name in names):
        raise MagisError("a line of code is no text that can be one")
    if any(type(number) is not int or number < 0 for number in (*kept["plan"], *kept["step"])):
        raise MagisError("a line of code is none of those that it names")
    then = [names[number] for number in kept["step"]]
    found = [names[number] for number in kept["plan"]]
    if len(then) != len(now) or len(found) != len(lines_of(plan)):
        raise MagisError("its lines of code are of another step")
    moved = dict(zip(reversed(then), reversed(now), strict=True))  # of two places the first
    return _placed(plan, iter([moved.get(line, line) for line in found]))


def _placed(graph: Graph, lines: Iterator[str]) -> Graph:
    ops = []
    for op in graph.ops:
        line = next(lines)
        body = None if op.body is None else replace(op.body, graph=_placed(op.body.graph, lines))
        ops.append(replace(op, line=line, body=body))
    return replace(graph, ops=tuple(ops))
