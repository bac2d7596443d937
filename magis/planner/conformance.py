"""Checks that the captured step is the one that eager runs: operators, order and outputs, recorded on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from magis.capture import Captured, Workload, capture
from magis.capture.captured import record_eager
from magis.capture.eager_run import Heard
from magis.capture.plain_run import plain_difference
from magis.capture.refusals import BranchError
from magis.errors import CaptureError
from magis.graph import Graph, Op, Ref, Value
from magis.ops.generators import generators_kept
from magis.planner.smaller_steps import MOST_BYTES, MOST_SECONDS, sized, smaller_step
from magis.units import format_bytes

# Capture runs a step without computing it. Code that detects this, or reads data that capture does not have, may take
# another branch; then plan and prediction would be for another step than the user's.


class ConformanceError(CaptureError):
    """The captured step differs from eager's."""


def check_conforms(captured: Graph, eager: Graph) -> None:
    """Raise ConformanceError, naming the first operator and module that differ, unless two graphs are the same step.
    Strides of dimensions of size 1 may differ."""
    difference = first_difference(captured, eager, strictly=False)
    if difference:
        raise ConformanceError(
            f"the captured step is not what eager runs: {difference}",
            hint="something in it depends on more than shapes (a counter, the time, who is watching): take that out",
        )


def first_difference(
    captured: Graph, eager: Graph, *, strictly: bool = True, sides: tuple[str, str] = ("in eager", "captured")
) -> str:
    """Describe the first difference of two recorded steps before the update; empty if there is none. `sides` label the
    second graph and the first."""
    pairs = zip(_steps(captured), _steps(eager), strict=False)
    for ours, theirs in pairs:
        if ours != theirs and (strictly or _without_idle_strides(ours) != _without_idle_strides(theirs)):
            there, here = step = _describe_step(theirs), _describe_step(ours)
            if there == here:
                there, here = _describe_arguments(eager, theirs[0]), _describe_arguments(captured, ours[0])
                if there == here:
                    there, here = _describe_strides(theirs), _describe_strides(ours)
                there = f"{step[0]}, {there},"
            return f"{there} {sides[0]}, {here} {sides[1]}"
    rest = len([*_steps(eager)]) - len([*_steps(captured)])
    if rest:
        return f"{abs(rest)} operators {'more' if rest > 0 else 'fewer'} {sides[0]}"
    return ""


_Step = tuple[Op, tuple[Value | None, ...]]


def _steps(graph: Graph) -> Iterator[_Step]:
    """Yield the operators before the update, with their outputs."""
    for op in graph.ops:
        if op.phase != "update":
            yield op, tuple(None if value is None else graph.values[value] for value in op.outputs)


def _without_idle_strides(step: _Step) -> _Step:
    """Return an operator and its outputs with strides of size-1 dimensions set to 0."""
    op, results = step

    def without(value: Value) -> Value:
        pairs = zip(value.shape, value.stride, strict=True)
        return replace(value, stride=tuple(0 if size == 1 else stride for size, stride in pairs))

    return op, tuple(None if value is None else without(value) for value in results)


def _describe_step(step: _Step) -> str:
    op, results = step
    shapes = ", ".join(f"{value.dtype}{list(value.shape)}" for value in results if value is not None)
    return f"{op.target} -> {shapes} in module {op.module or '(root)'!r}{f' at {op.line}' if op.line else ''}"


def _describe_strides(step: _Step) -> str:
    return f"with strides {', '.join(str(list(value.stride)) for value in step[1] if value is not None)}"


def _describe_arguments(graph: Graph, op: Op) -> str:
    """Describe an operator's arguments: scalars by value, tensors by name or producer."""
    makers = {value: other for other in graph.ops for value in other.made()}

    def told(value: int) -> str:
        name, maker = graph.values[value].name, makers.get(value)
        return name or (f"%{value}" if maker is None else f"{maker.target} of {maker.module or '(root)'!r}")

    def shown(arg: object) -> str:
        if isinstance(arg, tuple):
            return f"({', '.join(map(shown, arg))})"
        return told(arg.value) if isinstance(arg, Ref) else str(arg)

    return f"given {shown((*op.args, *(value for _, value in op.kwargs)))}"


WHOLE = "whole step"
UNCHECKED = "not checked"


def conformance(
    work: Workload,
    captured: Captured | None,
    peak_bytes: int,
    *,
    autocast: str | None,
    start: Callable[[], None],
    heard: Heard | None,
    mends: bool,
) -> tuple[str, Captured | None]:
    """Compare a captured step with eager's operators; return the extent of the comparison, and the capture to use.

    The extent is "whole step", "batch of 2, 512 of 65536", or "not checked: <why>". `work` is on CPU tensors,
    `captured` is an existing CPU capture or None, `start` seeds the generators, `peak_bytes` is the whole step's peak,
    and `heard` holds values recorded in an eager run. If the step is too large to run, or hollow, a smaller one is
    compared. Raises CaptureError, naming the first operator and module that differ. With `mends`, where only layouts
    differ, returns a new capture that follows eager's layouts.
    """

    def looked_at(work: Workload) -> Captured:
        with generators_kept():
            start()
            return capture(*work.parts, explicit_attention=work.explicit_attention, autocast=autocast, heard=heard)

    whole = captured
    if peak_bytes <= MOST_BYTES:
        if captured is None:
            with suppress(CaptureError):  # otherwise the comparison reports the error
                whole = looked_at(work)
        size = None if whole is None or whole is captured else sized(work, whole)
        if size is None or (size.nbytes <= MOST_BYTES and size.seconds <= MOST_SECONDS):
            return _compare_with_eager(work, whole, autocast, start, WHOLE, follows=mends)
    with smaller_step(work, looked_at) as small:
        if small is None:
            most = f"{format_bytes(MOST_BYTES)} or {MOST_SECONDS:.0f} s"
            return f"{UNCHECKED}: run here, the step and smaller ones like it take more than {most}", captured
        said, _ = _compare_with_eager(small.work, small.captured, autocast, start, small.said or WHOLE, follows=False)
    return said, captured


def _compare_with_eager(
    work: Workload,
    captured: Captured | None,
    autocast: str | None,
    start: Callable[[], None],
    said: str,
    *,
    follows: bool,
) -> tuple[str, Captured | None]:
    explicit = work.explicit_attention
    expects = captured is not None and captured.expects

    def eager() -> Captured:
        start()
        return record_eager(*work.parts, explicit_attention=explicit, autocast=autocast, expects=expects)

    def anew(heard: Heard | None) -> Captured:
        start()
        return capture(*work.parts, explicit_attention=explicit, autocast=autocast, heard=heard)

    try:
        with generators_kept():
            try:
                found = captured or anew(None)
            except BranchError:
                expects = True
                found = anew(eager().heard)
            theirs = eager()
            if follows and first_difference(found.graph, theirs.graph):
                again = anew(theirs.heard)
                found = found if first_difference(again.graph, theirs.graph) else again
            check_conforms(found.graph, theirs.graph)
            start()
            other = plain_difference(theirs, *work.parts, explicit_attention=explicit, autocast=autocast)
        if other:
            raise ConformanceError(
                f"eager computes other numbers where nobody watches: {other} differs",
                hint="something in the step asks who is watching: take that out",
            )
    except ConformanceError:
        raise
    except CaptureError as error:  # running the case reports the error
        return f"{UNCHECKED}: run on the CPU for this, {said} fails: {error}", captured
    return said, found
