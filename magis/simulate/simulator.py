"""The exact simulator of a graph: bytes at every operator in program order, and their time line.

Bytes = persistent storages + temporary storages alive + the workspace of the running operator. Views are free, a
storage lives until its last view is forgotten. With workspaces measured in isolation this equals
what the CPU allocator counts, byte for byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from magis.graph import Graph, Op, Value
from magis.graph.hazards import is_pure_view, lifetimes
from magis.results import Span

Workspace = Callable[[Op, Mapping[int, Value]], int]
"""Scratch in bytes of an operator, given the values of its graph."""


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes while each operator runs: ``tensors[i]`` without, ``peaks[i]`` with workspace; persistent ones counted.

    The peaks are those of the whole step; ``peak_position`` is the first operator at which the peak is reached (-1: no
    operator at all).
    """

    persistent_bytes: int
    tensors: tuple[int, ...]
    peaks: tuple[int, ...]

    @property
    def tensor_bytes(self) -> int:
        return max(self.tensors, default=self.persistent_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks, default=self.persistent_bytes)

    @property
    def peak_position(self) -> int:
        return self.peaks.index(self.peak_bytes) if self.peaks else -1


def rounded(nbytes: int, rounding: int) -> int:
    """Bytes that an allocator with blocks of ``rounding`` bytes hands out."""
    return -(-nbytes // rounding) * rounding


def replay(
    graph: Graph,
    workspace: Workspace,
    *,
    deaths: Mapping[int, int] | None = None,
    rounding: int = 1,
    held: frozenset[int] = frozenset(),
    numbers: tuple[tuple[int, int, int], ...] = (),
) -> MemoryProfile:
    """Walk the schedule. ``deaths`` are eager's own lifetimes.

    During a loop there are, besides what it takes and makes, the tensors and the scratch of its body: those of one part
    at a time, each the same as the others.

    Host storages (swapped tensors) count nothing. Storages in ``held`` are in memory the whole time.
    ``numbers`` are lives and bytes of small tensors that eager keeps besides the graph's (``Captured.numbers``); none
    on a GPU.
    They count like workspace, since no operator hands them out.
    """
    lives = lifetimes(graph, deaths)
    count = len(graph.ops)
    change = [0] * (count + 2)
    for storage, born in lives.born.items():
        if graph.storages[storage].kind == "host":
            continue
        nbytes = rounded(graph.storages[storage].nbytes, rounding)
        if storage in held:
            change[0] += nbytes
            continue
        change[born] += nbytes
        change[lives.dies[storage] + 1] -= nbytes
    small = [0] * (count + 2)
    for born, last, nbytes in numbers:
        small[born] += nbytes
        small[last + 1] -= nbytes
    persistent = sum(rounded(s.nbytes, rounding) for s in graph.storages.values() if s.persistent)
    level, beside = persistent, 0
    tensors = []
    peaks = []
    for position, op in enumerate(graph.ops):
        level += change[position]
        beside += small[position]
        parts, scratch = inside(op, graph, workspace, rounding)
        tensors.append(level + parts)
        peaks.append(level + beside + scratch)
    return MemoryProfile(persistent, tuple(tensors), tuple(peaks))


def inside(op: Op, graph: Graph, workspace: Workspace, rounding: int) -> tuple[int, int]:
    """Bytes of tensors, and of tensors and scratch, at the worst moments within an operator: a loop makes both."""
    if op.body is None:
        return 0, workspace(op, graph.values)
    profile = replay(op.body.graph, workspace, rounding=rounding)
    return profile.tensor_bytes, profile.peak_bytes


# A step as a simulated time line: when each call starts, how long it takes, and the bytes in memory meanwhile.

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


def timeline(
    graph: Graph, times: Times, workspace: Workspace, profile: MemoryProfile, *, rounding: int = 1
) -> tuple[Span, ...]:
    """The calls of a schedule in order, views left out; ``profile`` is what ``replay`` says of its bytes.

    Copies run beside the operators, one at a time in each direction, as the search counts them: a store or a load
    starts once what was given to the compute stream before is done, and whoever takes a loaded tensor waits for it.
    """
    apart = sum(1 if op.body is None else op.body.parts * len(op.body.graph.ops) for op in graph.ops) <= MOST_CALLS
    return tuple(_calls(graph, times, workspace, profile.peaks, _Clock(), rounding, apart=apart))


def _calls(
    graph: Graph,
    times: Times,
    workspace: Workspace,
    levels: tuple[int, ...],
    clock: _Clock,
    rounding: int,
    *,
    apart: bool,
) -> Iterator[Span]:
    storage_of = {value.id: value.storage for value in graph.values.values()}
    seen: Counter[int] = Counter()
    for op, level in zip(graph.ops, levels, strict=True):
        for value in op.inputs():  # what was loaded must be there
            clock.compute = max(clock.compute, clock.done.get(storage_of[value], 0))
        if op.body is not None and apart:
            inner = replay(op.body.graph, workspace, rounding=rounding)
            outside = level - inside(op, graph, workspace, rounding)[1]
            above = tuple(outside + peak for peak in inner.peaks)
            for _ in range(op.body.parts):
                part = _Clock(clock.compute, clock.out, clock.back)
                yield from _calls(op.body.graph, times, workspace, above, part, rounding, apart=apart)
                clock.compute, clock.out, clock.back = part.compute, part.out, part.back
        elif op.target in ("magis.store", "magis.load"):
            yield _copied(graph, op, times, clock, level)
        elif op.target not in UNTIMED and not is_pure_view(graph, op):
            again = op.origin is not None and seen[op.origin] > 0
            seen[-1 if op.origin is None else op.origin] += 1
            spent = times.nanoseconds(op, graph.values)
            yield _span(op, clock.compute, spent, level, again=again)
            clock.compute += spent


def _copied(graph: Graph, op: Op, times: Times, clock: _Clock, level: int) -> Span:
    """A copy, in the queue of its direction; a loaded tensor is there when it is done."""
    (taken,) = op.inputs()
    spent = math.ceil(graph.storages[graph.values[taken].storage].nbytes * (1e9 / times.link_bytes_per_s))
    if op.target == "magis.store":
        start = max(clock.out, clock.compute)
        clock.out = start + spent
        return _span(op, start, spent, level, stream="to host")
    start = max(clock.back, clock.compute)
    clock.back = start + spent
    (made,) = op.made()
    clock.done[graph.values[made].storage] = clock.back
    return _span(op, start, spent, level, stream="from host")


def _span(op: Op, start_ns: int, ns: int, level: int, *, stream: str = "compute", again: bool = False) -> Span:
    return Span(op.target, op.module, op.phase, op.line, start_ns / NS_PER_MS, ns / NS_PER_MS, level, stream, again)
