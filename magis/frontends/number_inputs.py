"""Python numbers that change from step to step, as inputs of a captured step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from magis.capture.number_places import OFF, NumberPlaces
from magis.capture.number_tracing import tracing
from magis.capture.traced_numbers import DRAWN, READ, SPECIAL, DrawCall, Expression, Trace
from magis.errors import MagisError
from magis.graph import ITEM_SIZE, Graph, Op, Scalar, Value, digest, with_scalars
from magis.ops.generators import HostGenerators
from magis.ops.python_objects import same
from magis.planner.subject import Subject

MOST_DECIDED = 4
"""Maximum number of branches on random numbers of the host in a step with number inputs."""
_FAILURES = (MagisError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""Errors that a capture may raise on a traced number in place of a Python number, which cannot be an index or a
size."""


Tensors: TypeAlias = Callable[[Collection[str]], Mapping[str, Tensor]]
"""Returns, by name, the live tensors off which a step reads numbers."""


@dataclass(frozen=True, eq=False)
class Given:
    """Numbers, generator states and constants that one step gets in addition to its batch."""

    numbers: Mapping[str, float]
    """Values of the graph's named scalars, by name."""
    left: Mapping[str, float]
    """Numbers to store in Python objects after the step, by path."""
    after: HostGenerators | None = None
    """State of Python's and numpy's generators after the step; None if the step does not draw from them."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Constants that differ from step to step, by the names of the graph's inputs."""


@dataclass(frozen=True, eq=False)
class NumberInputs:
    """The named scalars of a captured step, how they are computed from live numbers, and for which numbers it is
    valid."""

    places: NumberPlaces
    kinds: Mapping[str, tuple[type, bool]]
    """Type of each number, and True if it is zero, by path."""
    named: Mapping[str, Expression]
    outcomes: Mapping[Expression, object]
    """Outcomes of Python's comparisons and branches on these numbers."""
    negative: Mapping[str, bool]
    draws: tuple[DrawCall, ...] = ()
    """Draws from Python's and numpy's generators, in program order."""
    reads: tuple[tuple[Callable[[Mapping[str, Tensor]], Tensor], frozenset[str]], ...] = ()
    """Functions that compute tensors from named ones so that Python reads a number off them; with the names they
    take."""
    left: Mapping[str, Expression] = field(default_factory=dict)
    """Numbers that the step stores, by path."""

    @property
    def paths(self) -> set[str]:
        """Paths of all numbers that may change between steps."""
        return {*self.kinds, *(f"{OFF}{name}" for _, names in self.reads for name in names)}

    def now(self, tensors: Tensors) -> Given | None:
        """Return the inputs of the next step, with `tensors` to read numbers off; None if the captured step is invalid
        for the current numbers. The state of the generators does not change."""
        live = tensors(sorted(set().union(*(names for _, names in self.reads)))) if self.reads else {}
        before = HostGenerators() if self.draws else None
        try:
            drawn = {f"{DRAWN}{index}": draw.again() for index, draw in enumerate(self.draws)}
            after = HostGenerators() if self.draws else None
        finally:
            if before is not None:
                before.restore()
        try:
            read = {f"{READ}{index}": make(live).item() for index, (make, _) in enumerate(self.reads)}
        except (RuntimeError, TypeError, IndexError):  # eager raises the user's error
            return None
        try:
            known = {path: self.places.read(path) for path in self.kinds}
            if any((type(known[path]), known[path] == 0) != kind for path, kind in self.kinds.items()):
                return None
            known |= {**drawn, **read}
            if any(not same(each.value(known), then) for each, then in self.outcomes.items()):
                return None
            found = {name: each.value(known) for name, each in self.named.items()}
            left = {path: each.value(known) for path, each in self.left.items()}
        except (ArithmeticError, ValueError, LookupError, AttributeError, TypeError):
            return None  # eager raises the user's error
        usual = all(
            type(value) in (int, float) and math.isfinite(value) and value not in SPECIAL
            and (value < 0) is self.negative[name]
            for name, value in found.items()
        )  # fmt: skip
        return Given(found, left, after) if usual else None

    def leave(self, numbers: Mapping[str, float]) -> None:
        """Store numbers at their paths in Python objects."""
        for path, number in numbers.items():
            self.places.write(path, number)


def inputs_of(traces: tuple[Trace, Trace], places: NumberPlaces, paths: Iterable[str]) -> NumberInputs | None:
    """Combine two captures with different traced numbers; return None if they disagree or are valid for one number
    only."""
    one, other = traces
    alike = all(getattr(one, each) == getattr(other, each) for each in ("named", "outcomes", "draws", "left"))
    alike = alike and [names for _, names in one.reads] == [names for _, names in other.reads]
    if one.lost or other.lost or not alike:
        return None
    if sum(any(path.startswith(DRAWN) for path in each.paths()) for each in one.outcomes) > MOST_DECIDED:
        return None
    named = {name: each for each, name in one.named.items()}
    kinds = {path: (type(number), number == 0) for path in paths for number in [places.read(path)]}
    negative = {name: true < 0 for name, true in one.true.items()}
    return NumberInputs(
        places, kinds, named, one.outcomes, negative, tuple(one.draws), tuple(one.reads), dict(one.left)
    )


