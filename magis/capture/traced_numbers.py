"""Tracing of the user's own numbers through a capture: an annealed temperature, the weight of a loss.

During a capture such a number is a traced number: a float with a unique value. Python arithmetic on it returns a traced
number that knows its expression; an operator argument with such a value becomes a named scalar. Outcomes of Python code
that branches on it (comparisons, `int`, dictionary keys) are recorded: the capture is valid as long as live numbers
give equal outcomes. Numbers read by C code are constants, which differ in a second capture.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter

from magis.capture.contents import made_again
from magis.capture.number_places import NumberPlaces
from magis.graph import NUMBER, Arg, Scalar
from magis.ops.generators import HostGenerators
from magis.ops.operators import name_of, op_info

SPECIAL = frozenset({0, 1, -1, 2})
"""Numbers for which torch may choose other operators (a product with 1, a power of 2): they stay constants."""
MOST_PARTS = 64
"""Maximum number of nodes of an expression: a number that a loop updates is not traced further."""
_SHAPELESS = """
    full full_like new_full fill scalar_tensor addmm baddbmm addbmm addmv addr masked_fill native_layer_norm
    native_batch_norm native_group_norm native_dropout bernoulli uniform normal softplus softplus_backward celu
    huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward l1_loss rms_norm
    native_layer_norm_backward native_batch_norm_backward native_group_norm_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
"""
"""Operators, besides element-wise ones, whose result shapes do not depend on number arguments."""


# -- expressions ----------------------------------------------------------------------------------------------------

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY = ("neg", "pos", "abs")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_READ: dict[str, Callable[..., Any]] = {
    "bool": bool, "int": int, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "float": float,
    "hash": hash, "repr": repr, "str": str, "format": format, "round": round,
    "as_integer_ratio": lambda x: x.as_integer_ratio(), "is_integer": lambda x: float(x).is_integer(),
    "hex": lambda x: float(x).hex(),
}  # fmt: skip
MATH = {name: function for name, function in vars(math).items() if callable(function) and not name.startswith("_")}
_IN_TORCH: dict[str, Callable[..., Any]] = {
    "-x": operator.neg, "1-x": lambda x: 1 - x, "x-1": lambda x: x - 1, "x+1": lambda x: x + 1,
    "1/x": lambda x: 1 / x, "1/(1-x)": lambda x: 1 / (1 - x), "x*x": lambda x: x * x, "2*x": lambda x: 2 * x,
    "sqrt(x)": math.sqrt,
}  # fmt: skip
"""Functions that torch applies to a number before it calls an operator: scales of a dropout, derivatives."""
DRAWN, READ = "draw:", "read:"
"""Prefixes of the paths of drawn numbers, and of numbers that Python reads off tensors."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_BINARY, *_UNARY, *_COMPARED)},
    **_READ,
    **_IN_TORCH,
    **{f"math.{name}": function for name, function in MATH.items()},
}


@dataclass(frozen=True)
class Expression:
    """The computation of a number: a function of expressions and constants, or the number at a path."""

    function: str
    operands: tuple[Any, ...]
    parts: int = 1
    constants: str = ""
    """Constants among the operands as text, as 1 and 1.0 are equal."""

    def value(self, live: Mapping[str, float]) -> Any:
        """Return the value of the expression, given the numbers at its paths. Raises the errors of its function."""
        if not self.function:
            return live[self.operands[0]]
        operands = (each.value(live) if isinstance(each, Expression) else each for each in self.operands)
        return _FUNCTIONS[self.function](*operands)

    def paths(self) -> set[str]:
        """Return the paths of the numbers in the expression."""
        if not self.function:
            return {self.operands[0]}
        return set().union(*(each.paths() for each in self.operands if isinstance(each, Expression)))


# -- stand-ins ------------------------------------------------------------------------------------------------------


