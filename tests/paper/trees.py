"""Small graphs whose axes, dominators and F-Trees are known, random ones, and brute-force answers for them."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from magis.extensions.paper.dgraph import Vertex, vertices_of
from magis.extensions.paper.ftree import FTree, parts_problems
from magis.graph import Arg, Graph, Op, Ref, Storage, Value, verify
from magis.ops.splits import splits
from tests.fission.rows import step


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
    return step(
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
    """Products, transpositions, sums and pointwise operators on matrices of all sizes; one input, one weight."""
    drawn = _Drawn(random.Random(seed))
    drawn.fresh((4, 6), "batch", "input:0")
    drawn.fresh((6, 4), "parameter", "parameter:w")
    for _ in range(count):
        drawn.add()
    graph = Graph(
        drawn.storages, drawn.values, tuple(drawn.ops), (0, 1), tuple(v for op in drawn.ops[-2:] for v in op.made())
    )
    verify(graph)
    return graph


class _Drawn:
    """A graph while it is drawn."""

    def __init__(self, chosen: random.Random) -> None:
        self.chosen = chosen
        self.storages: dict[int, Storage] = {}
        self.values: dict[int, Value] = {}
        self.ops: list[Op] = []

    def fresh(self, shape: tuple[int, ...], kind: str, name: str = "") -> int:
        key = len(self.values)
        size = math.prod(shape)
        self.storages[key] = Storage(key, 8 * size, kind)
        self.values[key] = Value(key, shape, (shape[1], 1) if len(shape) == 2 else (1,), "float64", key, 0, name)
        return key

    def add(self) -> None:
        """One more operator, most often on what was made last."""
        pool = list(self.values)
        first = self.values[self.chosen.choice(pool[-5:] if self.chosen.random() < 0.7 else pool)]
        kind = self.chosen.choice(("mm", "mm", "t", "add", "sin", "sum"))
        if kind == "sin":
            self._emit("aten.sin.default", (first,), first.shape)
        elif kind == "add":
            self._with(first, "aten.add.Tensor", [v for v in self.values.values() if v.shape == first.shape])
        elif len(first.shape) < 2:
            return
        elif kind == "mm":
            fits = [v for v in self.values.values() if len(v.shape) == 2 and v.shape[0] == first.shape[1]]
            self._with(first, "aten.mm.default", fits)
        elif kind == "sum":
            dim = self.chosen.randrange(2)
            self._emit("aten.sum.dim_IntList", (first,), (first.shape[1 - dim],), ((dim,),))
        else:
            key = len(self.values)
            self.values[key] = Value(key, first.shape[::-1], first.stride[::-1], "float64", first.storage)
            self.ops.append(Op(len(self.ops), "aten.t.default", (Ref(first.id),), (), (key,)))

    def _with(self, first: Value, target: str, partners: list[Value]) -> None:
        if partners:
            other = self.chosen.choice(partners)
            shape = (first.shape[0], other.shape[1]) if target == "aten.mm.default" else first.shape
            self._emit(target, (first, other), shape)

    def _emit(
        self, target: str, taken: tuple[Value, ...], shape: tuple[int, ...], literals: tuple[Arg, ...] = ()
    ) -> None:
        made = self.fresh(shape, "temporary")
        reads = tuple(sorted({(value.storage, 0) for value in taken}))
        args = (*(Ref(value.id) for value in taken), *literals)
        self.ops.append(Op(len(self.ops), target, args, (), (made,), reads=reads))


# --- F-Trees ----------------------------------------------------------------------------------------------------------


def problems(tree: FTree) -> Iterator[str]:
    """Every broken rule as one line."""
    for index, parent in enumerate(tree.parents):
        if not -1 <= parent < index:
            yield f"node {index} stands before its parent {parent}"
            return
        if parent >= 0 and not set(tree.nodes[index].positions) <= set(tree.nodes[parent].positions):
            yield f"node {index} is no subset of its parent {parent}"
    yield from parts_problems(tree)


def describe(tree: FTree, graph: Graph) -> str:
    """The tree as text: one line per node with its operators, what it may be divided by, and n; children indented."""
    lines: list[str] = []

    def add(index: int, depth: int) -> None:
        node = tree.nodes[index]
        state = f"n = {node.parts}" if node.enabled else "candidate"
        first, last = graph.ops[node.positions[0]], graph.ops[node.positions[-1]]
        lines.append(
            f"{'  ' * depth}{index}: axis {node.component}, extent {node.extent}, {state}: {len(node.positions)}"
            f" operators {_runs(node.positions)}, {first.target} to {last.target}"
        )
        for child in tree.children(index):
            add(child, depth + 1)

    for top in tree.children(-1):
        add(top, 0)
    return "".join(f"{line}\n" for line in lines)


def _runs(positions: Sequence[int]) -> str:
    """1 2 3 7  ->  1-3 7"""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1] = [runs[-1][0], position]
        else:
            runs.append([position])
    return " ".join("-".join(map(str, run)) for run in runs)


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
