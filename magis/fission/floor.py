"""Bytes that no plan avoids, not even one that runs everything in parts."""

from __future__ import annotations

from magis.analysis.hazards import is_pure_view
from magis.aten.facts import IN_PLACE_FORM, OUT_FORM
from magis.aten.splits import splits
from magis.ir import Graph, Op
from magis.simulate.replay import Workspace, rounded


def lower_bound(graph: Graph, workspace: Workspace, rounding: int = 1) -> int:
    """Persistent bytes + the largest working set of one operator, of tensors that no way of cutting it makes smaller.

    An operator that can be cut may run on ever smaller parts of what is cut, one way within the other; only one that
    cannot be cut at all needs its scratch and, unless it may write over an input, all that it makes.
    """
    persistent = sum(rounded(s.nbytes, rounding) for s in graph.storages.values() if s.persistent)
    return persistent + max((_needed(graph, op, workspace, rounding) for op in graph.ops), default=0)


def _needed(graph: Graph, op: Op, workspace: Workspace, rounding: int) -> int:
    if op.phase == "update" or op.target.startswith("magis.") or is_pure_view(graph, op):
        return 0
    ways = splits(op, graph.values)
    whole = set(op.inputs())
    if not ways and op.target not in (*IN_PLACE_FORM, *OUT_FORM):
        whole |= set(op.made())
    for way in ways:
        whole -= {value for value, dim in zip(op.inputs(), way.inputs, strict=True) if dim is not None}
    # Tensors, not storages: some operators leave room behind a small result, which they need not when cut.
    needed: dict[int, int] = {}
    for value in whole:
        storage = graph.storages[graph.values[value].storage]
        if storage.kind == "temporary":
            nbytes = min(storage.nbytes, graph.values[value].nbytes)
            needed[storage.id] = max(needed.get(storage.id, 0), nbytes)
    scratch = 0 if ways else workspace(op, graph.values)
    return scratch + sum(rounded(nbytes, rounding) for nbytes in needed.values())
