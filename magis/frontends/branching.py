"""Steps whose forward draws random numbers on the host, and may therefore be another graph at each step. Such a step is
captured again each time, with the current state of the generators. The cache key of its plan is the outline of the
graph: all but the contents of constants, which each step gets as inputs, like a batch."""

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
    """Return a graph's constants as tensors, by input name; with `numbers`, only the constants that contain named
    scalars."""
    constants = {}
    for number, data in graph.constants.items():
        if numbers is not None and not any(isinstance(each, Scalar) for each in data):
            continue
        value = graph.values[number]
        made = torch.tensor(with_scalars(data, numbers or {}), dtype=getattr(torch, value.dtype), device=device)
        constants[value.name] = made.reshape(value.shape)
    return constants


def outline(graph: Graph) -> str:
    """Return a digest of a graph without the contents of its constants."""
    return digest(replace(graph, constants={number: (0.0,) * len(data) for number, data in graph.constants.items()}))


def check_outlines(one: Graph, other: Graph) -> None:
    """Raise CaptureError if two captures have equal operators but different numbers in them: each step would need a
    plan."""
    alike = [op.target for op in one.ops] == [op.target for op in other.ops]
    if alike and outline(one) != outline(other):
        raise CaptureError(
            "a number in an operator is one that the forward draws from Python's or numpy's random numbers, of which a"
            " step would repeat the first",
            hint=WHERE,
        )


@contextmanager
def contents_kept(module: nn.Module, loss_fn: object) -> Iterator[None]:
    """Restore, when the block ends, tensors that module and loss hold and that are no parameters or buffers of the
    module."""
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
