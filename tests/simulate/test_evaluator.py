"""The evaluator against a replay of the schedules that it hands out, and against plain recursion."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import VerifyError
from magis.simulate.evaluator import Evaluation, Evaluator, check_order, evaluate, expand, lower_bound
from magis.simulate.kernel import MOST_COPIES
from magis.simulate.problem import (
    BLOCK,
    DROP,
    FIRST,
    KEEP,
    LOAD,
    RECOMPUTE,
    REDO,
    REPEAT,
    STORE,
    SWAP,
    WAIT,
    BlockRow,
    Events,
    Int8s,
    Int32s,
    NodeRow,
    Problem,
    StorageRow,
    build_problem,
)
from tests.search.networks import transformer
from tests.simulate.plans import (
    longest_gap,
    plans,
    random_order,
    random_problem,
    reference_runs,
    reference_swaps,
    touches,
)
from tests.simulate.replays import Replayed, replay
from tests.strategies import examples

Plan = tuple[Problem, Int32s, Int8s]


def base(problem: Problem) -> Int32s:
    return np.arange(problem.n_nodes, dtype=np.int32)


def chain(sizes: list[int], *, backward: list[tuple[int, ...]], ns: int = 10, **more: float) -> Problem:
    """Storage i made from storage i - 1, then nodes that read the given storages and the one before."""
    nodes = [NodeRow((i - 1,) if i else (), (i,), ns, redo_ns=ns, redo_ok=True) for i in range(len(sizes))]
    storages = [StorageRow(size) for size in sizes]
    for reads in backward:
        nodes.append(NodeRow((*reads, len(storages) - 1), (len(storages),), ns))
        storages.append(StorageRow(8))
    return build_problem(nodes, storages, **more)


@examples(150)
@given(plans(), st.integers(0, 2**32 - 1))
def test_a_plan_costs_what_its_schedule_says_and_the_schedule_does_what_the_plan_says(plan: Plan, seed: int) -> None:
    problem, order, flags = plan
    found, events, truth = judged(plan)
    assert lower_bound(problem) <= found.peak
    sequence = list(zip(events.kind.tolist(), events.arg.tolist(), strict=True))
    assert [run for run in sequence if run[0] in (FIRST, REDO)] == reference_runs(*plan)
    check_blocks(problem, sequence)
    evaluator = Evaluator(problem, order)
    check_gaps(evaluator)
    # whatever was judged before
    evaluator.quick(np.random.default_rng(seed).integers(0, 5, problem.n_storages).astype(np.int8))
    assert evaluator.evaluate(flags) == found
    check_levels(evaluator, events, truth.levels)
    for flag in (KEEP, DROP):  # nothing is recomputed unless the plan says so
        plain = evaluator.evaluate(np.full(problem.n_storages, flag, dtype=np.int8))
        assert plain.redos == plain.swaps == 0
        assert plain.latency_ns == int(problem.node_ns.sum() + problem.blk_ns.sum())


def judged(plan: Plan) -> tuple[Evaluation, Events, Replayed]:
    """What a plan costs, its schedule, and the replay of that: they agree."""
    problem, _, _ = plan
    found, events = evaluate(*plan), expand(*plan)
    truth = replay(problem, events)
    assert (found.peak, found.tensor_peak, found.latency_ns) == (truth.peak, truth.tensor_peak, truth.latency_ns)
    assert found.redos == int((events.kind == REDO).sum())
    assert found.swaps == int((events.kind == STORE).sum()) == int((events.kind == LOAD).sum())
    assert truth.stalled_ns == 0
    check_swaps(plan, events)
    return found, events, truth


@examples(40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.003, 0.01]), st.sampled_from([REPEAT, SWAP]))
def test_many_swaps_and_copies(seed: int, xfer_ns_per_byte: float, most: int) -> None:
    """Swaps share the two copy streams; of a storage flagged REPEAT the last copy that there may be stays."""
    rng = np.random.default_rng(seed)
    problem = replace(random_problem(rng, 25), xfer_ns_per_byte=xfer_ns_per_byte)
    flags = rng.choice([KEEP, RECOMPUTE, REPEAT, most], p=[0.1, 0.1, 0.1, 0.7], size=problem.n_storages).astype(np.int8)
    order = random_order(problem, rng)
    found, events, truth = judged((problem, order, flags))
    runs = [run for run in zip(events.kind.tolist(), events.arg.tolist(), strict=True) if run[0] in (FIRST, REDO)]
    assert runs == reference_runs(problem, order, flags)
    evaluator = Evaluator(problem, order)
    assert evaluator.evaluate(flags) == found
    check_levels(evaluator, events, truth.levels)


def check_gaps(evaluator: Evaluator) -> None:
    """The longest idle stretches, also of storages that no plan may move: prices look at all of them."""
    problem, order, gaps = evaluator.problem, evaluator.order, evaluator.gaps
    for storage in range(problem.n_storages):
        expected = longest_gap(problem, order, storage) or (-1, -1)
        assert (gaps.start[storage], gaps.end[storage]) == expected
        assert gaps.last[storage] == touches(problem, order, storage)[-1]


def check_blocks(problem: Problem, sequence: list[tuple[int, int]]) -> None:
    """They run once each, as early as they may."""
    assert sorted(a for k, a in sequence if k == BLOCK) == list(range(problem.n_blocks))
    for block in range(problem.n_blocks):
        here = sequence.index((BLOCK, block))
        written = set(problem.block_writes(block).tolist())
        must_precede = [
            at
            for at, (kind, arg) in enumerate(sequence)
            if (kind in (FIRST, REDO) and written & set(problem.preads(arg).tolist()))
            or (kind == FIRST and arg in problem.last_write[problem.block_inputs(block)])
        ]
        earliest = max(must_precede, default=0)
        assert earliest < here
        between = sequence[earliest + 1 : here]  # nothing but stores and blocks with a lower number
        assert all(
            kind == STORE or (kind == BLOCK and arg < block) for kind, arg in between if kind not in (WAIT, LOAD)
        )
        assert not any(kind in (FIRST, REDO) for kind, _ in between[1:]) or not must_precede


def check_swaps(plan: Plan, events: Events) -> None:
    """Each leaves, frees its memory for something, and comes back."""
    problem, _, flags = plan
    swapped = [arg for kind, arg in zip(events.kind.tolist(), events.arg.tolist(), strict=True) if kind == STORE]
    for storage in swapped:
        at = [np.flatnonzero((events.kind == kind) & (events.arg == storage)) for kind in (STORE, WAIT, LOAD)]
        assert [len(found) for found in at] == [1, 1, 1]
        assert at[0][0] < at[1][0] < at[2][0]
        runs_between = events.kind[at[1][0] : at[2][0]]
        assert np.any(runs_between <= BLOCK), "a swap must free its memory for something"
        assert flags[storage] == SWAP
    runs = np.cumsum(np.isin(events.kind, (FIRST, REDO)))  # up to each event
    placed = {kind: dict(zip(events.arg[events.kind == kind].tolist(), runs[events.kind == kind].tolist(), strict=True))
              for kind in (STORE, WAIT, LOAD)}  # fmt: skip
    found = {storage: (placed[STORE][storage] - 1, placed[WAIT][storage], placed[LOAD][storage]) for storage in swapped}
    assert found == reference_swaps(problem, events, flags)


def check_levels(evaluator: Evaluator, events: Events, replayed: list[int]) -> None:
    """Bytes run by run, and who is alive then."""
    problem = evaluator.problem
    levels = evaluator.levels
    assert levels.max() == max(replayed)
    assert evaluator.peak_run == levels.argmax()  # the first of equal ones
    birth, death = evaluator.lifetimes()
    assert birth.shape == death.shape == (3, problem.n_storages)
    kinds = events.kind.tolist()
    truth = [at for at, kind in enumerate(kinds) if kind in (FIRST, REDO)]
    for run, (at, following) in enumerate(itertools.pairwise([*truth, len(kinds)])):
        behind = [other for other in range(at + 1, following) if kinds[other] == BLOCK]
        assert levels[run] == max(replayed[event] for event in (at, *behind))
    for run, (code, event) in enumerate(zip(evaluator.runs.tolist(), truth, strict=True)):
        alive = ((birth <= run) & (run <= death)).sum(axis=0)
        for storage, made_at, used_at in evaluator.between.tolist():
            alive[storage] += made_at <= run <= used_at
        exact = int((alive * problem.nbytes).sum()) + problem.persistent_bytes
        node, again = code >> 1, code & 1
        exact += int((problem.redo_ws if again else problem.node_ws)[node])
        made = problem.outputs(node)
        current = {int(s) for s, made_at, _ in evaluator.between.tolist() if made_at == run}
        current |= set(np.flatnonzero(birth[1] == run).tolist())
        exact += sum(int(problem.nbytes[s]) for s in made.tolist() if again and s not in current)
        taken = int(events.reuse[event])
        assert replayed[event] == exact - (int(problem.nbytes[taken]) if taken >= 0 else 0)
    there = birth >= 0
    assert np.array_equal(death >= 0, there)
    assert np.all(birth[there] <= death[there])
    assert np.all(death[there] < len(levels))
    assert np.array_equal(birth[1] >= 0, evaluator.recomputed())
    assert np.array_equal(birth[2] >= 0, evaluator.swapped())


def test_the_lower_bound_is_reached_by_a_single_node() -> None:
    problem = build_problem(
        [NodeRow((), (0,), 1), NodeRow((0,), (1, 2), 1, ws=5)],
        [StorageRow(10), StorageRow(20), StorageRow(30)],
        persistent_bytes=100,
    )
    flags = np.zeros(3, dtype=np.int8)
    assert lower_bound(problem) == evaluate(problem, base(problem), flags).peak == 100 + 10 + 20 + 30 + 5


@pytest.mark.parametrize(
    ("nodes", "block", "expected"),
    [
        ([NodeRow((), (0,), 1, ws=3)], None, 10 + 3),
        ([NodeRow((), (0,), 1), NodeRow((0,), (1,), 1, ws=3)], None, 10 + 10 + 3),
        ([NodeRow((), (0,), 1), NodeRow((0,), (1,), 1, ws=3, reuse=(0,))], None, 10 + 3),  # may run in place
        ([NodeRow((), (0,), 1), NodeRow((0,), (), 1, ws=3)], None, 10 + 3),
        ([NodeRow((), (0,), 1)], BlockRow((0,), (0,), 1, ws=7, late_ws=16), 10 + 7),
        ([NodeRow((), (0,), 1)], BlockRow((0,), (0,), 1, ws=7, late_ws=18), 18),  # its input is gone by then
    ],
)
def test_the_lower_bound_is_the_largest_need_of_a_node_or_a_block(
    nodes: list[NodeRow], block: BlockRow | None, expected: int
) -> None:
    made = {storage for node in nodes for storage in node.outputs}
    problem = build_problem(nodes, [StorageRow(10)] * len(made), [block] if block else [], persistent_bytes=100)
    assert lower_bound(problem) == 100 + expected
    assert evaluate(problem, base(problem), np.zeros(len(made), dtype=np.int8)).peak == 100 + expected


def test_a_dropped_tensor_is_made_again_from_what_is_kept() -> None:
    problem = chain([100, 100, 100, 10], backward=[(2,), (1,)])
    keep = np.full(problem.n_storages, DROP, dtype=np.int8)
    drop = keep.copy()
    drop[1] = RECOMPUTE
    drop[0] = KEEP
    events = expand(problem, base(problem), drop)
    assert list(zip(events.kind.tolist(), events.arg.tolist(), strict=True))[-2:] == [(REDO, 1), (FIRST, 5)]
    assert evaluate(problem, base(problem), drop).latency_ns == evaluate(problem, base(problem), keep).latency_ns + 10


def test_a_swap_that_fits_its_gap_costs_no_time() -> None:
    problem = chain([1000, 8, 8, 8, 8, 8], backward=[(4,), (3,), (2,), (1,), (0,)], xfer_ns_per_byte=0.02)
    flags = np.full(problem.n_storages, DROP, dtype=np.int8)
    before = evaluate(problem, base(problem), flags)
    flags[0] = SWAP
    after = evaluate(problem, base(problem), flags)
    assert after.swaps == 1
    assert after.latency_ns == before.latency_ns
    events = expand(problem, base(problem), flags)
    # 20 ns each way: gone two nodes after the touch that opens the gap, back two nodes before the one that ends it
    assert [int(events.arg[at - 1]) for at in np.flatnonzero(events.kind == STORE)] == [1]
    assert [int(events.arg[at + 1]) for at in np.flatnonzero(events.kind == WAIT)] == [4]
    assert [int(events.arg[at + 1]) for at in np.flatnonzero(events.kind == LOAD)] == [8]


def test_an_update_waits_for_recomputations_that_read_its_weight() -> None:
    nodes = [
        NodeRow((), (0,), 1),
        NodeRow((0,), (1,), 1, redo_ns=1, redo_ok=True, preads=(0,)),
        NodeRow((1,), (2,), 1),
        NodeRow((2,), (3,), 1),
        NodeRow((1, 3), (4,), 1),
    ]
    problem = build_problem(nodes, [StorageRow(8)] * 5, [BlockRow((2,), (0,), 1)])
    for flag, place in ((KEEP, 3), (RECOMPUTE, 5)):
        flags = np.array([KEEP, flag, KEEP, KEEP, KEEP], dtype=np.int8)
        assert np.flatnonzero(expand(problem, base(problem), flags).kind == BLOCK).tolist() == [place]


def test_plans_that_are_none_are_refused() -> None:
    problem = chain([8, 8, 8], backward=[(0,)])
    flags = np.zeros(problem.n_storages, dtype=np.int8)
    with pytest.raises(VerifyError, match=r"one flag in 0\.\.4 for each of 4 storages"):
        evaluate(problem, base(problem), flags[:-1])
    with pytest.raises(VerifyError, match="one flag"):
        expand(problem, base(problem), flags + np.int8(5))
    with pytest.raises(VerifyError, match="each of 4 nodes once"):
        check_order(problem, np.array([0, 1, 1, 3], dtype=np.int32))
    with pytest.raises(VerifyError, match="node 2 stands before node 1"):
        check_order(problem, np.array([0, 2, 1, 3], dtype=np.int32))


def test_every_storage_may_be_made_twice() -> None:
    """The longest schedule that there is: each node and, for each storage, one more run."""
    nodes = [
        NodeRow((), (0,), 1, redo_ns=1, redo_ok=True),
        NodeRow((0,), (1,), 1, redo_ns=1, redo_ok=True),
        NodeRow((), (), 1),
        NodeRow((1,), (), 1),
    ]
    problem = build_problem(nodes, [StorageRow(8), StorageRow(8)])
    flags = np.full(2, RECOMPUTE, dtype=np.int8)
    events = expand(problem, base(problem), flags)
    assert events.kind.tolist() == [FIRST, FIRST, FIRST, REDO, REDO, FIRST]
    assert events.arg.tolist() == [0, 1, 2, 0, 1, 3]
    assert evaluate(problem, base(problem), flags).latency_ns == 6


@pytest.mark.parametrize("readers", range(2, MOST_COPIES + 2))
def test_the_last_copy_that_there_may_be_stays(readers: int) -> None:
    """A storage that is dropped between the recomputations of those made from it, one by one."""
    made = [NodeRow((0,), (at,), 1, redo_ns=1, redo_ok=True) for at in range(1, readers + 1)]
    used = [NodeRow((at,), (), 1) for at in range(1, readers + 1)]
    nodes = [NodeRow((), (0,), 1, redo_ns=1, redo_ok=True), *made, *used, NodeRow((0,), (), 1)]
    problem = build_problem(nodes, [StorageRow(8)] * (readers + 1))
    flags = np.array([REPEAT] + [RECOMPUTE] * readers, dtype=np.int8)
    events = judged((problem, base(problem), flags))[1]
    again = [arg for kind, arg in zip(events.kind.tolist(), events.arg.tolist(), strict=True) if kind == REDO]
    assert again.count(0) == min(readers + 1, MOST_COPIES)  # one for each, and for the last node


def test_a_step_without_nodes_costs_what_persists() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    problem = build_problem([], [], persistent_bytes=7)
    found = evaluate(problem, nothing, nothing.astype(np.int8))
    assert lower_bound(problem) == 7
    assert (found.peak, found.tensor_peak, found.latency_ns) == (7, 7, 0)


def test_a_real_sized_step_equals_its_replay() -> None:
    problem, _ = transformer(3, batch=2, xfer_ns_per_byte=0.03)
    rng = np.random.default_rng(1)
    for _ in range(3):
        order = random_order(problem, rng)
        flags = rng.choice([KEEP, RECOMPUTE, SWAP, DROP, REPEAT], size=problem.n_storages).astype(np.int8)
        found, truth = evaluate(problem, order, flags), replay(problem, expand(problem, order, flags))
        assert (found.peak, found.tensor_peak, found.latency_ns) == (truth.peak, truth.tensor_peak, truth.latency_ns)
        assert found.redos > 0


def test_compiled_and_interpreted_agree(repository: Path) -> None:
    program = (
        "import numpy as np\n"
        "from tests.simulate.plans import random_order, random_problem\n"
        "from magis.simulate.evaluator import evaluate\n"
        "for seed in range(40):\n"
        "    rng = np.random.default_rng(seed)\n"
        "    problem = random_problem(rng, 12)\n"
        "    flags = rng.integers(0, 5, problem.n_storages).astype(np.int8)\n"
        "    print(evaluate(problem, random_order(problem, rng), flags))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=repository,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, 12)
        flags = rng.integers(0, 5, problem.n_storages).astype(np.int8)
        here.append(str(evaluate(problem, random_order(problem, rng), flags)))
    assert done.stdout.splitlines() == here
    assert len(set(here)) > 20, list(itertools.islice(here, 3))


def test_room_for_more_copies_is_made_once_a_plan_needs_it() -> None:
    """The same evaluator judges plans without REPEAT, with it, and without it again."""
    problem, _ = transformer(3, batch=2)
    order = np.arange(problem.n_nodes, dtype=np.int32)
    evaluator, copies = Evaluator(problem, order), list[int]()
    for flag in (RECOMPUTE, REPEAT, DROP):
        flags = np.full(problem.n_storages, flag, dtype=np.int8)
        assert evaluator.evaluate(flags) == evaluate(problem, order, flags)
        copies.append(len(evaluator.between))
    assert copies[0] == copies[2] == 0 < copies[1]
