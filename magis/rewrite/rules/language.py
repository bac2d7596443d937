"""The pattern language of rules: operators as Python expressions.

    mm(x, *a)                       all products with one left factor ``x``; ``a`` are the right factors
    cat(unary(*a), dim=d)           a concatenation of calls that differ only in their tensor
    split(mm(x, w), dim=-1)         all pieces of a split, in order
    unary(*split(x, dim=d))         equal calls on every piece of a split

A name is one tensor, equal wherever it occurs; a starred name is a list. Dimensions are negative, so that a pattern
fits matrices and batches of matrices. ``operator_forms`` defines the operators.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from magis.errors import MagisError


@dataclass(frozen=True, slots=True)
class Var:
    """A pattern variable that matches a tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class CallPattern:
    """A pattern that matches a call. ``dim`` is a negative number, the name of one, or None for operators without."""

    form: str
    args: tuple[Pattern, ...]
    dim: int | str | None = None


@dataclass(frozen=True, slots=True)
class Each:
    """A starred pattern: a list of tensors, or the pieces of a split."""

    of: Var | CallPattern


Pattern: TypeAlias = Var | CallPattern | Each

_LISTS = ("cat", "split")
"""Operators that take a list as one argument; any other operator is called once per member."""


def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. Raises MagisError for invalid text, which is a bug in the table of rules."""
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
    """Return True if the pattern matches a family: one call per member of a list."""
    if not isinstance(pattern, CallPattern) or pattern.form in _LISTS:
        return False
    return any(isinstance(arg, Each) or is_family(arg) for arg in pattern.args)


def member(pattern: Pattern, index: int) -> Pattern:
    """Return the pattern of one member of a family: ``*a`` becomes the tensor ``a.3``."""
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


# A rule is a row of ``rule_table``: two patterns (paper, TASO rules; the published implementation leaves them out).
# A rule applies where its calls are functional and the resulting graph is legal. New calls read the versions that the
# old calls read, and get one phase and the innermost common module. A new call takes the position of the first old
# one, or the first position behind it where its inputs exist; later operators move no further than that requires.
