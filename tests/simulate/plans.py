"""Random small problems and plans for them, and an evaluator that is slow and obviously right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from magis.simulate.kernel import MOST_COPIES
from magis.simulate.problem import (
    BLOCK,
    DROP,
    FIRST,
    KEEP,
    RECOMPUTE,
    REDO,
    REPEAT,
    SWAP,
    BlockRow,
    Events,
    Int8s,
    Int32s,
    NodeRow,
    Problem,
    StorageRow,
    build_problem,
)

SIZES = (0, 1, 512, 512, 1024, 1024, 4096)


@st.composite
def problems(draw: st.DrawFn, most_nodes: int = 12, *, mutation: bool = True, blocks: bool = True) -> Problem:
    """Steps with several outputs, shared inputs, mutated storages, in-place re-use, blocks and hazards."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_problem(rng, int(rng.integers(1, most_nodes + 1)), mutation=mutation, blocks=blocks)


def random_problem(rng: np.random.Generator, n_nodes: int, *, mutation: bool = True, blocks: bool = True) -> Problem:
    """One such step."""
    sizes: list[int] = []
    readers: list[list[int]] = []
    last_write: dict[int, int] = {}
    rows: list[dict[str, object]] = []
    for node in range(n_nodes):
        pool = len(sizes)
        inputs = [int(i) for i in rng.choice(pool, size=min(pool, int(rng.integers(0, 4))), replace=False)]
        extra = {int(rng.integers(0, node))} if node and rng.random() < 0.1 else set()
        redo_ok = rng.random() < 0.8
        for used in inputs:
            extra.update({last_write[used]} if used in last_write else set())
        if mutation and inputs and rng.random() < 0.12:
            target = inputs[0]
            extra.update(readers[target])
            for other in readers[target]:
                rows[other]["redo_ok"] = False
            last_write[target] = node
            redo_ok = False
        for used in inputs:
            readers[used].append(node)
        count = int(rng.choice([1, 1, 1, 2, 3, 0]))
        outputs = list(range(pool, pool + count))
        sizes += [int(rng.choice(SIZES)) for _ in outputs]
        readers += [[] for _ in outputs]
        rows.append(
            {
                "inputs": tuple(inputs),
                "outputs": tuple(outputs),
                "ns": int(rng.integers(1, 50)) if rng.random() < 0.7 else 0,
                "ws": int(rng.choice([0, 0, 256, 2048])),
                "redo_ns": int(rng.integers(1, 50)),
                "redo_ws": int(rng.choice([0, 0, 256, 2048])),
                "redo_ok": redo_ok,
                "copies": bool(rng.random() < 0.15),
                "preads": tuple(int(i) for i in np.flatnonzero(rng.random(3) < 0.2)),
                "extra": tuple(sorted(extra)),
            }
        )
    for row in rows:
        for whole, tensor in (("ws", "tensor"), ("redo_ws", "redo_tensor")):
            row[tensor] = int(rng.choice([0, 0, row[whole] // 2, row[whole]]))
    to_end = [bool(rng.random() < 0.1) for _ in sizes]
    for row in rows:
        made = row["outputs"]
        if len(made) == 1 and rng.random() < 0.6:
            fits = [i for i in row["inputs"] if sizes[i] == sizes[made[0]] and i not in last_write and not to_end[i]]
            row["reuse"] = tuple(fits)
    storages = [
        StorageRow(size, i in last_write or bool(rng.random() < 0.05), last_write.get(i), to_end[i])
        for i, size in enumerate(sizes)
    ]
    for row in rows:
        row["reuse"] = tuple(i for i in row.get("reuse", ()) if not storages[i].pinned)
    number = rng.permutation(len(sizes))  # late storages may have low numbers, early ones the highest
    storages = [storages[i] for i in np.argsort(number)]
    for row in rows:
        row.update({name: tuple(int(number[i]) for i in row[name]) for name in ("inputs", "outputs", "reuse")})
    written = rng.permutation(3)
    updates = []
    for index in range(int(rng.integers(0, 4)) if blocks and sizes else 0):
        grads = tuple(
            int(i) for i in rng.choice(len(sizes), size=min(len(sizes), int(rng.integers(1, 3))), replace=False)
        )
        tensor, late = (int(rng.choice([0, 512])) for _ in range(2))
        sizes_of = {"ws": tensor + 256, "tensor": tensor, "late_ws": 2 * late + 128, "late_tensor": 2 * late}
        updates.append(BlockRow(grads, (int(written[index]),), ns=int(rng.integers(0, 30)), **sizes_of))
    return build_problem(
        [NodeRow(**row) for row in rows],
        storages,
        updates,
        persistent_bytes=int(rng.integers(0, 1000)),
        xfer_ns_per_byte=float(rng.choice([0.0, 0.001, 0.01, 0.04])),
        copy_ns=int(rng.choice([0, 0, 7])),
    )


def random_order(problem: Problem, rng: np.random.Generator) -> Int32s:
    """A legal order, drawn by picking among the nodes that are ready."""
    return _ordered(problem, lambda ready: ready.pop(int(rng.integers(len(ready)))))


def adversarial_order(problem: Problem, rng: np.random.Generator) -> Int32s:
    """A legal order far from the program's: backwards, in leaps, or mutations and their kin as early as they may."""
    kind = int(rng.integers(3))
    writers = {int(node) for node, made in zip(problem.last_write, problem.producer, strict=True) if node != made}

    def take(ready: list[int]) -> int:
        if kind == 2 and rng.random() < 0.8:
            chosen = max(ready, key=lambda node: (node in writers or len(problem.extras(node)) > 0, node))
        elif kind == 1 and rng.random() < 0.5:
            chosen = min(ready)
        else:
            chosen = max(ready)
        ready.remove(chosen)
        return chosen

    return _ordered(problem, take)


def _ordered(problem: Problem, take: Callable[[list[int]], int]) -> Int32s:
    """The order that ``take`` makes by removing one after the other from the nodes that are ready."""
    waits = [
        {*problem.extras(v).tolist(), *problem.producer[problem.inputs(v)].tolist()} for v in range(problem.n_nodes)
    ]
    followers: list[list[int]] = [[] for _ in waits]
    for node, before in enumerate(waits):
        for other in before:
            followers[other].append(node)
    left = [len(before) for before in waits]
    ready = [node for node, count in enumerate(left) if count == 0]
    done: list[int] = []
    while ready:
        node = take(ready)
        done.append(node)
        for other in followers[node]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return np.array(done, dtype=np.int32)


@st.composite
def plans(draw: st.DrawFn, most_nodes: int = 12) -> tuple[Problem, Int32s, Int8s]:
    problem = draw(problems(most_nodes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    flags = rng.choice([KEEP, RECOMPUTE, RECOMPUTE, SWAP, DROP, REPEAT, REPEAT], size=problem.n_storages)
    return problem, random_order(problem, rng), flags.astype(np.int8)


# --- the reference ------------------------------------------------------------------------------------------


def touches(problem: Problem, order: Int32s, storage: int) -> list[int]:
    """Positions at which nodes make, write or read a storage, from its last write on."""
    found = [
        at
        for at, node in enumerate(order.tolist())
        if storage in problem.inputs(node) or storage in problem.outputs(node)
    ]
    written = order.tolist().index(int(problem.last_write[storage]))
    return [at for at in found if at >= written]


def longest_gap(problem: Problem, order: Int32s, storage: int) -> tuple[int, int] | None:
    """Positions of the two touches around its longest idle stretch, in time, then in positions; the first of them."""
    ns = [int(problem.node_ns[v]) for v in order]
    pairs = [(a, b) for a, b in itertools.pairwise(touches(problem, order, storage)) if b - a > 1]
    return max(pairs, key=lambda pair: (sum(ns[pair[0] + 1 : pair[1]]), pair[1] - pair[0], -pair[0]), default=None)


def first_copy_until(problem: Problem, order: Int32s, flags: Int8s, storage: int) -> float:
    """Last position at which the plan leaves the first copy in memory."""
    maker = int(problem.producer[storage])
    in_block = storage in problem.block_inputs.idx
    if flags[storage] not in (RECOMPUTE, DROP, REPEAT) or problem.pinned[storage] or problem.to_end[storage]:
        return math.inf
    if not problem.redo_ok[maker] or in_block:
        return math.inf
    if flags[storage] != DROP and longest_gap(problem, order, storage) is not None:
        return longest_gap(problem, order, storage)[0]  # type: ignore[index]
    return touches(problem, order, storage)[-1]


def reference_runs(problem: Problem, order: Int32s, flags: Int8s) -> list[tuple[int, int]]:
    """(FIRST or REDO, node) by plain recursion."""
    until = [first_copy_until(problem, order, flags, s) for s in range(problem.n_storages)]
    copies = [0] * problem.n_storages
    runs: list[tuple[int, int]] = []

    def provide(node: int, position: int) -> None:
        for used in problem.inputs(node).tolist():
            if until[used] < position:
                provide(maker := int(problem.producer[used]), position)
                runs.append((REDO, maker))
                for made in problem.outputs(maker).tolist():
                    if until[made] < position:
                        copies[made] += 1
                        gap = longest_gap(problem, order, made)
                        again = (
                            flags[made] == REPEAT and copies[made] < MOST_COPIES and (gap is None or position < gap[1])
                        )
                        until[made] = position if again else math.inf

    for position, node in enumerate(order.tolist()):
        provide(node, position)
        runs.append((FIRST, node))
    return runs


def copy_ns(problem: Problem, storage: int) -> int:
    """Time of one copy to or from the host."""
    return problem.copy_ns + math.ceil(int(problem.nbytes[storage]) * problem.xfer_ns_per_byte)


def reference_swaps(problem: Problem, events: Events, flags: Int8s) -> dict[int, tuple[int, int, int]]:
    """Storage -> the run behind which it is stored, those before which it is waited for and loaded.

    Stores one after the other from where the gaps open, in order of time, then of numbers; loads backwards from where
    the gaps close. Who would not be gone for any run stays; so does who would be under way when a run begins that makes
    copies of its own.
    """
    runs, begins, ends = _run_times(problem, events)
    copying = [at for at, (_, node) in enumerate(runs) if problem.copies[node]]
    gaps: list[tuple[int, int, int]] = []  # store behind, load before, storage
    for storage in range(problem.n_storages):
        stays = problem.pinned[storage] or problem.to_end[storage] or storage in problem.block_inputs.idx
        if flags[storage] == SWAP and not stays and problem.nbytes[storage] and problem.xfer_ns_per_byte:
            seen = [
                at
                for at, (kind, node) in enumerate(runs)
                if storage in problem.inputs(node) or (kind == FIRST and storage in problem.outputs(node))
            ]
            pairs = list(itertools.pairwise(seen))
            a, b = max(pairs, key=lambda pair: begins[pair[1]] - ends[pair[0]], default=(0, 0))
            if begins[b] > ends[a]:
                gaps.append((a, b, storage))
    free, wait, waits = 0, 0, {}
    for a, _, storage in sorted(gaps, key=lambda gap: (gap[0], gap[2])):
        done = max(free, ends[a]) + copy_ns(problem, storage)
        if any(a < at and begins[at] < done for at in copying):
            continue
        free = done
        wait = next((at for at in range(max(wait, a + 1), len(runs)) if begins[at] >= free), len(runs))
        waits[storage] = wait
    free, latest, found = ends[-1], len(runs), {}
    for a, b, storage in sorted(gaps, key=lambda gap: (-gap[1], gap[2])):
        if storage not in waits:
            continue
        loads = {}
        for at in range(waits[storage] + 1, min(latest, b) + 1):
            ahead = [begins[other] for other in copying if at <= other < b]
            begin = min([free, begins[b], *ahead]) - copy_ns(problem, storage)
            if begins[at] <= begin:
                loads[at] = begin
        if loads:
            latest = max(loads)
            free = loads[latest]
            found[storage] = (a, waits[storage], latest)
    return found


def _run_times(problem: Problem, events: Events) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """First runs and recomputations, and when each begins and ends; the blocks behind them take time, too."""
    runs, begins, ends, now = [], [], [], 0
    for kind, arg in zip(events.kind.tolist(), events.arg.tolist(), strict=True):
        if kind in (FIRST, REDO, BLOCK):
            took = int((problem.node_ns, problem.redo_ns, problem.blk_ns)[kind][arg])
            if kind != BLOCK:
                runs.append((kind, arg))
                begins.append(now)
                ends.append(now + took)
            now += took
    return runs, begins, ends
