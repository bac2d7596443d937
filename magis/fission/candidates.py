"""Candidate regions for fission: grown from a cut tensor, or around one operator (paper, D-Graph).

The D-Graph's vertices are dimensions of tensors; an edge joins two dimensions that an operator cuts together, as the
split labels of the operator say (``magis.ops.splits``). Its components are the axes along which a step can be cut,
wherever they begin: tokens of one sequence behind a `view(-1, features)`, heads, columns of a vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import rustworkx as rx

from magis.fission.region import Region, most_parts, needs_equal_parts, ways
from magis.graph import Graph, Op
from magis.graph.hazards import dependency_graph
from magis.ops.splits import Cut, Halo, How, Overlap, Split, dimension


def grow(
    graph: Graph,
    start: Mapping[int, int],
    allowed: Collection[int],
    dag: rx.PyDiGraph[int, None] | None = None,
    makers: Mapping[int, Split] | None = None,
) -> dict[int, Split]:
    """Grow a region from tensors cut as ``start`` says (value -> dimension), among the positions ``allowed``.

    In program order, an operator joins if it can be split as its inputs from the region are, and none of its inputs
    depends on the end of the region. Growth stops at operators that cannot be split, and at overlapping windows: halo
    rows are available only of tensors made before the region. Operators that cut no input (`full`) join as ``makers``
    says. Returns the split of each operator, by position.
    """
    return _followed(graph, start, allowed, dag, makers or {}, across=False)[0]


@dataclass(frozen=True, eq=False)
class Axis:
    """An axis throughout a step: the cut dimension of each value, and the split of each operator reached."""

    dims: Mapping[int, int]
    cuts: Mapping[int, Split]
    closed: bool = False
    """True if a region along the axis must hold no operators but those of ``cuts``."""


def components(graph: Graph, least: int, *, even: bool = True) -> list[Axis]:
    """Return the components of the D-Graph as axes, those with most bytes of temporary tensors first.

    ``least`` divides the extent of every operator's split; if not ``even``, no extent is smaller. A tensor of which a
    component has two dimensions (scores of tokens with tokens) is not cut.
    """
    links: rx.PyGraph[tuple[int, int], None] = rx.PyGraph()
    node: dict[tuple[int, int], int] = {}
    found: list[tuple[int, Split, list[tuple[int, int]]]] = []
    for position, op in enumerate(graph.ops):
        for split in () if op.random or op.phase == "update" else ways(op, graph.values):
            pairs = zip((*op.inputs(), *op.outputs), (*split.inputs, *split.outputs), strict=True)
            tied = [(value, how) for value, how in pairs if value is not None and isinstance(how, int)]
            if (split.extent % least if even else split.extent < least) or not tied:
                continue
            node.update((vertex, links.add_node(vertex)) for vertex in dict.fromkeys(tied) if vertex not in node)
            links.add_edges_from_no_data([(node[tied[0]], node[vertex]) for vertex in tied[1:]])
            found.append((position, split, tied))
    parts = [sorted(links[vertex] for vertex in part) for part in rx.connected_components(links)]
    owner = {vertex: number for number, part in enumerate(parts) for vertex in part}
    times = [Counter(value for value, _ in part) for part in parts]
    dims = [{value: dim for value, dim in part if times[number][value] == 1} for number, part in enumerate(parts)]
    cuts: list[dict[int, Split]] = [{} for _ in parts]
    for position, split, tied in found:
        number = owner[tied[0]]
        if all(value in dims[number] for value, _ in tied) and not any(isinstance(how, Halo) for how in split.inputs):
            cuts[number].setdefault(position, split)
    nbytes = [held_bytes(graph, its) for its in dims]
    order = sorted(range(len(parts)), key=lambda number: (-nbytes[number], number))
    return [Axis(dims[n], cuts[n], closed=True) for n in order if cuts[n]]


def held_bytes(graph: Graph, values: Iterable[int]) -> int:
    """Return the bytes of the storages of values; none for persistent ones."""
    return sum(_weight(graph, value) for value in values)


def factories(graph: Graph, cuts: Mapping[int, Split], among: Collection[int]) -> dict[int, Split]:
    """Return the splits of operators that make wide tensors of small ones or of none, as the operators of ``cuts`` cut
    these, and of those in between: zeros, and a sum of other tensors into them; differences of all positions. Only
    operators at the positions ``among`` are looked at."""
    wanted: dict[int, set[Cut]] = {}
    for position, split in cuts.items():
        for value, cut in zip(graph.ops[position].inputs(), split.inputs, strict=True):
            wanted.setdefault(value, set()).add(cut)
    first = min(cuts, default=0)
    between: dict[int, set[Cut]] = {}  # the same of operators in between
    makers: dict[int, Split] = {}
    leaves: set[int] = set()
    for position in sorted(among, reverse=True):
        op = graph.ops[position]
        asked = {value: wanted.get(value) or between.get(value) for value in op.made()}
        if position in cuts or op.random or op.phase == "update" or not any(asked.values()):
            continue
        widens = _widens(graph, op)
        for split in ways(op, graph.values):
            makes = [(asked[v], how) for v, how in zip(op.outputs, split.outputs, strict=True) if v is not None]
            leaf = widens or set(split.inputs) <= {None}
            if (leaf or position > first) and all(not cut or cut == {how} for cut, how in makes):
                makers[position] = split
                leaves.update([position] if leaf else [])
                for value, cut in zip(op.inputs(), split.inputs, strict=True):
                    between.setdefault(value, set()).add(cut)
                break
    found: dict[int, Split] = {}
    made: set[int] = set()
    for position, split in sorted(makers.items()):
        op = graph.ops[position]
        given = {v for v, cut in zip(op.inputs(), split.inputs, strict=True) if cut is not None}
        if position in leaves or not given.isdisjoint(made):
            found[position] = split
            made.update(op.made())
    return found


def _widens(graph: Graph, op: Op) -> bool:
    """Return True for an operator whose results are much larger than its inputs."""
    taken, made = (sum(graph.values[value].nbytes for value in each) for each in (op.inputs(), op.made()))
    return taken * SMALL <= made


def follow(graph: Graph, start: Mapping[int, int]) -> Axis:
    """Return the axis through the values of ``start`` (value -> dimension).

    Unlike a region, an axis continues through overlapping windows, and through dropout, which cannot be split but keeps
    the axis.
    """
    cuts, state = _followed(graph, start, range(len(graph.ops)), None, {}, across=True)
    return Axis({value: how for value, how in state.items() if isinstance(how, int)}, cuts)


def _followed(
    graph: Graph,
    start: Mapping[int, int],
    allowed: Collection[int],
    dag: rx.PyDiGraph[int, None] | None,
    makers: Mapping[int, Split],
    *,
    across: bool,
) -> tuple[dict[int, Split], dict[int, How]]:
    """Return the splits of ``grow`` (or, ``across``, of ``follow``) and the cut of every value reached."""
    dag = dependency_graph(graph) if dag is None else dag
    state: dict[int, How] = dict(start)
    made: set[int] = set()
    cuts: dict[int, Split] = {}
    behind: set[int] = set()  # positions that depend on the end of the region
    wanted = set(allowed)  # operators outside of this range cannot join
    for position in range(min(wanted, default=0), min(max(wanted, default=-1) + 1, len(graph.ops))):
        op = graph.ops[position]
        before = dag.predecessor_indices(position)
        if any(p in behind for p in before):
            behind.add(position)
            continue
        touched = any(value in state for value in op.inputs())
        split = _matching(op, graph, state, () if across else made) if touched and position in wanted else None
        if split is None and position in wanted and made.isdisjoint(op.inputs()):
            split = makers.get(position)
        if split is not None:
            cuts[position] = split
            made.update(op.made())
            outputs = (dimension(how) if across and isinstance(how, Overlap) else how for how in split.outputs)
            state.update({v: how for v, how in zip(op.outputs, outputs, strict=True) if v is not None})
        elif across and touched and op.random:
            state.update(_cuts_through(op, graph, state))
        elif any(p in cuts for p in before):
            behind.add(position)
    return cuts, state


def _cuts_through(op: Op, graph: Graph, state: Mapping[int, How]) -> dict[int, How]:
    """Return cuts of a random operator's outputs: as an input of equal shape is cut."""
    known = {graph.values[value].shape: state[value] for value in op.inputs() if isinstance(state.get(value), int)}
    shapes = {value: graph.values[value].shape for value in op.made()}
    return {value: known[shape] for value, shape in shapes.items() if shape in known}


