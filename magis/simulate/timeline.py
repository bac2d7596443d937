"""A step as a simulated timeline: start and duration of each call, and the bytes in memory at that time by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from magis.cost.machines import Times
from magis.graph import ARRIVED, Graph, Op
from magis.graph.hazards import is_pure_view
from magis.ops.collectives import is_message, under_way
from magis.results import Span
from magis.simulate.compiled_problem import GENERATOR_NS
from magis.simulate.peak_breakdown import tenancies
from magis.simulate.simulator import MemoryProfile, Workspace, bytes_inside, replay, rounded

MOST_CALLS = 50_000
"""Most calls of a timeline that shows every part of a loop; in a longer one, a loop is one call."""
NS_PER_MS = 1e6
UNTIMED = ("magis.wait", "magis.rng_save", "magis.rng_enter", "magis.rng_leave", ARRIVED)
"""Operators for which the search counts no time."""
COPIES = {"magis.store": "to host", "magis.load": "from host"}
"""Streams of host copies, by operator."""
MESSAGES = "messages"
"""Stream of collectives that are waited for later."""


@dataclass
class _Clock:
    """Time in ns at which each stream is free, and at which copied or communicated storages are ready."""

    compute: int = 0
    copies: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COPIES.values(), 0))
    done: dict[int, int] = field(default_factory=dict)
    messages: int = 0

    def meet(self, storages: Iterable[int]) -> None:
        """Make the compute stream wait for storages that are being copied or communicated."""
        self.compute = max([self.compute, *(self.done.get(storage, 0) for storage in storages)])

    def run(self, spent: int) -> int:
        """Run a call on the compute stream; return its start in ns."""
        start, self.compute = self.compute, self.compute + spent
        return start

    def copy(self, stream: str, nbytes: int, made: int, times: Times) -> tuple[int, int]:
        """Copy a storage after earlier copies in this direction and all calls enqueued on the compute stream; return
        start and duration in ns."""
        start = max(self.copies[stream], self.compute)
        spent = copy_ns(nbytes, times)
        self.copies[stream] = self.done[made] = start + spent
        return start, spent

    def send(self, made: int, spent: int) -> int:
        """Start an overlapped collective after the previous one and all enqueued calls; return its start in ns."""
        start = max(self.messages, self.compute)
        self.messages = self.done[made] = start + spent
        return start

    def exchange(self, spent: int) -> int:
        """Run a blocking collective after the previous one; return its start in ns."""
        start = max(self.messages, self.compute)
        self.messages = self.compute = start + spent
        return start

    def inside(self) -> _Clock:
        """Return a clock at the current time for one part of a loop, with its own storages and without collectives."""
        return _Clock(self.compute, self.copies)


def copy_ns(nbytes: int, times: Times) -> int:
    """Return the time of a host copy in ns."""
    return times.copy_ns + math.ceil(nbytes * (1e9 / times.link_bytes_per_s))


def elapsed_ns(graph: Graph, times: Times) -> int:
    """Return the latency in ns of a schedule on a machine, with its waits for copies and collectives."""
    clock = _Clock()
    for _ in _advance(graph, times, clock):
        pass
    return clock.compute


def moments(graph: Graph, times: Times) -> Iterator[int]:
    """Yield the time in ns at the end of each operator of a schedule on a machine; of a loop, those of its body for
    each part."""
    return _advance(graph, times, _Clock())


def _advance(graph: Graph, times: Times, clock: _Clock) -> Iterator[int]:
    storage_of = {value.id: value.storage for value in graph.values.values()}
    beside = under_way(graph.ops)
    for op in graph.ops:
        clock.meet(storage_of[value] for value in op.inputs())
        if op.body is not None:
            for _ in range(op.body.parts):
                part = clock.inside()
                yield from _advance(op.body.graph, times, part)
                clock.compute = part.compute
            continue
        if op.target in COPIES:
            taken, made = op.inputs()[0], op.made()[0]
            clock.copy(COPIES[op.target], graph.storages[storage_of[taken]].nbytes, storage_of[made], times)
        elif op.target == "magis.rng_enter":
            clock.compute += GENERATOR_NS
        elif not beside.isdisjoint(op.made()):
            clock.send(storage_of[op.made()[0]], times.nanoseconds(op, graph.values))
        elif is_message(op.target):
            clock.exchange(times.nanoseconds(op, graph.values))
        elif op.target not in UNTIMED and not is_pure_view(graph.values, op):
            clock.run(times.nanoseconds(op, graph.values))
        yield clock.compute


Held = tuple[int, ...]
"""Bytes of tensors by kind, in the order of Span.KINDS without the last one (scratch)."""
TENSOR_KINDS = len(Span.KINDS) - 1
PLACES = {
    "parameter": 0, "state": 1, "batch": 2, "buffer": 2, "constant": 2, "activation": 3, "gradient": 4, "update": 5,
}  # fmt: skip
"""Index in ``Held`` by kind of owner."""


def timeline(
    graph: Graph,
    times: Times,
    workspace: Workspace,
    profile: MemoryProfile,
    *,
    deaths: Mapping[int, int] | None = None,
    rounding: int = 1,
) -> tuple[Span, ...]:
    """List the calls of a schedule in order, without views; ``profile`` is the result of ``replay`` with equal
    arguments.

    Host copies overlap the operators, one at a time in each direction, as in the search: a store or a load starts once
    all earlier calls on the compute stream are done. A reader of a loaded tensor waits for the load, and the memory of
    a stored tensor is freed once it is on the host. Collectives overlap both, one at a time, until the schedule waits
    for them; a blocking collective stops the compute stream.
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
        """Yield the calls of a graph or of one part of a loop; ``levels`` are all bytes during each operator, ``held``
        the bytes of tensors by kind."""
        storage_of = {value.id: value.storage for value in graph.values.values()}
        seen: Counter[int] = Counter()
        beside = under_way(graph.ops)
        for op, level, own in zip(graph.ops, levels, held, strict=True):
            clock.meet(storage_of[value] for value in op.inputs())
            if op.body is not None and self.apart:
                inner = replay(op.body.graph, self.workspace, rounding=self.rounding)
                outside = level - bytes_inside(op, graph, self.workspace, self.rounding)[1]
                above = [outside + peak for peak in inner.peaks]
                within = [_add_kinds(own, each) for each in held_by_kind(op.body.graph, rounding=self.rounding)]
                for _ in range(op.body.parts):
                    part = clock.inside()
                    yield from self.calls(op.body.graph, above, within, part)
                    clock.compute = part.compute
            elif op.target in COPIES:
                source, target = (graph.storages[storage_of[value]] for value in (op.inputs()[0], op.made()[0]))
                stream = COPIES[op.target]
                start, spent = clock.copy(stream, source.nbytes, target.id, self.times)
                yield _span(op, start, spent, level, own, stream=stream)
            elif op.target not in UNTIMED and not is_pure_view(graph.values, op):
                again = op.origin is not None and seen[op.origin] > 0
                seen[-1 if op.origin is None else op.origin] += 1
                spent = self.times.nanoseconds(op, graph.values)
                if not beside.isdisjoint(op.made()):
                    start = clock.send(storage_of[op.made()[0]], spent)
                    yield _span(op, start, spent, level, own, stream=MESSAGES, again=again)
                    continue
                alone = clock.exchange if is_message(op.target) else clock.run
                yield _span(op, alone(spent), spent, level, _add_kinds(own, self._worst(op)), again=again)

    def _worst(self, op: Op) -> Held:
        """Return the bytes by kind of the tensors inside an operator at its peak; only a loop has any."""
        if op.body is None or not op.body.graph.ops:
            return (0,) * TENSOR_KINDS
        graph = op.body.graph
        at = replay(graph, self.workspace, rounding=self.rounding).peak_position
        return _add_kinds(held_by_kind(graph, rounding=self.rounding)[at], self._worst(graph.ops[at]))


def _span(
    op: Op, start_ns: int, ns: int, level: int, held: Held, *, stream: str = "compute", again: bool = False
) -> Span:
    kinds = (*held, level - sum(held))
    where = (op.target, op.module, op.phase, op.line)
    return Span(*where, start_ns / NS_PER_MS, ns / NS_PER_MS, level, stream, again, kinds)


def _add_kinds(one: Held, other: Held) -> Held:
    return tuple(map(add, one, other))


def held_by_kind(graph: Graph, *, deaths: Mapping[int, int] | None = None, rounding: int = 1) -> list[Held]:
    """Return the bytes of tensors in memory during each operator, by kind, as ``replay`` counts them but without loop
    bodies.

    A storage that is reused in place counts as the new tensor's kind.
    """
    end = len(graph.ops)
    change = [[0] * TENSOR_KINDS for _ in range(end + 2)]
    for each in tenancies(graph, deaths):
        place = PLACES.get(each.owner.kind, PLACES["activation"])
        nbytes = rounded(graph.storages[each.storage].nbytes, rounding)
        change[max(each.born, 0)][place] += nbytes
        change[each.dies + 1][place] -= nbytes
    return list(accumulate(map(tuple, change[:end]), _add_kinds))
