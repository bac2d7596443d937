"""Python numbers that autograd keeps as tensors: `x * 3` makes eager keep the 3 until the backward formula has run.

Which operators do so is asked of torch, since no schema says it: the operator is called on tensors of one element, and
its autograd node looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from magis.ir.types import Op, Value

__all__ = ["Kind", "TakenNumber", "end_unread", "kept_bytes", "kinds", "lives", "takes_number"]

Kind = tuple[type, str, bool]
"""Of an argument: its Python type; for a tensor also its data type, and whether it requires a gradient."""


@dataclass(frozen=True)
class TakenNumber:
    """A call of the forward that is given a number in a tensor's place, and that autograd may keep."""

    made: int
    """Position of the operator."""
    sequence: int
    """Of its autograd node."""
    func: Any
    given: tuple[Kind, ...]
    named: tuple[tuple[str, Any], ...]
    in_place: bool


def takes_number(func: Any, args: Sequence[Any]) -> bool:
    """Whether a number stands where the operator's schema has a tensor."""
    return any(True for _ in _numbers(func, args))


def _numbers(func: Any, args: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Position and name of such arguments."""
    for position, (argument, given) in enumerate(zip(func._schema.arguments, args, strict=False)):
        if isinstance(given, (bool, int, float, complex)) and isinstance(argument.type, torch.TensorType):
            yield position, argument.name


def kinds(args: Sequence[Any]) -> tuple[Kind, ...] | None:
    """What `kept_bytes` must know of a call's positional arguments; None for one with lists or constants of torch's."""
    if not all(arg is None or isinstance(arg, (Tensor, bool, int, float, complex, str)) for arg in args):
        return None
    return tuple(_kind(arg) for arg in args)


def _kind(arg: Any) -> Kind:
    return (Tensor, str(arg.dtype)[6:], arg.requires_grad) if isinstance(arg, Tensor) else (type(arg), "", False)


@functools.lru_cache(maxsize=4096)
def kept_bytes(func: Any, given: tuple[Kind, ...], named: tuple[tuple[str, Any], ...], in_place: bool) -> int:
    """Bytes of the numbers that autograd keeps of such a call."""
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        args = [_sample(kind, first=in_place and not at) for at, kind in enumerate(given)]
        try:
            out = func(*args, **dict(named))
        except (RuntimeError, TypeError, ValueError):  # nothing that a single element of ones is good for
            return 0
        node = out.grad_fn if isinstance(out, Tensor) else None
        saved = [getattr(node, f"_saved_{name}", None) for _, name in _numbers(func, args)]
    return sum(each.nbytes for each in saved if isinstance(each, Tensor))


def _sample(kind: Kind, *, first: bool) -> Any:
    what, dtype, grad = kind
    if what is Tensor:
        tensor = torch.ones(1, dtype=getattr(torch, dtype), requires_grad=grad)
        return tensor.clone() if first else tensor
    return None if what is type(None) else what(1)


def lives(
    numbers: Sequence[TakenNumber], uses: Mapping[int, Sequence[int]], last_of_node: Mapping[int, int], end: int
) -> tuple[tuple[int, int, int], ...]:
    """First and last position, and bytes, of each number as autograd keeps it, in a step of `end` operators.

    `uses` are the positions at which a node passes its number on, `last_of_node` that of its last operator.
    """
    found = []
    for number in numbers:
        nbytes = kept_bytes(number.func, number.given, number.named, number.in_place)
        born = number.made + 1
        for use in uses.get(number.sequence, ()):
            found.append((born, use - 1, nbytes))
            born = use + 1
        found.append((born, last_of_node.get(number.sequence, end), nbytes))
    return tuple((born, last, nbytes) for born, last, nbytes in found if born <= last and nbytes)


def end_unread(number: TakenNumber, ops: Sequence[Op], values: Mapping[int, Value], deaths: Mapping[int, int]) -> int:
    """The last position before a node that no backward runs goes, with all that the forward made of its result."""
    reached = {value for value in ops[number.made].outputs if value is not None}
    for op in ops[number.made + 1 :]:
        if op.phase == "forward" and not reached.isdisjoint(op.inputs()):
            reached.update(op.made())
    return max((deaths.get(values[value].storage, len(ops) + 1) for value in reached), default=0) - 1
