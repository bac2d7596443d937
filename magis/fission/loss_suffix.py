"""Regions from a position of the forward to the loss and back, their pieces, and reasons why a step has none.

    forward  a b c | d e f loss        the region "from d": d e f loss f' e' d', cut along the batch
    backward a'b'c'| d'e'f'

With a batch of 1, height or width of images is cut instead, from the last operator with overlapping windows on, whose
halo needs rows of other parts. Where the inputs allow few parts, tokens and other components of the D-Graph are cut.

A position near the loss gives a region of the loss head alone (vocabulary projection and cross-entropy, whose scores
then never exist whole), the first position a region of the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import rustworkx as rx

from magis.fission.candidates import Axis, components, connected, factories, follow, grow, held_bytes, regions_in_parts
from magis.fission.region import Region, most_parts, region_problems
from magis.graph import Graph
from magis.graph.hazards import dependency_graph
from magis.ops.splits import Halo, Split, why_not


def axes(graph: Graph, at: int | None = None) -> Iterator[Axis]:
    """Yield the batch axis; with a batch of 1, the spatial axes of images: height, width ...

    Where these allow few parts, or hold less than half of what the largest component of the D-Graph does, the largest
    components follow, of those that cut the operator at a position, if one is given: the tokens of one sequence, say.
    """

    def largest(least: int, *, even: bool) -> list[Axis]:
        found = (axis for axis in components(graph, least, even=even) if at is None or at in axis.cuts)
        return list(islice(found, COMPONENTS))

    batch = batch_inputs(graph)
    shapes = [graph.values[value].shape for value in batch]
    single = any(shape[:1] == (1,) for shape in shapes)
    if not single:
        inputs = [follow(graph, batch)]
    else:
        longest = max(map(len, shapes))
        dims = range(2, longest)
        inputs = [follow(graph, {v: dim for v in batch if len(graph.values[v].shape) == longest}) for dim in dims]
    yield from (axis for axis in inputs if axis.cuts)
    many = [axis for axis in inputs if axis.cuts and most_parts(axis.cuts) >= FEW]
    found = largest(FEW, even=True) if single or not many else []
    enough = sum(held_bytes(graph, axis.dims) for axis in many)
    if not many or (found and enough < held_bytes(graph, found[0].dims) // 2):
        yield from found
        rows = largest(FEW // 2, even=False)
        odd = (axis for axis in rows if most_parts(axis.cuts) % FEW)  # 99 rows of 100
        yield from (axis for axis in odd if any(each.parts >= FEW // 2 for each in regions_in_parts(axis.cuts)))


FEW = 16
"""Number of parts below which an axis of the inputs is not enough."""
COMPONENTS = 4
"""Number of components of the D-Graph to try, those with the most bytes."""


def batch_inputs(graph: Graph) -> dict[int, int]:
    """Map every input of the step to dimension 0."""
    return {value: 0 for value in graph.inputs if graph.values[value].name.startswith("input:")}


def places(graph: Graph, axis: Axis, count: int) -> list[int]:
    """Return positions of the forward at which few bytes are live, spread evenly over the bytes saved for the backward.

    The first position of the axis comes first, the loss head last. With overlapping windows, only positions from the
    last such operator on are taken, since no earlier region reaches the loss.
    """
    forward = [p for p in sorted(axis.cuts) if graph.ops[p].phase == "forward"]
    if not forward:
        return []
    overlapping = [p for p in forward if any(isinstance(cut, Halo) for cut in axis.cuts[p].inputs)]
    forward = [p for p in forward if p >= max(overlapping, default=0)]
    crossing = _crossing_bytes(graph, forward[-1] + 1)
    kept = _kept_bytes(graph)
    total = sum(kept[p] for p in forward)
    found: list[int] = []
    for index in range(count):
        low, high = total * index / count, total * (index + 1) / count
        seen = 0
        stretch = []
        for p in forward:
            if low <= seen < high:
                stretch.append(p)
            seen += kept[p]
        if stretch:
            found.append(min(stretch, key=lambda p: (crossing[p], p)))
    # The loss head begins at one of the last products.
    heavy = [p for p in forward if graph.ops[p].target.split(".")[1] in ("mm", "addmm", "convolution")]
    return list(dict.fromkeys([forward[0], *found, *heavy[-2:]]))


def _crossing_bytes(graph: Graph, end: int) -> list[int]:
    """Return, per position of the forward, the bytes of temporary storages made before and still used from there on."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for position in range(end):
        op = graph.ops[position]
        for value in op.inputs():
            last[graph.values[value].storage] = position
        for value in op.made():
            made.setdefault(graph.values[value].storage, position)
    change = [0] * (end + 1)
    for storage, position in made.items():
        if storage in last and graph.storages[storage].kind == "temporary":
            change[position + 1] += graph.storages[storage].nbytes
            change[min(last[storage] + 1, end)] -= graph.storages[storage].nbytes
    level, found = 0, []
    for position in range(end):
        level += change[position]
        found.append(level)
    return found


