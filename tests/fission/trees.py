"""Small graphs whose axes, dominators and F-Trees are known, random ones, and brute-force answers for them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping

from magis.fission.dimensions import Vertex, vertices_of
from magis.aten.splits import Split, splits
from magis.ir import Graph, Op, Ref, Storage, Value, parse, verify

HEAD = "magis graph 1"


def sound(*lines: str) -> Graph:
    """A sound graph of these lines."""
    graph = parse("\n".join([HEAD, *lines]) + "\n")
    verify(graph)
    return graph


def learner() -> Graph:
    """A layer, its activation, and the gradients of both weights: mm, relu, mm, relu', mm', mm'."""
    shapes = {1: (6, 4), 2: (4, 8), 3: (8, 2), 4: (6, 8), 5: (6, 8), 6: (6, 2), 7: (2, 8), 8: (6, 8), 9: (6, 8)}
    shapes |= {10: (4, 6), 11: (4, 8)}
    base = {7: 3, 10: 1}  # views
    kinds = {1: "batch", 2: "parameter", 3: "parameter"}
    lines = []
    for key, shape in shapes.items():
        if key not in base:
            lines.append(f"storage {key} {kinds.get(key, 'temporary')} {8 * shape[0] * shape[1]}")
    for key, (rows, columns) in shapes.items():
        stride = (columns, 1) if key not in base else (1, rows)
        name = ' "input:0"' if key == 1 else ""
        lines.append(
            f"value {key} @{base.get(key, key)} float64 [{rows}, {columns}] {{{stride[0]}, {stride[1]}}} +0{name}"
        )
    return sound(
        *lines,
        "input 1", "input 2", "input 3",
        "op 0 %4 = aten.mm.default(%1, %2) reads 1:0 2:0 phase forward",
        "op 1 %5 = aten.relu.default(%4) reads 4:0 phase forward",
        "op 2 %6 = aten.mm.default(%5, %3) reads 3:0 5:0 phase forward",
        "op 3 %7 = aten.t.default(%3) phase backward",
        "op 4 %8 = aten.mm.default(%6, %7) reads 3:0 6:0 phase backward",
        "op 5 %9 = aten.threshold_backward.default(%8, %5, 0) reads 5:0 8:0 phase backward",
        "op 6 %10 = aten.t.default(%1) phase backward",
        "op 7 %11 = aten.mm.default(%10, %9) reads 1:0 9:0 phase backward",
        "output 11",
    )  # fmt: skip


def random_graph(seed: int, count: int = 12) -> Graph:
    """Products, transpositions, sums and pointwise operators on square and other matrices, one input, one weight."""
    chosen = random.Random(seed)
    storages: dict[int, Storage] = {}
    values: dict[int, Value] = {}
    ops: list[Op] = []

    def fresh(shape: tuple[int, ...], kind: str, name: str = "") -> int:
        key = len(values)
        stride = (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
        size = 1
        for each in shape:
            size *= each
        storages[key] = Storage(key, 8 * size, kind)
        values[key] = Value(key, shape, stride, "float64", key, 0, name)
        return key

    fresh((4, 6), "batch", "input:0")
    fresh((6, 4), "parameter", "parameter:w")
    inputs = (0, 1)
    for _ in range(count):
        pool = list(values)
        first = chosen.choice(pool[-5:] if chosen.random() < 0.7 else pool)
        looks = values[first]
        kind = chosen.choice(("mm", "mm", "t", "add", "exp", "sum"))
        partners = [key for key in pool if key != first]
        target, args, reads = "", (Ref(first),), {looks.storage}
        shape: tuple[int, ...] = looks.shape
        if kind == "mm":
            fits = [k for k in pool if len(looks.shape) == 2 == len(values[k].shape) and values[k].shape[0] == looks.shape[1]]
            if not fits:
                continue
            other = chosen.choice(fits)
            target, args = "aten.mm.default", (Ref(first), Ref(other))
            shape = (looks.shape[0], values[other].shape[1])
            reads.add(values[other].storage)
        elif kind == "t":
            if len(looks.shape) != 2:
                continue
            key = len(values)
            rows, columns = looks.shape
            values[key] = Value(key, (columns, rows), looks.stride[::-1], "float64", looks.storage)
            ops.append(Op(len(ops), "aten.t.default", (Ref(first),), (), (key,)))
            storages.setdefault(key, Storage(key, 0, "temporary"))
            continue
        elif kind == "add":
            fits = [key for key in partners if values[key].shape == looks.shape]
            if not fits:
                continue
            other = chosen.choice(fits)
            target, args = "aten.add.Tensor", (Ref(first), Ref(other))
            reads.add(values[other].storage)
        elif kind == "exp":
            target = "aten.sin.default"
        else:
            if len(looks.shape) != 2:
                continue
            target, args, shape = "aten.sum.dim_IntList", (Ref(first), (chosen.randrange(2),)), ()
            dim = args[1][0]
            shape = (looks.shape[1 - dim],)
        made = fresh(shape, "temporary")
        met = tuple(sorted((storage, 0) for storage in reads))
        ops.append(Op(len(ops), target, args, (), (made,), reads=met))
    used = {value.storage for value in values.values()}
    storages = {key: storage for key, storage in storages.items() if key in used}
    graph = Graph(storages, values, tuple(ops), inputs, tuple(v for op in ops[-2:] for v in op.made()))
    verify(graph)
    return graph


# --- brute force ------------------------------------------------------------------------------------------------------


def axes(graph: Graph) -> set[frozenset[Vertex]]:
    """Components of the D-Graph, by merging sets until none shares a vertex."""
    groups: list[set[Vertex]] = []
    for position, op in enumerate(graph.ops):
        for number, split in enumerate(splits(op, graph.values)):
            sources, targets = vertices_of(graph, position, number, split)
            new = {*sources, *targets}
            for group in [group for group in groups if group & new]:
                new |= group
                groups.remove(group)
            groups.append(new)
    return {frozenset(group) for group in groups}


def reached(edges: Collection[tuple[int, int]], without: int | None = None) -> set[int]:
    """What can be reached from -1 when a node is taken away."""
    found = {-1} - {without}
    grown = True
    while grown:
        more = {after for before, after in edges if before in found and after != without} - found
        grown = bool(more)
        found |= more
    return found


def strictly_dominated(edges: Collection[tuple[int, int]]) -> dict[int, set[int]]:
    """For every node that can be reached, those that cannot be without it."""
    everything = reached(edges)
    return {node: everything - reached(edges, node) - {node} for node in everything}


def score(graph: Graph, below: Iterable[int], hot: Mapping[int, int], reachable: Collection[int]) -> int:
    """Twice the score of the operators at these positions, by its definition, for n = 2."""
    inside = set(below)
    maker: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        for value in op.made():
            maker.setdefault(graph.values[value].storage, position)
    warm = sum(nbytes for storage, nbytes in hot.items() if maker.get(storage) in inside)
    taken = {graph.values[value].storage for position in inside for value in graph.ops[position].inputs()}
    cold = [s for s in taken - set(hot) if graph.storages[s].kind == "temporary" and maker.get(s) not in inside]
    assert inside <= set(reachable)
    return warm - 2 * sum(graph.storages[storage].nbytes for storage in cold)


def by_hand(graph: Graph, position: int, output: int | str) -> Split:
    """The one split of an operator whose first output is joined or combined so."""
    (split,) = (each for each in splits(graph.ops[position], graph.values) if each.outputs[0] == output)
    return split
