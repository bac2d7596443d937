"""How long eager keeps the Python numbers of a forward for its backward: to the node's last operator, or its death."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from magis.graph import Op, Value
from magis.ops.eager_only import Kind, TakenNumber, end_unread, lives

_ALIVE = -1


class _Token:
    """Lies in what autograd keeps beside a node, and dies with it."""


class Numbers:
    """The numbers that a step's forward hands to autograd; ``ran`` grows by the operators that run."""

    def __init__(self, ran: Sequence[Op]) -> None:
        self._ran = ran
        self._taken: list[TakenNumber] = []
        self._uses: dict[int, list[int]] = {}  # positions at which an autograd node passes its number on
        self._last_of_node: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # of nodes that may die unread: the last position before
        self._watched: dict[int, weakref.ref[_Token]] = {}
        self._fresh: tuple[weakref.ref[Tensor], int] | None = None

    def taken(
        self, func: Any, given: tuple[Kind, ...], named: Any, sequence: int, out: Any, *, at: int, in_place: bool
    ) -> None:
        """The call at a position of the forward, whose node has this number, was given Python numbers."""
        if not torch.is_grad_enabled() or not any(grad for _, _, grad in given):
            return
        self._taken.append(TakenNumber(at, sequence, func, given, named, in_place))
        # Torch makes a view's node anew where somebody asks for it.
        if isinstance(out, Tensor) and not out._is_view():
            self._fresh = weakref.ref(out), sequence

    def watch(self) -> None:
        """Watch the node that the last call's result got once that was over."""
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
        """The node passes its number on to the operator at a position of the backward."""
        self._uses.setdefault(sequence, []).append(position)

    def ran(self, sequence: int, position: int) -> None:
        """The operator at a position of the backward is the node's."""
        self._last_of_node[sequence] = position

    def lives(
        self, ops: Sequence[Op], values: Mapping[int, Value], deaths: Mapping[int, int]
    ) -> tuple[tuple[int, int, int], ...]:
        """Lives, as first and last position, and bytes, in the step so far."""
        ends = {}
        for number in self._taken:
            end = self._ends.get(number.sequence)
            if end is None:  # its node could not be watched: it goes with all that was made of its result
                end = end_unread(number, ops, values, deaths)
            ends[number.sequence] = len(ops) if end == _ALIVE else end
        return lives(self._taken, self._uses, {**ends, **self._last_of_node}, len(ops))
