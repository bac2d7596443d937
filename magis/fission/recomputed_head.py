"""A loss head that runs twice, in parts each time: for the loss, and again for the gradients.

    y = x @ w;  l = f(y);  loss = g(l);  dy = f'(y, dl);  dx = dy @ w.T

Where ``dl`` needs the whole loss (one sequence is preferred to another, say), no loop has both f and f'. Computed again
ahead of its gradients, the head is part of two loops, and the scores ``y`` never exist whole:

    for each part: y = x @ w;  l = f(y)          loss = g(l)          for each part: y = x @ w;  dy = f'(y, dl) ...
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from magis.fission.candidates import Axis, connected, factories, grow
from magis.fission.loss_suffix import Piece, axes, heaviest, own_bytes, places, suffix
from magis.graph import Graph, Op, Storage, Value, with_inputs
from magis.graph.hazards import dependency_graph
from magis.ops.splits import Split

WIDE = 16
"""Reciprocal of the fraction of the step's bytes that a tensor must hold to be worth a second computation."""


@dataclass(frozen=True, eq=False)
class RecomputedHead:
    """A step whose loss head is computed twice."""

    graph: Graph
    first: Piece
    """The first computation."""
    again: frozenset[int]
    """Values of the second computation."""
    axis: Axis


def recomputed_head(graph: Graph) -> RecomputedHead | None:
    """Return the step with its loss head computed twice. None where a loop to the loss and back has all of it, where
    the gradients read nothing wide of it, where other forward operators make wide tensors of it, or where it cannot
    run again behind its first time."""
    gradients, wide, dag = _gradients(graph), _wide(graph), dependency_graph(graph)
    for axis in axes(graph) if wide else ():
        for at in reversed(places(graph, axis, 1)[-2:]):
            pieces = connected(graph, suffix(graph, axis, at, dag), dag)
            piece = next((piece for piece in pieces if at in piece), {})
            if any(not gradients.isdisjoint(graph.ops[position].made()) for position in piece):
                return None
            # a view that the backward takes of the forward's results is one of their readers
            cuts = {each: split for each, split in piece.items() if graph.ops[each].phase == "forward"}
            made = {value for position in cuts for value in graph.ops[position].made()}
            behind = [op for position, op in enumerate(graph.ops) if position > at and position not in cuts]
            others = {value for op in behind if op.phase == "forward" for value in op.made()}
            read = {value for op in behind if op.phase == "backward" for value in op.inputs()}
            needed = made & wide & read
            again = _made_again(graph, cuts, needed)
            if needed and not others & wide and _may_repeat(graph, again, max(cuts)):
                return _computed_twice(graph, cuts, axis, again)
    return None


def _may_repeat(graph: Graph, again: Sequence[int], last: int) -> bool:
    """Return True if some operators compute the same behind operator ``last``, and no gradient comes earlier."""
    written = {storage: version for op in graph.ops[: last + 1] for storage, version in op.writes}
    repeated = [graph.ops[at] for at in again]
    reads = [read for op in repeated for read in op.reads]
    stale = any(written.get(storage, version) != version for storage, version in reads)
    early = any(op.phase == "backward" for op in graph.ops[:last])
    return not (stale or early or any(op.writes for op in repeated))


def _made_again(graph: Graph, cuts: Collection[int], needed: set[int]) -> list[int]:
    """Return the positions among ``cuts`` of the operators that lead to the needed values."""
    inside = {value for position in cuts for value in graph.ops[position].made()}
    found: list[int] = []
    for position in sorted(cuts, reverse=True):
        if not needed.isdisjoint(graph.ops[position].made()):
            found.append(position)
            needed = needed | inside.intersection(graph.ops[position].inputs())
    return found[::-1]


def _gradients(graph: Graph) -> set[int]:
    """Return the values that depend on a constant of the backward: the loss's gradient by itself, which is 1."""
    found: set[int] = set()
    for op in graph.ops:
        if op.phase == "backward" and (not op.inputs() or not found.isdisjoint(op.inputs())):
            found.update(op.made())
    return found


def _wide(graph: Graph) -> set[int]:
    """Return the temporary values on wide storages."""
    whole = graph.persistent_bytes() + own_bytes(graph, dict.fromkeys(range(len(graph.ops)), 0), 1)[0]
    storages = ((value, graph.storages[graph.values[value].storage]) for op in graph.ops for value in op.made())
    return {value for value, each in storages if each.kind == "temporary" and each.nbytes * WIDE >= whole}