def _matching(op: Op, graph: Graph, state: Mapping[int, How], made: Collection[int]) -> Split | None:
    """Return the split of ``op`` that agrees with its inputs' cuts, else None; ``made`` are values of the region."""
    if op.random or op.phase == "update":
        return None
    for split in ways(op, graph.values):
        pairs = list(zip(op.inputs(), split.inputs, strict=True))
        agrees = all(_same(state[value], cut, outside=value not in made) for value, cut in pairs if value in state)
        if agrees and any(cut is not None and value in state for value, cut in pairs):
            return split
    return None


def _same(given: How, wanted: Cut, *, outside: bool) -> bool:
    if isinstance(wanted, Halo):
        return outside and given == wanted.dim
    return given == (wanted if wanted is not None else "same")


PARTS = (2, 4, 8, 16, 32)


def numbers_of_parts(most: int) -> list[int]:
    """List the divisors of ``most`` to try as numbers of parts, increasing: powers of two, else all up to 32."""
    even = [parts for parts in PARTS if most % parts == 0]
    return even if len(even) > 1 else [parts for parts in range(2, PARTS[-1] + 1) if most % parts == 0]


def regions_in_parts(cuts: Mapping[int, Split]) -> list[Region]:
    """Return the regions of these operators to try, in ever more parts: equal ones, if several numbers divide the cut
    dimensions; else the last part is smaller, but where windows overlap or means are merged."""
    most = most_parts(cuts)
    even = [Region(cuts, parts) for parts in numbers_of_parts(most)]
    if most <= PARTS[1] or len(even) > 2 or any(needs_equal_parts(split) for split in cuts.values()):
        return even
    regions = (region_in_parts(cuts, parts) for parts in PARTS if parts < most)
    return list({region.parts: region for region in regions}.values())


