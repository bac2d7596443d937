"""Moments of a step: nodes of one path, which every legal order runs one after the other, and tensors that last over
them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from magis.simulate.arrays import NodeStep, make_step
from magis.simulate.problem import Bools, Int32s, Int64s, Problem

MOMENTS = 12
CELLS = 6_000
"""Most tensors times moments, about: half a second of the solver."""
FEWEST = 3
"""Least number of moments, however many tensors there are."""
SMALL = 4_000


@dataclass(frozen=True, eq=False)
class Chain:
    """Moments of a step: nodes v(0), v(1), ... each of which comes before the next one in every order."""

    problem: Problem
    step: NodeStep
    moments: Int32s
    before: Int32s
    """[n] first moment that the node surely runs before, or is; the number of moments where there is none."""
    after: Int32s
    """[n] last moment that the node surely runs behind, or is; -1: there is none."""
    large: Bools
    """[s] tensors that count."""

    @classmethod
    def of(cls, problem: Problem, limit: int, loops: Collection[int]) -> Chain:
        """Choose the moments that matter under a limit; none where everything may stay."""
        path = _longest_path(problem, loops)
        before, after = _ranks(problem, path)
        large = problem.nbytes * SMALL >= limit
        levels = _levels(problem, path, before, after)
        tensors = int(np.count_nonzero(last_readers(problem, after) > before[problem.producer]))
        chosen = _chosen(levels, limit, max(FEWEST, min(MOMENTS, CELLS // max(1, tensors))))
        chosen = np.union1d(chosen, np.flatnonzero(np.isin(path, list(loops))))
        first = np.searchsorted(chosen, before).astype(np.int32)
        last = (np.searchsorted(chosen, after, side="right") - 1).astype(np.int32)
        return cls(problem, make_step(problem), path[chosen], first, last, large)


def _predecessors(problem: Problem, node: int) -> list[int]:
    return [*problem.extras(node).tolist(), *problem.producer[problem.inputs(node)].tolist()]


def _longest_path(problem: Problem, loops: Collection[int]) -> Int32s:
    """Find the path through most nodes; through loops where that is possible."""
    length = [0] * problem.n_nodes
    came = [-1] * problem.n_nodes
    for node in range(problem.n_nodes):
        for other in _predecessors(problem, node):
            if length[other] > length[node]:
                length[node], came[node] = length[other], other
        length[node] += problem.n_nodes if node in loops else 1
    node = int(np.argmax(length))
    path = []
    while node >= 0:
        path.append(node)
        node = came[node]
    return np.array(path[::-1], dtype=np.int32)


def _ranks(problem: Problem, path: Int32s) -> tuple[Int32s, Int32s]:
    """Return [n] the first place of the path that each node is an ancestor of, or is, and the last one that it descends
    from, or is."""
    count = problem.n_nodes
    before = [len(path)] * count
    after = [-1] * count
    for place, node in enumerate(path.tolist()):
        before[node] = after[node] = place
    for node in range(count):
        for other in _predecessors(problem, node):
            after[node] = max(after[node], after[other])
    for node in range(count - 1, -1, -1):
        for other in _predecessors(problem, node):
            before[other] = min(before[other], before[node])
    return np.array(before, dtype=np.int32), np.array(after, dtype=np.int32)


def last_readers(problem: Problem, after: Int32s) -> Int32s:
    """Return [s] the last place of the path at or behind which some reader surely runs; -1: none does."""
    reach = np.full(problem.n_storages, -1, dtype=np.int32)
    np.maximum.at(reach, problem.inputs.idx, after[problem.inputs.places()])
    reach[problem.to_end] = np.iinfo(np.int32).max
    return reach


def _levels(problem: Problem, path: Int32s, before: Int32s, after: Int32s) -> Int64s:
    """Return [path] the bytes at each node of the path that no order avoids without recomputing or swapping."""
    change = np.zeros(len(path) + 1, dtype=np.int64)
    made = before[problem.producer]
    reach = np.minimum(last_readers(problem, after), len(path) - 1)
    reach = np.maximum(reach, np.where(after[problem.producer] == made, made, -1))  # outputs of the path itself
    over = reach >= made
    np.add.at(change, made[over], problem.nbytes[over])
    np.add.at(change, reach[over] + 1, -problem.nbytes[over])
    levels: Int64s = np.cumsum(change)[:-1] + problem.node_ws[path] + problem.persistent_bytes
    return levels


def _chosen(levels: Int64s, limit: int, count: int) -> Int64s:
    """Choose ``count`` places of the path: of those above the limit the highest in each of as many stretches."""
    above = np.flatnonzero(levels > limit)
    if not len(above):
        return above
    found = [int(part[np.argmax(levels[part])]) for part in np.array_split(above, min(count, len(above)))]
    return np.unique(found)