def _computed_twice(graph: Graph, cuts: Mapping[int, Split], axis: Axis, second: Sequence[int]) -> RecomputedHead:
    """Return the step in which gradients read the results of some operators of ``cuts`` from a second computation,
    behind the first."""
    ops = graph.ops
    used, dropped = set(graph.outputs), set[int]()  # of the first computation, what only gradients have read
    for position in reversed(range(len(ops))):
        if position in second and used.isdisjoint(ops[position].made()):
            dropped.add(position)
        elif ops[position].phase != "backward":
            used.update(ops[position].inputs())
    twins = _Twins(dict(graph.values), dict(graph.storages), {}, {})
    found: list[tuple[Op, Split | None]] = []
    for position, op in enumerate(ops):
        if position not in dropped:
            found.append((twins.reader(op) if op.phase == "backward" else op, cuts.get(position)))
        if position == max(cuts):
            found += [(twins.operator(ops[each]), None) for each in second]
    numbered = tuple(replace(op, id=number) for number, (op, _) in enumerate(found))
    held = {value for op in numbered for value in (*op.inputs(), *op.made())} | {*graph.inputs, *graph.outputs}
    values = {number: value for number, value in twins.values.items() if number in held}
    alive = {value.storage for value in values.values()}
    storages = {n: each for n, each in twins.storages.items() if n in alive or each.kind != "temporary"}
    first = {number: split for number, (_, split) in enumerate(found) if split is not None}
    changed = replace(graph, ops=numbered, values=values, storages=storages)
    return RecomputedHead(changed, Piece(first, 0, axis.closed), frozenset(twins.value.values()), axis)


@dataclass
class _Twins:
    """Values and storages of a second computation, by those of the first."""

    values: dict[int, Value]
    storages: dict[int, Storage]
    value: dict[int, int]
    storage: dict[int, int]

    def operator(self, op: Op) -> Op:
        """Return the second computation of an operator."""
        given = {self.values[value].storage for value in op.inputs()}
        for value in op.made():
            old = self.values[value].storage
            if old not in self.storage and old not in given:  # no view of what is from outside
                self.storage[old] = max(self.storages) + 1
                self.storages[self.storage[old]] = replace(self.storages[old], id=self.storage[old])
            self.value[value] = max(self.values) + 1
            twin = replace(self.values[value], id=self.value[value], storage=self.storage.get(old, old))
            self.values[twin.id] = twin
        return self.reader(replace(op, outputs=tuple(v if v is None else self.value[v] for v in op.outputs)))

    def reader(self, op: Op) -> Op:
        """Return an operator that reads (and writes in place) the second computation, of which its views are, too."""
        for value in op.made():
            storage = self.values[value].storage
            self.values[value] = replace(self.values[value], storage=self.storage.get(storage, storage))
        reads, writes = (
            tuple((self.storage.get(storage, storage), version) for storage, version in each)
            for each in (op.reads, op.writes)
        )
        return replace(with_inputs(op, self.value), reads=reads, writes=writes)


def gradients_of_head(graph: Graph, head: RecomputedHead) -> Piece | None:
    """Return the second computation, with the gradients that read it, to run in parts; ``graph``: the step of ``head``
    with the first one as a loop."""
    dag = dependency_graph(graph)
    copies = [at for at, op in enumerate(graph.ops) if not head.again.isdisjoint(op.made())]
    loop = next(at for at, op in enumerate(graph.ops) if op.body is not None)
    given = {graph.values[value].storage for at in (loop, *copies) for value in graph.ops[at].inputs()}
    early = {graph.values[value].storage for op in graph.ops[:loop] for value in op.made()} - given
    early = {storage for storage in early if graph.storages[storage].kind == "temporary"}
    allowed = set(copies)
    for at, op in enumerate(graph.ops):
        if op.phase == "backward":
            if any(graph.values[value].storage in early for value in op.inputs()):
                break
            allowed.add(at)
    made = {value for at in allowed for value in graph.ops[at].made()}
    taken = {value for at in allowed for value in graph.ops[at].inputs()} - made
    start = {value: dim for value, dim in head.axis.dims.items() if value in taken}
    cuts = grow(graph, start, allowed, dag)
    return heaviest(graph, grow(graph, start, allowed, dag, factories(graph, cuts, allowed)), dag)
