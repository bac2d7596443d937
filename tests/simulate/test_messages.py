"""Messages beside the nodes: kernel against plain Python on random steps, and what they may cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magis.search.latency_bound import NEVER, latency_lower_bound
from magis.simulate.evaluator import Evaluator, check_order, evaluate, expand, lower_bound
from magis.simulate.problem import (
    ARRIVE,
    BLOCK,
    DROP,
    FIRST,
    KEEP,
    RECOMPUTE,
    REDO,
    REPEAT,
    SWAP,
    BlockRow,
    Int8s,
    Int32s,
    NodeRow,
    Problem,
    StorageRow,
    build_problem,
)
from tests.simulate.plans import random_order, reference_runs
from tests.simulate.replays import replay
from tests.strategies import examples

SIZES = (256, 512, 512, 1024, 4096)
FLAGS = (KEEP, RECOMPUTE, RECOMPUTE, SWAP, DROP, REPEAT)


@dataclass
class Rows:
    """A random step under construction: weights are gathered, used, and their gradients reduced."""

    rng: np.random.Generator
    nodes: list[NodeRow] = field(default_factory=list)
    storages: list[StorageRow] = field(default_factory=list)
    blocks: list[BlockRow] = field(default_factory=list)
    pool: list[int] = field(default_factory=list)
    """Storages that any node may read."""

    def storage(self, *, plain: bool = True) -> int:
        pinned, to_end = (bool(self.rng.random() < 0.06 and not plain) for _ in range(2))
        self.storages.append(StorageRow(int(self.rng.choice(SIZES)), pinned=pinned, to_end=to_end))
        return len(self.storages) - 1

    def node(self, inputs: tuple[int, ...], outputs: tuple[int, ...], preads: tuple[int, ...] = ()) -> None:
        ws, redo_ws = (int(self.rng.choice([0, 0, 256, 2048])) for _ in range(2))
        ns, redo_ns = int(self.rng.integers(0, 50)), int(self.rng.integers(0, 50))
        redo_ok = bool(self.rng.random() < 0.9)
        fits = [i for i in inputs if self.storages[i].nbytes == self.storages[outputs[0]].nbytes] if outputs else []
        plain = [i for i in fits if not (self.storages[i].pinned or self.storages[i].to_end)]
        reuse = tuple(plain) if len(outputs) == 1 and self.rng.random() < 0.5 else ()
        self.nodes.append(
            NodeRow(
                inputs, outputs, ns, ws, redo_ns, redo_ws, redo_ok=redo_ok, reuse=reuse, preads=preads,
                at_once=bool(self.rng.random() < 0.2),
            )
        )  # fmt: skip

    def send(self, taken: tuple[int, ...], preads: tuple[int, ...] = ()) -> int:
        made = self.storage()
        extra = (int(self.rng.integers(len(self.nodes))),) if self.nodes and self.rng.random() < 0.1 else ()
        ns = int(self.rng.integers(1, 120))
        self.nodes.append(
            NodeRow(taken, (made,), 0, message_ns=ns, redo_ok=not extra, preads=preads, extra=extra)
        )  # fmt: skip
        return made

    def gather(self) -> None:
        """A message of what persists, as it stands or with one or two early nodes before it."""
        preads = (int(self.rng.integers(3)),)
        taken: tuple[int, ...] = ()
        for _ in range(int(self.rng.integers(0, 3))):
            made = self.storage()
            self.node(taken, (made,), preads)
            taken = (made,)
        self.pool.append(self.send(taken, () if taken else preads))

    def compute(self) -> None:
        count = int(self.rng.integers(1, 4))
        recent = self.pool[-4:] if self.rng.random() < 0.7 else self.pool
        inputs = self.rng.choice(recent, size=min(count, len(recent)), replace=False) if recent else []
        outputs = tuple(self.storage(plain=False) for _ in range(int(self.rng.choice([1, 1, 2]))))
        self.node(tuple(int(i) for i in inputs), outputs)
        self.pool += outputs

    def reduce(self) -> None:
        """A message of something that was computed for it; what arrives goes to nodes, to a block, or to nobody."""
        flat = self.storage()
        self.node(tuple(self.pool[-1:]), (flat,))
        made = self.send((flat,))
        kind = int(self.rng.integers(4))
        if kind in (0, 1):
            ns, ws, late = (int(self.rng.integers(0, 30)) for _ in range(3))
            self.blocks.append(BlockRow((made,), (int(self.rng.integers(3)),), ns, ws=ws, late_ws=late))
        if kind in (1, 2):
            self.pool.append(made)


def random_step(rng: np.random.Generator, most: int) -> Problem:
    """A step with messages; blocks overwrite what gathers read."""
    rows = Rows(rng)
    rows.compute()
    for _ in range(int(rng.integers(1, most))):
        (rows.gather, rows.compute, rows.compute, rows.reduce)[int(rng.integers(4))]()
    return build_problem(
        rows.nodes, rows.storages, rows.blocks, persistent_bytes=int(rng.integers(0, 1000)),
        xfer_ns_per_byte=float(rng.choice([0.0, 0.001, 0.01])), copy_ns=int(rng.choice([0, 7])),
    )  # fmt: skip


def random_plan(seed: int, most: int = 14) -> tuple[Problem, Int32s, Int8s]:
    rng = np.random.default_rng(seed)
    problem = random_step(rng, most)
    ceiling = int(rng.choice([0, 0, 1 << 40, int(problem.nbytes.sum()) // 2]))
    flags = rng.choice(FLAGS, size=problem.n_storages).astype(np.int8)
    order = random_order(problem, rng) if rng.random() < 0.7 else np.arange(problem.n_nodes, dtype=np.int32)
    return replace(problem, ceiling=ceiling), order, flags


def without_messages(problem: Problem) -> Problem:
    """The same step with messages that take no time."""
    return replace(problem, message_ns=np.zeros_like(problem.message_ns))


@examples(300)
@given(st.integers(0, 2**32 - 1))
def test_a_plan_costs_what_three_streams_say(seed: int) -> None:
    problem, order, flags = random_plan(seed)
    evaluator = Evaluator(problem, order)
    evaluator.quick(np.random.default_rng(seed).choice(FLAGS, size=problem.n_storages).astype(np.int8))
    found, events = evaluator.evaluate(flags), evaluator.events()
    truth = replay(problem, events)
    assert (found.peak, found.tensor_peak, found.latency_ns) == (truth.peak, truth.tensor_peak, truth.latency_ns)
    assert truth.stalled_ns == 0, "for copies"
    assert evaluate(problem, order, flags) == found
    assert lower_bound(problem) <= found.peak
    assert evaluator.levels.max() == found.peak
    assert evaluator.peak_run == evaluator.levels.argmax()
    birth, death = evaluator.lifetimes()
    assert np.all(birth[birth >= 0] <= death[birth >= 0])


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_only_messages_and_what_makes_their_inputs_run_earlier(seed: int) -> None:
    problem, order, flags = random_plan(seed)
    events = expand(problem, order, flags)
    sequence = list(zip(events.kind.tolist(), events.arg.tolist(), strict=True))
    runs = [run for run in sequence if run[0] in (FIRST, REDO)]
    expected = reference_runs(problem, order, flags)
    assert sorted(runs) == sorted(expected)
    stays = [not (problem.early[node] or problem.message_ns[node]) for node in range(problem.n_nodes)]
    assert [run for run in runs if stays[run[1]]] == [run for run in expected if stays[run[1]]]
    check_order(problem, np.array([node for kind, node in runs if kind == FIRST], dtype=np.int32))
    sends = [int(problem.outputs(node)[0]) for _, node in runs if problem.message_ns[node]]
    assert sorted(sends) == sorted(arg for kind, arg in sequence if kind == ARRIVE)
    for at, (kind, block) in enumerate(sequence):
        written = set(problem.block_writes(block).tolist()) if kind == BLOCK else set()
        for other, arg in sequence[at:] if written else ():
            node = int(problem.producer[arg]) if other == ARRIVE else arg
            reads = set(problem.preads(node).tolist()) if other in (FIRST, REDO, ARRIVE) else set()
            assert not reads & written, "a block overwrites what is being sent"


@examples(200)
@example(10680)
@example(58605)
@given(st.integers(0, 2**32 - 1))
def test_a_plan_is_within_the_sums_and_needs_no_more_room_than_if_it_waits_at_once(seed: int) -> None:
    problem, order, flags = random_plan(seed)
    flags[flags == SWAP] = KEEP  # which are placed by time
    found, waiting = evaluate(problem, order, flags), evaluate(without_messages(problem), order, flags)
    runs = expand(problem, order, flags)
    sent = sum(
        int(problem.message_ns[node])
        for kind, node in zip(runs.kind.tolist(), runs.arg.tolist(), strict=True)
        if kind in (FIRST, REDO)
    )
    assert max(waiting.latency_ns, sent) <= found.latency_ns <= waiting.latency_ns + sent
    assert found.peak <= max(waiting.peak, problem.ceiling)
    assert found.redos == waiting.redos


@examples(40)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_is_below_the_bound(seed: int) -> None:
    problem, order, flags = random_plan(seed, most=10)
    found = evaluate(problem, order, flags)
    bound = latency_lower_bound(problem, found.peak)
    assert bound != NEVER
    assert max(problem.least_ns, int(problem.message_ns.sum())) <= bound <= found.latency_ns


def weights(layers: int, ns: int, message_ns: int) -> Problem:
    """Layers that each gather a weight (1000 bytes, from 10) and use it once, and a block for each gradient."""
    nodes, storages, blocks = [NodeRow((), (0,), ns)], [StorageRow(8)], []
    hidden = 0
    for layer in range(layers):
        first = len(storages)
        nodes += [
            NodeRow((), (first,), 0, redo_ok=True, preads=(layer,)),
            NodeRow((first,), (first + 1,), 0, message_ns=message_ns, redo_ok=True),
            NodeRow((hidden, first + 1), (first + 2,), ns),
            NodeRow((first + 2,), (first + 3,), ns),
            NodeRow((first + 3,), (first + 4,), 0, message_ns=message_ns),
        ]
        storages += [StorageRow(size) for size in (10, 1000, 8, 1000, 10)]
        blocks.append(BlockRow((first + 4,), (layer,), 1))
        hidden = first + 2
    return build_problem(nodes, storages, blocks)


@pytest.mark.parametrize("message_ns", [1, 3, 7])
def test_a_message_runs_beside_where_nothing_can_be_repeated(message_ns: int) -> None:
    nodes = [
        NodeRow((), (0,), 1),
        NodeRow((0,), (1,), 0, message_ns=message_ns),
        NodeRow((), (2,), 3),
        NodeRow((1, 2), (3,), 1),
    ]
    problem = build_problem(nodes, [StorageRow(8)] * 4)
    found = evaluate(replace(problem, ceiling=1 << 40), np.arange(4, dtype=np.int32), np.zeros(4, dtype=np.int8))
    assert (found.latency_ns, found.redos) == (1 + max(message_ns, 3) + 1, 0)


def test_everything_is_swapped_that_may_be_beside_a_message() -> None:
    """What takes long enough for two copies lies between the first node and the last; the message is left alone."""
    nodes = [
        NodeRow((), (0,), 1),
        NodeRow((), (1,), 1),
        NodeRow((1,), (2,), 0, message_ns=5),
        NodeRow((2,), (3,), 50),
        NodeRow((3,), (4,), 50),
        NodeRow((4,), (5,), 50),
        NodeRow((0, 5), (6,), 1),
    ]
    problem = build_problem(nodes, [StorageRow(1000)] * 7, xfer_ns_per_byte=0.01)
    evaluator = Evaluator(problem, np.arange(7, dtype=np.int32))
    found = evaluator.evaluate(np.full(7, SWAP, dtype=np.int8))
    assert (found.swaps, found.latency_ns) == (1, 1 + 1 + 5 + 3 * 50 + 1)
    assert evaluator.swapped().tolist() == [True] + [False] * 6
