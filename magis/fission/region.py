"""Regions of fission (paper, F-Trans): operators, the split of each, a number of parts; legality, in-place outputs.

    Region(cuts={operator: Split, ...}, parts=4)

Each rule of the paper is a check that names the operator that breaks it; illegal regions raise nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd

import rustworkx as rx

from magis.cost.signature import signature
from magis.graph import Graph, Op, Value
from magis.graph.hazards import dependency_graph, fills, is_dense, is_pure_view
from magis.ops.splits import Cut, Halo, How, Overlap, Split, splits, why_opaque


@dataclass(frozen=True, eq=False)
class Region:
    """A region: operators (by position in ``graph.ops``) with the split of each, and the number of parts."""

    cuts: Mapping[int, Split]
    parts: int
    uneven: bool = False
    """True if the number of parts need not divide the cut dimensions: the last part is then smaller."""

    @functools.cached_property
    def scale(self) -> Fraction:
        """Sizes of cut dimensions as multiples of those in a part: the number of parts, if these are equal."""
        most = most_parts(self.cuts)
        return Fraction(most, -(-most // self.parts)) if self.uneven else Fraction(self.parts)


def most_parts(cuts: Mapping[int, Split]) -> int:
    """Return the greatest common divisor of all cut dimensions: the number of equal parts must divide it."""
    return gcd(*(split.extent for split in cuts.values()))


def needs_equal_parts(split: Split) -> bool:
    """Return True for a split in which windows overlap, or means are merged."""
    return any(how == "mean" or isinstance(how, Halo | Overlap) for how in (*split.inputs, *split.outputs))


@dataclass(frozen=True)
class Leaving:
    """An output of a region, which operators outside or the step use; ``how``: merge of its parts."""

    value: int
    maker: int
    how: int | str | Overlap


def region_problems(graph: Graph, region: Region) -> Iterator[str]:
    """Yield every broken rule of a region as one line; a region without any can be expanded, kernels permitting."""
    if region.parts < 2 or not region.cuts:
        yield f"a region has operators and at least 2 parts, not {len(region.cuts)} and {region.parts}"
        return
    if not set(region.cuts) <= set(range(len(graph.ops))):
        yield "the region names operators that the graph does not have"
        return
    impossible = False
    for position, split in sorted(region.cuts.items()):
        for problem in _operator_problems(graph, graph.ops[position], split, region):
            impossible = True
            yield problem
    if impossible:
        return  # further checks need valid splits
    if all(is_pure_view(graph.values, graph.ops[position]) for position in region.cuts):
        yield "the region computes nothing: its operators are views"
        return
    yield from _edge_problems(graph, region)
    yield from _write_problems(graph, region)
    yield from _leaving_problems(graph, region)
    yield from _shape_problems(graph, region)


def _where(op: Op) -> str:
    return f"operator {op.id} ({op.target})"


def _operator_problems(graph: Graph, op: Op, split: Split, region: Region) -> Iterator[str]:
    """Yield reasons why the operator cannot be split that way into so many parts."""
    if op.random:
        yield f"{_where(op)}: draws random numbers, which would be others in parts"
    elif op.body is not None:
        yield f"{_where(op)}: is split already"
    elif split not in (known := ways(op, graph.values)):
        reason = "not in that way" if known else why_opaque(op, graph.values)
        yield f"{_where(op)}: cannot be cut: {reason}"
    elif split.extent % region.scale:
        yield f"{_where(op)}: {region.parts} parts do not divide {split.extent}"
    elif region.uneven and needs_equal_parts(split):
        yield f"{_where(op)}: needs parts of equal sizes"


def _edge_problems(graph: Graph, region: Region) -> Iterator[str]:
    """Yield operators that cut a tensor of the region otherwise than its maker (one component of the D-Graph)."""
    given = made_in(graph, region)
    for position, split in sorted(region.cuts.items()):
        op = graph.ops[position]
        for value, wanted in zip(op.inputs(), split.inputs, strict=True):
            if value in given and given[value] != (wanted if wanted is not None else "same"):
                how = given[value]
                by = f"rows of {how.dim} that overlap" if isinstance(how, Overlap) else repr(how)
                cut = "whole" if wanted is None else f"cut along {wanted}"
                if isinstance(wanted, Halo):
                    cut = f"cut along {wanted.dim} with rows of other parts"
                yield f"{_where(op)}: takes value {value} {cut}, which its maker gives by {by}"
            elif (
                value not in given
                and wanted is not None
                and graph.values[value].bits
                and is_pure_view(graph.values, op)
            ):
                # A copied stretch has no lazy bits but its conjugate has one, which kernels resolve, unlike in eager.
                bits = " ".join(graph.values[value].bits)
                yield f"{_where(op)}: opens a view in parts of value {value}, which has the bits {bits}"


def made_in(graph: Graph, region: Region) -> dict[int, How]:
    """Map the values made in the region to the merge of their parts."""
    return {
        value: how
        for position, split in region.cuts.items()
        for value, how in zip(graph.ops[position].outputs, split.outputs, strict=True)
        if value is not None
    }


def _write_problems(graph: Graph, region: Region) -> Iterator[str]:
    """Yield writes of the region to outer storages, and vice versa; running statistics are allowed if they are cut."""
    taken, born = set[int](), set[int]()
    for position in sorted(region.cuts):
        taken |= {graph.values[value].storage for value in graph.ops[position].inputs()}
        born |= {graph.values[value].storage for value in graph.ops[position].made()} - taken
    stretched: dict[int, int] = {}
    for position, split in sorted(region.cuts.items()):
        op = graph.ops[position]
        for storage, _ in op.writes:
            if storage in born and graph.storages[storage].kind == "temporary":
                continue
            value = _written_by_stretch(graph, op, split, storage)
            if value is None:
                yield f"{_where(op)}: writes storage {storage}, which is not the region's own"
            else:
                stretched[storage] = value
    yield from _whole_read_problems(graph, region, stretched)
    for position, op in enumerate(graph.ops):
        if position not in region.cuts:
            for storage, _ in op.writes:
                if storage in born:
                    yield f"{_where(op)}: writes storage {storage}, which the region makes"


def _written_by_stretch(graph: Graph, op: Op, split: Split, storage: int) -> int | None:
    """Return the call's only argument on this storage if it is a dense 1-d tensor that is cut; else None."""
    touched = [
        (value, dim)
        for value, dim in zip(op.inputs(), split.inputs, strict=True)
        if graph.values[value].storage == storage
    ]
    if len(touched) != 1 or any(graph.values[value].storage == storage for value in op.made()):
        return None
    ((value, dim),) = touched
    vector = len(graph.values[value].shape) == 1 and is_dense(graph.values[value])
    return value if vector and dim == 0 else None


