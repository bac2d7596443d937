"""What Hypothesis draws: graphs, programs that run, plans; and orders that try to break hazards."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import rustworkx as rx
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from magis.graph import BITS, GENERATOR, ITEM_SIZE, PERSISTENT_KINDS, Arg, Const, Graph, Op, Ref, Scalar, Storage, Value
from magis.graph.hazards import dependency_graph
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, REPEAT, SWAP, Int8s, Problem
from tests.nets import FORWARD, Block, Net


def examples(quick: int) -> settings:
    """So many examples of a test in every run, twenty times as many in a soak run."""
    return settings(max_examples=20 * quick if is_soak() else quick)


def is_soak() -> bool:
    """Whether this is a soak run."""
    return settings.get_current_profile_name() == "soak"


# --- text: any graph that can be written down, sound or not -----------------------------------------------------------

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
small = st.integers(0, 40)
wide = st.integers(-(10**15), 10**15)
literals = st.one_of(
    wide, st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.booleans(), st.none(), names,
    words.map(Scalar), small.map(Ref),
    st.builds(Const, st.sampled_from(["dtype", "device", "layout", "memory_format"]), words),
)  # fmt: skip
args: st.SearchStrategy[Arg] = st.recursive(
    literals, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)
versions = st.lists(st.tuples(small, small), max_size=3).map(tuple)


@st.composite
def written_graphs(draw: st.DrawFn) -> Graph:
    """Graphs whose parts need not fit together: all that the text form must carry."""
    storages = {
        key: Storage(key, draw(st.integers(0, 10**15)), draw(st.sampled_from([*PERSISTENT_KINDS, "temporary", "host"])))
        for key in draw(st.sets(small, max_size=4))
    }
    values = {}
    for key in draw(st.sets(small, max_size=4)):
        dims = draw(st.lists(st.tuples(st.integers(0, 10**9), wide), max_size=3))
        values[key] = Value(
            key, tuple(size for size, _ in dims), tuple(step for _, step in dims), draw(st.sampled_from([*ITEM_SIZE])),
            draw(small), draw(st.integers(0, 10**12)), draw(names),
            draw(st.sampled_from([(), BITS[:1], BITS[1:], BITS])),
        )  # fmt: skip
    ops = draw(st.lists(written_ops(), max_size=4))
    number = st.one_of(wide, st.floats(allow_nan=False), st.complex_numbers(allow_nan=False), st.booleans())
    data = st.lists(number, max_size=3).map(tuple)
    inputs, outputs = (tuple(draw(st.lists(small, max_size=3))) for _ in range(2))
    return Graph(storages, values, tuple(ops), inputs, outputs, draw(st.dictionaries(small, data, max_size=2)))


@st.composite
def written_ops(draw: st.DrawFn) -> Op:
    outputs = tuple(draw(st.lists(st.one_of(st.none(), small), max_size=3)))
    many = len(outputs) != 1 or draw(st.booleans())
    return Op(
        id=draw(small),
        target=".".join(draw(st.lists(words, min_size=2, max_size=3))),
        args=tuple(draw(st.lists(args, max_size=3))),
        kwargs=tuple((name, draw(args)) for name in sorted(draw(st.sets(words, max_size=2)))),
        outputs=outputs,
        many=many,
        reads=draw(versions),
        writes=draw(versions),
        random=draw(st.booleans()),
        phase=draw(st.sampled_from(["forward", "backward", "update"])),
        module=draw(names),
        origin=draw(st.one_of(st.none(), small)),
    )


# --- schedules: sound graphs of made-up operators, for liveness and simulation ----------------------------------------


@st.composite
def schedules(draw: st.DrawFn, most_ops: int = 10) -> Graph:
    """Sound graphs: fresh storages, views, writes, random numbers, host storages; sizes from a handful of bytes up."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    storages = {GENERATOR: Storage(GENERATOR, 0, "generator")}
    values: dict[int, Value] = {}
    version: dict[int, int] = {GENERATOR: 0}

    def add(kind: str, size: int) -> int:
        storage = Storage(len(storages), 4 * size, kind)
        storages[storage.id] = storage
        version[storage.id] = 0
        return window(storage.id, size)

    def window(storage: int, size: int) -> int:
        values[len(values)] = Value(len(values), (size,), (1,), "float32", storage)
        return len(values) - 1

    inputs = [add(PERSISTENT_KINDS[int(rng.integers(5))], int(rng.integers(0, 40))) for _ in range(rng.integers(1, 4))]
    ops: list[Op] = []
    for position in range(int(rng.integers(0, most_ops + 1))):
        taken = [
            int(v) for v in rng.choice(list(values), size=min(len(values), int(rng.integers(0, 4))), replace=False)
        ]
        touched = sorted({values[v].storage for v in taken})
        reads = [(s, version[s]) for s in touched]
        writes: list[tuple[int, int]] = []
        made: list[int] = []
        kind = rng.choice(["make", "view", "write", "random", "host"], p=[0.5, 0.15, 0.2, 0.1, 0.05])
        if kind in ("view", "write") and taken:
            storage = values[taken[0]].storage
            made = [window(storage, int(rng.integers(0, values[taken[0]].shape[0] + 1)))]
            if kind == "write":
                version[storage] += 1
                writes = [(storage, version[storage])]
            else:
                reads = []
        else:
            place = "host" if kind == "host" else "temporary"
            made = [add(place, int(rng.integers(0, 40))) for _ in range(rng.integers(0, 3))]
        if kind == "random":
            reads = sorted([*reads, (GENERATOR, version[GENERATOR])])
            version[GENERATOR] += 1
            writes = sorted([*writes, (GENERATOR, version[GENERATOR])])
        ops.append(
            Op(
                position, f"test.{kind}.default", tuple(Ref(v) for v in taken), (), tuple(made), many=len(made) != 1,
                reads=tuple(reads), writes=tuple(writes), random=kind == "random",
            )
        )  # fmt: skip
    outputs = [int(v) for v in rng.choice(list(values), size=int(rng.integers(0, 3)))]
    return Graph(storages, values, tuple(ops), tuple(inputs), tuple(dict.fromkeys(outputs)))


