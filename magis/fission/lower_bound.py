"""Bytes that no plan avoids, not even one that runs everything in parts; and what makes them, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from magis.graph import Graph, Op, Value
from magis.graph.hazards import is_pure_view, lifetimes
from magis.ops.operators import op_info
from magis.ops.splits import splits
from magis.simulate.simulator import Workspace, replay, rounded
from magis.units import format_bytes

NAMED = 3
"""Tensors that a text lists; it counts the others."""
WORDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "optimizer state",
    "batch": "batch",
    "constant": "constants",
}
"""Persistent kinds of storages."""


@dataclass(frozen=True)
class Needed:
    """A tensor that is there whole. ``name`` is that of a parameter, input, ...; empty where it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def __str__(self) -> str:
        sizes = ",".join(str(size) for size in self.shape)
        return f"{self.name} {self.dtype}[{sizes}] {format_bytes(self.nbytes)}".lstrip()


@dataclass(frozen=True)
class LowerBound:
    """The bound, and what makes it: all that stays, and one operator with the tensors that it needs whole."""

    nbytes: int
    kinds: tuple[tuple[str, int], ...]
    """Persistent bytes by kind of storage, most first."""
    largest: Needed | None
    """Of the persistent tensors."""
    op: str = ""
    """Empty: every operator can be cut, and only what stays counts."""
    module: str = ""
    phase: str = ""
    tensors: tuple[Needed, ...] = ()
    """Temporary ones, most bytes first."""
    scratch_bytes: int = 0

    @property
    def persistent_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.kinds)

    def __str__(self) -> str:
        """One line."""
        kinds = ", ".join(f"{WORDS[kind]} {format_bytes(nbytes)}" for kind, nbytes in self.kinds)
        largest = "" if self.largest is None else f" (largest: {self.largest})"
        stays = f"{format_bytes(self.persistent_bytes)} that stay{': ' if kinds else ''}{kinds}{largest}"
        if not self.op:
            return f"{stays}; every operator can be cut"
        where = f" of {self.module}" if self.module else ""
        own = format_bytes(self.nbytes - self.persistent_bytes)
        return f"{stays}; + {own} that {self.op}{where} ({self.phase}) needs whole: {', '.join(self._wholes())}"

    def _wholes(self) -> Iterator[str]:
        named, others = self.tensors[:NAMED], self.tensors[NAMED:]
        yield from map(str, named)
        if others:
            yield f"{len(others)} more {format_bytes(sum(tensor.nbytes for tensor in others))}"
        if self.scratch_bytes:
            yield f"scratch {format_bytes(self.scratch_bytes)}"


def lower_bound(graph: Graph, workspace: Workspace, rounding: int = 1) -> int:
    """Persistent bytes + the largest working set of one operator, of tensors that no way of cutting it makes smaller.

    An operator that can be cut may run on ever smaller parts of what is cut, one way within the other; only one that
    cannot be cut at all needs its scratch and, unless it may write over an input, all that it makes.
    """
    return floor(graph, workspace, rounding).nbytes


def floor(graph: Graph, workspace: Workspace, rounding: int = 1) -> LowerBound:
    """The same, explained."""
    sizes = {s.id: rounded(s.nbytes, rounding) for s in graph.storages.values() if s.persistent}
    kinds: dict[str, int] = {}
    for storage, nbytes in sizes.items():
        kind = graph.storages[storage].kind
        kinds[kind] = kinds.get(kind, 0) + nbytes
    stays = LowerBound(
        nbytes=sum(sizes.values()),
        kinds=tuple(sorted(((kind, n) for kind, n in kinds.items() if n), key=lambda item: (-item[1], item[0]))),
        largest=_largest(graph, sizes),
    )
    every = ((op, *_needed(graph, op, workspace, rounding)) for op in graph.ops)
    worst, scratch, needed = max(every, key=lambda each: each[1] + sum(each[2].values()), default=(None, 0, {}))
    own = scratch + sum(needed.values())
    if worst is None or not own:
        return stays
    wholes = [_described(graph.values[value], nbytes) for value, nbytes in needed.items()]
    return LowerBound(
        nbytes=stays.nbytes + own,
        kinds=stays.kinds,
        largest=stays.largest,
        op=worst.target,
        module=worst.module,
        phase=worst.phase,
        tensors=tuple(sorted(wholes, key=lambda tensor: -tensor.nbytes)),
        scratch_bytes=scratch,
    )


def with_behind(
    found: LowerBound,
    name: str,
    whole: Graph,
    workspace: Workspace,
    deaths: Mapping[int, int],
    rounding: int,
    start: int,
) -> LowerBound:
    """The bound for a step that others follow, from position ``start`` of ``whole`` on, which no plan changes and
    which are called ``name``."""
    profile = replay(whole, workspace, deaths=deaths, rounding=rounding)
    at = max(range(start, len(whole.ops)), key=lambda position: profile.peaks[position], default=-1)
    if at < 0 or profile.peaks[at] <= found.nbytes:
        return found
    lives = lifetimes(whole, deaths)
    held = {storage for storage, born in lives.born.items() if born <= at <= lives.dies[storage]}
    first = {value.storage: value for value in reversed(whole.values.values()) if value.storage in held}
    sizes = [(value, rounded(whole.storages[value.storage].nbytes, rounding)) for value in first.values()]
    tensors = [_described(value, n) for value, n in sizes if whole.storages[value.storage].kind == "temporary"]
    return replace(
        found,
        nbytes=profile.peaks[at],
        op=name,
        module="",
        phase="update",
        tensors=tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes)),
        scratch_bytes=profile.peaks[at] - profile.tensors[at],
    )


def _largest(graph: Graph, sizes: dict[int, int]) -> Needed | None:
    """The first of the largest persistent tensors."""
    there = [graph.values[value] for value in graph.inputs if graph.values[value].storage in sizes]
    found = max(there, key=lambda value: value.nbytes, default=None)
    return None if found is None else _described(found, sizes[found.storage])


def _described(value: Value, nbytes: int) -> Needed:
    return Needed(value.name, value.shape, value.dtype, nbytes)


def _needed(graph: Graph, op: Op, workspace: Workspace, rounding: int) -> tuple[int, dict[int, int]]:
    """Scratch bytes, and those of the temporary tensors (value -> bytes, one of each storage) that the operator needs
    whole."""
    if op.phase == "update" or op.target.startswith("magis.") or is_pure_view(graph, op):
        return 0, {}
    ways = splits(op, graph.values)
    whole = dict.fromkeys(op.inputs())
    info = op_info(op.target)
    if not ways and info.in_place_form(op.target) is None and info.out_form(op.target) is None:
        whole.update(dict.fromkeys(op.made()))
    for way in ways:
        for taken, dim in zip(op.inputs(), way.inputs, strict=True):
            if dim is not None:
                whole.pop(taken, None)
    found: dict[int, Value] = {}
    for number in whole:
        value = graph.values[number]
        if graph.storages[value.storage].kind == "temporary":
            other = found.get(value.storage, value)
            found[value.storage] = max(other, value, key=lambda each: _extent(graph, each))
    scratch = 0 if ways else workspace(op, graph.values)
    return scratch, {value.id: rounded(_extent(graph, value), rounding) for value in found.values()}


def _extent(graph: Graph, value: Value) -> int:
    """Tensors, not storages: some operators leave room behind a small result, which they need not when cut."""
    return min(graph.storages[value.storage].nbytes, value.nbytes)
