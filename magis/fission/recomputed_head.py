"""A loss head that runs twice, in parts each time: for the loss, and again for the gradients.

    y = x @ w;  l = f(y);  loss = g(l);  dy = f'(y, dl);  dx = dy @ w.T

Where ``dl`` needs the whole loss (one sequence is preferred to another, say), no loop has both f and f'. Computed again
ahead of its gradients, the head is part of two loops, and the scores ``y`` never exist whole:

    for each part: y = x @ w;  l = f(y)          loss = g(l)          for each part: y = x @ w;  dy = f'(y, dl) ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from magis.fission.candidates import Axis, connected, factories, grow
from magis.fission.loss_suffix import FEW, Piece, axes, heaviest, of_parameters, own_bytes, places, suffix
from magis.fission.region import most_parts
from magis.graph import Graph, Op, Storage, Value, with_inputs
from magis.graph.hazards import dependency_graph
from magis.ops.splits import Split

WIDE = 16
"""Reciprocal of the fraction of the step's bytes that a tensor must hold to be worth a second computation."""

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default")
HEADS = 4
"""Most loss heads of a step: two of a preference loss, those of teachers."""


@dataclass(frozen=True, eq=False)
class RecomputedHead:
    """A step whose loss head is computed twice."""

    graph: Graph
    first: Piece
    """The first computation."""
    once: frozenset[int]
    """Values of the first computation."""
    again: frozenset[int]
    """Values of the second computation; none where the head runs once only."""
    axis: Axis
    in_few: bool = False
    """True if a loop along another axis has all of the head, to the loss and back, in few parts."""


def heads(graph: Graph) -> Iterator[tuple[int, bool]]:
    """Yield values with which a loss head may begin: the results of the widest products, last ones first, if these are
    few; then, marked True, results at the last places of each axis, of which one at most is a head."""
    wide = _wide(graph, 2 * WIDE)  # scores become twice as wide in float32
    made = [op.made()[0] for op in graph.ops if op.phase == "forward" and op.target in PRODUCTS]
    nbytes = {value: graph.values[value].nbytes for value in made if value in wide}
    widest = [value for value, held in nbytes.items() if 2 * held >= max(nbytes.values())]
    tried = widest[::-1] if len(widest) <= HEADS else []
    yield from ((value, False) for value in tried)
    last = (graph.ops[at].made()[0] for axis in axes(graph) for at in places(graph, axis, 1)[:-3:-1]) if wide else ()
    results = (value for value in dict.fromkeys(last) if not graph.storages[graph.values[value].storage].persistent)
    yield from ((value, True) for value in results if value not in tried)


def recomputed_head(graph: Graph, head: int) -> RecomputedHead | None:
    """Return the step with the loss head that begins with a value computed twice; once only, if it is given nothing
    wide, and gradients read nothing wide of it. None where a loop to the loss and back has all of it, where other
    forward operators make wide tensors of it, or where it cannot run again behind its first time."""
    gradients, wide, dag = _gradients(graph), _wide(graph), dependency_graph(graph)
    at = next((at for at, op in enumerate(graph.ops) if head in op.made()), None)
    if at is None:
        return None  # part of another head
    best: RecomputedHead | None = None
    few: RecomputedHead | None = None
    in_few = False
    # rows of a few sequences have more parts together than the sequences
    matrix = len(graph.values[head].shape) == 2
    enough = FEW if matrix else 1
    for axis in axes(graph, at):
        pieces = connected(graph, suffix(graph, axis, at, dag), dag)
        piece = next((piece for piece in pieces if at in piece), {})
        if any(not gradients.isdisjoint(graph.ops[position].made()) for position in piece):
            if most_parts(piece) >= enough:
                return None
            in_few = True
            continue
        if best is not None:
            continue
        # a view that the backward takes of the forward's results is one of their readers
        cuts = {each: split for each, split in piece.items() if graph.ops[each].phase == "forward"}
        made = {value for position in cuts for value in graph.ops[position].made()}
        behind = [op for position, op in enumerate(graph.ops) if position > at and position not in cuts]
        others = set[int]()  # made of the head's results by other forward operators
        for op in behind:
            if op.phase == "forward" and not (others | made).isdisjoint(op.inputs()):
                others.update(op.made())
        read = {value for op in behind for value in op.inputs()} & made
        needed = {value for op in behind if op.phase == "backward" for value in op.inputs()} & made & wide
        again = _made_again(graph, cuts, needed)
        found: RecomputedHead | None = None
        given = {value for position in cuts for value in graph.ops[position].inputs()} - made
        if read and made & wide and not (read | given) & wide:
            found = RecomputedHead(graph, Piece(cuts, 0, axis.closed), frozenset(made), frozenset(), axis)
        elif needed and not others & wide and _may_repeat(graph, again, reader := _first_gradient(graph, again)):
            found = _computed_twice(graph, cuts, axis, again, reader)
        # columns of scores, whose sums need all of them
        whole = matrix and any(op.phase == "forward" and not (made & wide).isdisjoint(op.inputs()) for op in behind)
        if most_parts(cuts) >= enough and not whole:
            best = found
        few = few or found
    best = best or few
    return None if best is None else replace(best, in_few=in_few)


