"""Random regions that break a rule for certain: what makes them illegal is found without asking the rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import rustworkx as rx

from magis.fission.candidates import grow
from magis.fission.region import Region, most_parts
from magis.graph import Graph
from magis.ops.splits import Split, splits

Dag = rx.PyDiGraph[int, None]
Mistake = Callable[[Graph, Dag, Region, random.Random], Region | None]
"""Makes a legal region illegal; None where this one does not lend itself to it."""


def without(cuts: Mapping[int, Split], gone: int) -> dict[int, Split]:
    return {position: split for position, split in cuts.items() if position != gone}


def not_convex(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """An operator between two others is left out."""
    inside = set(region.cuts)
    between = [p for p in inside if inside & rx.ancestors(dag, p) and inside & rx.descendants(dag, p)]
    return Region(without(region.cuts, chosen.choice(sorted(between))), region.parts) if between else None


def unconnected(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """Two pieces that nothing connects: a further operator from afar, or one in the middle left out."""
    for position in chosen.sample(range(len(graph.ops)), 60):
        near = set(dag.predecessor_indices(position)) | set(dag.successor_indices(position)) | {position}
        found = [split for split in splits(graph.ops[position], graph.values) if split.extent % region.parts == 0]
        if found and not near & set(region.cuts):
            return Region({**region.cuts, position: chosen.choice(found)}, region.parts)
    return None


def not_divided(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """A number of parts that does not divide every size."""
    most = most_parts(region.cuts)
    wrong = [n for n in range(2, 2 * most + 2) if most % n]
    return Region(region.cuts, chosen.choice(wrong))


def too_few(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """No region at all."""
    return chosen.choice([Region(region.cuts, chosen.choice([1, 0, -2])), Region({}, region.parts)])


def from_elsewhere(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """A position that the graph has not."""
    split = chosen.choice(list(region.cuts.values()))
    return Region({**region.cuts, chosen.choice([-1, len(graph.ops), 10**9]): split}, region.parts)


def changed(graph: Graph, split: Split, chosen: random.Random) -> Split:
    """Another way to cut, that may fit no operator."""
    how = [
        each if each is None else chosen.choice([0, 1, 2, "sum", "mean", "max", "min", "same"])
        for each in split.outputs
    ]
    dims = [chosen.choice([None, 0, 1, 2]) for _ in split.inputs]
    return chosen.choice([
        replace(split, outputs=tuple(how)),
        replace(split, inputs=tuple(dims)),
        replace(split, inputs=(*split.inputs, 0)),
        replace(split, outputs=split.outputs[1:]),
        replace(split, sizes=((0,),)),
        replace(split, extent=split.extent * 2),
        Split((), (), (), split.extent),
    ])  # fmt: skip


def wrong_split(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """A way to cut that the operator does not have."""
    position = chosen.choice(sorted(region.cuts))
    split = changed(graph, region.cuts[position], chosen)
    if split in splits(graph.ops[position], graph.values):
        return None
    return Region({**region.cuts, position: split}, region.parts)


def mismatched(graph: Graph, cuts: Mapping[int, Split]) -> bool:
    """Whether an operator takes what another one of the region makes otherwise than it is cut there."""
    made = {v: how for p, split in cuts.items() for v, how in zip(graph.ops[p].outputs, split.outputs, strict=True)}
    return any(
        value in made and made[value] != ("same" if dim is None else dim)
        for position, split in cuts.items()
        for value, dim in zip(graph.ops[position].inputs(), split.inputs, strict=True)
    )


def two_components(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """An operator of the region cut in another of its ways: along another component of the D-Graph."""
    positions = sorted(region.cuts)
    chosen.shuffle(positions)
    for position in positions:
        for split in splits(graph.ops[position], graph.values):
            cuts = {**region.cuts, position: split}
            if split.extent % region.parts == 0 and mismatched(graph, cuts):
                return Region(cuts, region.parts)
    return None


def beyond(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """The region goes on behind its end, along another component."""
    made = [(p, v) for p in region.cuts for v in graph.ops[p].made() if len(graph.values[v].shape) > 1]
    chosen.shuffle(made)
    for position, value in made:
        for dim in range(len(graph.values[value].shape)):
            more = grow(graph, {value: dim}, range(position + 1, position + 20), dag)
            cuts = {**more, **region.cuts}
            if len(cuts) > len(region.cuts) and mismatched(graph, cuts) and most_parts(cuts) % region.parts == 0:
                return Region(cuts, region.parts)
    return None


def random_numbers(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """An operator that draws random numbers, cut as a pointwise one would be."""
    found = [position for position, op in enumerate(graph.ops) if op.random]
    if not found:
        return None
    position = chosen.choice(found)
    op = graph.ops[position]
    split = Split(tuple(0 for _ in op.inputs()), tuple(0 for _ in op.outputs), (), region.parts)
    return Region({**region.cuts, position: split}, region.parts)


def batch_of_a_batch_norm(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """Batch statistics of a part."""
    found = [position for position, op in enumerate(graph.ops) if "native_batch_norm" in op.target]
    if not found:
        return None
    position = chosen.choice(found)
    op = graph.ops[position]
    whole = {value for value in op.inputs() if len(graph.values[value].shape) > 1}
    inputs = tuple(0 if value in whole else None for value in op.inputs())
    outputs = tuple(0 if at == 0 else "same" for at in range(len(op.outputs)))
    return Region({position: Split(inputs, outputs, (), graph.values[op.inputs()[0]].shape[0])}, 2)


def opaque(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """An operator that nothing can cut."""
    found = [p for p, op in enumerate(graph.ops) if op.made() and not splits(op, graph.values)]
    position = chosen.choice(found)
    op = graph.ops[position]
    split = Split(tuple(0 for _ in op.inputs()), tuple(0 for _ in op.outputs), (), region.parts)
    return Region({**region.cuts, position: split}, region.parts)


def foreign_writes(graph: Graph, dag: Dag, region: Region, chosen: random.Random) -> Region | None:
    """The update of a weight that others read: many dimensions, or none of them the first."""
    found = [
        (position, split)
        for position, op in enumerate(graph.ops)
        if op.phase == "update" and op.writes
        for split in splits(op, graph.values)
        if len(graph.values[op.inputs()[0]].shape) > 1 and split.inputs[0] is not None
    ]
    position, split = chosen.choice(found)
    return Region({position: split}, split.extent)


MISTAKES: dict[str, Mistake] = {
    mistake.__name__: mistake
    for mistake in (
        not_convex, unconnected, not_divided, too_few, from_elsewhere, wrong_split, two_components, beyond,
        random_numbers, batch_of_a_batch_norm, opaque, foreign_writes,
    )
}  # fmt: skip
