"""The user's own numbers that change from step to step, as inputs of a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from magis.capture.number_places import NumberPlaces
from magis.capture.traced_numbers import Expression, Trace, tracing
from magis.errors import MagisError
from magis.graph import Graph, Op, Scalar, digest, with_scalars
from magis.ops.python_objects import same
from magis.planner.subject import Subject

SPECIAL = frozenset({0, 1, -1, 2})
"""For these, torch's own code may choose other operators (a product with 1, a power of 2): they stay constants."""
_FAILURES = (MagisError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""What code may raise that is given a stand-in: one is no index, and no size."""


@dataclass(frozen=True, eq=False)
class NumberInputs:
    """The named scalars of a captured step that are computed of live numbers, and for which numbers the step holds."""

    places: NumberPlaces
    kinds: Mapping[str, tuple[type, bool]]
    """Of the numbers, by path: their types, and whether they are zero."""
    named: Mapping[str, Expression]
    outcomes: Mapping[Expression, object]
    """What Python decided by them."""
    negative: Mapping[str, bool]

    def now(self) -> dict[str, float] | None:
        """Values of the scalars; None where the step is another one for the present numbers."""
        try:
            live = {path: self.places.read(path) for path in self.kinds}
            if any((type(live[path]), live[path] == 0) != kind for path, kind in self.kinds.items()):
                return None
            if any(not same(each.value(live), then) for each, then in self.outcomes.items()):
                return None
            found = {name: each.value(live) for name, each in self.named.items()}
        except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError):
            return None  # eager will say what is wrong with them
        usual = all(
            type(value) in (int, float) and math.isfinite(value) and value not in SPECIAL
            and (value < 0) is self.negative[name]
            for name, value in found.items()
        )  # fmt: skip
        return found if usual else None


def inputs_of(traces: tuple[Trace, Trace], places: NumberPlaces, paths: Iterable[str]) -> NumberInputs | None:
    """What captures with other stand-ins agree on; None where they do not, or hold for one number alone."""
    one, other = traces
    if one.lost or other.lost or one.named != other.named or one.outcomes != other.outcomes:
        return None
    named = {name: each for each, name in one.named.items()}
    kinds = {path: (type(number), number == 0) for path in paths for number in [places.read(path)]}
    return NumberInputs(places, kinds, named, one.outcomes, {name: true < 0 for name, true in one.true.items()})


def special_paths(trace: Trace) -> set[str]:
    """Paths of the numbers because of which operators take special ones."""
    special = {name for name, true in trace.true.items() if true in SPECIAL}
    return set().union(*(each.paths() for each, name in trace.named.items() if name in special))


def with_numbers(graph: Graph, numbers: Mapping[str, float]) -> Graph:
    """The graph with these numbers as constants in place of the named scalars."""

    def filled(op: Op) -> Op:
        body = None if op.body is None else replace(op.body, graph=with_numbers(op.body.graph, numbers))
        named = tuple((name, with_scalars(arg, numbers)) for name, arg in op.kwargs)
        return replace(op, args=with_scalars(op.args, numbers), kwargs=named, body=body)

    def rounded(value: int) -> tuple[complex | Scalar, ...]:
        dtype = getattr(torch, graph.values[value].dtype)
        return tuple(torch.tensor(with_scalars(graph.constants[value], numbers), dtype=dtype).tolist())

    constants = {value: rounded(value) for value in graph.constants}
    return replace(graph, ops=tuple(map(filled, graph.ops)), constants=constants)


def with_number_inputs(
    look: Callable[[], Subject], plain: Subject, places: NumberPlaces, paths: Iterable[str]
) -> tuple[Subject, NumberInputs] | None:
    """The step as ``look`` captures it, with the numbers at ``paths`` as named scalars, and what these are computed of.

    None where it is another one than the ``plain`` one, which has the present numbers as constants, or where it is good
    for them alone. Numbers for which torch may choose other operators stay constants.
    """
    traced = partial(_traced, look, plain, places)
    left = {path for path in paths if places.has(path)}
    near = traced(left, 1, far=False) if left else None
    while near is not None and (special := special_paths(near[1])):
        left -= special
        near = traced(left, 1, far=False) if left else None
    if near is None:
        return None
    subject, trace = near
    far = traced(left, 2, far=True)
    if far is None:  # out of range
        far = traced(left, 2, far=False)
        whole = {subject.captured.graph.values[value].dtype for value in subject.captured.graph.constants}
        if far is None or any(not each.startswith(("float", "bfloat", "complex")) for each in whole):
            return None
    inputs = inputs_of((trace, far[1]), places, left)
    now = None if inputs is None else inputs.now()
    if inputs is None or now is None or subject.digest != far[0].digest:
        return None
    captured, known = subject.captured, plain.captured
    pairs = (captured.graph, known.graph), (captured.original.graph, known.original.graph)
    same = all(digest(with_numbers(traced, now)) == digest(constant) for traced, constant in pairs)
    return (subject, inputs) if same else None


def _traced(
    look: Callable[[], Subject], plain: Subject, places: NumberPlaces, paths: Iterable[str], seed: int, *, far: bool
) -> tuple[Subject, Trace] | None:
    """A capture with stand-ins; None where the code does not take these."""
    try:
        with tracing(places, paths, seed, far=far) as trace:
            subject = look()
            subject.hear(plain.captured.heard)
            _ = subject.captured
    except _FAILURES:
        return None
    return subject, trace