def _kept_bytes(graph: Graph) -> dict[int, int]:
    """Return, per position, the bytes that its operator makes and the backward uses."""
    used = {graph.values[value].storage for op in graph.ops if op.phase == "backward" for value in op.inputs()}
    found: dict[int, int] = {}
    counted: set[int] = set()
    for position, op in enumerate(graph.ops):
        fresh = {graph.values[value].storage for value in op.made()} - counted
        counted |= fresh
        kinds = graph.storages
        found[position] = sum(kinds[s].nbytes for s in fresh & used if kinds[s].kind == "temporary")
    return found


def suffix(graph: Graph, axis: Axis, at: int, dag: rx.PyDiGraph[int, None] | None = None) -> dict[int, Split]:
    """Grow a region from the values live at position ``at`` of the forward, to the loss and back; ``dag``: edges of the
    graph."""
    late = (p for p in range(at, len(graph.ops)) if p in axis.cuts or not axis.closed)
    made_late = {value for position in late for value in graph.ops[position].made()}
    crossing = {
        value: axis.dims[value]
        for op in graph.ops[at:]
        if op.phase == "forward"
        for value in op.inputs()
        if value in axis.dims and value not in made_late
    }
    held = {graph.values[value].storage for value in crossing}
    made_early = {graph.values[value].storage for op in graph.ops[:at] for value in op.made()}
    early = {storage for storage in made_early - held if graph.storages[storage].kind == "temporary"}
    end = next(
        (
            position
            for position, op in enumerate(graph.ops)
            if position >= at
            and op.phase == "backward"
            and any(graph.values[value].storage in early for value in op.inputs())
        ),
        len(graph.ops),
    )
    aside = _totals_of_data(graph, axis)
    allowed = {p for p in range(at, end) if p not in aside and (p in axis.cuts or not axis.closed)}
    cuts = grow(graph, crossing, allowed, dag)
    makers = factories(graph, cuts, allowed)
    return grow(graph, crossing, allowed, dag, makers) if makers else cuts


def _totals_of_data(graph: Graph, axis: Axis) -> set[int]:
    """Return positions of operators that sum up data along the axis: the count of targets that a loss divides by.

    In a region they would hold up the backward, which needs the total, until the loop ends. They use no parameter.
    """
    learned = of_parameters(graph)
    totals: set[int] = set()
    for position, op in enumerate(graph.ops):
        of_data = op.phase == "forward" and learned.isdisjoint(op.inputs())
        if of_data and position in axis.cuts and any(isinstance(how, str) for how in axis.cuts[position].outputs):
            totals.add(position)
    needed = {value for position in totals for value in graph.ops[position].inputs()}
    for position in reversed(range(len(graph.ops))):
        op = graph.ops[position]
        if op.phase == "forward" and learned.isdisjoint(op.made()) and not needed.isdisjoint(op.made()):
            totals.add(position)
            needed.update(op.inputs())
    return totals


def of_parameters(graph: Graph) -> set[int]:
    """Return the values that depend on parameters, and all that the backward makes."""
    kinds = {value: graph.storages[graph.values[value].storage].kind for value in graph.inputs}
    learned = {value for value, kind in kinds.items() if kind not in ("batch", "buffer", "constant")}
    for op in graph.ops:
        if op.phase != "forward" or not learned.isdisjoint(op.inputs()):
            learned.update(op.made())
    return learned


PLACES = 8
"""Number of positions of the forward to try, besides the first one and the loss head."""
LARGE = 8
"""Reciprocal of the fraction of the largest piece's bytes that a piece along a component must hold."""
LEAST = 200
"""Reciprocal of the fraction of the step's bytes that a piece must hold alone. Seen in fourteen networks: useful pieces
hold a fiftieth or more, stretches between two dropouts less than a thousandth."""
USEFUL = 50
"""The same for a piece along a component, which would take the place of loops around single operators at the peak."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Connected operators (position -> split); ``nbytes``: peak bytes of tensors that only they use."""

    cuts: Mapping[int, Split]
    nbytes: int
    closed: bool = False
    """True if it is cut along a component of the D-Graph, not along an axis of the inputs."""
    graph: Graph | None = None
    """The step whose operators these are, if it is not the one given: its head is computed twice."""

    @property
    def at(self) -> int:
        """Return the position of the first operator."""
        return min(self.cuts)


