"""The exact simulator of a graph: bytes at every operator in program order.

Bytes = persistent storages + live temporary storages + the workspace of the running operator. Views need no memory; a
storage lives until its last view dies. With workspaces measured per operator, this equals the CPU allocator's count
byte for byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from magis.graph import Graph, Op, Value
from magis.graph.hazards import lifetimes

Workspace = Callable[[Op, Mapping[int, Value]], int]
"""Callback: operator and the graph's values -> workspace in bytes."""


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes while each operator runs, with persistent storages: ``tensors[i]`` without workspace, ``peaks[i]`` with it.

    ``peak_bytes`` and ``tensor_bytes`` are the maxima over the step; ``peak_position`` is the first operator at the
    peak (-1: no operators).
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
    """Return the bytes of an allocation in blocks of ``rounding`` bytes."""
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
    """Simulate a schedule and count bytes. ``deaths`` are eager's frees (storage -> position).

    A loop adds the peak of one part of its body to its inputs and outputs: parts run one at a time and are equal. Host
    storages (swapped tensors) count 0. Storages in ``held`` are in memory throughout. ``numbers`` are first position,
    last position and bytes of scalars that eager keeps for backward (``Captured.numbers``), none on a GPU; they count
    as workspace, since no operator allocates them.
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
    """Return the peak bytes inside an operator: of tensors (those of a loop's body), and of tensors and workspace."""
    if op.body is None:
        return 0, workspace(op, graph.values)
    profile = replay(op.body.graph, workspace, rounding=rounding)
    return profile.tensor_bytes, profile.peak_bytes
