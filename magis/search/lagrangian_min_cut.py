"""Lagrangian relaxation of the memory limit: minimum cuts choose the tensors to recompute at given memory prices.

The relaxed problem is the linear program of keeping, swapping and recomputing tensors. With a price per byte at every
position of the order, the optimum is a minimum cut, found in a fraction of a millisecond: a storage that is read again
is kept (costs its bytes times the prices over its gap), swapped (costs link time), or recomputed, which needs its
producer's inputs. Prices rise where the plan exceeds the limit and fall elsewhere. From the previous plan the model
learns how early a recomputed copy is made; *checkpoints*, storages that must not be recomputed, bound the length of
recomputed chains. The exact evaluator evaluates every proposal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from magis.search.budgeted_evaluator import BudgetedEvaluator, JudgedPlan
from magis.simulate.arrays import part
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, SWAP, Bools, Int8s, Int32s, Int64s

# Minimum cuts: the tensors to keep and to recompute at given memory prices.
# Dinic's algorithm on CSR arrays, integer capacities, deterministic.


@part
def _levels(start: Int32s, to: Int32s, left: Int64s, source: int, sink: int, level: Int32s, queue: Int32s) -> bool:
    """Compute BFS distances over edges with residual capacity (-1: unreachable); return True if the sink is
    reachable."""
    level[:] = -1
    level[source] = 0
    queue[0] = source
    first, past = 0, 1
    while first < past:
        vertex = queue[first]
        first += 1
        for k in range(start[vertex], start[vertex + 1]):
            if left[k] > 0 and level[to[k]] < 0:
                level[to[k]] = level[vertex] + 1
                queue[past] = to[k]
                past += 1
    return bool(level[sink] >= 0)


@part
def _residual(
    tail: Int32s, head: Int32s, capacity: Int64s, start: Int32s, to: Int32s, back: Int32s, left: Int64s
) -> None:
    """Build the residual network in CSR form; ``back`` maps each edge to its reverse edge."""
    for edge in range(len(tail)):
        start[tail[edge] + 1] += 1
        start[head[edge] + 1] += 1
    for vertex in range(len(start) - 1):
        start[vertex + 1] += start[vertex]
    fill = start[:-1].copy()
    for edge in range(len(tail)):
        there = fill[tail[edge]]
        fill[tail[edge]] += 1
        home = fill[head[edge]]
        fill[head[edge]] += 1
        to[there] = head[edge]
        to[home] = tail[edge]
        back[there] = home
        back[home] = there
        left[there] = capacity[edge]
        left[home] = 0


@numba.njit(cache=True)
def min_cut(n_vertices: int, tail: Int32s, head: Int32s, capacity: Int64s, source: int, sink: int) -> Bools:
    """Mark [n_vertices] the vertices on the source side of the minimum cut closest to the source."""
    edges = len(tail)
    start = np.zeros(n_vertices + 1, dtype=np.int32)
    to = np.empty(2 * edges, dtype=np.int32)
    back = np.empty(2 * edges, dtype=np.int32)
    left = np.empty(2 * edges, dtype=np.int64)
    _residual(tail, head, capacity, start, to, back, left)
    level = np.empty(n_vertices, dtype=np.int32)
    queue = np.empty(n_vertices, dtype=np.int32)
    path = np.empty(n_vertices + 1, dtype=np.int32)
    arc = np.empty(n_vertices, dtype=np.int32)
    while True:
        if not _levels(start, to, left, source, sink, level, queue):
            return level >= 0
        for vertex in range(n_vertices):  # in a slice, numba compiles an error message for other lengths
            arc[vertex] = start[vertex]
        depth = 0
        vertex = source
        while True:
            if vertex == sink:
                flow = left[path[0]]
                for i in range(1, depth):
                    flow = min(flow, left[path[i]])
                cut = depth
                for i in range(depth - 1, -1, -1):
                    left[path[i]] -= flow
                    left[back[path[i]]] += flow
                    if left[path[i]] == 0:
                        cut = i
                vertex = to[back[path[cut]]]
                depth = cut
                continue
            moved = False
            while arc[vertex] < start[vertex + 1]:
                k = arc[vertex]
                if left[k] > 0 and level[to[k]] == level[vertex] + 1:
                    path[depth] = k
                    depth += 1
                    vertex = to[k]
                    moved = True
                    break
                arc[vertex] += 1
            if not moved:
                if depth == 0:
                    break
                level[vertex] = -1
                depth -= 1
                vertex = to[back[path[depth]]]
                arc[vertex] += 1


Floats = npt.NDArray[np.float64]

UNBOUNDED = 1 << 60
NEW_PRICE = 0.01  # least price of a position that exceeds the limit, as a share of the highest price
MOST_COST = 1e15  # far above any sum of nanoseconds, far below UNBOUNDED


class LagrangianMinCut:
    """Flow network of one order; vertices: storages (present when read again), nodes (recomputed), source, sink."""

    def __init__(self, evaluator: Evaluator) -> None:
        problem, step, gaps = evaluator.problem, evaluator.step, evaluator.gaps
        self.evaluator = evaluator
        self._redoable = step.redoable
        self._has_gap = gaps.start >= 0
        self._wanted = self._has_gap & step.redoable
        needed_at = _needed_at(evaluator, self._wanted)
        # The interval that keeping is charged for: the gap, or from the last touch to the recomputation that reads it.
        self._from = np.where(self._has_gap, gaps.start, gaps.last) + 1
        self._latest = np.where(self._has_gap, gaps.end, np.maximum(needed_at, self._from))
        self._until = self._latest.copy()
        self._source = problem.n_storages + problem.n_nodes
        tails, heads, redo_edges, redo_nodes = self._edges()
        self._tail = np.array(tails, dtype=np.int32)
        self._head = np.array(heads, dtype=np.int32)
        self._capacity = np.full(len(tails), UNBOUNDED, dtype=np.int64)
        self._capacity[redo_edges] = np.maximum(1, problem.redo_ns[redo_nodes])

    def _edges(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return tails and heads of the edges, indices of the recompute edges, and the nodes that these recompute.

        The first edges, one per storage, are its keep edges.
        """
        problem = self.evaluator.problem
        storages = problem.n_storages
        sink = self._source + 1
        tails = list(range(storages))  # keep the storage, or recompute its producer
        heads = np.where(self._redoable, storages + problem.producer, sink).tolist()
        for storage in np.flatnonzero(self._wanted).tolist():
            tails.append(self._source)
            heads.append(storage)
        redo_edges: list[int] = []
        redo_nodes = np.flatnonzero(problem.redo_ok).tolist()
        for node in redo_nodes:
            redo_edges.append(len(tails))
            tails.append(storages + node)
            heads.append(sink)
            for used in problem.inputs(node).tolist():
                tails.append(storages + node)
                heads.append(used)
        return tails, heads, redo_edges, redo_nodes

    def solve(self, prices: Floats, link_price: float, kept: Bools | None = None, tilt: float = 0.0) -> Int8s:
        """Return the flags of least cost; ``prices`` in ns per byte at each position, ``link_price`` in ns per ns of
        link time.

        A negative link price forbids swaps. Storages in ``kept`` are never recomputed. ``tilt`` raises (below 0:
        lowers) the cost of keeping by that share towards the start of the order, so that equal layers do not all flip
        at one price.
        """
        step, storages = self.evaluator.step, len(self._from)
        total = np.concatenate(([0.0], np.cumsum(prices)))
        tilted = 1.0 + tilt * (1.0 - self._from / max(1, len(prices)))
        holding = step.nbytes * (total[self._until] - total[self._from]) * tilted
        cost = np.clip(holding, 0.0, MOST_COST).astype(np.int64)
        swaps = np.zeros(storages, dtype=np.bool_)
        if link_price >= 0.0:
            link = np.minimum(step.xfer_ns * link_price + 1.0, MOST_COST).astype(np.int64)
            swaps = step.swappable & self._has_gap & (link < cost)
            cost = np.where(swaps, link, cost)
        if kept is not None:
            cost[kept] = 0
        self._capacity[:storages] = cost
        side = min_cut(self._source + 2, self._tail, self._head, self._capacity, self._source, self._source + 1)
        there = side[:storages]
        made = there & self._redoable & side[storages + step.producer]
        flags = np.full(storages, DROP, dtype=np.int8)
        flags[there & ~made] = KEEP
        flags[made & self._wanted] = RECOMPUTE
        flags[swaps & ~made] = SWAP
        return flags

    def learn(self, flags: Int8s) -> None:
        """Correct the intervals that keeping is charged for, from the plan evaluated last.

        A storage that was recomputed is charged only up to its recomputation; for a kept one, the correction decays.
        """
        made_at = _positions(self.evaluator)[self.evaluator.lifetimes()[0][1]]
        again = self.evaluator.recomputed()
        faded = self._until + ((self._latest - self._until) >> 3)
        seen = np.clip(made_at, self._from, self._latest)
        self._until = np.where(again, seen, np.where(flags == KEEP, faded, self._until))

    def forget(self) -> None:
        """Reset everything that ``learn`` has changed."""
        self._until = self._latest.copy()


