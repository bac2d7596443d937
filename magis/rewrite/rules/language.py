"""The language in which rules are written: patterns of operators as Python expressions.

    mm(x, *a)                       every product with one and the same left factor ``x``; ``a`` are the right ones
    cat(unary(*a), dim=d)           one concatenation of calls that differ in their tensor alone
    split(mm(x, w), dim=-1)         all pieces of one split, in order
    unary(*split(x, dim=d))         the same call on every piece of a split

A bare name stands for one tensor, the same wherever it occurs; a starred one for a list. Dimensions are counted from
the last, -1, so that a pattern says the same of matrices and of batches of them. ``operator_forms`` defines the
operators.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.errors import MagisError


@dataclass(frozen=True, slots=True)
class Var:
    """A tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class CallPattern:
    """An operator. ``dim`` is a number (negative), the name of one, or None for operators without."""

    form: str
    args: tuple[Pattern, ...]
    dim: int | str | None = None


@dataclass(frozen=True, slots=True)
class Each:
    """A list: of tensors, or the pieces of a split."""

    of: Var | CallPattern


Pattern: TypeAlias = Var | CallPattern | Each

_LISTS = ("cat", "split")
"""Operators that take a list as such, where any other one is called once for each of its members."""


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. Raises MagisError for another text, which is a mistake in our table of rules."""
    try:
        tree = ast.parse(f"({text},)", mode="eval").body
    except SyntaxError as error:
        raise _wrong(text) from error
    if not isinstance(tree, ast.Tuple) or len(tree.elts) != 1:
        raise _wrong(text)
    return _pattern(tree.elts[0], text)


def _pattern(node: ast.expr, text: str) -> Pattern:
    match node:
        case ast.Name(id=name):
            return Var(name)
        case ast.Starred(value=inner):
            found = _pattern(inner, text)
            if isinstance(found, Each):
                raise _wrong(text)
            return Each(found)
        case ast.Call(func=ast.Name(id=form), args=args, keywords=keywords):
            dims = {keyword.arg: keyword.value for keyword in keywords}
            if dims.keys() - {"dim"}:
                raise _wrong(text)
            return CallPattern(form, tuple(_pattern(arg, text) for arg in args), _dim(dims.get("dim"), text))
        case _:
            raise _wrong(text)


def _dim(node: ast.expr | None, text: str) -> int | str | None:
    match node:
        case None:
            return None
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case _:
            raise _wrong(text)


def _wrong(text: str) -> MagisError:
    return MagisError(f"not a pattern: {text!r}", hint="write calls of operators on names, dim=-1 or dim=d")


def is_family(pattern: Pattern) -> bool:
    """Return True if the pattern stands for one call per member of a list."""
    if not isinstance(pattern, CallPattern) or pattern.form in _LISTS:
        return False
    return any(isinstance(arg, Each) or is_family(arg) for arg in pattern.args)


def member(pattern: Pattern, index: int) -> Pattern:
    """Return one member of a family: ``*a`` becomes the tensor ``a.3``."""
    match pattern:
        case Each(of=Var(name=name)):
            return Var(f"{name}.{index}")
        case CallPattern(form=form) if form not in _LISTS:
            return replace(pattern, args=tuple(member(arg, index) for arg in pattern.args))
        case _:
            return pattern


def calls(pattern: Pattern) -> Iterator[CallPattern]:
    """Yield every call in the pattern, the outermost first."""
    if isinstance(pattern, Each):
        yield from calls(pattern.of)
    elif isinstance(pattern, CallPattern):
        yield pattern
        for arg in pattern.args:
            yield from calls(arg)


# A rule: what it looks for, what it puts in its place, and where that is possible (paper, TASO rules).
# The published implementation leaves these rules out. Here each is a row of ``rule_table``: two patterns. Everything
# else is common to all of them: a rule applies where its calls are functional and the graph that comes out is
# legal, with the versions that the old calls met, one phase, and the innermost module that holds them all. A new
# call stands where the first old one stood, or as soon after it as its inputs exist; what follows is moved no
# further than that demands.
