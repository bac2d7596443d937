"""The published search on a small step: what it promises is what the realized graph takes, and computes the same."""

from __future__ import annotations

import functools
import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from torch import Tensor, nn

from magis.cost.cost_model import RooflineCosts, device_model
from magis.extensions.paper.coordinated_search import PaperSearch
from magis.extensions.paper.ftree import Analysis, FTree, mutations
from magis.extensions.paper.nested_loops import (
    LoopFrame,
    flags_of,
    frame_of,
    judge,
    loops_for_tree,
    realized,
    view_at_peak,
)
from magis.fission.proof import verify_fission
from magis.graph import Graph, verify
from magis.ops.optimizers import scalars
from magis.rewrite.functionalize import functionalize, untangle
from magis.runtime.codegen import compile_step
from magis.search.budgeted_evaluator import Objective
from magis.search.loop_nest import level
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, SWAP
from magis.simulate.simulator import replay
from tests.fission.cutout import Outcome, differences, draw, in_float64, tensors_of
from tests.nets import Net, rows
from tests.oracles import captured

LAYERS = Net(
    lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh()),
    rows(96, 8),
    loss_fn=lambda output: output.pow(2).sum(),
)
STATES = 200


@functools.cache
def step() -> tuple[Graph, Analysis]:
    """Forward, backward and updates, in double precision."""
    graph = in_float64(untangle(functionalize(captured(LAYERS.build()).graph)))
    return graph, Analysis(graph)


@functools.cache
def costs() -> RooflineCosts:
    return device_model("sim:rtx3090")


def framed(tree: FTree) -> LoopFrame:
    graph, _ = step()
    looped = loops_for_tree(graph, tree)
    assert isinstance(looped, Graph)
    return frame_of(level(looped, costs(), reuse=True), graph)


def start() -> tuple[int, int]:
    figures = judge(framed(FTree()), {})
    return figures.peak, figures.latency_ns


@functools.cache
def found(memory: str = "", latency: str = "", states: int = STATES) -> PaperSearch:
    graph, _ = step()
    peak, latency_ns = start()
    limit = int(Fraction(memory) * peak) if memory else None
    goal = Objective(limit, int(Fraction(latency) * latency_ns) if latency else None)
    return PaperSearch(graph, costs(), goal, states=states).run()


def check(tree: FTree, decisions: dict[int, int], order: np.ndarray | None = None) -> None:
    """The realized graph is sound, computes the same, and takes the bytes that the search was promised."""
    graph, _ = step()
    level = framed(tree)
    made = realized(level, decisions, order)
    verify(made)
    verify_fission(level.nest.compiled.graph, graph)
    profile = replay(made, costs().workspace, rounding=costs().rounding)
    figures = judge(level, decisions, order)
    assert (profile.peak_bytes, profile.tensor_bytes) == (figures.peak, figures.tensor_peak)
    memory = draw(graph, 0)
    assert differences(ran(graph, memory, graph.outputs), ran(made, memory, graph.outputs), graph) == []


def ran(graph: Graph, memory: dict[int, Tensor], outputs: tuple[int, ...]) -> Outcome:
    """What a run on a copy of the memory leaves; results under the ids of the step as it was."""
    copied = {storage: tensor.clone() for storage, tensor in memory.items()}
    results = compile_step(graph)(tensors_of(graph, copied), scalars(LAYERS.rule, 1))
    return Outcome(dict(zip(outputs, results, strict=True)), copied)


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_promised_bytes_are_those_of_the_realized_graph(seed: int) -> None:
    """Random mutations of the F-Tree, and random decisions."""
    graph, analysis = step()
    chosen = random.Random(seed)
    tree = analysis.tree(view_at_peak(framed(FTree()), {}).hot)
    assert tree.nodes
    for _ in range(seed % 5):
        tree = chosen.choice([each.tree for each in mutations(tree)])
    temporary = [storage.id for storage in graph.storages.values() if storage.kind == "temporary"]
    flags = (KEEP, RECOMPUTE, DROP, SWAP)
    decisions = {storage: chosen.choice(flags) for storage in temporary if chosen.random() < 0.3 * (seed % 3)}
    check(tree, decisions)


def test_a_nested_loop_runs_as_often_as_both_say() -> None:
    """Latency of a realized graph is what the cost model says of it."""
    _, analysis = step()
    tree = analysis.tree(view_at_peak(framed(FTree()), {}).hot)
    inner = max(range(len(tree.nodes)), key=lambda index: len(list(tree.ancestors(index))))
    (outer,) = {list(tree.ancestors(inner))[-1]}
    nested = tree.with_parts({outer: 2, inner: 4})
    level = framed(nested)
    made = realized(level, {})
    assert judge(level, {}).latency_ns == sum(costs().nanoseconds(op, made.values) for op in made.ops)


def test_what_a_loop_hands_out_is_not_recomputed_from_outside() -> None:
    """But it may be swapped; and its part, within the loop, follows the decision."""
    _, analysis = step()
    tree = analysis.tree(view_at_peak(framed(FTree()), {}).hot)
    level = framed(tree.with_parts({0: 2}))
    handed = [level.names[place] for place in np.flatnonzero(level.handed).tolist()]
    assert handed
    assert set(flags_of(level, dict.fromkeys(handed, RECOMPUTE)).tolist()) == {KEEP}
    assert flags_of(level, dict.fromkeys(handed, SWAP)).tolist().count(SWAP) == len(handed)
    ((_, body),) = level.inner
    assert RECOMPUTE in flags_of(body, dict.fromkeys(handed, RECOMPUTE)).tolist()


# --- search -----------------------------------------------------------------------------------------------------------

LIMITS = [{"memory": "0.8"}, {"memory": "0.5"}, {"latency": "1.05"}, {"latency": "2"}, {"latency": "6"}]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_the_best_state_is_what_it_says(limit: dict[str, str]) -> None:
    result = found(**limit)
    assert result.states <= STATES
    order = None if result.best.order is None else np.array(result.best.order, dtype=np.int32)
    check(result.best.tree, dict(result.best.decided), order)
    assert judge(framed(result.best.tree), dict(result.best.decided), order) == result.figures


def test_one_recomputation_by_brute_force() -> None:
    """From the step itself without fission, a single move: the best of the first generation is the best of all."""
    whole = framed(FTree())
    view = view_at_peak(whole, {})
    goal = Objective(memory_limit=1)
    moves = [{move.storage: move.flag} for move in view.moves]
    best = min(goal.key(f.peak, f.latency_ns) for f in (judge(whole, each) for each in moves))
    graph, _ = step()
    every = [
        {storage.id: flag}
        for storage, flag in itertools.product(graph.storages.values(), (RECOMPUTE, SWAP))
        if storage.kind == "temporary"
    ]
    assert best == min(goal.key(f.peak, f.latency_ns) for f in (judge(whole, each) for each in every))
