"""Lower bound on the peak of all plans, fission included, with the tensors that cause it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from magis.graph import Graph, Op, Value
from magis.graph.hazards import is_pure_view, lifetimes
from magis.ops.operators import op_info
from magis.ops.splits import splits
from magis.simulate.simulator import Workspace, replay, rounded
from magis.units import format_bytes

NAMED = 3
"""Number of tensors that the text of a bound names."""
WORDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "state": "optimizer state",
    "batch": "batch",
    "constant": "constants",
}
"""Persistent kinds of storages, in words."""


@dataclass(frozen=True)
class Needed:
    """A tensor that must be in memory whole; ``name`` of a parameter, input, ..., or empty."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def __str__(self) -> str:
        sizes = ",".join(str(size) for size in self.shape)
        return f"{self.name} {self.dtype}[{sizes}] {format_bytes(self.nbytes)}".lstrip()


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on a peak: persistent tensors, and one operator with the tensors that it needs whole."""

    nbytes: int
    kinds: tuple[tuple[str, int], ...]
    """Persistent bytes by kind of storage, largest first."""
    largest: Needed | None
    """Largest persistent tensor; None without any."""
    op: str = ""
    """Name of the operator; empty if every operator can be split: only persistent tensors count."""
    module: str = ""
    phase: str = ""
    tensors: tuple[Needed, ...] = ()
    """Temporary tensors that the operator needs whole, largest first."""
    scratch_bytes: int = 0

    @property
    def persistent_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.kinds)

    def __str__(self) -> str:
        """Describe the bound in one line."""
        kinds = ", ".join(f"{WORDS[kind]} {format_bytes(nbytes)}" for kind, nbytes in self.kinds)
        largest = "" if self.largest is None else f" (largest: {self.largest})"
        stays = f"{format_bytes(self.persistent_bytes)} that stay{': ' if kinds else ''}{kinds}{largest}"
        if not self.op:
            return f"{stays}; every operator can be cut"
        where = f" of {self.module}" if self.module else ""
        own = format_bytes(self.nbytes - self.persistent_bytes)
        whole, others = [str(tensor) for tensor in self.tensors[:NAMED]], self.tensors[NAMED:]
        if others:
            whole.append(f"{len(others)} more {format_bytes(sum(tensor.nbytes for tensor in others))}")
        if self.scratch_bytes:
            whole.append(f"scratch {format_bytes(self.scratch_bytes)}")
        return f"{stays}; + {own} that {self.op}{where} ({self.phase}) needs whole: {', '.join(whole)}"


def lower_bound(graph: Graph, workspace: Workspace, rounding: int = 1) -> LowerBound:
    """Return persistent bytes + the largest working set of one operator, counting only tensors that no split shrinks.

    An operator that can be split may run on ever smaller parts; only one without splits needs its workspace and, unless
    it can overwrite an input, all of its outputs.
    """
    sizes = {s.id: rounded(s.nbytes, rounding) for s in graph.storages.values() if s.persistent}
    kinds: dict[str, int] = {}
    for storage, nbytes in sizes.items():
        kind = graph.storages[storage].kind
        kinds[kind] = kinds.get(kind, 0) + nbytes
    there = [graph.values[value] for value in graph.inputs if graph.values[value].storage in sizes]
    largest = max(there, key=lambda value: value.nbytes, default=None)
    stays = LowerBound(
        nbytes=sum(sizes.values()),
        kinds=tuple(sorted(((kind, n) for kind, n in kinds.items() if n), key=lambda item: (-item[1], item[0]))),
        largest=None if largest is None else _described(largest, sizes[largest.storage]),
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
    """Return the bound raised to the peak of the operators from position ``start`` of ``whole`` on, which no plan
    changes; ``name`` names them."""
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


def _described(value: Value, nbytes: int) -> Needed:
    return Needed(value.name, value.shape, value.dtype, nbytes)


def _needed(graph: Graph, op: Op, workspace: Workspace, rounding: int) -> tuple[int, dict[int, int]]:
    """Return the workspace bytes that the operator needs, and the temporary tensors that it needs whole (value ->
    bytes, one per storage)."""
    if op.phase == "update" or op.target.startswith("magis.") or is_pure_view(graph.values, op):
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
    """Return the bytes of a tensor, at most those of its storage; unused space in the storage does not count."""
    return min(graph.storages[value.storage].nbytes, value.nbytes)
