"""What a graph's storages ask of the order of operators: views, hazards beyond data flow, lifetimes.

The order rules are the storage versions of the operators (``magis.graph.nodes``): the writer of version k + 1 comes
after every reader of version k and after the writer of version k. Any order that keeps these edges and data flow meets
the same versions everywhere, hence computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import rustworkx as rx

from magis.graph import Graph, Op, Storage, Value
from magis.graph.nodes import side_by_side


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
    return side_by_side(value.shape, value.stride)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of that shape whose last dimension is innermost."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


# When storages and values are needed: the basis of simulation and of the generated code's ``del``.


@dataclass(frozen=True)
class Lifetimes:
    """Life of every temporary storage, as positions in the schedule, both ends included.

    ``born[s]`` is the operator that allocates it, ``dies[s]`` the last one during which it is in memory;
    ``len(graph.ops)`` means that it outlives the step.
    """

    born: Mapping[int, int]
    dies: Mapping[int, int]


def lifetimes(graph: Graph, deaths: Mapping[int, int] | None = None) -> Lifetimes:
    """Lives of the temporary and host storages.

    A storage dies with the last operator that touches any value on it. ``deaths``, where given, overrides that with
    the number of operators after which eager frees the storage (missing: at the end of the step).
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
    """For every position, the values that no later operator takes and the caller does not get: free to forget."""
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
