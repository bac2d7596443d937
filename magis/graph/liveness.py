"""When storages and values are needed: the basis of simulation and of the generated code's ``del``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magis.graph import Graph


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
