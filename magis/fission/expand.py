"""Expansion of a region into a loop: slices of its inputs, its operators at a part's size, merges of its outputs.

    y = relu(x @ w)        y = empty(...)
    (cut along rows)  ->   for each part:  p = magis.part(x, 0);  q = relu(p @ w);  magis.join(y, q, 0)

Whole tensors keep id, shape and strides, so that nothing outside of the region changes. A slice is a view if the cut
dimension is outermost in memory; other slices, and those with a halo, are copies with the same order of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil

import rustworkx as rx

from magis.cost.shapes import bytes_of, describe
from magis.errors import VerifyError
from magis.fission.global_calls import with_literals
from magis.fission.part_sums import with_direct_sums, with_float32_sums
from magis.fission.proof import last_part
from magis.fission.region import Leaving, Region, last_readers, leavings, region_problems, takeovers
from magis.graph import Graph, Loop, Op, Ref, Storage, Value
from magis.graph.hazards import dependency_graph, is_dense, is_pure_view, packed
from magis.graph.loop_rules import JOIN, LOOP, PART, REDUCE
from magis.ops.splits import Cut, Halo, Overlap, part


def expand(graph: Graph, region: Region, *, in_place: bool = False) -> Graph:
    """Return the graph with the region as one ``magis.loop``. Raises VerifyError for the first broken rule.

    ``in_place``: outputs of the loop overwrite, part by part, inputs of equal layout that are dead afterwards
    (``magis.fission.region``).
    """
    for problem in region_problems(graph, region):
        raise VerifyError(problem)
    graph, region = with_float32_sums(graph, region)
    left = leavings(graph, region)
    looped = with_direct_sums(_spliced(graph, region, _body(graph, region, left, in_place), left))
    for op in looped.ops:
        last_part(op, looped.values)  # kernels may reject its size
    return looped


def reparted(graph: Graph, region: Region, *, in_place: bool = False) -> Loop:
    """Return the loop of a region that ``expand`` has already expanded, in another number of parts.

    Raises VerifyError if the number does not divide the cut dimensions, or a kernel rejects parts of that size.
    """
    for split in region.cuts.values():
        if split.extent % region.scale:
            raise VerifyError(f"{region.parts} parts do not divide {split.extent}")
    graph, region = with_float32_sums(graph, region)
    body = _body(graph, region, leavings(graph, region), in_place)
    loop = Op(0, LOOP, tuple(map(Ref, body.given)), (), tuple(body.wholes), many=True, body=(own := body.loop()))
    last_part(loop, graph.values)  # kernels may reject its size
    return own


def _body(graph: Graph, region: Region, left: list[Leaving], in_place: bool) -> _Body:
    over = takeovers(graph, region, left) if in_place else {}
    builder = _Body(graph, region, over)
    ends = _merged_behind(graph, region, left, over)
    for position in sorted(region.cuts):
        builder.operator(graph.ops[position], position)
        for leaving in ends.get(position, ()):
            builder.merge(leaving)
    # In the order of the loop's outputs.
    builder.wholes = {leaving.value: builder.wholes[leaving.value] for leaving in left}
    return builder


def _merged_behind(
    graph: Graph, region: Region, left: list[Leaving], over: Mapping[int, int]
) -> dict[int, list[Leaving]]:
    """Map positions to the outputs merged after them: complete by then, and overwriting nothing that is still read."""
    written: dict[int, int] = {}
    for position in sorted(region.cuts):
        written |= dict.fromkeys((storage for storage, _ in graph.ops[position].writes), position)
    read = last_readers(graph, region)
    found: dict[int, list[Leaving]] = {}
    for leaving in left:
        storage = graph.values[leaving.value].storage
        end = max(leaving.maker, written.get(storage, 0), read.get(over.get(storage, -1), 0))
        found.setdefault(end, []).append(leaving)
    return found


@dataclass
class _Body:
    """The loop's body under construction."""

    graph: Graph
    region: Region
    over: Mapping[int, int]
    """Storage of an output -> storage that it overwrites."""
    storages: dict[int, Storage] = field(default_factory=dict)
    values: dict[int, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    given: dict[int, int] = field(default_factory=dict)
    """Outer value -> input of the body."""
    wholes: dict[int, int] = field(default_factory=dict)
    """Output of the loop -> input of the body."""
    inside: dict[int, int] = field(default_factory=dict)
    """Value of the graph -> part of the value in the body."""
    outer: dict[int, int] = field(default_factory=dict)
    """Outer storage -> storage of the body."""
    versions: dict[int, int] = field(default_factory=dict)
    stretches: dict[tuple[int, int | Halo], int] = field(default_factory=dict)

    def operator(self, op: Op, position: int) -> None:
        """Add one operator at a part's size."""
        split = self.region.cuts[position]
        taken = [
            self.inside[value] if value in self.inside else self._from_outside(value, dim)
            for value, dim in zip(op.inputs(), split.inputs, strict=True)
        ]
        new = with_literals(part(op, split, self.region.scale), (), taken, op.outputs)
        new = replace(new, id=len(self.ops), origin=op.id, random=False)
        self._emit(new, op)

    def _emit(self, new: Op, op: Op) -> None:
        """Append an operator with its outputs, and its reads and writes of storages."""
        made = describe(new, self.values)
        if len(made) != len(op.outputs):
            raise VerifyError(f"operator {op.id} ({op.target}): makes {len(made)} tensors in parts")
        taken = new.inputs()
        outputs: list[int | None] = []
        fresh: dict[int, int] = {}
        for value, each in zip(op.outputs, made, strict=True):
            if value is None or each is None:
                outputs.append(None)
                continue
            if value in self.inside and value in op.made()[: len(outputs)]:
                outputs.append(self.inside[value])
                continue
            if each.base is None:
                whole = self.graph.values[value].storage
                if whole not in fresh:
                    fresh[whole] = self._storage(each.nbytes, "temporary")
                storage, offset = fresh[whole], each.offset
            else:
                base = self.values[taken[each.base]]
                storage, offset = base.storage, each.offset_on(base)
            looks = Value(len(self.values), each.shape, each.stride, each.dtype, storage, offset, bits=each.bits)
            self.values[looks.id] = looks
            self.inside[value] = looks.id
            outputs.append(looks.id)
        wrote = {storage for storage, _ in op.writes}
        hit = sorted(
            {
                self.values[ours].storage
                for theirs, ours in zip(op.inputs(), taken, strict=True)
                if self.graph.values[theirs].storage in wrote
            }
        )
        view = is_pure_view(self.graph.values, op)
        self._append(replace(new, outputs=tuple(outputs)), hit, reads=not view)

    def _append(self, op: Op, written: Sequence[int], *, reads: bool) -> None:
        touched = sorted({self.values[value].storage for value in op.inputs()}) if reads else []
        met = tuple((storage, self.versions.get(storage, 0)) for storage in touched)
        left = []
        for storage in written:
            self.versions[storage] = self.versions.get(storage, 0) + 1
            left.append((storage, self.versions[storage]))
        self.ops.append(replace(op, id=len(self.ops), reads=met, writes=tuple(left)))

    def _storage(self, nbytes: int, kind: str) -> int:
        key = len(self.storages)
        self.storages[key] = Storage(key, nbytes, kind)
        return key

    def _outer(self, value: int) -> int:
        """Add an outer tensor as an input of the body."""
        looks = self.graph.values[value]
        theirs = self.over.get(looks.storage, looks.storage)
        if theirs not in self.outer:
            self.outer[theirs] = self._storage(self.graph.storages[theirs].nbytes, "outer")
        new = replace(looks, id=len(self.values), storage=self.outer[theirs], name="")
        self.values[new.id] = new
        return new.id

    def _from_outside(self, value: int, cut: Cut) -> int:
        """Return the part's slice of an outer tensor, or the whole tensor if ``cut`` is None."""
        if value not in self.given:
            self.given[value] = self._outer(value)
        whole = self.given[value]
        if cut is None:
            return whole
        if (value, cut) in self.stretches:
            return self.stretches[value, cut]
        looks = self.values[whole]
        dim, around = (cut.dim, (cut.before, cut.after)) if isinstance(cut, Halo) else (cut, ())
        shape = list(looks.shape)
        shape[dim] = shape[dim] // self.region.scale + sum(around)
        window = replace(looks, id=len(self.values), shape=tuple(shape))
        # A stretch is a view if it is dense, or the whole has expanded dimensions.
        expanded = any(stride == 0 and size > 1 for stride, size in zip(looks.stride, shape, strict=True))
        if around or not (expanded or is_dense(window)):
            dense = packed(tuple(shape), looks.stride)  # a copy
            storage = self._storage(bytes_of(tuple(shape), looks.dtype), "temporary")
            window = replace(window, stride=dense, storage=storage, offset=0, bits=())
        self.values[window.id] = window
        self.stretches[value, cut] = window.id
        copies = window.storage != looks.storage
        self._append(Op(0, PART, (Ref(whole), dim, *around), (), (window.id,)), (), reads=copies)
        return window.id

    def merge(self, leaving: Leaving) -> None:
        """Append the merge of a part into an output of the loop."""
        whole = self.wholes[leaving.value] = self._outer(leaving.value)
        maker, how = self.graph.ops[leaving.maker], leaving.how
        target = REDUCE if isinstance(how, str) else JOIN
        put = (how.dim, how.before, how.after) if isinstance(how, Overlap) else (how,)
        op = Op(0, target, (Ref(whole), Ref(self.inside[leaving.value]), *put), (), ())
        self._append(replace(op, phase=maker.phase, module=maker.module), (self.values[whole].storage,), reads=True)

    def loop(self) -> Loop:
        inputs = (*self.given.values(), *self.wholes.values())
        body = Graph(self.storages, self.values, tuple(self.ops), inputs, ())
        return Loop(ceil(self.region.scale), with_direct_sums(body))

    def written(self) -> list[int]:
        """Return the outer storages that the body writes, except those of the loop's outputs."""
        made = {self.graph.values[value].storage for value in self.wholes}
        hit = {storage for op in self.ops for storage, _ in op.writes}
        return sorted(theirs for theirs, ours in self.outer.items() if ours in hit and theirs not in made)


def _spliced(graph: Graph, region: Region, body: _Body, left: list[Leaving]) -> Graph:
    """Return the graph with the loop in place of the region's operators; views of outputs are reopened after the
    loop."""
    inside = sorted(region.cuts)
    shared = {graph.values[value].storage for value in body.given} | set(body.written())
    met = {storage: version for p in reversed(inside) for storage, version in reversed(graph.ops[p].reads)}
    after = {storage: version for p in inside for storage, version in graph.ops[p].writes}
    first, last = graph.ops[inside[0]], graph.ops[inside[-1]]
    loop = Op(
        id=0, target=LOOP, args=tuple(Ref(value) for value in body.given), kwargs=(),
        outputs=tuple(leaving.value for leaving in left), many=True,
        reads=tuple((storage, met.get(storage, 0)) for storage in sorted(shared)),
        writes=tuple((storage, after.get(storage, met.get(storage, 0) + 1)) for storage in body.written()),
        phase="backward" if "backward" in (first.phase, last.phase) else first.phase,
        module=_common_module([graph.ops[p].module for p in inside if graph.ops[p].module]), body=body.loop(),
    )  # fmt: skip
    storages = dict(graph.storages)
    for leaving in left:
        value = graph.values[leaving.value]
        storages[value.storage] = replace(storages[value.storage], nbytes=bytes_of(value.shape, value.dtype))
    views = [p for p in inside if is_pure_view(graph.values, graph.ops[p])]
    order = _order(graph, set(inside) - set(_needed_views(graph, region, views)), set(inside), loop)
    # Storages that the region writes several times, the loop makes once.
    made = {graph.values[value].storage for value in loop.made()}
    moved = {storage: (storage, -after.get(storage, 0)) for storage in made}
    moved |= {ours: (theirs, met.get(theirs, 0) + 1) for ours, theirs in body.over.items()}
    ops = tuple(_on_moved_storages(replace(op, id=number), moved) for number, op in enumerate(order))
    values = {
        key: replace(value, storage=moved[value.storage][0]) if value.storage in moved else value
        for key, value in graph.values.items()
    }
    return _pruned(replace(graph, storages=storages, values=values, ops=ops))


def _common_module(modules: list[str]) -> str:
    """Return the path of the innermost common module."""
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _on_moved_storages(op: Op, moved: Mapping[int, tuple[int, int]]) -> Op:
    """Return the operator with its storages and versions renumbered by ``moved``."""
    if not moved or not any(storage in moved for storage, _ in (*op.reads, *op.writes)):
        return op

    def there(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        return tuple((moved[s][0], moved[s][1] + version) if s in moved else (s, version) for s, version in pairs)

    return replace(op, reads=there(op.reads), writes=there(op.writes))


def _needed_views(graph: Graph, region: Region, views: list[int]) -> list[int]:
    """Return the positions of the region's views that outer operators use."""
    used = set(graph.outputs)
    for position, op in enumerate(graph.ops):
        if position not in region.cuts:
            used.update(op.inputs())
    found = []
    for position in reversed(views):
        if used & set(graph.ops[position].made()):
            found.append(position)
            used.update(graph.ops[position].inputs())
    return found


def _order(graph: Graph, gone: set[int], inside: set[int], loop: Op) -> list[Op]:
    """Return the operators in program order, with the loop as early as its inputs allow."""
    dag = dependency_graph(graph)
    anchor = min(gone)
    taken = {storage for storage, _ in loop.writes}
    early = {p for p in range(min(inside)) if any(storage in taken for storage, _ in graph.ops[p].reads)}
    moved: rx.PyDiGraph[int, None] = rx.PyDiGraph()
    moved.add_nodes_from(range(len(graph.ops)))
    for position in range(len(graph.ops)):
        before = {anchor if p in gone else p for p in dag.predecessor_indices(position)}
        if position in gone:
            # a view that outer operators use is reopened behind the loop, and made again inside, of the same tensor
            while views := before & inside - gone:
                before = before - views | {p for view in views for p in dag.predecessor_indices(view)}
            before = before - gone | early
        node = anchor if position in gone else position
        moved.add_edges_from_no_data([(earlier, node) for earlier in before - {node}])
    order = rx.lexicographical_topological_sort(moved, key=lambda position: f"{position:09}")
    if len(order) != len(graph.ops):  # rustworkx silently omits nodes of a cycle
        raise VerifyError("the region is not convex: its loop would need its own results")
    swallowed = gone - {anchor}
    return [loop if position == anchor else graph.ops[position] for position in order if position not in swallowed]


def _pruned(graph: Graph) -> Graph:
    """Return the graph without unused values and temporary storages."""
    shown = {*graph.inputs, *graph.outputs, *(value for op in graph.ops for value in (*op.inputs(), *op.made()))}
    values = {key: value for key, value in graph.values.items() if key in shown}
    held = {value.storage for value in values.values()}
    storages = {k: s for k, s in graph.storages.items() if k in held or s.kind != "temporary"}
    return replace(graph, values=values, storages=storages)