class TracedNumber(float):
    """A traced number: torch gets a float with a unique value, Python's operators use the true value."""

    __slots__ = ("expression", "trace", "true")
    __array_ufunc__ = None  # else numpy would read the float unseen
    trace: Trace
    expression: Expression
    true: Any
    """The true value, a float or an int."""

    def _made(self, name: str, *others: object) -> Any:
        return self.trace.made(name, self, *others)

    def _turned(self, name: str, other: object) -> Any:
        return self.trace.made(name, other, self)

    def _read(self, name: str, *others: object) -> Any:
        return self.trace.read(name, self, *others)

    def __pow__(self, other: object, modulus: object = None) -> Any:
        return self._made("pow", other) if modulus is None else NotImplemented

    def __round__(self, digits: Any = None) -> Any:
        return self._read("round") if digits is None else self._made("round", digits)

    def __divmod__(self, other: object) -> Any:
        return self._made("floordiv", other), self._made("mod", other)

    def __rdivmod__(self, other: object) -> Any:
        return self._turned("floordiv", other), self._turned("mod", other)

    def __deepcopy__(self, _known: object) -> TracedNumber:
        return self

    def __copy__(self) -> TracedNumber:
        return self

    def __hash__(self) -> int:
        return int(self._read("hash"))


for _name in _BINARY:
    if _name != "pow":
        setattr(TracedNumber, f"__{_name}__", partialmethod(TracedNumber._made, _name))
    setattr(TracedNumber, f"__r{_name}__", partialmethod(TracedNumber._turned, _name))
for _name in _UNARY:
    setattr(TracedNumber, f"__{_name}__", partialmethod(TracedNumber._made, _name))
for _name in _COMPARED:
    setattr(TracedNumber, f"__{_name}__", partialmethod(TracedNumber._read, _name))
for _name in ("bool", "int", "trunc", "floor", "ceil", "float", "repr", "str", "format"):
    setattr(TracedNumber, f"__{_name}__", partialmethod(TracedNumber._read, _name))
for _name in ("as_integer_ratio", "is_integer", "hex"):
    setattr(TracedNumber, _name, partialmethod(TracedNumber._read, _name))


@dataclass(frozen=True)
class DrawCall:
    """A call that draws a random number."""

    function: Callable[..., Any]
    given: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def again(self) -> float:
        """Draw the next number."""
        return float(self.function(*self.given, **dict(self.keywords)))


