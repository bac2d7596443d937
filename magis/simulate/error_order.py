"""Ordering of update blocks after nodes that may raise, so that an error leaves no weight updated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from magis.graph import Graph, Op
from magis.ops.raising import may_raise
from magis.simulate.problem import BlockRow, NodeRow


def update_behind_errors(
    graph: Graph,
    nodes: Sequence[Sequence[Op]],
    blocks: Sequence[Sequence[Op]],
    rows: list[NodeRow],
    updates: list[BlockRow],
    ended: Mapping[int, int],
) -> tuple[list[NodeRow], list[BlockRow]]:
    """Order weight updates after all nodes that may raise (`magis.ops.raising`); return the new rows.

    Nodes that already precede an update through its inputs are not added, since the update would then wait for their
    recomputations, too. `ended` is the last node that writes each temporary storage.
    """
    raising = may_raise(graph)
    found = {index for index, group in enumerate(nodes) if not raising.keys().isdisjoint(op.id for op in group)}
    if not found:
        return rows, updates
    maker = {storage: index for index, row in enumerate(rows) for storage in row.outputs}
    behind: list[set[int]] = []  # per node: those of `found` among its ancestors and itself
    for index, row in enumerate(rows):
        before = {*row.extra, *(maker[storage] for storage in row.inputs)}
        behind.append(({index} & found).union(*(behind[node] for node in before)))
    for index, group in enumerate(nodes):
        if group[0].phase == "update":
            earlier = {node for node in found if node < index}
            rows[index] = replace(rows[index], extra=tuple(sorted({*rows[index].extra, *earlier})))
    waits = (found.difference(*(behind[ended[storage]] for storage in row.inputs)) for row in updates)
    return rows, [
        replace(row, waits=tuple(sorted(them))) if block[0].phase == "update" else row
        for block, row, them in zip(blocks, updates, waits, strict=True)
    ]