def pieces(graph: Graph, most: int = PLACES) -> list[Piece]:
    """Return the distinct pieces of about ``most`` positions that are worth a loop, largest first.

    The graph must be free of false dependences (``untangle``).
    """
    whole = graph.persistent_bytes() + own_bytes(graph, dict.fromkeys(range(len(graph.ops)), 0), 1)[0]
    found: dict[tuple[tuple[int, Split], ...], Piece] = {}
    dag = dependency_graph(graph)
    for axis in axes(graph):
        for at in places(graph, axis, most):
            piece = heaviest(graph, suffix(graph, axis, at, dag), dag)
            if piece is not None and piece.nbytes * (USEFUL if axis.closed else LEAST) >= whole:
                found.setdefault(tuple(sorted(piece.cuts.items())), replace(piece, closed=axis.closed))
    largest = max((piece.nbytes for piece in found.values()), default=0)
    worth = (piece for piece in found.values() if not piece.closed or piece.nbytes * LARGE >= largest)
    return sorted(worth, key=lambda piece: -piece.nbytes)


def heaviest(graph: Graph, cuts: Mapping[int, Split], dag: rx.PyDiGraph[int, None]) -> Piece | None:
    """Return the connected component of operators that holds most bytes; None without operators.

    Only tensors that no other operator uses count: a loop makes no others smaller.
    """
    found = connected(graph, cuts, dag)
    owner = {position: number for number, piece in enumerate(found) for position in piece}
    held = own_bytes(graph, owner, len(found))
    return max(map(Piece, found, held), key=lambda piece: piece.nbytes, default=None)


def own_bytes(graph: Graph, owner: Mapping[int, int], count: int) -> list[int]:
    """Return, per piece, the peak bytes in program order of temporary storages that only its operators use, outputs of
    the step excluded."""
    span: dict[int, tuple[int, int]] = {}
    returned = {graph.values[value].storage for value in graph.outputs}
    holder: dict[int, int | None] = {}
    for position, op in enumerate(graph.ops):
        mine = owner.get(position)
        for storage in {graph.values[value].storage for value in (*op.inputs(), *op.made())}:
            first, _ = span.get(storage, (position, position))
            span[storage] = (first, position)
            holder[storage] = mine if holder.get(storage, mine) == mine else None
    change: list[dict[int, int]] = [{} for _ in range(count)]
    for storage, number in holder.items():
        if number is not None and graph.storages[storage].kind == "temporary" and storage not in returned:
            (first, last), nbytes = span[storage], graph.storages[storage].nbytes
            change[number][first] = change[number].get(first, 0) + nbytes
            change[number][last + 1] = change[number].get(last + 1, 0) - nbytes
    return [max(accumulate(each[at] for at in sorted(each)), default=0) for each in change]


ENOUGH_PLACES = 2
"""Number of positions tried to find the reason why a step has no region."""
NAMED = 3
"""Number of operators to name, most frequent obstacles first."""


def blocked(graph: Graph) -> str:
    """Return in one line why the step has no region; "" if it has one."""
    start = batch_inputs(graph)
    sizes = sorted({graph.values[value].shape[0] for value in start if graph.values[value].shape})
    if not sizes:
        return "no input has a batch dimension"
    if sizes == [1]:
        return "" if any(axis.cuts for axis in axes(graph)) else "a batch of 1 has no parts"
    axis = follow(graph, start)
    found = Counter(
        (op.target.split(".")[1], reason)
        for position, op in enumerate(graph.ops)
        if position not in axis.cuts and op.phase != "update"
        for reason in _reasons(graph, position, axis.dims)
    )
    if found:
        calls = Counter(op.target.split(".")[1] for op in graph.ops)
        first = sorted(found, key=lambda each: (-found[each], each))[:NAMED]
        return ", ".join(f"{name} ({calls[name]} calls: {reason})" for name, reason in first)
    if axis.cuts and most_parts(axis.cuts) == 1:
        return f"a batch of {' or '.join(map(str, sizes))} has no equal parts with the other sizes of the step"
    return _first_problem(graph, axis)


def _first_problem(graph: Graph, axis: Axis) -> str:
    """Return why the first possible region is illegal; "" if a region is legal."""
    reason = ""
    dag = dependency_graph(graph)
    for at in places(graph, axis, ENOUGH_PLACES):
        piece = heaviest(graph, suffix(graph, axis, at, dag), dag)
        if piece is None:
            continue
        found = next(region_problems(graph, Region(piece.cuts, most_parts(piece.cuts))), "")
        if not found:
            return ""
        reason = reason or found
    return reason


def _reasons(graph: Graph, position: int, dims: Mapping[int, int]) -> set[str]:
    """Return why the operator cannot be split as its inputs are cut; one reason at most."""
    op = graph.ops[position]
    for number, value in enumerate(op.inputs()):
        if value in dims:
            reason = why_not(op, graph.values, number, dims[value])
            if reason:
                return {reason}
    return set()
