"""Replacement of a user's own numbers by traced numbers while a step is captured. Functions of `math`, random
functions, `int` and `float` in the user's modules, and tensor indexing are patched to accept traced numbers
(`traced_numbers.py`)."""

from __future__ import annotations

import builtins
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod
from typing import Any

import torch
from torch import Tensor

from magis.capture.number_places import NumberPlaces
from magis.capture.traced_numbers import MATH, SPECIAL, TRACE, Expression, Trace, TracedNumber, true_of

_DRAWS = {
    "random": """
        random uniform triangular betavariate expovariate gammavariate gauss lognormvariate normalvariate
        vonmisesvariate paretovariate weibullvariate
    """,
    "numpy.random": """
        beta uniform normal random random_sample rand randn exponential gamma standard_normal lognormal laplace
        triangular chisquare standard_gamma standard_exponential weibull pareto vonmises
    """,
}
"""Functions that draw a number from Python's or numpy's generator."""


@contextmanager
def tracing(
    places: NumberPlaces,
    paths: Collection[str],
    seed: int,
    *,
    far: bool,
    moved: Collection[str] = (),
    wanted: Collection[str] = (),
) -> Iterator[Trace]:
    """Replace the numbers at these paths, and those that Python draws, by traced numbers while the context lasts. The
    step changes the numbers at the paths `moved`, and Python reads numbers off the tensors named `wanted`."""
    trace = Trace(seed, far=far, pinned=moved, wanted=wanted)
    trace.look = partial(trace.note_left, places, paths)
    token = TRACE.set(trace)
    with ExitStack() as stack:
        stack.callback(TRACE.reset, token)
        watched: dict[int, Callable[..., Any]]
        watched = {id(function): partial(_of_math, name, function) for name, function in MATH.items()}
        drawing: list[Any] = []  # bound methods: a module's attribute is always one object
        for name, function in MATH.items():
            setattr(math, name, watched[id(function)])
            stack.callback(setattr, math, name, function)
        make, show = logging.getLogRecordFactory(), builtins.print  # printed numbers are not computed with
        logging.setLogRecordFactory(partial(_recorded, make))
        stack.callback(logging.setLogRecordFactory, make)
        builtins.print = lambda *items, **named: show(*map(true_of, items), **named)
        stack.callback(setattr, builtins, "print", show)
        for name in ("__getitem__", "__setitem__"):
            index = getattr(Tensor, name)
            setattr(Tensor, name, partialmethod(_indexed, trace, index, seed > 1))
            stack.callback(setattr, Tensor, name, index)
        for namespace in places.namespaces:
            for name, kind in (("int", _Int), ("float", _Float)):
                if name not in namespace:
                    namespace[name] = kind
                    stack.callback(namespace.pop, name)
        for name, functions in _DRAWS.items():
            module = sys.modules.get(name)
            for each in functions.split() if module is not None else ():
                function = getattr(module, each)
                watched[id(function)] = partial(trace.drawn, function)
                setattr(module, each, watched[id(function)])
                stack.callback(setattr, module, each, function)
                drawing.append(function)
        for path, function in places.holding([*MATH.values(), *drawing]).items():
            places.write(path, watched[id(function)])
            stack.callback(places.write, path, function)
        for path in sorted(paths):
            true = places.read(path)
            places.write(path, trace.stand_in(Expression("", (path,)), true))
            stack.callback(places.write, path, true)
        yield trace


def _of_math(name: str, function: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    """Call a function of `math`; return a traced number if it is given one."""
    trace = next((each.trace for each in given if isinstance(each, TracedNumber)), None)
    if trace is None or keywords:
        return function(*given, **keywords)
    result = function(*(each.true if isinstance(each, TracedNumber) else each for each in given))
    make = trace.made if type(result) is float else trace.read
    found = make(f"math.{name}", *given)
    return result if found is NotImplemented else found


def _recorded(make: Callable[..., logging.LogRecord], *given: Any, **named: Any) -> logging.LogRecord:
    """Make a log record with plain numbers in place of traced ones; the sixth argument holds the values of the
    message."""
    return make(*given[:5], tuple(map(true_of, given[5])), *given[6:], **named)


def _indexed(tensor: Tensor, trace: Trace, plainly: Callable[..., Any], shift: bool, index: Any, *value: Any) -> Any:
    """Index a tensor by traced numbers: by one slice of constant length, with all other dimensions whole.

    With ``shift`` the slice begins at another offset than now, so that a tensor with equal offset by chance can be told
    apart. Other slices are valid for the current numbers only, and so are slices of tensors with gradients, as
    autograd's backward has the numbers as constants.
    """
    parts = index if isinstance(index, tuple) else (index,)
    places = [at for at, each in enumerate(parts) if isinstance(each, slice) and _traced_among(each.start, each.stop)]
    if not places and not _traced_among(*value):
        return plainly(tensor, index, *value)
    bounds = [(parts[at].start, parts[at].stop) for at in places]
    whole = all(each == slice(None) for at, each in enumerate(parts) if at not in places)
    inputs: tuple[Any, ...] = ()
    simple = len(places) == 1 and whole and parts[places[0]].step is None and None not in bounds[0]
    given = (each for each in (tensor, *value) if isinstance(each, Tensor))
    simple = simple and not (torch.is_grad_enabled() and any(each.requires_grad for each in given))
    if simple and 0 <= true_of(bounds[0][0]) <= true_of(bounds[0][1]) <= tensor.shape[places[0]]:  # nothing is cut off
        inputs = start, stop = bounds[0]
        trace.read("ge", start, 0)
        trace.read("le", stop, tensor.shape[places[0]])
        length = trace.made("sub", stop, start)
        trace.outcomes.update({length.expression: length.true} if isinstance(length, TracedNumber) else {})
    else:
        found = [each for pair in bounds for each in pair if isinstance(each, TracedNumber)]
        trace.outcomes.update({each.expression: each.true for each in found})
    true = tuple(
        slice(*map(true_of, (each.start, each.stop, each.step))) if at in places else each
        for at, each in enumerate(parts)
    )
    number = value[0] if value and isinstance(value[0], TracedNumber) and type(value[0].true) is int else None
    to = value if number is None else (number.true,)
    if inputs and shift and not any(each in SPECIAL for each in map(true_of, inputs)):
        by = 1 if true_of(inputs[1]) < tensor.shape[places[0]] else -1
        window = slice(true_of(inputs[0]) + by, true_of(inputs[1]) + by)
        true = tuple(window if at in places else each for at, each in enumerate(true))
    placed = true[places[0]] if inputs else slice(0)
    with trace.hinted(inputs, (placed.start, placed.stop), number):
        return plainly(tensor, true if isinstance(index, tuple) else true[0], *to)


def _traced_among(*items: object) -> bool:
    return any(isinstance(each, TracedNumber) for each in items)


class _AsBuiltin(type):
    """Metaclass of replacements for `int` and `float` in namespaces of a user's code, which pass traced numbers on."""

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, cls.__mro__[1])

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.__mro__[1])

    def __call__(cls, item: Any = 0, *more: Any, **named: Any) -> Any:
        kind: Any = cls.__mro__[1]
        item = item.item() if isinstance(item, Tensor) and item.numel() == 1 else item
        if not isinstance(item, TracedNumber):
            return kind(item, *more, **named)
        if type(item.true) is kind:
            return item
        return item.trace.made("float", item) if kind is float else item.trace.read("int", item)


class _Int(int, metaclass=_AsBuiltin):
    pass


class _Float(float, metaclass=_AsBuiltin):
    pass
