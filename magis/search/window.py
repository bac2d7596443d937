"""Reordering by dynamic programming over a window of nodes around the peak (paper, Algorithm 2).

States are the subsets of the window that can run first; the tensors in memory after a subset do not depend on its
order. The best order of the window minimizes the peak. Windows have at most ``WIDEST`` nodes, so that exact search
takes about a millisecond. Outside the window, storages live as in the plan; inside, they die after their last reader.
Recomputations and updates inside the window are not modelled: the exact evaluator decides if a new order is better.
"""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import Bools, Int32s, Int64s

WIDEST = 12


@numba.njit(cache=True)
def best_order(before: Int64s, needs: Int64s, readers: Int64s, maker: Int64s, nbytes: Int64s, extra: Int64s) -> Int64s:
    """Return the order of a window's nodes with the lowest peak; of equal ones the first.

    ``before`` [w]: bit mask of the nodes that must precede a node; ``needs`` [w]: bytes that it allocates; ``extra``
    [w]: workspace, less what it saves by running in place. Per storage touched: ``readers``, the mask of nodes after
    all of which it dies (0: it outlives the window), ``maker``, the node that allocates it (-1: it is alive from the
    beginning), ``nbytes``. Bytes that are alive in every order are left out.
    """
    width = len(before)
    full = (1 << width) - 1
    far = np.int64(1) << 62
    worst = np.empty(full + 1, dtype=np.int64)
    choice = np.empty(full + 1, dtype=np.int64)
    worst[:] = far
    choice[:] = -1
    worst[full] = 0
    for mask in range(full - 1, -1, -1):  # best continuation for each set of executed nodes
        level = np.int64(0)
        for storage in range(len(nbytes)):
            made = maker[storage] < 0 or mask >> maker[storage] & 1
            dead = readers[storage] != 0 and readers[storage] & mask == readers[storage]
            if made and not dead:
                level += nbytes[storage]
        for node in range(width):
            if mask >> node & 1 or before[node] & mask != before[node]:
                continue
            rest = worst[mask | 1 << node]
            peak = max(level + needs[node] + extra[node], rest)
            if peak < worst[mask]:
                worst[mask] = peak
                choice[mask] = node
    order = np.empty(width, dtype=np.int64)
    mask = 0
    for k in range(width):
        order[k] = choice[mask]
        mask |= 1 << choice[mask]
    return order


def window_orders(evaluator: Evaluator, width: int = 10) -> Iterator[Int32s]:
    """Yield legal orders that may lower the peak of the plan evaluated last: one per window around the peak."""
    runs, problem = evaluator.runs, evaluator.problem
    first = (runs & 1) == 0
    peak = int(np.count_nonzero(first[: evaluator.peak_run]))
    ends = np.flatnonzero(first)  # run index of each position
    _, death = evaluator.lifetimes()
    last_run = np.where(problem.to_end, len(runs), death.max(axis=0))
    order = evaluator.order
    width = min(width, WIDEST, len(order))
    low, high = max(0, peak - width + 1), min(peak, len(order) - width)
    for start in range(low, high + 1, max(1, width // 3)):
        window = order[start : start + width]
        outlives = last_run > ends[start + width - 1]
        best = best_order(*_window_arrays(evaluator, window, outlives))
        if not np.array_equal(best, np.arange(width)):
            new = order.copy()
            new[start : start + width] = window[best]
            yield new


def _window_arrays(
    evaluator: Evaluator, window: Int32s, outlives: Bools
) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Return the arguments of ``best_order`` for consecutive nodes of an order."""
    problem = evaluator.problem
    place = {int(node): k for k, node in enumerate(window)}
    readers: dict[int, int] = {}
    maker: dict[int, int] = {}
    before = np.zeros(len(window), dtype=np.int64)
    extra = np.zeros(len(window), dtype=np.int64)
    for k, node in enumerate(window.tolist()):
        for other in (*problem.extras(node).tolist(), *problem.producer[problem.inputs(node)].tolist()):
            if other in place:
                before[k] |= 1 << place[other]
        for storage in problem.outputs(node).tolist():
            maker[storage] = k
            readers[storage] = 1 << k
        for storage in problem.inputs(node).tolist():
            maker.setdefault(storage, -1)
            readers[storage] = readers.get(storage, 0) | 1 << k
        extra[k] = problem.node_ws[node]
    for k, node in enumerate(window.tolist()):
        for storage in problem.reuses(node).tolist():
            touches = 1 << k | (1 << maker[storage] if maker[storage] >= 0 else 0)
            if readers[storage] == touches and not outlives[storage]:  # no other reader
                extra[k] -= problem.nbytes[storage]
                break
    storages = sorted(readers)
    return (
        before,
        evaluator.step.out_bytes[window],
        np.array([0 if outlives[s] else readers[s] for s in storages], dtype=np.int64),
        np.array([maker[s] for s in storages], dtype=np.int64),
        problem.nbytes[storages],
        extra,
    )
