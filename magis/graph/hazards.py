"""Order constraints (edges), layouts and lifetimes derived from a graph's storages.

Storage versions (``magis.graph.nodes``) define the edges: the writer of version k + 1 runs after every reader and the
writer of version k. Any topological order of these edges and data flow reads the same versions everywhere, and so
computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import rustworkx as rx

from magis.graph import Graph, Op, Storage, Value
from magis.graph.nodes import side_by_side


def is_pure_view(values: Mapping[int, Value], op: Op) -> bool:
    """Return True if the operator only returns views of its inputs: it computes and writes nothing."""
    if op.writes or op.random or not op.made():
        return False
    taken = {values[value].storage for value in op.inputs()}
    return all(values[value].storage in taken for value in op.made())


def order_edges(ops: tuple[Op, ...]) -> list[tuple[int, int]]:
    """Return sorted edges (earlier, later) between positions, implied by the storage versions."""
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
    """Return the dependency graph on the positions of the schedule: edges of data flow and of storage versions.

    The schedule itself need not be legal; if no legal order exists, the graph has cycles.
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


def fills(value: Value, storage: Storage) -> bool:
    """Return True if the value covers each byte of its storage exactly once, without lazy bits."""
    return not value.bits and value.offset == 0 and value.nbytes == storage.nbytes and is_dense(value)


def is_dense(value: Value) -> bool:
    """Return True if the value is dense and non-overlapping, in some order of the dimensions."""
    return side_by_side(value.shape, value.stride)


def packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions lie in the order of the given strides."""
    dense, step = [0] * len(shape), 1
    for each in sorted(range(len(shape)), key=lambda each: (stride[each], -each)):
        dense[each] = step
        step *= max(1, shape[each])
    return tuple(dense)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of that shape, in elements."""
    return packed(shape, (0,) * len(shape))


@dataclass(frozen=True)
class Lifetimes:
    """Liveness of every temporary and host storage, as positions in the schedule, both ends included.

    ``born[s]`` is the operator that allocates storage ``s``, ``dies[s]`` the last operator during which ``s`` is
    allocated; ``len(graph.ops)`` means that ``s`` outlives the step.
    """

    born: Mapping[int, int]
    dies: Mapping[int, int]


def lifetimes(graph: Graph, deaths: Mapping[int, int] | None = None) -> Lifetimes:
    """Return the liveness of all temporary and host storages.

    A storage is freed after the last operator that uses a value on it, or, with ``deaths``, after the number of
    operators after which eager frees it (a storage missing in ``deaths``: at the end of the step).
    """
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    storage_of = {value.id: value.storage for value in graph.values.values()}
    for position, op in enumerate(graph.ops):
        for value in (*op.inputs(), *op.made()):
            storage = storage_of[value]
            if graph.storages[storage].kind not in ("temporary", "host"):
                continue
            born.setdefault(storage, position)
            dies[storage] = position
    end = len(graph.ops)
    if deaths is not None:
        dies = {storage: max(deaths[storage] - 1, born[storage]) if storage in deaths else end for storage in dies}
    for value in graph.outputs:
        if storage_of[value] in dies:
            dies[storage_of[value]] = end
    return Lifetimes(born, dies)


def last_uses(graph: Graph) -> list[tuple[int, ...]]:
    """Return, for every position, the values whose last use it is, outputs of the step excepted."""
    last: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for value in (*op.inputs(), *op.made()):
            last[value] = position
    for value in (*graph.outputs, *graph.inputs):
        last.pop(value, None)
    forget: list[list[int]] = [[] for _ in graph.ops]
    for value, position in sorted(last.items()):
        forget[position].append(value)
    return [tuple(values) for values in forget]