# --- programs: modules that really run --------------------------------------------------------------------------------

Step = Callable[[list[Tensor], int, int], Tensor]
STEPS: tuple[Step, ...] = (
    lambda p, i, j: p[i] + p[j],
    lambda p, i, j: p[i] * p[j].mean(),
    lambda p, i, j: p[i].relu(),
    lambda p, i, j: p[i] @ p[j].t() @ p[i],
    lambda p, i, j: p[i].t().contiguous().t(),
    lambda p, i, j: torch.cat([p[i][:2], p[j][2:]]),
    lambda p, i, j: p[i].flip(0),
    lambda p, i, j: p[i].clone(),
)
VIEWS: tuple[Step, ...] = (
    lambda p, i, j: p[i].view(-1).view(4, 4) if p[i].is_contiguous() else p[i].t(),
    lambda p, i, j: p[i].t().t(),
    lambda p, i, j: p[i][:, :],
)
WRITES: tuple[Step, ...] = (
    lambda p, i, j: p[i].add_(p[j].clone()),
    lambda p, i, j: p[i].mul_(0.5),
    lambda p, i, j: p[i].relu_(),
    lambda p, i, j: p[i][1:3].copy_(p[j][:2].clone()).repeat(2, 1),
    lambda p, i, j: p[i].t().add_(1.0).t(),
    lambda p, i, j: p[i].fill_(0.25),
    lambda p, i, j: p[i].uniform_(),
    lambda p, i, j: p[i].bernoulli_(0.5),
)


@st.composite
def programs(draw: st.DrawFn, most_steps: int = 14) -> Net:
    """Straight-line inference programs full of views, in-place writes and random numbers on few storages."""
    choice = st.integers(0, len(STEPS) + len(VIEWS) + len(WRITES) - 1)
    lines = draw(st.lists(st.tuples(choice, st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=most_steps))

    def run(block: Any, x: Tensor) -> tuple[Tensor, ...]:
        pool = [x * 1.0, block.weight + 0.0, block.state]
        for code, i, j in lines:
            pool.append((STEPS + VIEWS + WRITES)[code](pool, i % len(pool), j % len(pool)))
        return tuple(pool)

    return Net(
        lambda: Block(run, weight=nn.Parameter(torch.randn(4, 4)), state=torch.randn(4, 4)),
        lambda: (torch.randn(4, 4),), loss_fn=None, rule=FORWARD,
    )  # fmt: skip


# --- orders and plans -------------------------------------------------------------------------------------------------

Priority = Callable[[int], Any]


def topological(dag: rx.PyDiGraph[int, None], priority: Priority) -> list[int]:
    """The legal order that always takes the ready position of least priority."""
    waiting = {node: dag.in_degree(node) for node in dag.node_indices()}
    ready = [(priority(node), node) for node, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for after in dag.successor_indices(node):
            waiting[after] -= 1
            if waiting[after] == 0:
                heapq.heappush(ready, (priority(after), after))
    return order


def adversarial_order(graph: Graph, seed: int) -> list[int]:
    """A legal order far from the program's: backwards, writers first, readers first, ... or random, by the seed.

    Seeds 0 to 3 order by the rule alone; greater ones leave more and more to chance between what the rule likes.
    """
    ops = graph.ops
    ranks = np.random.default_rng(seed).permutation(len(ops)) if seed > 3 else -np.arange(len(ops))
    rules: list[Priority] = [
        lambda at: 0,
        lambda at: not ops[at].writes,
        lambda at: bool(ops[at].writes),
        lambda at: bool(ops[at].reads),
    ]
    rule = rules[seed % 4]
    return topological(dependency_graph(graph), lambda at: (rule(at), int(ranks[at])))


def adversarial_orders(graph: Graph, seed: int, randoms: int = 2) -> list[list[int]]:
    """Every rule of ``adversarial_order`` once, and so many random orders."""
    chance = [4 * (seed + number + 1) for number in range(randoms)]
    return [adversarial_order(graph, number) for number in (0, 1, 2, 3, *chance)]


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    return replace(graph, ops=tuple(graph.ops[at] for at in order))


def random_flags(problem: Problem, rng: np.random.Generator) -> Int8s:
    """A plan's flags, with more or less recomputation and swapping."""
    shares = (
        [0.5, 0.3, 0.05, 0.15, 0.0],
        [0.2, 0.4, 0.1, 0.1, 0.2],
        [0.4, 0.0, 0.6, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0, 0.0],
        [0.1, 0.0, 0.1, 0.1, 0.7],
    )
    share = shares[int(rng.integers(len(shares)))]
    return rng.choice([KEEP, RECOMPUTE, SWAP, DROP, REPEAT], size=problem.n_storages, p=share).astype(np.int8)
