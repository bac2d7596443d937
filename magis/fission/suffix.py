"""Regions that run from some place of the forward pass to the loss and back: micro-batches of the rest of the step.

    forward  a b c | d e f loss        the region "from d": d e f loss f' e' d', cut along the batch
    backward a'b'c'| d'e'f'

Where the batch is 1, height or width of pictures is cut instead: from the last operator whose windows overlap on, since
it takes rows of other parts.

A place near the loss makes a region of the loss head alone (vocabulary projection and cross-entropy, whose scores then
never exist in full), the first place one of the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import rustworkx as rx

from magis.aten.splits import Halo, Split
from magis.fission.grow import follow, grow
from magis.ir import Graph


@dataclass(frozen=True, eq=False)
class Suffix:
    """Operators that a cut of the values crossing position ``at`` reaches; ``crossing`` maps them to dimensions."""

    at: int
    cuts: Mapping[int, Split]
    crossing: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Axis:
    """How the batch, or another dimension of the input, runs through a step: the cut dimension of every tensor that it
    reaches, and how operators would be cut (not all of them together where windows overlap)."""

    dims: Mapping[int, int]
    cuts: Mapping[int, Split]


def batch_axis(graph: Graph, start: Mapping[int, int]) -> Axis:
    """The axis that runs through the values of ``start`` (value -> dimension)."""
    cuts, dims = follow(graph, start)
    return Axis(dims, cuts)


def axes(graph: Graph) -> Iterator[Axis]:
    """The batch; where that is 1, the places of pictures: height, width ..."""
    batch = batch_inputs(graph)
    shapes = [graph.values[value].shape for value in batch]
    if all(shape[:1] != (1,) for shape in shapes):
        yield batch_axis(graph, batch)
        return
    for dim in range(2, max(map(len, shapes), default=0)):
        start = {value: dim for value in batch if len(graph.values[value].shape) == max(map(len, shapes))}
        axis = batch_axis(graph, start)
        if axis.cuts:
            yield axis


def batch_inputs(graph: Graph) -> dict[int, int]:
    """The first dimension of everything that the step is given as input."""
    return {value: 0 for value in graph.inputs if graph.values[value].name.startswith("input:")}


def places(graph: Graph, axis: Axis, count: int) -> list[int]:
    """Positions of the forward pass at which few bytes cross, about evenly spread over what the backward pass keeps.

    The first position of the axis comes first, the loss head last. Where windows overlap, no region that begins ahead
    of the last such operator reaches the loss.
    """
    forward = [p for p in sorted(axis.cuts) if graph.ops[p].phase == "forward"]
    if not forward:
        return []
    overlapping = [p for p in forward if any(isinstance(cut, Halo) for cut in axis.cuts[p].inputs)]
    forward = [p for p in forward if p >= max(overlapping, default=0)]
    crossing = _crossing_bytes(graph, forward[-1] + 1)
    kept = _kept_bytes(graph)
    total = sum(kept[p] for p in forward)
    found: list[int] = []
    for index in range(count):
        low, high = total * index / count, total * (index + 1) / count
        seen = 0
        stretch = []
        for p in forward:
            if low <= seen < high:
                stretch.append(p)
            seen += kept[p]
        if stretch:
            found.append(min(stretch, key=lambda p: (crossing[p], p)))
    head = _head(graph, forward)
    return list(dict.fromkeys([forward[0], *found, *head]))


def _head(graph: Graph, forward: Sequence[int]) -> list[int]:
    """Matrix products and convolutions among the last operators: the loss head begins at one of them."""
    heavy = [p for p in forward if graph.ops[p].target.split(".")[1] in ("mm", "addmm", "convolution")]
    return heavy[-2:]


def _crossing_bytes(graph: Graph, end: int) -> list[int]:
    """Per position of the forward pass, bytes of temporary storages made before it that a later forward operator
    takes."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for position in range(end):
        op = graph.ops[position]
        for value in op.inputs():
            last[graph.values[value].storage] = position
        for value in op.made():
            made.setdefault(graph.values[value].storage, position)
    change = [0] * (end + 1)
    for storage, position in made.items():
        if storage in last and graph.storages[storage].kind == "temporary":
            change[position + 1] += graph.storages[storage].nbytes
            change[min(last[storage] + 1, end)] -= graph.storages[storage].nbytes
    level, found = 0, []
    for position in range(end):
        level += change[position]
        found.append(level)
    return found


def _kept_bytes(graph: Graph) -> dict[int, int]:
    """Per forward operator, bytes that it makes and the backward pass takes."""
    used = {graph.values[value].storage for op in graph.ops if op.phase == "backward" for value in op.inputs()}
    found: dict[int, int] = {}
    counted: set[int] = set()
    for position, op in enumerate(graph.ops):
        fresh = {graph.values[value].storage for value in op.made()} - counted
        counted |= fresh
        kinds = graph.storages
        found[position] = sum(kinds[s].nbytes for s in fresh & used if kinds[s].kind == "temporary")
    return found


def suffix(graph: Graph, axis: Axis, at: int, dag: rx.PyDiGraph[int, None] | None = None) -> Suffix:
    """The region from position ``at`` of the forward pass to its end and back; ``dag`` is the graph's."""
    made_late = {value for op in graph.ops[at:] for value in op.made()}
    crossing = {
        value: axis.dims[value]
        for op in graph.ops[at:]
        if op.phase == "forward"
        for value in op.inputs()
        if value in axis.dims and value not in made_late
    }
    held = {graph.values[value].storage for value in crossing}
    made_early = {graph.values[value].storage for op in graph.ops[:at] for value in op.made()}
    early = {storage for storage in made_early - held if graph.storages[storage].kind == "temporary"}
    end = next(
        (
            position
            for position, op in enumerate(graph.ops)
            if position >= at
            and op.phase == "backward"
            and any(graph.values[value].storage in early for value in op.inputs())
        ),
        len(graph.ops),
    )
    return Suffix(at, grow(graph, crossing, range(at, end), dag), crossing)
