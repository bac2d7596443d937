"""Steps that branch on data: where a batch takes another way than the captured step, eager runs that step instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from magis.aten.expect import ExpectationError, undone
from magis.aten.states import generator_of
from magis.backend.steps import GraphStep
from magis.capture.snapshot import Snapshot
from magis.ir import Graph

__all__ = ["Undo", "contents_kept", "undo_of"]

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


@contextmanager
def contents_kept(module: nn.Module, loss_fn: object) -> Iterator[None]:
    """Put back what the block writes into tensors that are no parameters or buffers of the module: those, captures
    exchange; others that module and loss hold are the user's own."""
    exchanged = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held = [each for _, each in Snapshot({"model": module, "loss": loss_fn}).tensors.values()]
    before = [(each, each._version, each.detach().clone()) for each in held if id(each) not in exchanged]  # noqa: SLF001
    try:
        yield
    finally:
        for tensor, version, contents in before:
            if tensor._version != version:  # noqa: SLF001
                with torch.no_grad():
                    tensor.copy_(contents)


def undo_of(graph: Graph, step: GraphStep, device: str) -> Undo | None:
    """For a step that runs a graph; None for a graph without branches on data."""
    names = undone(graph)
    if names is None:
        return None
    tensors = [
        tensor for tensor, value in zip(step.tensors, graph.inputs, strict=True) if graph.values[value].name in names
    ]
    return Undo(tuple(tensors), (generator_of(device), *step.generators.values()))