def follow_prices(
    judge: BudgetedEvaluator,
    model: LagrangianMinCut,
    limit: int,
    *,
    rounds: int,
    link_price: float = -1.0,
    kept: Bools | None = None,
    learning: bool = True,
    tilt: float = 0.0,
    sharp: bool = False,
) -> list[JudgedPlan]:
    """Propose plans while prices adapt to a memory limit (bytes), at most one plan per round.

    Prices start equal over all positions where the plan without recomputation exceeds the limit, or, if ``sharp``, at
    its peak alone; they rise by ever smaller steps where a plan exceeds the limit, and fall elsewhere. They use sums
    and products only, no libm functions, so that every machine computes equal prices.
    """
    judge.look(judge.untouched)
    levels = levels_by_position(judge.evaluator)
    over = levels > limit
    if not over.any():
        return []
    model.forget()
    first = levels == levels.max() if sharp else over
    prices = np.where(first, 1e-4 / int(first.sum()), 0.0)
    step = 0.4
    plans: list[JudgedPlan] = []
    for _ in range(rounds):
        flags = model.solve(prices, link_price, kept, tilt)
        if not plans or not np.array_equal(flags, plans[-1].flags):
            plans.append(JudgedPlan(judge.evaluator.order, flags, *judge.look(flags)))
            over = levels_by_position(judge.evaluator) > limit
            if learning:
                model.learn(flags)
        prices = np.where(over, (prices + NEW_PRICE * prices.max()) * (1.0 + step), prices * (1.0 - step / 4))
        step *= 0.97
    return plans