def _whole_read_problems(graph: Graph, region: Region, stretched: Mapping[int, int]) -> Iterator[str]:
    """Yield whole reads of storages (-> value) that the region writes by slices: later parts would differ."""
    made = made_in(graph, region)
    for position, split in sorted(region.cuts.items()):
        op = graph.ops[position]
        for value, dim in zip(op.inputs(), split.inputs, strict=True):
            looks = graph.values[value]
            if value in made or looks.storage not in stretched:
                continue
            written = graph.values[stretched[looks.storage]]
            if dim != 0 or (looks.shape, looks.stride, looks.offset) != (written.shape, written.stride, written.offset):
                yield (
                    f"{_where(op)}: takes value {value}, on storage {looks.storage}, which the region writes stretch "
                    "by stretch"
                )


def _leaving_problems(graph: Graph, region: Region) -> Iterator[str]:
    """Yield outputs of the region that share a storage or do not cover one."""
    storages: dict[int, int] = {}
    for leaving in leavings(graph, region):
        value = graph.values[leaving.value]
        op = graph.ops[leaving.maker]
        if not fills(value, graph.storages[value.storage]):
            yield f"{_where(op)}: value {value.id} leaves the region as part of a larger storage"
        if storages.setdefault(value.storage, value.id) != value.id:
            yield f"{_where(op)}: two tensors on storage {value.storage} leave the region"


def leavings(graph: Graph, region: Region) -> list[Leaving]:
    """Return the outputs of the region, which operators outside or the step use; for a view, its base."""
    root = roots(graph)
    used = {root[value] for value in graph.outputs}
    for position, op in enumerate(graph.ops):
        if position not in region.cuts:
            used.update(root[value] for value in op.inputs())
    found = []
    for position in sorted(region.cuts):
        outputs = zip(graph.ops[position].outputs, region.cuts[position].outputs, strict=True)
        found += [
            Leaving(value, position, how)
            for value, how in outputs
            if value is not None and how is not None and value in used and root[value] == value
        ]
    return found


def roots(graph: Graph) -> dict[int, int]:
    """Map every value to the base of which it is a view, or to itself."""
    found = {value: value for value in graph.inputs}
    for op in graph.ops:
        view = is_pure_view(graph.values, op)
        for value in op.made():
            storage = graph.values[value].storage
            bases = [taken for taken in op.inputs() if graph.values[taken].storage == storage] if view else []
            found[value] = found[bases[0]] if bases else value
    return found


