"""What a split of an operator is, and the call that one part of it makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.errors import MagisError
from magis.ir.types import Arg, Op

__all__ = ["COMBINATIONS", "Path", "Split", "part"]

Path: TypeAlias = tuple[int, ...]
"""Where a literal or a tensor stands in a call: position in the arguments (of the keyword arguments: after the last
positional one), then positions inside of nested tuples."""

COMBINATIONS = ("sum", "mean", "max", "min", "same")
"""How whole-size results of the parts become the result: added, averaged, the element-wise largest or smallest; or
every part already gives all of it."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to cut a call into n parts that run one after another and together give the call's result.

    Part i works on the i-th of n equal stretches of every cut dimension. Dimensions are counted from 0.
    """

    inputs: tuple[int | None, ...]
    """For every entry of `op.inputs()`: the dimension that is cut; None: every part takes all of it."""
    outputs: tuple[int | str | None, ...]
    """For every entry of `op.outputs`: the dimension along which the parts are joined, or one of COMBINATIONS; None
    where the operator returned None."""
    sizes: tuple[Path, ...] = ()
    """Where the integer literals stand that a part divides by n."""
    extent: int = 1
    """What n must divide: the greatest common divisor of all cut dimensions' sizes and literals."""


def part(op: Op, split: Split, n: int) -> Op:
    """The call of one of `n` parts: the same operator, labelled literals divided; ids, reads and writes as they were.

    Raises MagisError if `n` does not divide the split's extent.
    """
    if n < 1 or split.extent % n:
        raise MagisError(f"{op.target} cannot be split into {n} parts", hint=f"use a divisor of {split.extent}")
    count = len(op.args)
    args = _divided((*op.args, *(arg for _, arg in op.kwargs)), split.sizes, n)
    kwargs = tuple((name, arg) for (name, _), arg in zip(op.kwargs, args[count:], strict=True))
    return replace(op, args=args[:count], kwargs=kwargs)


def _divided(args: tuple[Arg, ...], paths: tuple[Path, ...], n: int) -> tuple[Arg, ...]:
    """The arguments with the integers at `paths` divided by `n`."""
    changed = list(args)
    for path in paths:
        head, *rest = path
        arg = changed[head] if 0 <= head < len(changed) else None
        if rest and isinstance(arg, tuple):
            changed[head] = _divided(arg, (tuple(rest),), n)
        elif not rest and isinstance(arg, int) and not isinstance(arg, bool) and arg % n == 0:
            changed[head] = arg // n
        else:
            raise MagisError(f"no integer that {n} divides at {path} of the arguments {args!r}")
    return tuple(changed)
