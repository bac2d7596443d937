"""The exact simulator of a graph: bytes at every operator in program order.

Bytes = persistent storages + temporary storages alive + the workspace of the running operator. Views are free, a
storage lives until its last view is forgotten. With workspaces measured in isolation this equals
what the CPU allocator counts, byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from magis.graph import Graph, Op, Value
from magis.graph.hazards import lifetimes

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
    """Return the bytes that an allocator with blocks of ``rounding`` bytes hands out."""
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
    """Walk the schedule and count bytes. ``deaths`` are eager's own lifetimes.

    A loop counts the tensors and the scratch of its body at the size of one part, besides its inputs and outputs: parts
    run one at a time, each the same as the others. Host storages (swapped tensors) count nothing. Storages in ``held``
    are in memory the whole time. ``numbers`` are lives and bytes of small tensors that eager keeps besides the graph's
    (``Captured.numbers``); none on a GPU. They count like workspace, since no operator hands them out.
    """
    lives = lifetimes(graph, deaths)
    change = Counter[int]()
    for storage, born in lives.born.items():
        if graph.storages[storage].kind == "host":
            continue
        nbytes = rounded(graph.storages[storage].nbytes, rounding)
        if storage in held:
            change[0] += nbytes
            continue
        change[born] += nbytes
        change[lives.dies[storage] + 1] -= nbytes
    small = Counter[int]()
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
        parts, scratch = bytes_inside(op, graph, workspace, rounding)
        tensors.append(level + parts)
        peaks.append(level + beside + scratch)
    return MemoryProfile(persistent, tuple(tensors), tuple(peaks))


def bytes_inside(op: Op, graph: Graph, workspace: Workspace, rounding: int) -> tuple[int, int]:
    """Return the peaks within an operator: of tensors (those of a loop's body), and of tensors and scratch."""
    if op.body is None:
        return 0, workspace(op, graph.values)
    profile = replay(op.body.graph, workspace, rounding=rounding)
    return profile.tensor_bytes, profile.peak_bytes