def _shape_problems(graph: Graph, region: Region) -> Iterator[str]:
    """Yield reasons why the region is not convex or not weakly connected."""
    inside = set(region.cuts)
    dag = dependency_graph(graph)
    after: set[int] = set()
    for position in range(len(graph.ops)):
        before = dag.predecessor_indices(position)
        tainted = any(p in after or (p in inside and position not in inside) for p in before)
        if tainted:
            after.add(position)
            if position in inside:
                yield f"{_where(graph.ops[position])}: depends on an operator that needs the region's result"
    sub = dag.subgraph(sorted(inside))
    count = rx.number_weakly_connected_components(sub)
    if count > 1:
        yield f"the region falls into {count} unconnected pieces"


# In-place by parts: outputs of a region that overwrite its inputs.
#
#     for each part:  p = magis.part(x, 0);  q = f(p);  magis.join(y, q, 0)        y lies on the memory of x
#
# A stretch of x is dead after its last read: the part's output may overwrite it. Whole operators can run in-place only
# if they are element-wise; in parts, any operator can whose output has the layout of its input. The published method
# allocates every output of a region besides its inputs.


def takeovers(graph: Graph, region: Region, left: Sequence[Leaving]) -> dict[int, int]:
    """Map storages of the region's outputs to the storages that they overwrite."""
    found: dict[int, int] = {}
    victims = dict(_victims(graph, region))
    written = {storage for p in region.cuts for storage, _ in graph.ops[p].writes}
    written |= {graph.values[value].storage for value in graph.outputs}
    for leaving in left:
        ours = graph.values[leaving.value]
        if ours.storage in written:
            continue
        for storage, (value, dim) in victims.items():
            theirs = graph.values[value]
            same = (theirs.shape, theirs.stride, theirs.dtype) == (ours.shape, ours.stride, ours.dtype)
            if dim == leaving.how and same and storage not in found.values():
                found[ours.storage] = storage
                break
    return found


def _victims(graph: Graph, region: Region) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (storage, (value, dimension)) for inputs cut in one way that only the region uses once it has begun."""
    touching: dict[int, list[int]] = {}
    for position, op in enumerate(graph.ops):
        for value in (*op.inputs(), *op.made()):
            touching.setdefault(graph.values[value].storage, []).append(position)
    first = min(region.cuts)
    kept = {graph.values[value].storage for value in graph.outputs}
    kept |= {storage for p in region.cuts for storage, _ in graph.ops[p].writes}
    # Storages from outside, with the values through which operators take them and the dimensions that these cut.
    made = {value for position in region.cuts for value in graph.ops[position].made()}
    through: dict[int, set[tuple[int, Cut]]] = {}
    for position, split in region.cuts.items():
        for value, dim in zip(graph.ops[position].inputs(), split.inputs, strict=True):
            if value not in made:
                through.setdefault(graph.values[value].storage, set()).add((value, dim))
    for storage, taken in through.items():
        (value, dim), *others = sorted(taken, key=str)
        last = max((position for position in touching[storage] if position not in region.cuts), default=first)
        if others or not isinstance(dim, int) or last >= first or storage in kept:
            continue  # other parts read it as well
        if graph.storages[storage].kind == "temporary" and fills(graph.values[value], graph.storages[storage]):
            yield storage, (value, dim)


def last_readers(graph: Graph, region: Region) -> dict[int, int]:
    """Map each storage to the position of its last reader in the region."""
    found: dict[int, int] = {}
    for position in sorted(region.cuts):
        found |= dict.fromkeys((graph.values[value].storage for value in graph.ops[position].inputs()), position)
    return found


# Splits of a call (``magis.ops.splits``), cached for equal calls, since layers repeat.


@dataclass(frozen=True)
class _Call:
    """A call as a cache key: hashed and compared by ``looks``."""

    looks: tuple[object, ...]
    op: Op = field(compare=False)
    values: Mapping[int, Value] = field(compare=False)


def ways(op: Op, values: Mapping[int, Value]) -> tuple[Split, ...]:
    """Return the splits of a call, cached for equal calls."""
    own = {number: values[number] for number in (*op.inputs(), *op.made())}
    storages = {storage: number for number, storage in enumerate(dict.fromkeys(v.storage for v in own.values()))}
    lies = tuple((storages[own[number].storage], own[number].offset) for number in op.inputs())
    results = [None if number is None else own[number] for number in op.outputs]
    made = tuple(None if v is None else (v.dtype, v.shape, v.stride, v.offset, storages[v.storage]) for v in results)
    return _cached_splits(_Call((signature(op, own), op.random, lies, made), op, own))


@functools.lru_cache(maxsize=8192)
def _cached_splits(call: _Call) -> tuple[Split, ...]:
    return splits(call.op, call.values)