def slide_prices(
    judge: BudgetedEvaluator,
    model: LagrangianMinCut,
    limits: Sequence[int],
    *,
    rounds: int,
    link_price: float,
    kept: Bools | None,
) -> None:
    """Propose plans for falling memory limits (bytes), each starting from the prices of the limit before; ``judge``
    keeps the plans. A few rounds per limit are enough, since prices do not start from zero."""
    judge.look(judge.untouched)
    model.forget()
    over = levels_by_position(judge.evaluator) > limits[0]
    prices = np.where(over, 1e-4 / max(1, int(over.sum())), 0.0)
    for limit in limits:
        step = 0.4
        for _ in range(rounds):
            flags = model.solve(prices, link_price, kept)
            judge.look(flags)
            over = levels_by_position(judge.evaluator) > limit
            model.learn(flags)
            if not over.any():
                break
            prices = np.where(over, (prices + NEW_PRICE * prices.max()) * (1.0 + step), prices * (1.0 - step / 4))
            step *= 0.85


def _needed_at(evaluator: Evaluator, wanted: Bools) -> Int32s:
    """Return [s] the last position at which a recomputation may read a storage that has no later reads; -1: none."""
    problem = evaluator.problem
    needed = np.where(wanted, evaluator.gaps.end, -1).astype(np.int32)
    for node in evaluator.order[::-1].tolist():
        if not problem.redo_ok[node]:
            continue
        made = problem.outputs(node)
        latest = int(needed[made[evaluator.step.redoable[made]]].max(initial=-1))
        if latest >= 0:
            used = problem.inputs(node)
            used = used[~wanted[used]]
            needed[used] = np.maximum(needed[used], latest)
    return needed


