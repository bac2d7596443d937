"""The types of a split of an operator, and the call that one part of it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from magis.errors import MagisError
from magis.graph.nodes import Arg, Op

Path: TypeAlias = tuple[int, ...]
"""Where a literal or a tensor stands in a call: position in the arguments (of the keyword arguments: after the last
positional one), then positions inside of nested tuples."""

COMBINATIONS = ("sum", "mean", "max", "min", "same")
"""How whole-size results of the parts become the result: added, averaged, the element-wise largest or smallest; or
every part already gives all of it."""


@dataclass(frozen=True, slots=True)
class Halo:
    """How an input is cut where windows overlap: a stretch of dimension `dim`, and the rows next to it on both sides.

    Rows outside of the tensor are zeros, so that all stretches have the same size. They may reach over several parts.
    """

    dim: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """How an output is put together where windows overlap: each part gives its stretch of dimension `dim` and adds to
    the rows next to it on both sides; what it gives outside of the tensor is dropped."""

    dim: int
    before: int
    after: int


Cut: TypeAlias = int | Halo | None
"""How parts take an input: a stretch of a dimension, one with a halo, or all of it (None)."""

How: TypeAlias = int | str | Overlap | None
"""How parts make up an output: joined along a dimension, one of COMBINATIONS, or rows that overlap; None where the
operator returned None."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to cut a call into n parts that run one after another and together give the call's result.

    Part i works on the i-th of n equal stretches of every cut dimension. Dimensions are counted from 0.
    """

    inputs: tuple[Cut, ...]
    """For every entry of `op.inputs()`."""
    outputs: tuple[How, ...]
    """For every entry of `op.outputs`."""
    sizes: tuple[Path, ...] = ()
    """Where the integer literals stand that a part divides by n."""
    extent: int = 1
    """What n must divide: the greatest common divisor of all cut dimensions' sizes and literals."""
    replaced: tuple[tuple[Path, int], ...] = ()
    """Where a part has another integer literal, and which: no padding where a halo has it already."""


def dimension(how: Cut | How) -> int | None:
    """The dimension that is cut or joined; None where none is."""
    if isinstance(how, Halo | Overlap):
        return how.dim
    return how if isinstance(how, int) else None


def part(op: Op, split: Split, n: int) -> Op:
    """The call of one of `n` parts: the same operator with a part's literals; ids, reads and writes as they were.

    Raises MagisError if `n` does not divide the split's extent.
    """
    if n < 1 or split.extent % n:
        raise MagisError(f"{op.target} cannot be split into {n} parts", hint=f"use a divisor of {split.extent}")
    count = len(op.args)
    args = (*op.args, *(arg for _, arg in op.kwargs))
    for path in split.sizes:
        args = _changed(args, path, lambda size: size // n if size % n == 0 else None)
    for path, literal in split.replaced:
        args = _changed(args, path, partial(_instead, literal))
    kwargs = tuple((name, arg) for (name, _), arg in zip(op.kwargs, args[count:], strict=True))
    return replace(op, args=args[:count], kwargs=kwargs)


def _instead(literal: int, _: int) -> int:
    return literal


def _changed(args: tuple[Arg, ...], path: Path, change: Callable[[int], int | None]) -> tuple[Arg, ...]:
    """The arguments with another integer at `path`."""
    head, *rest = path
    arg = args[head] if 0 <= head < len(args) else None
    new: Arg = None
    if rest and isinstance(arg, tuple):
        new = _changed(arg, tuple(rest), change)
    elif not rest and isinstance(arg, int) and not isinstance(arg, bool):
        new = change(arg)
    if new is None:
        raise MagisError(f"no integer that can be cut at {path} of the arguments {args!r}")
    return (*args[:head], new, *args[head + 1 :])


# Operators that are never split, and why.
