"""Functional variants of calls: without in-place writes and without running statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from torch._ops import OpOverload

from magis.graph import Arg, Op, Ref, Value
from magis.ops.call import resolve
from magis.ops.operators import op_info


def plain_form(op: Op) -> tuple[Op, int | None]:
    """Return the functional variant of a call, without running statistics, and the value it overwrites or None."""
    info, args = op_info(op.target), op.args
    statistics = [args[at] for at in info.undeclared_writes(args)]
    if statistics and all(isinstance(arg, Ref) for arg in statistics):
        return replace(op, args=info.without_statistics(args)), None
    plain = info.functional_form(op.target)
    if plain is not None and args and isinstance(args[0], Ref):
        return replace(op, target=plain), args[0].value
    in_place = info.in_place_form(op.target)
    if in_place is not None:  # several functional variants may share one in-place variant
        return replace(op, target=info.functional_form(in_place) or op.target), None
    keyword = info.keyword or info.out
    over = dict(op.kwargs).get(keyword) if info.out and op.target.endswith(f".{info.out}") else None
    if isinstance(over, Ref):
        target = f"{op.target.removesuffix(info.out)}default"
        return replace(op, target=target, kwargs=tuple(pair for pair in op.kwargs if pair[0] != keyword)), over.value
    return op, None


def commutes(op: Op, values: Mapping[int, Value]) -> bool:
    """Return True if swapping the call's two tensors does not change a bit of the result."""
    info = op_info(op.target)
    if not info.commutative or op.kwargs or len(op.args) != 2 or not all(isinstance(arg, Ref) for arg in op.args):
        return False
    return info.may_change_place(op.target, op.args, op.kwargs, dtype=values[op.inputs()[0]].dtype)


def written(op: Op) -> list[int]:
    """Return the value ids that a call writes, by its operator's schema."""
    spared, kwargs = op_info(op.target).spared(dict(op.kwargs)), dict(op.kwargs)
    found: list[int] = []
    for position, name in _written_arguments(resolve(op.target)):
        if position != spared:
            found += refs(op.args[position] if position < len(op.args) else kwargs.get(name))
    return found


@cache
def _written_arguments(overload: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that the operator's schema marks as written."""
    arguments = enumerate(overload._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def refs(arg: Arg) -> list[int]:
    """Return the value ids in an argument, in order."""
    if isinstance(arg, tuple):
        return [value for item in arg for value in refs(item)]
    return [arg.value] if isinstance(arg, Ref) else []


def text_of(op: Op) -> str:
    """Return a call's arguments as text, with "%" for every tensor."""
    return f"{_masked(op.args)} {[(name, _masked(arg)) for name, arg in op.kwargs]}"


def _masked(arg: Arg) -> str:
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_masked, arg))}]"
    return "%" if isinstance(arg, Ref) else repr(arg)
