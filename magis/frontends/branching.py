"""Steps that go another way from batch to batch: forwards that draw on the host, branches on data.

A step that draws on the host is captured anew each time, with the generators as they are. Plans are kept by the outline
of the graph, all of it but the contents of its constants, which are fed to the step like a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from magis.capture import Captured
from magis.capture.snapshot import Snapshot
from magis.errors import CaptureError
from magis.graph import Graph, Scalar, digest, with_scalars
from magis.ops.call import ExpectationError, undone
from magis.ops.generators import HostGenerators, generator_of
from magis.runtime.steps import GraphStep

NUMBERS = "draw with torch, and compute with the tensors that it makes"


@dataclass(frozen=True, eq=False)
class Draw:
    """What one step has drawn."""

    constants: Mapping[str, Tensor]
    """By the names of the graph's inputs."""
    after: HostGenerators | None
    """Python's and numpy's generators as the step leaves them."""


def draw_of(captured: Captured, device: str) -> Draw:
    """What a captured step has drawn."""
    return Draw(constants_of(captured.graph, None, device), captured.after)


def constants_of(graph: Graph, numbers: Mapping[str, float] | None, device: str) -> dict[str, Tensor]:
    """The constants of a graph by the names of its inputs; with `numbers` those alone that hang on its scalars."""
    constants = {}
    for number, data in graph.constants.items():
        if numbers is not None and not any(isinstance(each, Scalar) for each in data):
            continue
        value = graph.values[number]
        made = torch.tensor(with_scalars(data, numbers or {}), dtype=getattr(torch, value.dtype), device=device)
        constants[value.name] = made.reshape(value.shape)
    return constants


def outline(graph: Graph) -> str:
    """A digest of all but the contents of constants."""
    return digest(replace(graph, constants={number: (0.0,) * len(data) for number, data in graph.constants.items()}))


def check_outlines(one: Graph, other: Graph) -> None:
    """Raise CaptureError where two draws differ in numbers within operators, of which every step would need a plan."""
    alike = [op.target for op in one.ops] == [op.target for op in other.ops]
    if alike and outline(one) != outline(other):
        raise CaptureError(
            "a number in an operator is one that the forward draws from Python's or numpy's random numbers, of which a"
            " step would repeat the first",
            hint=NUMBERS,
        )


# Steps that branch on data: where a batch takes another way than the captured step, eager runs that step instead.

OTHER_WAY = "a batch takes another way at a branch on data than the planned step: eager mode runs it, in eager's memory"


@dataclass(frozen=True, eq=False)
class Undo:
    """What a planned step changes before it knows that all branches go as expected."""

    step: GraphStep
    positions: tuple[int, ...]
    """Of the tensors among the step's: each batch brings others."""
    generators: tuple[torch.Generator, ...]

    def attempt(self, planned: Callable[[], Tensor], eager: Callable[[], Tensor]) -> Tensor:
        """The loss of the planned step; where a branch goes another way, that of eager's on everything as it was."""
        tensors = self.step.tensors
        memory = [tensors[position].untyped_storage() for position in self.positions]
        kept = [(storage, storage.clone()) for storage in memory]
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
    positions = (at for at, value in enumerate(graph.inputs) if graph.values[value].name in names)
    return Undo(step, tuple(positions), (generator_of(device), *step.generators.values()))
