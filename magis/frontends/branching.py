"""Steps that go another way from batch to batch: forwards that draw on the host.

A step that draws on the host is captured anew each time, with the generators as they are. Plans are kept by the outline
of the graph, all of it but the contents of its constants, which are fed to the step like a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from magis.capture.side_effects import WHERE
from magis.capture.snapshot import Snapshot
from magis.errors import CaptureError
from magis.graph import Graph, Scalar, digest, with_scalars


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
            hint=WHERE,
        )


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
