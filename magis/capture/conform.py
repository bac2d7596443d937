"""Whether a captured step is what eager runs: the operators, their order and their results, recorded on real tensors.

Capture looks at a step without computing it. Code that tells the two apart, or reads what it should not, takes another
way through a library; then plan and prediction would be of another step than the user's.
"""

from __future__ import annotations

from collections.abc import Iterator

from magis.errors import CaptureError
from magis.ir import Graph, Op, Ref, Value

__all__ = ["ConformanceError", "check_conforms", "first_difference"]


class ConformanceError(CaptureError):
    """The captured step is another one than eager's."""


def check_conforms(captured: Graph, eager: Graph) -> None:
    """Raise ConformanceError, naming the first operator and module that differ, unless both are one step."""
    difference = first_difference(captured, eager)
    if difference:
        raise ConformanceError(
            f"the captured step is not what eager runs: {difference}",
            hint="something in it depends on more than shapes (a counter, the time, who is watching): take that out",
        )


def first_difference(captured: Graph, eager: Graph) -> str:
    """In words, where two recordings of a step part before the update; empty if they are one."""
    pairs = zip(_steps(captured), _steps(eager), strict=False)
    for ours, theirs in pairs:
        if ours != theirs:
            there, here = _told(theirs), _told(ours)
            if there == here:
                there, here = f"{there}, {_given(eager, theirs[0])},", _given(captured, ours[0])
            return f"{there} in eager, {here} captured"
    rest = len([*_steps(eager)]) - len([*_steps(captured)])
    if rest:
        return f"{abs(rest)} operators {'more' if rest > 0 else 'fewer'} in eager"
    return ""


_Step = tuple[Op, tuple[Value | None, ...]]


def _steps(graph: Graph) -> Iterator[_Step]:
    """The operators before the update, and what they return."""
    for op in graph.ops:
        if op.phase != "update":
            yield op, tuple(None if value is None else graph.values[value] for value in op.outputs)


def _told(step: _Step) -> str:
    op, results = step
    shapes = ", ".join(f"{value.dtype}{list(value.shape)}" for value in results if value is not None)
    return f"{op.target} -> {shapes} in module {op.module or '(root)'!r}{f' at {op.line}' if op.line else ''}"


def _given(graph: Graph, op: Op) -> str:
    """What an operator is called with: numbers as they are, tensors by their names or by who made them."""
    makers = {value: other for other in graph.ops for value in other.made()}

    def told(value: int) -> str:
        name, maker = graph.values[value].name, makers.get(value)
        return name or (f"%{value}" if maker is None else f"{maker.target} of {maker.module or '(root)'!r}")

    def shown(arg: object) -> str:
        if isinstance(arg, tuple):
            return f"({', '.join(map(shown, arg))})"
        return told(arg.value) if isinstance(arg, Ref) else str(arg)

    return f"given {shown((*op.args, *(value for _, value in op.kwargs)))}"
