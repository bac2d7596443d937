"""Why a step cannot run in parts: the operators at which a cut along the batch ends.

Of a batch of 1 nothing is said where height or width can be cut instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from magis.analysis.hazards import dependency_graph
from magis.aten.splits import why_not
from magis.fission.grow import most_parts
from magis.fission.pieces import heaviest
from magis.fission.region import Region, region_problems
from magis.fission.suffix import Axis, axes, batch_axis, batch_inputs, places, suffix
from magis.ir import Graph

PLACES = 2
NAMED = 3
"""Operators that are named, those first that stand in the way most often."""


def blocked(graph: Graph) -> str:
    """What stands in the way, in one line; empty where nothing does."""
    start = batch_inputs(graph)
    sizes = sorted({graph.values[value].shape[0] for value in start if graph.values[value].shape})
    if not sizes:
        return "no input has a batch dimension"
    if sizes == [1]:
        return "" if any(axis.cuts for axis in axes(graph)) else "a batch of 1 has no parts"
    axis = batch_axis(graph, start)
    found = Counter(
        (op.target.split(".")[1], reason)
        for position, op in enumerate(graph.ops)
        if position not in axis.cuts and op.phase != "update"
        for reason in _reasons(graph, position, axis.dims)
    )
    if found:
        calls = Counter(op.target.split(".")[1] for op in graph.ops)
        return ", ".join(f"{name} ({calls[name]} calls: {reason})" for (name, reason), _ in _first(found))
    if axis.cuts and most_parts(axis.cuts) == 1:
        return f"a batch of {' or '.join(map(str, sizes))} has no equal parts with the other sizes of the step"
    return _refused(graph, axis)


def _refused(graph: Graph, axis: Axis) -> str:
    """Why the first region that could be cut is no legal one; empty if one is."""
    reason = ""
    dag = dependency_graph(graph)
    for at in places(graph, axis, PLACES):
        piece = heaviest(graph, suffix(graph, axis, at, dag).cuts, dag)
        if piece is None:
            continue
        found = next(region_problems(graph, Region(piece.cuts, most_parts(piece.cuts))), "")
        if not found:
            return ""
        reason = reason or found
    return reason


def _reasons(graph: Graph, position: int, dims: Mapping[int, int]) -> set[str]:
    """Why the operator cannot be cut as its inputs are; one reason at most."""
    op = graph.ops[position]
    for number, value in enumerate(op.inputs()):
        if value in dims:
            reason = why_not(op, graph.values, number, dims[value])
            if reason:
                return {reason}
    return set()


def _first(found: Counter[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))[:NAMED]
