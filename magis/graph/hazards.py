"""Views of storages, and the pairs of operators whose order is fixed beyond data flow.

The order rules are the storage versions of the operators (``magis.graph.nodes``): the writer of version k + 1 comes
after every reader of version k and after the writer of version k. Any order that keeps these edges and data flow meets
the same versions everywhere, hence computes the same numbers.
"""

from __future__ import annotations

import rustworkx as rx

from magis.graph import Graph, Op, Storage, Value


def is_pure_view(graph: Graph, op: Op) -> bool:
    """Whether the call only opens windows on memory that it takes: nothing computed, nothing written."""
    if op.writes or op.random or not op.made():
        return False
    taken = {graph.values[value].storage for value in op.inputs()}
    return all(graph.values[value].storage in taken for value in op.made())


def order_edges(ops: tuple[Op, ...]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of positions that follow from storage versions, without duplicates, sorted."""
    writer: dict[tuple[int, int], int] = {}
    readers: dict[tuple[int, int], list[int]] = {}
    for position, op in enumerate(ops):
        for pair in op.reads:
            readers.setdefault(pair, []).append(position)
        for pair in op.writes:
            writer[pair] = position
    edges: set[tuple[int, int]] = set()
    for (storage, version), position in writer.items():
        before = readers.get((storage, version - 1), [])
        edges.update((reader, position) for reader in before if reader != position)
        earlier = writer.get((storage, version - 1))
        if earlier is not None:
            edges.add((earlier, position))
        edges.update((position, reader) for reader in readers.get((storage, version), []))
    return sorted(edges)


def dependency_graph(graph: Graph) -> rx.PyDiGraph[int, None]:
    """All order constraints, data flow and versions, as a directed acyclic graph on the positions of the schedule.

    The schedule itself need not be legal; where no legal one exists, the graph has cycles.
    """
    dag: rx.PyDiGraph[int, None] = rx.PyDiGraph(multigraph=False)
    dag.add_nodes_from(range(len(graph.ops)))
    maker = {value: position for position, op in enumerate(graph.ops) for value in op.made()}
    edges: list[tuple[int, int, None]] = []
    for position, op in enumerate(graph.ops):
        edges.extend((maker[value], position, None) for value in op.inputs() if value in maker)
    edges.extend((a, b, None) for a, b in order_edges(graph.ops))
    dag.add_edges_from(edges)
    return dag


# How a value lies on its storage.


def fills(value: Value, storage: Storage) -> bool:
    """Whether the window is the whole storage, each byte once and as it is stored."""
    return not value.bits and value.offset == 0 and value.nbytes == storage.nbytes and is_dense(value)


def is_dense(value: Value) -> bool:
    """Whether the elements lie side by side without overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(value.stride, value.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of that shape whose last dimension is innermost."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)
