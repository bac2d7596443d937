"""Python numbers that autograd saves as tensors: `x * 3` makes eager keep the 3 until the backward formula has run. No
schema says which operators do so: torch is asked, by a call on one-element tensors whose autograd node is inspected. A
saved number lives until its node's last operator, or until the node dies."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from magis.graph import Op, Value

Kind = tuple[type, str, bool]
"""Python type of an argument; for a tensor also its dtype, and True if it requires a gradient."""
_ALIVE = -1


@dataclass(frozen=True)
class _Taken:
    """An operator call of the forward with a Python number as a tensor argument, which autograd may save."""

    made: int
    """Position of the operator."""
    sequence: int
    """Sequence number of its autograd node."""
    call: tuple[Any, ...]
    """Arguments of `_kept_bytes`."""


class _Token:
    """Object in an autograd node's metadata, which dies with the node."""


class Numbers:
    """Python numbers that a step's forward passes to autograd; ``ran`` is the growing list of operators."""

    def __init__(self, ran: Sequence[Op]) -> None:
        self._ran = ran
        self._taken: list[_Taken] = []
        self._uses: dict[int, list[int]] = {}  # positions where a node passes on its number
        self._last_of_node: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # last position before the death of an unread node
        self._watched: dict[int, weakref.ref[_Token]] = {}
        self._fresh: tuple[weakref.ref[Tensor], int] | None = None

    def taken(
        self, func: Any, given: tuple[Kind, ...], named: Any, sequence: int, out: Any, *, at: int, in_place: bool
    ) -> None:
        """Record a call of the forward with Python numbers, by its position and its autograd node's sequence number."""
        if not torch.is_grad_enabled() or not any(grad for _, _, grad in given):
            return
        self._taken.append(_Taken(at, sequence, (func, given, named, in_place)))
        # Torch creates a view's node again on access.
        if isinstance(out, Tensor) and not out._is_view():
            self._fresh = weakref.ref(out), sequence

    def watch(self) -> None:
        """Start to watch the autograd node of the last call's result, once the call has returned."""
        if self._fresh is None:
            return
        (result, sequence), self._fresh = self._fresh, None
        tensor = result()
        if tensor is None:
            self._ends[sequence] = len(self._ran) - 1
            return
        tensor._fix_weakref()  # type: ignore[attr-defined]
        node: Any = tensor.grad_fn
        if node is None or node._sequence_nr() != sequence:
            return
        token = node.metadata[self] = _Token()
        self._ends[sequence] = _ALIVE
        ends, ran = self._ends, self._ran

        def died(_reference: object) -> None:
            ends[sequence] = len(ran) - 1

        self._watched[sequence] = weakref.ref(token, died)

    def used(self, sequence: int, position: int) -> None:
        """Record that an autograd node passes its saved number to the operator at a position of the backward."""
        self._uses.setdefault(sequence, []).append(position)

    def ran(self, sequence: int, position: int) -> None:
        """Record that an autograd node runs the operator at a position of the backward."""
        self._last_of_node[sequence] = position

    def lives(
        self, ops: Sequence[Op], values: Mapping[int, Value], deaths: Mapping[int, int]
    ) -> tuple[tuple[int, int, int], ...]:
        """Return first position, last position and bytes of each number that autograd saves, in the step so far."""
        found = []
        for number in self._taken:
            born, nbytes = number.made + 1, _kept_bytes(*number.call)
            for use in self._uses.get(number.sequence, ()):
                found.append((born, use - 1, nbytes))
                born = use + 1
            end = self._last_of_node.get(number.sequence, self._ends.get(number.sequence))
            if end is None:  # unwatched node: dies with all results derived from its own
                end = _end_unread(number.made, ops, values, deaths)
            found.append((born, len(ops) if end == _ALIVE else end, nbytes))
        return tuple((born, last, nbytes) for born, last, nbytes in found if born <= last and nbytes)


def _end_unread(made: int, ops: Sequence[Op], values: Mapping[int, Value], deaths: Mapping[int, int]) -> int:
    """Return the last position before the death of a node that no backward runs: all results derived from it are
    dead."""
    reached = set(ops[made].made())
    for op in ops[made + 1 :]:
        if op.phase == "forward" and not reached.isdisjoint(op.inputs()):
            reached.update(op.made())
    return max((deaths.get(values[value].storage, len(ops) + 1) for value in reached), default=0) - 1


def takes_number(func: Any, args: Sequence[Any]) -> bool:
    """Return True if an operator is given a Python number for a tensor argument of its schema."""
    return any(True for _ in _names_of_numbers(func, args))


def _names_of_numbers(func: Any, args: Sequence[Any]) -> Iterator[str]:
    """Yield the names of tensor arguments that are given a Python number."""
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if isinstance(given, (bool, int, float, complex)) and isinstance(argument.type, torch.TensorType):
            yield argument.name


def kinds(args: Sequence[Any]) -> tuple[Kind, ...] | None:
    """Return the kinds of a call's positional arguments; None if one is a list or a torch constant."""
    if not all(arg is None or isinstance(arg, (Tensor, bool, int, float, complex, str)) for arg in args):
        return None
    return tuple(
        (Tensor, str(arg.dtype)[6:], arg.requires_grad) if isinstance(arg, Tensor) else (type(arg), "", False)
        for arg in args
    )


@functools.lru_cache(maxsize=4096)
def _kept_bytes(func: Any, given: tuple[Kind, ...], named: tuple[tuple[str, Any], ...], in_place: bool) -> int:
    """Return the bytes of the numbers that autograd saves for a call."""
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        args = [_sample(kind, first=in_place and not at) for at, kind in enumerate(given)]
        try:
            out = func(*args, **dict(named))
        except (RuntimeError, TypeError, ValueError):  # a single one is no valid argument
            return 0
        node = out.grad_fn if isinstance(out, Tensor) else None
        saved = [getattr(node, f"_saved_{name}", None) for name in _names_of_numbers(func, args)]
    return sum(each.nbytes for each in saved if isinstance(each, Tensor))


def _sample(kind: Kind, *, first: bool) -> Any:
    what, dtype, grad = kind
    if what is Tensor:
        tensor = torch.ones(1, dtype=getattr(torch, dtype), requires_grad=grad)
        return tensor.clone() if first else tensor
    return None if what is type(None) else what(1)