def region_in_parts(cuts: Mapping[int, Split], parts: int) -> Region:
    """Return the region of these operators in so many parts; in fewer, the last one smaller, if the number does not
    divide the cut dimensions."""
    most = most_parts(cuts)
    if most % parts == 0 or any(needs_equal_parts(split) for split in cuts.values()):
        return Region(cuts, parts)
    size = -(-most // parts)
    while most % size == 1:  # of one row, the last part could be a part of other calls as well
        size += 1
    return Region(cuts, -(-most // size), uneven=most % size != 0)


def connected(
    graph: Graph, cuts: Mapping[int, Split], dag: rx.PyDiGraph[int, None] | None = None
) -> list[dict[int, Split]]:
    """Return the weakly connected components of operators, largest first, each in program order."""
    dag = dependency_graph(graph) if dag is None else dag
    sub = dag.subgraph(sorted(cuts))
    pieces = [sorted(sub[node] for node in piece) for piece in rx.weakly_connected_components(sub)]
    return [{p: cuts[p] for p in piece} for piece in sorted(pieces, key=len, reverse=True)]


# Regions around one operator, to lower the memory while that operator runs.

REACH = 8
"""Number of operators before the given one, updates excluded, at which a region may begin."""
LENGTHS = (0, 2, 5, 12)
"""Numbers of operators after the given one at which a region may end."""
SMALL = 16
"""Tensors smaller than 1 / SMALL of the largest nearby tensor are not cut."""


def regions_around(graph: Graph, position: int, *, most: int) -> list[dict[int, Split]]:
    """Return up to ``most`` candidate regions around the operator at ``position``, and up to ``most`` of what waits for
    it; some may be illegal. Candidates with most bytes of inner tensors come first."""
    dag = dependency_graph(graph)
    ahead = [p for p in range(position) if graph.ops[p].phase != "update"][-REACH:]
    behind = [p for p in range(position, len(graph.ops)) if graph.ops[p].phase != "update"]

    def grown(starts: Iterator[tuple[dict[int, int], int]]) -> Iterator[dict[int, Split]]:
        for start, first in starts:
            for length in LENGTHS:
                allowed = range(first, behind[min(length, len(behind) - 1)] + 1)
                cuts = grow(graph, start, allowed, dag)
                makers = factories(graph, cuts, range(min([first, *ahead]), allowed.stop))
                if makers:
                    cuts = grow(graph, start, {*allowed, *makers}, dag, makers)
                yield from (piece for piece in connected(graph, cuts, dag) if position in piece)

    alone = ({position: split} for split in ways(graph.ops[position], graph.values))
    near = _varied(graph, [*grown(_starts(graph, [*ahead, position])), *alone], most)
    return [
        *near,
        *(cuts for cuts in _varied(graph, grown(_starts_of_held(graph, position)), most) if cuts not in near),
    ]


def _varied(graph: Graph, regions: Iterable[dict[int, Split]], most: int) -> list[dict[int, Split]]:
    """Return up to ``most`` regions, those first that hold most bytes; of those that hold equal ones, the smallest."""
    found = {tuple(cuts.items()): inner_bytes(graph, cuts) for cuts in regions}
    ranked = sorted(found, key=lambda key: (-found[key], len(key)))
    smallest: dict[int, tuple[tuple[int, Split], ...]] = {}  # inner bytes -> smallest region
    for key in ranked:
        smallest.setdefault(found[key], key)
    varied = dict.fromkeys([*list(smallest.values())[: most - 1], *ranked])
    return [dict(key) for key in list(varied)[:most]]


def _starts(graph: Graph, near: Sequence[int]) -> Iterator[tuple[dict[int, int], int]]:
    """Yield pairs (start of a region: value -> dimension, position of the first operator allowed)."""
    sizes = [_weight(graph, value) for at in near for value in graph.ops[at].inputs()]
    largest = max(sizes, default=0)
    seen: set[tuple[int, int, int]] = set()
    for at in near:
        for value in graph.ops[at].inputs():
            if _weight(graph, value) * SMALL < largest:
                continue
            for dim, size in enumerate(graph.values[value].shape):
                if size > 1 and (value, dim, at) not in seen:
                    seen.add((value, dim, at))
                    yield {value: dim}, at


def _starts_of_held(graph: Graph, position: int) -> Iterator[tuple[dict[int, int], int]]:
    """Yield starts at the operators that lead from small tensors to the large ones that wait for ``position``.

    A head that is made before the blocks' backward and read after it (log-probabilities of another loss) is far away
    from the peak; its loop begins where small tensors become large.
    """
    maker = {value: at for at in range(position) for value in graph.ops[at].made()}
    later = {value for op in graph.ops[position:] if op.phase != "update" for value in op.inputs()}
    sizes = {value: graph.values[value].nbytes for value in maker if _weight(graph, value)}
    least = max((sizes[value] for value in later & sizes.keys()), default=0) / SMALL
    wanted = sorted((value for value in later & sizes.keys() if sizes[value] >= least), key=lambda value: maker[value])
    seen = set(wanted)
    for value in wanted:
        at = maker[value]
        large = {each for each in graph.ops[at].inputs() if sizes.get(each, 0) >= least}
        wanted.extend(large - seen)
        seen |= large
        if not large:
            for taken in dict.fromkeys(graph.ops[at].inputs()):
                if _weight(graph, taken):
                    yield from (({taken: dim}, at) for dim, size in enumerate(graph.values[taken].shape) if size > 1)


def _weight(graph: Graph, value: int) -> int:
    storage = graph.storages[graph.values[value].storage]
    return 0 if storage.persistent else storage.nbytes


def inner_bytes(graph: Graph, cuts: Mapping[int, Split]) -> int:
    """Return the bytes of temporary storages made by the operators and used by no other operator."""
    made = {graph.values[value].storage for p in cuts for value in graph.ops[p].made()}
    used = {graph.values[v].storage for p, op in enumerate(graph.ops) if p not in cuts for v in op.inputs()}
    used |= {graph.values[value].storage for value in graph.outputs}
    taken = {graph.values[v].storage for p in cuts for v in graph.ops[p].inputs()}
    storages = graph.storages
    return sum(storages[s].nbytes for s in made - used if s in taken and storages[s].kind == "temporary")
