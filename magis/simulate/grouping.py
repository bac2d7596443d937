"""Which operators act as one: nodes that fill a storage in several steps, and blocks that update a weight.

noise = empty_like(x); noise.bernoulli_(p); noise.div_(p)   ->   one node that makes the noise
all operators of AdamW on one weight                        ->   one block, which floats
"""

from __future__ import annotations

import rustworkx as rx

from magis.analysis.hazards import is_pure_view
from magis.ir import Graph, Op

Group = tuple[Op, ...]


def split(graph: Graph) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Nodes, in program order, and blocks of the graph; pure views belong to neither."""
    views = {op.id for op in graph.ops if is_pure_view(graph, op)}
    sinks = _sinks(graph, views)
    if len(views) + len(sinks) == len(graph.ops):
        sinks.clear()  # blocks run behind nodes: where nothing else runs, nothing floats
    ops = [op for op in graph.ops if op.id not in views and op.id not in sinks]
    return _nodes(graph, ops), _blocks(graph, [op for op in graph.ops if op.id in sinks])


def _sinks(graph: Graph, views: set[int]) -> set[int]:
    """Operators that float: weight updates, and writes to persistent memory that no temporary storage feeds.

    What they write or make must not matter to any operator that does not float, which could not wait for them; nor may
    one that does not float write what they read only, since they run at any time.
    """
    found = set()
    for op in graph.ops:
        if op.id in views or op.random or any(graph.storages[storage].kind == "generator" for storage, _ in op.writes):
            continue
        kinds = {graph.storages[graph.values[value].storage].kind for value in (*op.inputs(), *op.made())}
        if op.phase == "update" or (op.writes and "temporary" not in kinds):
            found.add(op.id)
    while True:
        _discard_met(graph, views, found)
        others = (op for op in graph.ops if op.id not in found)
        written = {storage for op in others for storage, _ in op.writes if graph.storages[storage].persistent}
        bound = {op.id for op in graph.ops if op.id in found and written & _only_read(op)}
        if not bound:
            return found
        found -= bound


def _only_read(op: Op) -> set[int]:
    return {storage for storage, _ in op.reads} - {storage for storage, _ in op.writes}


def _discard_met(graph: Graph, views: set[int], found: set[int]) -> None:
    """Take out what operators that do not float meet."""
    # Backwards: who meets a version met it after its writer, so one pass sees all readers first.
    met: set[tuple[int, int]] = set()
    taken: set[int] = set()
    for op in reversed(graph.ops):
        free = met.isdisjoint(op.writes) and taken.isdisjoint(op.made())
        if free and (op.id in found or op.id in views):
            continue
        found.discard(op.id)
        taken.update(op.inputs())
        met.update(op.reads)
        met.update((storage, version - 1) for storage, version in op.writes)


def _blocks(graph: Graph, ops: list[Op]) -> tuple[Group, ...]:
    """Sinks that belong together: they touch a storage that one of them writes or makes."""
    own = {graph.values[value].storage for op in ops for value in op.made()}
    own |= {storage for op in ops for storage, _ in op.writes}
    links: rx.PyGraph[int, None] = rx.PyGraph()
    links.add_nodes_from(range(len(ops)))
    owner: dict[int, int] = {}
    for index, op in enumerate(ops):
        touched = {graph.values[value].storage for value in (*op.inputs(), *op.made())}
        for storage in sorted(touched & own):
            if storage in owner:
                links.add_edge(owner[storage], index, None)
            owner[storage] = index
    groups = [sorted(group) for group in rx.connected_components(links)]
    return tuple(tuple(ops[index] for index in group) for group in sorted(groups))


def _nodes(graph: Graph, ops: list[Op]) -> tuple[Group, ...]:
    """Operators one by one, but runs of them that make a storage and then write only to it as one node."""
    last_write = {storage: position for position, op in enumerate(ops) for storage, _ in op.writes}
    groups: list[Group] = []
    position = 0
    while position < len(ops):
        end = position + 1
        made = {graph.values[value].storage for value in ops[position].made()}
        while end < len(ops) and len(made) == 1 and _only_writes(ops[end], made):
            end += 1
        if any(last_write.get(storage, 0) >= end for storage in made):  # not complete: somebody else writes, too
            end = position + 1
        groups.append(tuple(ops[position:end]))
        position = end
    return tuple(groups)


def _writes(op: Op, storages: set[int]) -> bool:
    return any(storage in storages for storage, _ in op.writes)


def _only_writes(op: Op, storages: set[int]) -> bool:
    """Whether the operator writes to these storages and, random numbers aside, to nothing else."""
    others = [storage for storage, _ in op.writes if storage not in storages]
    return op.body is None and _writes(op, storages) and len(others) == int(op.random)