def special_paths(trace: Trace) -> set[str]:
    """Return the paths of numbers whose scalars equal 0, 1 or another value for which torch may choose other
    operators."""
    special = {name for name, true in trace.true.items() if true in SPECIAL}
    return set().union(*(each.paths() for each, name in trace.named.items() if name in special))


def with_numbers(graph: Graph, numbers: Mapping[str, float]) -> Graph:
    """Return the graph with numbers in place of its named scalars."""

    def filled(op: Op) -> Op:
        body = None if op.body is None else replace(op.body, graph=with_numbers(op.body.graph, numbers))
        named = tuple((name, with_scalars(arg, numbers)) for name, arg in op.kwargs)
        return replace(op, args=with_scalars(op.args, numbers), kwargs=named, body=body)

    def rounded(value: int) -> tuple[complex | Scalar, ...]:
        dtype = getattr(torch, graph.values[value].dtype)
        return tuple(torch.tensor(with_scalars(graph.constants[value], numbers), dtype=dtype).tolist())

    constants = {value: rounded(value) for value in graph.constants}
    values = {**graph.values, **_moved_slices(graph, numbers)}
    return replace(graph, ops=tuple(map(filled, graph.ops)), values=values, constants=constants)


def _moved_slices(graph: Graph, numbers: Mapping[str, float]) -> dict[int, Value]:
    """Return slices by named scalars, and views of the slices, with the offsets for these numbers."""
    found: dict[int, Value] = {}
    for op in graph.ops if any(map(_sliced, graph.ops)) else ():
        given = [graph.values[value] for value in op.inputs()]
        for looks in (graph.values[value] for value in op.made()):
            base = next((each for each in given if each.storage == looks.storage), None)
            now = None if base is None else found.get(base.id, base)
            if base is None or now is None:
                continue
            moved = (now.offset - base.offset) * ITEM_SIZE[base.dtype]
            if _sliced(op):
                dim, start = (int(with_scalars(arg, numbers)) for arg in op.args[1:3])
                moved = (now.offset + start * base.stride[dim] - looks.offset) * ITEM_SIZE[base.dtype]
            if moved and looks.id not in found:
                found[looks.id] = replace(looks, offset=looks.offset + moved // ITEM_SIZE[looks.dtype])
    return found


def _sliced(op: Op) -> bool:
    return op.target == "aten.slice.Tensor" and bool(op.scalars())


def _at_constants(graph: Graph) -> bool:
    """Return True if `as_strided` with a constant offset may address a slice by a named scalar: in the backward of
    writes."""
    windows = (op for op in graph.ops if "as_strided" in op.target)
    return any(map(_sliced, graph.ops)) and any(len(op.args) > 3 and op.args[3] is not None for op in windows)


def with_number_inputs(
    look: Callable[[], Subject],
    plain: Subject,
    places: NumberPlaces,
    paths: Collection[str],
    moved: Collection[str],
    tensors: Tensors,
) -> tuple[Subject, NumberInputs] | None:
    """Capture the step with numbers as named scalars: those at ``paths``, those that the step itself changes
    (``moved``), and random numbers of the host; return it with the inputs that compute them.

    Return None if the step then differs from ``plain``, which has the current numbers as constants, or is valid for
    those alone. Numbers for which torch may choose other operators stay constants.
    """
    wanted = {path.removeprefix(OFF) for path in paths if path.startswith(OFF)}
    traced, drawn = partial(_traced, look, plain, places, moved, wanted), plain.captured.drawn or wanted
    left = {path for path in (*paths, *moved) if places.has(path)}
    near = traced(left, 1, far=False) if left or drawn else None
    while near is not None and (special := special_paths(near[1])):
        left -= special
        near = traced(left, 1, far=False) if left or drawn else None
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
    now = None if inputs is None else inputs.now(tensors)
    if inputs is None or now is None or subject.captured.drawn:
        return None
    sliced = any(map(_sliced, subject.captured.graph.ops))  # at another offset in the other capture
    both = {
        digest(with_numbers(each.captured.graph, now.numbers)) if sliced else each.digest for each in (subject, far[0])
    }
    if len(both) > 1:
        return None
    if not inputs.left.keys() >= {*moved} or _at_constants(subject.captured.graph):
        return None
    captured, known = subject.captured, plain.captured
    pairs = (captured.graph, known.graph), (captured.original.graph, known.original.graph)
    same = all(digest(with_numbers(traced, now.numbers)) == digest(constant) for traced, constant in pairs)
    return (subject, inputs) if same else None


def _traced(
    look: Callable[[], Subject],
    plain: Subject,
    places: NumberPlaces,
    moved: Collection[str],
    wanted: Collection[str],
    paths: Collection[str],
    seed: int,
    *,
    far: bool,
) -> tuple[Subject, Trace] | None:
    """Capture the step with traced numbers; return None if the code does not accept traced numbers."""
    try:
        with tracing(places, paths, seed, far=far, moved=moved, wanted=wanted) as trace:
            subject = look()
            subject.hear(plain.captured.heard)
            _ = subject.captured
    except _FAILURES:
        return None
    return subject, trace
