"""Steps that branch on data: where a batch takes another way than the captured step, eager runs that step instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from magis.aten.expect import ExpectationError, undone
from magis.aten.states import generator_of
from magis.backend.steps import GraphStep
from magis.ir import Graph

__all__ = ["Undo", "undo_of"]

OTHER_WAY = "a batch takes another way at a branch on data than the planned step: eager mode runs it, in eager's memory"


@dataclass(frozen=True, eq=False)
class Undo:
    """What a planned step changes before it knows that all branches go as expected."""

    tensors: tuple[Tensor, ...]
    generators: tuple[torch.Generator, ...]

    def attempt(self, planned: Callable[[], Tensor], eager: Callable[[], Tensor]) -> Tensor:
        """The loss of the planned step; where a branch goes another way, that of eager's on everything as it was."""
        kept = [(tensor.untyped_storage(), tensor.untyped_storage().clone()) for tensor in self.tensors]
        states = [(generator, generator.get_state()) for generator in self.generators]
        try:
            return planned()
        except ExpectationError:
            for storage, before in kept:
                storage.copy_(before)
            for generator, state in states:
                generator.set_state(state)
        warnings.warn(OTHER_WAY, stacklevel=4)
        return eager()


def undo_of(graph: Graph, step: GraphStep, device: str) -> Undo | None:
    """For a step that runs a graph; None for a graph without branches on data."""
    names = undone(graph)
    if names is None:
        return None
    tensors = [
        tensor for tensor, value in zip(step.tensors, graph.inputs, strict=True) if graph.values[value].name in names
    ]
    return Undo(tuple(tensors), (generator_of(device), *step.generators.values()))
