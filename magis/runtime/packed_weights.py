"""Packing of weights that a graph needs adjacent in memory (``magis.rewrite.rules.merged_weights``), before a step. The
parameters keep their identity, shape and values; their data becomes a view of a common storage, as after
`flatten_parameters` of torch's RNNs. Saving, loading and optimizing them works as before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from magis.errors import MagisError
from magis.graph import Graph, Value

MERGED = "merged"
"""Prefix, up to the colon, of the names of graph inputs that merge several parameters."""


def pack_weights(graph: Graph, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move parameters that a graph needs adjacent into one storage; return the merged weights by name. ``known`` holds
    the parameters by name. Parameters that are adjacent already are not moved; moving takes additional memory for one
    merged weight at a time."""
    found = {}
    for merged in merged_inputs(graph):
        parts = _parts(graph, merged)
        whole = _already_packed(merged, {key: known[key] for key in parts}, parts)
        if whole is None:
            some = known[next(iter(parts))]
            whole = torch.empty(merged.shape, dtype=some.dtype, device=some.device)
            with torch.no_grad():
                for name, part in parts.items():
                    window = whole.as_strided(part.shape, part.stride, part.offset)
                    window.copy_(known[name])
                    known[name].set_(window)  # type: ignore[call-overload]
        found[merged.name] = whole
    return found


def check_places(graph: Graph, tensors: Sequence[Tensor]) -> None:
    """Raise MagisError if a parameter is no longer part of its merged weight: after a move to a device, or to the
    storage of another step. ``tensors`` are those of ``graph.inputs``."""
    known = {graph.values[number].name: tensor for number, tensor in zip(graph.inputs, tensors, strict=True)}
    for merged in merged_inputs(graph):
        whole = known[merged.name]
        for name, part in _parts(graph, merged).items():
            if known[name].data_ptr() != whole.data_ptr() + part.offset * whole.element_size():
                raise MagisError(
                    f"{name} lies no longer in the memory that the step has for it",
                    hint="make the step again after moving the module, and use one step of a module at a time",
                )


def merged_inputs(graph: Graph) -> list[Value]:
    """Return the inputs of a graph that merge several weights in one storage."""
    inputs = (graph.values[number] for number in graph.inputs)
    return [value for value in inputs if value.name.partition(":")[0] == MERGED]


def _parts(graph: Graph, merged: Value) -> dict[str, Value]:
    looks = (graph.values[number] for number in graph.inputs)
    return {value.name: value for value in looks if value.storage == merged.storage and value.id != merged.id}


def _already_packed(merged: Value, known: Mapping[str, Tensor], parts: Mapping[str, Value]) -> Tensor | None:
    """Return the merged weight if another step has packed its parts already; else None."""
    name, part = next(iter(parts.items()))
    first = known[name]
    start = first.storage_offset() - part.offset
    storage = first.untyped_storage()
    if start < 0 or (start + merged.numel) * first.element_size() > storage.nbytes():
        return None
    for other, looks in parts.items():
        tensor = known[other]
        if (
            tensor.untyped_storage().data_ptr() != storage.data_ptr()
            or tensor.storage_offset() != start + looks.offset
            or tensor.stride() != looks.stride
        ):
            return None
    return first.detach().as_strided(merged.shape, merged.stride, start)