def _first_gradient(graph: Graph, again: Sequence[int]) -> int:
    """Return the position of the first operator of the backward that reads results of some operators."""
    made = {value for at in again for value in graph.ops[at].made()}
    readers = (op.phase == "backward" and not made.isdisjoint(op.inputs()) for op in graph.ops)
    return next(at for at, reads in enumerate(readers) if reads)


def _may_repeat(graph: Graph, again: Sequence[int], before: int) -> bool:
    """Return True if some operators compute the same ahead of the operator at a position, which is behind them."""
    written = {storage: version for op in graph.ops[:before] for storage, version in op.writes}
    repeated = [graph.ops[at] for at in again]
    reads = [read for op in repeated for read in op.reads]
    stale = any(written.get(storage, version) != version for storage, version in reads)
    return not (stale or max(again) >= before or any(op.writes for op in repeated))


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


def _wide(graph: Graph, share: int = WIDE) -> set[int]:
    """Return the temporary values on wide storages."""
    whole = graph.persistent_bytes() + own_bytes(graph, dict.fromkeys(range(len(graph.ops)), 0), 1)[0]
    storages = ((value, graph.storages[graph.values[value].storage]) for op in graph.ops for value in op.made())
    return {value for value, each in storages if each.kind == "temporary" and each.nbytes * share >= whole}


def _computed_twice(
    graph: Graph, cuts: Mapping[int, Split], axis: Axis, second: Sequence[int], before: int
) -> RecomputedHead:
    """Return the step in which gradients read the results of some operators of ``cuts`` from a second computation,
    ahead of the first of them."""
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
        if position == before:
            found += [(twins.operator(ops[each]), None) for each in second]
        if position not in dropped:
            found.append((twins.reader(op) if op.phase == "backward" else op, cuts.get(position)))
    numbered = tuple(replace(op, id=number) for number, (op, _) in enumerate(found))
    held = {value for op in numbered for value in (*op.inputs(), *op.made())} | {*graph.inputs, *graph.outputs}
    values = {number: value for number, value in twins.values.items() if number in held}
    alive = {value.storage for value in values.values()}
    storages = {n: each for n, each in twins.storages.items() if n in alive or each.kind != "temporary"}
    first = {number: split for number, (_, split) in enumerate(found) if split is not None}
    changed = replace(graph, ops=numbered, values=values, storages=storages)
    once = frozenset(value for position in cuts for value in ops[position].made())
    return RecomputedHead(changed, Piece(first, 0, axis.closed), once, frozenset(twins.value.values()), axis)


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
    loop = next(at for at, op in enumerate(graph.ops) if op.body is not None and not head.once.isdisjoint(op.made()))
    given = {graph.values[value].storage for at in (loop, *copies) for value in graph.ops[at].inputs()}
    learned = of_parameters(graph)  # masks of tokens may be made ahead of the head
    early = {graph.values[value].storage for op in graph.ops[:loop] for value in op.made() if value in learned} - given
    early = {storage for storage in early if graph.storages[storage].kind == "temporary"}
    allowed = set(copies)
    for at, op in enumerate(graph.ops):
        if op.phase == "backward" and op.body is None:  # a loop has the gradients of another head
            if any(graph.values[value].storage in early for value in op.inputs()):
                break
            allowed.add(at)
    made = {value for at in allowed for value in graph.ops[at].made()}
    taken = {value for at in allowed for value in graph.ops[at].inputs()} - made
    start = {value: dim for value, dim in head.axis.dims.items() if value in taken}
    cuts = grow(graph, start, allowed, dag)
    rows = {cuts[at].extent for at in copies if at in cuts}
    makers = factories(graph, cuts, allowed)
    if head.axis.closed:  # of a few sequences, cut all rows together
        allowed = {at for at in allowed if at not in cuts or cuts[at].extent in rows}
        makers = {at: split for at, split in makers.items() if split.extent in rows}
    return heaviest(graph, grow(graph, start, allowed, dag, makers), dag)
