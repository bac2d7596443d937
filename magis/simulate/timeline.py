"""A step as a simulated time line: when each call starts, how long it takes, the bytes in memory meanwhile by kind."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Protocol

from magis.graph import Graph, Op, Value
from magis.graph.hazards import is_pure_view, lifetimes
from magis.results import Span
from magis.simulate.peak_breakdown import Owner, named_owners, note_owners
from magis.simulate.simulator import MemoryProfile, Workspace, inside, replay, rounded

MOST_CALLS = 50_000
"""Of a time line in which the parts of loops are told one by one; in a longer one a loop is one call."""
NS_PER_MS = 1e6
UNTIMED = ("magis.wait", "magis.rng_save", "magis.rng_enter", "magis.rng_leave")
"""What the search counts no time for."""


class Times(Protocol):
    """What calls take, and how fast copies to and from the host are (0: there are none)."""

    @property
    def link_bytes_per_s(self) -> float: ...

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int: ...


@dataclass
class _Clock:
    """Nanoseconds at which each stream is free, and at which loaded storages are there."""

    compute: int = 0
    out: int = 0
    back: int = 0
    done: dict[int, int] = field(default_factory=dict)


Held = tuple[int, ...]
"""Bytes of tensors by kind, in the order of Span.KINDS, whose last one is scratch."""
TENSOR_KINDS = len(Span.KINDS) - 1
PLACES = {
    "parameter": 0, "state": 1, "batch": 2, "buffer": 2, "constant": 2, "activation": 3, "gradient": 4, "update": 5,
}  # fmt: skip
"""Of the kinds that owners have."""


def timeline(
    graph: Graph,
    times: Times,
    workspace: Workspace,
    profile: MemoryProfile,
    *,
    deaths: Mapping[int, int] | None = None,
    rounding: int = 1,
) -> tuple[Span, ...]:
    """The calls of a schedule in order, views left out; ``profile`` is what ``replay`` says of its bytes with the same
    arguments.

    Copies run beside the operators, one at a time in each direction, as the search counts them: a store or a load
    starts once what was given to the compute stream before is done, and whoever takes a loaded tensor waits for it.
    """
    apart = sum(1 if op.body is None else op.body.parts * len(op.body.graph.ops) for op in graph.ops) <= MOST_CALLS
    walk = _Walk(times, workspace, rounding, apart)
    held = held_by_kind(graph, deaths=deaths, rounding=rounding)
    return tuple(walk.calls(graph, profile.peaks, held, _Clock()))


@dataclass(frozen=True)
class _Walk:
    times: Times
    workspace: Workspace
    rounding: int
    apart: bool

    def calls(self, graph: Graph, levels: Sequence[int], held: Sequence[Held], clock: _Clock) -> Iterator[Span]:
        """The calls of a graph or of one part of a loop, with all bytes and those of tensors during each operator."""
        storage_of = {value.id: value.storage for value in graph.values.values()}
        seen: Counter[int] = Counter()
        for op, level, own in zip(graph.ops, levels, held, strict=True):
            for value in op.inputs():  # what was loaded must be there
                clock.compute = max(clock.compute, clock.done.get(storage_of[value], 0))
            if op.body is not None and self.apart:
                inner = replay(op.body.graph, self.workspace, rounding=self.rounding)
                outside = level - inside(op, graph, self.workspace, self.rounding)[1]
                above = [outside + peak for peak in inner.peaks]
                within = [_sum(own, each) for each in held_by_kind(op.body.graph, rounding=self.rounding)]
                for _ in range(op.body.parts):
                    part = _Clock(clock.compute, clock.out, clock.back)
                    yield from self.calls(op.body.graph, above, within, part)
                    clock.compute, clock.out, clock.back = part.compute, part.out, part.back
            elif op.target in ("magis.store", "magis.load"):
                yield self._copied(graph, op, clock, level, own)
            elif op.target not in UNTIMED and not is_pure_view(graph, op):
                again = op.origin is not None and seen[op.origin] > 0
                seen[-1 if op.origin is None else op.origin] += 1
                spent = self.times.nanoseconds(op, graph.values)
                yield _span(op, clock.compute, spent, level, _sum(own, self._worst(op)), again=again)
                clock.compute += spent

    def _worst(self, op: Op) -> Held:
        """Tensors inside an operator where all its bytes peak: only a loop has them."""
        if op.body is None or not op.body.graph.ops:
            return (0,) * TENSOR_KINDS
        graph = op.body.graph
        at = replay(graph, self.workspace, rounding=self.rounding).peak_position
        return _sum(held_by_kind(graph, rounding=self.rounding)[at], self._worst(graph.ops[at]))

    def _copied(self, graph: Graph, op: Op, clock: _Clock, level: int, held: Held) -> Span:
        """A copy, in the queue of its direction; a loaded tensor is there when it is done."""
        (taken,) = op.inputs()
        nbytes = graph.storages[graph.values[taken].storage].nbytes
        spent = math.ceil(nbytes * (1e9 / self.times.link_bytes_per_s))
        if op.target == "magis.store":
            start = max(clock.out, clock.compute)
            clock.out = start + spent
            return _span(op, start, spent, level, held, stream="to host")
        start = max(clock.back, clock.compute)
        clock.back = start + spent
        (made,) = op.made()
        clock.done[graph.values[made].storage] = clock.back
        return _span(op, start, spent, level, held, stream="from host")


def _span(
    op: Op, start_ns: int, ns: int, level: int, held: Held, *, stream: str = "compute", again: bool = False
) -> Span:
    kinds = (*held, level - sum(held))
    where = (op.target, op.module, op.phase, op.line)
    return Span(*where, start_ns / NS_PER_MS, ns / NS_PER_MS, level, stream, again, kinds)


def _sum(one: Held, other: Held) -> Held:
    return tuple(map(add, one, other))


def held_by_kind(graph: Graph, *, deaths: Mapping[int, int] | None = None, rounding: int = 1) -> list[Held]:
    """Tensors in memory during each operator, as ``replay`` counts them but for those inside of loops. Memory that was
    taken over is of the kind of what took it."""
    lives = lifetimes(graph, deaths)
    after: defaultdict[int, list[int]] = defaultdict(list)
    for storage, last in lives.dies.items():
        after[last + 1].append(storage)
    owners, wholes = named_owners(graph), dict[int, Owner]()
    storage_of = {value.id: value.storage for value in graph.values.values()}
    nbytes = {each.id: rounded(each.nbytes, rounding) for each in graph.storages.values()}
    level = [0] * TENSOR_KINDS
    for each in graph.storages.values():
        if each.persistent:
            level[PLACES[each.kind]] += nbytes[each.id]
    place: dict[int, int] = {}
    found: list[Held] = []
    for position, op in enumerate(graph.ops):
        for storage in after[position]:
            if storage in place:
                level[place.pop(storage)] -= nbytes[storage]
        note_owners(graph, op, owners, wholes)
        for storage in {storage_of[value] for value in (*op.inputs(), *op.made())}:
            if graph.storages[storage].kind == "temporary" and position <= lives.dies[storage]:
                if storage in place:
                    level[place[storage]] -= nbytes[storage]
                kind = owners[storage].kind if storage in owners else ""
                place[storage] = PLACES.get(kind, PLACES["activation"])
                level[place[storage]] += nbytes[storage]
        found.append(tuple(level))
    return found
