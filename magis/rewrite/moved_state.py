"""Optimizer state in host memory: it is on the device for its update only.

    exp_avg.lerp_(grad, 0.1)      ->      %d = magis.load(%host)
                                          lerp_(%d, grad, 0.1)
                                          %h = magis.store(%d, %host)     into the host memory it came from
                                          magis.wait(%d, %h)              frees the device memory

The state's storage becomes one of the host, which no plan counts. `with_moved_state` puts the copies right around the
operators that use a state, so that they belong to the update block, which the search places. In a planned schedule
`copies_ahead` then moves them away from the updates, so that they overlap other work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from magis.graph import HOST_COPIES, Graph, Op, Ref, Storage, Value, with_inputs
from magis.graph.hazards import fills

STORE, WAIT, LOAD = HOST_COPIES


def movable_state(graph: Graph) -> tuple[int, ...]:
    """Return the storages of optimizer state that can stay in host memory, in the order in which updates use them:
    those that only the update touches, and that one value covers."""
    used: dict[int, None] = {}
    barred: set[int] = set()
    for op in graph.ops:
        touched = {graph.values[value].storage for value in (*op.inputs(), *op.made())}
        states = [each for each in sorted(touched) if graph.storages[each].kind == "state"]
        used.update(dict.fromkeys(states))
        if op.phase != "update" or op.body is not None:
            barred.update(states)
    given = [graph.values[value] for value in graph.inputs]
    whole = {each.storage for each in given if fills(each, graph.storages[each.storage])}
    barred.update(graph.values[value].storage for value in graph.outputs)
    return tuple(each for each in used if each in whole - barred and graph.storages[each].nbytes)


def first_states(graph: Graph, nbytes: int) -> tuple[int, ...]:
    """Return the first of `movable_state` that have this many bytes at most in all."""
    found, left = list[int](), nbytes
    for storage in movable_state(graph) if nbytes else ():
        if graph.storages[storage].nbytes <= left:
            found.append(storage)
            left -= graph.storages[storage].nbytes
    return tuple(found)


def with_moved_state(graph: Graph, moved: Sequence[int]) -> Graph:
    """Return the graph with these storages of `movable_state` in host memory."""
    if not moved:
        return graph
    builder = _WithCopies(graph, frozenset(moved))
    first, last = dict[int, int](), dict[int, int]()
    for position, op in enumerate(graph.ops):
        for value in (*op.inputs(), *op.made()):
            storage = graph.values[value].storage
            if storage in builder.moved:
                first.setdefault(storage, position)
                last[storage] = position
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for storage in first:
        begins[first[storage]].append(storage)
        ends[last[storage]].append(storage)
    for position, op in enumerate(graph.ops):
        for storage in begins[position]:
            builder.load(storage, op)
        builder.node(op)
        for storage in ends[position]:
            builder.store(storage, op)
        for storage in ends[position]:
            builder.wait(storage, op)
    return builder.graph()


def moved_state(graph: Graph) -> frozenset[str]:
    """Return the names of states in host memory ("exp_avg:layer.weight")."""
    given = (graph.values[value] for value in graph.inputs)
    return frozenset(each.name.partition(":")[2] for each in given if graph.storages[each.storage].kind == "host")


def host_bytes(graph: Graph) -> int:
    """Return the bytes of states in host memory."""
    storages = {graph.values[value].storage for value in graph.inputs}
    return sum(graph.storages[each].nbytes for each in storages if graph.storages[each].kind == "host")


class _WithCopies:
    """Emitter of a graph's operators with copies of moved storages."""

    def __init__(self, graph: Graph, moved: frozenset[int]) -> None:
        self.moved = moved
        self._source = graph
        self._storages = dict(graph.storages)
        self._values = dict(graph.values)
        self._ops: list[Op] = []
        self._given = {graph.values[value].storage: value for value in graph.inputs}
        self._on_device: dict[int, tuple[int, int]] = {}
        """Moved storage -> its storage on the device, and the value that covers it."""
        self._version: dict[int, int] = {}
        self._stored: dict[int, int] = {}
        self._fresh = max((*graph.storages, *graph.values), default=0)
        for storage in moved:
            self._storages[storage] = replace(self._storages[storage], kind="host")

    def load(self, storage: int, op: Op) -> None:
        """Emit the copy of a storage to the device."""
        self._fresh += 1
        device = self._fresh
        self._storages[device] = Storage(device, self._storages[storage].nbytes, "temporary")
        value = self._new_value(replace(self._values[self._given[storage]], storage=device, name=""))
        self._on_device[storage], self._version[storage] = (device, value), 0
        self._copy(op, LOAD, (self._given[storage],), value)

    def node(self, op: Op) -> None:
        """Emit an operator on the device's copies."""
        mapping = {}
        for value in (*op.inputs(), *op.made()):
            storage = self._source.values[value].storage
            if storage in self.moved:
                device, whole = self._on_device[storage]
                if value == self._given[storage]:
                    mapping[value] = whole
                else:
                    self._values[value] = replace(self._source.values[value], storage=device)
        for storage, version in op.writes:
            if storage in self.moved:
                self._version[storage] = version
        self._ops.append(
            replace(
                with_inputs(op, mapping),
                id=len(self._ops),
                reads=tuple(map(self._renamed, op.reads)),
                writes=tuple(map(self._renamed, op.writes)),
            )
        )

    def store(self, storage: int, op: Op) -> None:
        """Emit the copy of a storage back into its host memory."""
        device, whole = self._on_device[storage]
        host = self._given[storage]
        self._stored[storage] = value = self._new_value(replace(self._values[host], name=""))
        reads = ((device, self._version[storage]), (storage, 0))
        self._copy(op, STORE, (whole, host), value, reads=reads, writes=((storage, 1),))

    def wait(self, storage: int, op: Op) -> None:
        """Emit the wait for the copy, which frees the device's memory."""
        self._copy(op, WAIT, (self._on_device[storage][1], self._stored[storage]), None)

    def graph(self) -> Graph:
        return replace(self._source, storages=self._storages, values=self._values, ops=tuple(self._ops))

    def _renamed(self, pair: tuple[int, int]) -> tuple[int, int]:
        storage, version = pair
        return (self._on_device[storage][0], version) if storage in self.moved else pair

    def _new_value(self, like: Value) -> int:
        self._fresh += 1
        self._values[self._fresh] = replace(like, id=self._fresh)
        return self._fresh

    def _copy(
        self,
        op: Op,
        target: str,
        taken: tuple[int, ...],
        made: int | None,
        reads: tuple[tuple[int, int], ...] = (),
        writes: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Emit an operator of the copies, in phase and module of the update's own."""
        outputs = () if made is None else (made,)
        args = tuple(map(Ref, taken))
        self._ops.append(
            Op(
                len(self._ops), target, args, (), outputs, reads=reads, writes=writes, phase=op.phase, module=op.module,
                line=op.line,
            )
        )  # fmt: skip
