"""Tensors that a step writes beside its module's: counts of a loss, what a hook adds up in a closure, a global.

Modules and batches are copied for each step, these are not. Steps that are compared find what they left there
themselves, as if they ran alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from magis.ops.held_tensors import PREFIX, look_up
from magis.planner.subject import Subject


class SharedTensors:
    """Keeps, for each step that runs `within`, what it leaves in ``tensors``; a step's first run begins with what was
    there at the start."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._first = _contents(tensors)
        self._left: dict[object, dict[str, Tensor]] = {}

    @contextmanager
    def within(self, step: object) -> Iterator[None]:
        """Give ``step`` its own contents for the block, and put those of the start back behind it."""
        self._fill(self.left_by(step))
        try:
            yield
            self._left[step] = _contents(self._tensors)
        finally:
            self._fill(self._first)

    def left_by(self, step: object) -> dict[str, Tensor]:
        """Contents by name, as the last block of ``step`` left them."""
        return self._left.get(step, self._first)

    def _fill(self, contents: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(contents[name])


def shared_tensors(subject: Subject) -> SharedTensors:
    """What the subject's step writes and its modules do not own."""
    (graph, cached), holders = (subject.captured.graph, subject.captured.cached), subject.holders
    written = {storage for op in graph.ops for storage, _ in op.writes}
    names = (value.name for value in map(graph.values.__getitem__, graph.inputs) if value.storage in written)
    return SharedTensors(
        {
            name: cached[name] if name in cached else look_up(holders, name)
            for name in names
            if name in cached or name.startswith(PREFIX)
        }
    )


def _contents(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
