"""Host copies of a planned schedule that overlap other work, as far as a memory limit allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from magis.cost.machines import Times
from magis.graph import HOST_COPIES, Graph, Op
from magis.graph.hazards import is_pure_view
from magis.simulate.problem import Int64s
from magis.simulate.simulator import Workspace, replay, rounded
from magis.simulate.timeline import UNTIMED, copy_ns

STORE, WAIT, LOAD = HOST_COPIES


@dataclass(frozen=True)
class _Arrival:
    """A storage that comes from the host, in a schedule without loads and waits."""

    load: Op
    left: int
    """Host value that it is loaded from."""
    use: int
    """Position of the first operator on its device memory."""
    last: int
    """Position of the last one."""
    nbytes: int
    ns: int
    """Time of the copy."""


@dataclass(frozen=True)
class _Departure:
    """A storage on its way to the host."""

    wait: Op
    nbytes: int
    ns: int


def with_copies_ahead(graph: Graph, times: Times, workspace: Workspace, rounding: int, limit: int) -> Graph:
    """Return a planned schedule whose host copies overlap other work: loads as early as their time asks for, waits as
    late, as far as the peak stays within ``limit`` bytes. It is never above the schedule's own peak. Copies inside of
    loops stay."""
    loads = [op for op in graph.ops if op.target == LOAD]
    waits = [op for op in graph.ops if op.target == WAIT]
    if not loads:
        return graph
    apart = {op.id for op in (*loads, *waits)}
    ops = tuple(op for op in graph.ops if op.id not in apart)
    storage_of = {value.id: value.storage for value in graph.values.values()}
    spans = _spans(ops, storage_of, {storage_of[op.made()[0]] for op in loads})

    def copied(value: int) -> tuple[int, int]:
        nbytes = graph.storages[storage_of[value]].nbytes
        return rounded(nbytes, rounding), copy_ns(nbytes, times)

    arrivals = [_Arrival(op, op.inputs()[0], *spans[storage_of[op.made()[0]]], *copied(op.made()[0])) for op in loads]
    stored_at = {op.made()[0]: position for position, op in enumerate(ops) if op.target == STORE}
    departures: dict[int, list[_Departure]] = {}
    for op in waits:
        departures.setdefault(stored_at[op.inputs()[1]], []).append(_Departure(op, *copied(op.inputs()[0])))
    untimed = [op.target in UNTIMED or op.target == STORE or is_pure_view(graph.values, op) for op in ops]
    ns = [0 if free else times.nanoseconds(op, graph.values) for op, free in zip(ops, untimed, strict=True)]
    schedule = _Schedule(
        sorted(arrivals, key=lambda each: each.use),
        departures,
        np.array(ns, dtype=np.int64),
        _levels(graph, ops, spans.keys(), workspace, rounding),
        max(limit, replay(graph, workspace, rounding=rounding).peak_bytes),
    )
    before = schedule.placed()
    found = [each for position, op in enumerate(ops) for each in (*before[position], op)] + before[len(ops)]
    return replace(graph, ops=tuple(replace(op, id=number) for number, op in enumerate(found)))


def _spans(ops: Sequence[Op], storage_of: Mapping[int, int], storages: Collection[int]) -> dict[int, tuple[int, int]]:
    """Return the positions of the first and the last operator on each storage."""
    found = dict[int, tuple[int, int]]()
    for position, op in enumerate(ops):
        for storage in {storage_of[value] for value in (*op.inputs(), *op.made())}.intersection(storages):
            found[storage] = (found.get(storage, (position, 0))[0], position)
    return found


def _levels(
    graph: Graph, ops: tuple[Op, ...], on_device: Collection[int], workspace: Workspace, rounding: int
) -> Int64s:
    """Return the bytes in memory during each operator, without the device memory of loaded storages."""
    uncounted = {each: replace(graph.storages[each], kind="host") for each in on_device}
    bare = replace(graph, ops=ops, storages={**graph.storages, **uncounted})
    return np.array(replay(bare, workspace, rounding=rounding).peaks, dtype=np.int64)


@dataclass
class _Schedule:
    """Placing of loads and waits between the other operators, from first to last."""

    arrivals: Sequence[_Arrival]
    """In the order of their first uses."""
    departures: Mapping[int, Sequence[_Departure]]
    """By the position of their stores."""
    ns: Int64s
    held: Int64s
    """Bytes during each operator, without those on their way to the host."""
    limit: int
    now: int = 0
    late: int = 0
    """Bytes on their way to the host."""
    leaving: deque[tuple[int, _Departure]] = field(default_factory=deque)
    """Departures, with the time in ns at which each copy ends."""
    on_way: set[int] = field(default_factory=set)
    """Host values whose departures have not been waited for."""
    before: list[list[Op]] = field(default_factory=list)
    """Loads and waits before each operator, and behind the last one."""

    def placed(self) -> list[list[Op]]:
        """Return ``before``. A load begins where all later ones, one after the other, still end in time, or where
        memory allows it first. The first waits are where copies end, or where their memory is needed."""
        self.before = [[] for _ in range(len(self.ns) + 1)]
        self.on_way = {each.wait.inputs()[1] for some in self.departures.values() for each in some}
        coming, ready = deque(zip(self.arrivals, self._latest_begins(), strict=True)), dict[int, int]()
        loaded = stored = 0
        for position in range(len(self.ns)):
            while self.leaving and self.leaving[0][0] <= self.now:
                self._wait(position)
            while coming and self._begins(*coming[0], position):
                each, _ = coming.popleft()
                self.before[position].append(each.load)
                self.held[position : each.last + 1] += each.nbytes
                ready[each.use] = loaded = max(loaded, self.now) + each.ns  # copies end in this order
            while self.leaving and self.late + int(self.held[position]) > self.limit:
                self._wait(position)
            self.now = max(self.now, ready.get(position, 0)) + int(self.ns[position])
            for leaves in self.departures.get(position, ()):
                stored = max(stored, self.now) + leaves.ns
                self.leaving.append((stored, leaves))
                self.late += leaves.nbytes
        while self.leaving:
            self._wait(len(self.ns))
        return self.before

    def _begins(self, each: _Arrival, begin: int, position: int) -> bool:
        """Return True if a load begins before an operator: that one reads it, or there is room and time demands it."""
        if each.use == position:
            while self.leaving and (each.left in self.on_way or self._room(each, position) < each.nbytes):
                self._wait(position)
            return True
        now = begin <= self.now + int(self.ns[position])
        return now and each.left not in self.on_way and self._room(each, position) >= each.nbytes

    def _latest_begins(self) -> list[int]:
        """Return the latest time in ns at which each load begins so that no operator waits."""
        start = np.concatenate(([0], np.cumsum(self.ns)))
        begins, latest = [0] * len(self.arrivals), int(start[-1])
        for number in range(len(begins) - 1, -1, -1):
            latest = min(latest, int(start[self.arrivals[number].use])) - self.arrivals[number].ns
            begins[number] = latest
        return begins

    def _room(self, each: _Arrival, position: int) -> int:
        return self.limit - self.late - int(self.held[position : each.last + 1].max())

    def _wait(self, position: int) -> None:
        """Wait for the first copy to the host before an operator."""
        done, each = self.leaving.popleft()
        self.before[position].append(each.wait)
        self.on_way.discard(each.wait.inputs()[1])
        self.now, self.late = max(self.now, done), self.late - each.nbytes