def _positions(evaluator: Evaluator) -> Int64s:
    """Return [r] the position in the order of each run of the last plan; a recomputation has that of its user."""
    first = (evaluator.runs & 1) == 0
    positions: Int64s = np.cumsum(first) - first
    return positions


def levels_by_position(evaluator: Evaluator) -> Int64s:
    """Return [n] the last plan's memory peak in bytes at each position of the order, with the recomputations for it."""
    levels = np.zeros(evaluator.problem.n_nodes, dtype=np.int64)
    np.maximum.at(levels, _positions(evaluator), evaluator.levels)
    return levels


def turning_point(evaluator: Evaluator) -> int:
    """Return the position with most idle bytes: there the forward pass ends and the backward pass begins."""
    gaps, nbytes = evaluator.gaps, evaluator.step.nbytes
    idle = gaps.start >= 0
    change = np.zeros(evaluator.problem.n_nodes + 1, dtype=np.int64)
    np.add.at(change, gaps.start[idle] + 1, nbytes[idle])
    np.add.at(change, gaps.end[idle], -nbytes[idle])
    return int(np.argmax(np.cumsum(change)))


def checkpoints(evaluator: Evaluator) -> list[Bools]:
    """Return sets of storages to keep, such that all others between two cut points may be recomputed.

    At a cut point, all storages that cross it to a later node of the same pass are kept; gaps do not count. Cut points
    are every k-th waist, where a single storage crosses (ignoring others below a hundredth of its size), and the
    positions with fewest crossing bytes in k intervals of equal time.
    """
    problem, gaps = evaluator.problem, evaluator.gaps
    n = problem.n_nodes
    made_at = np.empty(n, dtype=np.int64)
    made_at[evaluator.order] = np.arange(n)
    birth = made_at[problem.producer]
    leave = np.where(gaps.start >= 0, gaps.start, gaps.last)
    change = np.zeros(n + 1, dtype=np.int64)
    np.add.at(change, birth, problem.nbytes)
    np.add.at(change, leave, -problem.nbytes)
    crossing = np.cumsum(change)
    turn = turning_point(evaluator)
    ends_ns = np.cumsum(problem.node_ns[evaluator.order])[:turn]
    waists: dict[int, int] = {}
    for at in range(turn):
        across = np.flatnonzero((birth <= at) & (leave > at))
        if len(across):
            largest = int(across[np.argmax(problem.nbytes[across])])
            if int(crossing[at]) * 99 < int(problem.nbytes[largest]) * 100:
                waists.setdefault(largest, at)
    cuts = [list(waists.values())[every - 1 :: every] for every in (1, 2, 3, 4, 6, 8) if every <= len(waists)]
    count = 2
    while count <= min(96, turn):
        bounds = np.searchsorted(ends_ns, [int(ends_ns[-1]) * k // count for k in range(count + 1)]).tolist()
        pairs = [(low, high) for low, high in itertools.pairwise(bounds) if low < high]
        cuts.append([low + int(np.argmin(crossing[low:high])) for low, high in pairs])
        count += max(1, count // 2)
    sets: list[Bools] = []
    for at_once in cuts:
        kept = np.zeros(problem.n_storages, dtype=np.bool_)
        for cut in at_once:
            kept |= (birth <= cut) & (leave > cut)
        if kept.any() and not any(np.array_equal(kept, other) for other in sets):
            sets.append(kept)
    return sets