class Trace:
    """The traced numbers of one capture: near the true numbers, or `far` from them, which reveals unseen rounding."""

    def __init__(self, seed: int, *, far: bool, pinned: Collection[str] = (), wanted: Collection[str] = ()) -> None:
        self._far = far
        self._wanted = frozenset(wanted)
        """Names of the tensors off which read numbers become inputs."""
        self._pinned = frozenset(pinned)
        """Paths of numbers that stay inputs even if an operator takes them as a `SPECIAL` constant."""
        self._random = random.Random(seed)  # noqa: S311 (numbers that nobody else has, no secret)
        self._known: dict[float, tuple[Expression, float]] = {}
        self._made: dict[float, tuple[Expression, float]] = {}
        self.outcomes: dict[Expression, object] = {}
        self.named: dict[Expression, str] = {}
        """Names of the scalars for numbers that operators take."""
        self.true: dict[str, float] = {}
        """Current values of the scalars."""
        self.draws: list[DrawCall] = []
        """Draws of the step from Python's and numpy's generators, in order."""
        self._bounds: tuple[Any, ...] = ()
        self._window: tuple[int, ...] = ()
        self._hint: TracedNumber | None = None
        self.reads: list[tuple[Callable[[Mapping[str, Tensor]], Tensor], frozenset[str]]] = []
        """Functions that recompute tensors off which Python reads a number from named tensors; with their names."""
        self.left: dict[str, Expression] = {}
        """Expressions of the numbers that the step stores, by path."""
        self.look: Callable[[], None] = lambda: None
        """Records the numbers that the step stores, at its end."""
        self.lost = ""
        """Reason why the capture is valid for the current numbers only; empty if it is not."""

    def stand_in(self, expression: Expression, true: float) -> TracedNumber:
        """Return a traced number with the sign of the true one. If not `far`, it is closer to 0 by more than rounding
        to half precision, so that a share stays a share."""
        shift = (1 + self._random.random()) * 2.0**-4
        value = (true or 1.0) * (shift if true == 0 else 1 - shift)
        value = value + math.copysign(1000 * (1 + shift), value) if self._far else value
        made = float.__new__(TracedNumber, value)
        made.trace, made.expression, made.true = self, expression, true
        self._made[value] = expression, true
        self._note_float(value, expression, true)
        return made

    def _note_float(self, value: float, expression: Expression, true: float) -> None:
        """Record the float of an expression, and the floats that torch's own code may compute from it."""
        self._known[value] = expression, true
        for name, function in _IN_TORCH.items():
            try:
                other, meant = function(value), function(true)
            except (ArithmeticError, ValueError):
                continue
            self._known.setdefault(other, (Expression(name, (expression,), expression.parts + 1), meant))

    def made(self, name: str, *operands: Any) -> Any:
        """Return a function's traced result; the plain one if it is untraceable, NotImplemented for other operands."""
        plain, expression = self._applied(name, operands)
        if expression is None:
            return plain
        if type(plain) not in (int, float) or not math.isfinite(plain) or expression.parts > MOST_PARTS:
            self.lost = self.lost or f"{name} makes another kind of number of it"
            return plain
        return self.stand_in(expression, plain)

    def read(self, name: str, *operands: Any) -> Any:
        """Return the plain result of a function, recorded as an outcome that later steps must repeat."""
        plain, expression = self._applied(name, operands)
        if expression is not None:
            self.outcomes[expression] = plain
        return plain

    def _applied(self, name: str, operands: tuple[Any, ...]) -> tuple[Any, Expression | None]:
        if not all(isinstance(each, TracedNumber) or type(each) in (int, float, bool, str) for each in operands):
            return NotImplemented, None
        plain = _FUNCTIONS[name](*(each.true if isinstance(each, TracedNumber) else each for each in operands))
        parts = tuple(each.expression if isinstance(each, TracedNumber) else each for each in operands)
        size = 1 + sum(each.parts for each in parts if isinstance(each, Expression))
        return plain, Expression(name, parts, size, repr([each for each in parts if not isinstance(each, Expression)]))

    def begin(self) -> None:
        """Forget draws, reads, outcomes and stored numbers of an earlier run of the step."""
        for found in (self.draws, self.reads, self.left, self.outcomes, self.named, self.true):
            found.clear()

    def drawn(self, function: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
        """Draw a number and return it as a traced number."""
        number = function(*given, **keywords)
        self.draws.append(DrawCall(function, given, tuple(keywords.items())))
        if type(number) is not float or any(isinstance(each, TracedNumber) for each in given):
            self.lost = self.lost or "the step draws what is no number, or by another number"
            return number
        return self.stand_in(Expression("", (f"{DRAWN}{len(self.draws) - 1}",)), number)

    def read_off(self, tensor: Tensor, sources: frozenset[str], number: float) -> TracedNumber | None:
        """Return a traced number for one that Python reads off a tensor; None if it is a constant."""
        made = made_again(tensor)
        if made is None or not sources or not sources <= self._wanted:
            return None
        self.reads.append((made, sources))
        return self.stand_in(Expression("", (f"{READ}{len(self.reads) - 1}",)), number)

    @contextmanager
    def hinted(self, bounds: tuple[Any, ...], window: tuple[int, ...], number: object) -> Iterator[None]:
        """Use named scalars for a slice with these bounds or a tensor of this integer; unused bounds are constants."""
        self._bounds, self._window, self._hint = bounds, window, number if isinstance(number, TracedNumber) else None
        waiting = [each for each in (*bounds, self._hint) if isinstance(each, TracedNumber)]
        try:
            yield
        finally:
            left = [each for each in waiting if each.expression not in self.named]
            self.outcomes.update({each.expression: each.true for each in left})
            self._bounds, self._window, self._hint = (), (), None

    def slice_args(self, target: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Return an operator's arguments; for a slice with traced bounds, with named scalars as bounds."""
        if target != "aten.slice.Tensor" or not self._bounds or args[2:4] != self._window:
            return args
        named = (self._whole(each) if isinstance(each, TracedNumber) else each for each in self._bounds)
        return (*args[:2], *named, *args[4:])

    def _whole(self, number: TracedNumber) -> int | Scalar:
        if number.true in SPECIAL:
            self.outcomes[number.expression] = number.true
            return int(number.true)
        name = self.named.setdefault(number.expression, f"{NUMBER}{len(self.named)}")
        self.true[name] = number.true
        return Scalar(name)

    def explains(self, before: HostGenerators) -> bool:
        """Return True if the recorded draws alone explain the generators' state since `before`."""
        after = HostGenerators()
        before.restore()
        for draw in self.draws:
            draw.again()
        same = not after.moved()
        after.restore()
        return same

    def note_left(self, places: NumberPlaces, paths: Iterable[str]) -> None:
        """Record the numbers at these paths at the end of the step."""
        for path in paths:
            found = places.read(path)
            if not isinstance(found, TracedNumber):
                self.lost = self.lost or f"the step leaves another number at {path}"
            elif found.expression != Expression("", (path,)):
                self.left[path] = found.expression

    def scalar(self, value: float, target: str) -> float | Scalar:
        """Return the argument of an operator as a named scalar, or as a constant."""
        known = self._known.get(value) or self._quotient(value)
        if known is None:
            return float(value)
        expression, number = known
        stays_input = all(path in self._pinned or path.startswith((DRAWN, READ)) for path in expression.paths())
        if number in SPECIAL and stays_input:
            self.outcomes[expression] = number
            return number
        if not (op_info(target).elementwise or name_of(target) in _SHAPELESS.split()):
            self.lost = self.lost or f"{target} takes it"
        return self._named(value, *known)

    def data(self, numbers: tuple[complex, ...], dtype: torch.dtype) -> tuple[complex | Scalar, ...]:
        """Return the elements of a tensor that Python made from numbers, with named scalars for traced numbers."""
        if self._hint is not None and numbers == (self._hint.true,) and type(self._hint.true) is int:
            return (self._whole(self._hint),)
        made: dict[Any, tuple[Expression, float]] = {}
        if dtype.is_floating_point:  # the traced numbers as the tensor holds them, rounded
            with _disable_current_modes():
                rounded = torch.tensor([*self._made], dtype=dtype).tolist()
            made = dict(zip(rounded, self._made.values(), strict=True))
        found = [(number, made.get(number) if isinstance(number, float) else None) for number in numbers]
        return tuple(number if known is None else self._named(number, *known) for number, known in found)

    def _quotient(self, value: float) -> tuple[Expression, float] | None:
        """Return the expression of a traced number divided by an integer, as torch does for a mean; None if no
        match."""
        for made, (expression, true) in self._made.items() if value else ():
            parts = round(made / value) if abs(made / value) < 2**31 else 0
            if parts > 1 and made / parts == value:
                return Expression("truediv", (expression, parts), expression.parts + 1, repr([parts])), true / parts
        return None

    def _named(self, value: Any, expression: Expression, true: float) -> Scalar:
        name = self.named.setdefault(expression, f"{NUMBER}{len(self.named)}")
        if name not in self.true:
            self.true[name] = true
            self._note_float(value, expression, true)  # torch may compute with this float
        return Scalar(name)

    def known(self, value: object) -> bool:
        """Return True if a float is the value of a traced number."""
        return type(value) is float and value in self._known


TRACE: ContextVar[Trace | None] = ContextVar("numbers that are traced", default=None)


def begun() -> Trace | None:
    """Return the trace of the current capture, cleared for a new run of the step; None without tracing."""
    trace = TRACE.get()
    if trace is not None:
        trace.begin()
    return trace


def traced_among(given: Any) -> frozenset[str]:
    """Return the source of contents computed from traced numbers among arguments; empty if there are none."""
    trace = TRACE.get()
    return frozenset({NUMBER}) if trace is not None and any(map(trace.known, tree_iter(given))) else frozenset()


def traced_within(tensor: Tensor) -> frozenset[str]:
    """Return the source of a tensor that Python has just made from traced numbers; empty if there are none."""
    trace = TRACE.get()
    if trace is None or not tensor.is_floating_point():
        return frozenset()
    with _disable_current_modes():
        data = tuple(tensor.flatten().tolist())
    named = (each for each in trace.data(data, tensor.dtype) if isinstance(each, Scalar))
    return frozenset({NUMBER} if any(named) else ())


def trace_read(tensor: Tensor, sources: frozenset[str], read: Callable[[Tensor], Any]) -> TracedNumber | None:
    """Return a traced number for one that Python reads off a tensor; None if it is a constant."""
    trace = TRACE.get()
    if trace is None or tensor.numel() != 1 or tensor.dtype == torch.bool or tensor.is_complex():
        return None
    with _disable_current_modes():
        number = read(tensor)
    return trace.read_off(tensor, sources, number)


def true_of(item: Any) -> Any:
    """Return the true value of a traced number; any other object unchanged."""
    return item.true if isinstance(item, TracedNumber) else item


def none_traced(sources: frozenset[str]) -> frozenset[str]:
    """Return the sources without that of traced numbers, which are lost where Python reads a tensor made from them."""
    trace = TRACE.get()
    if trace is not None and NUMBER in sources:
        trace.lost = "Python reads a tensor that is made of it"
    return sources - {NUMBER}
