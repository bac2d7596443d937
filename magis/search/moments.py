"""Moments of a step (nodes of one path, which run in sequence in every legal order) and tensors alive across them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from magis.simulate.arrays import NodeStep, make_step
from magis.simulate.problem import Bools, Int32s, Int64s, Problem

MOMENTS = 12
CELLS = 6_000
"""Approximate most tensors times moments: half a second of the solver."""
FEWEST = 3
"""Least number of moments, for any number of tensors."""
SMALL = 4_000


@dataclass(frozen=True, eq=False)
class Chain:
    """Moments of a step: nodes v(0), v(1), ... that run in this sequence in every legal order."""

    problem: Problem
    step: NodeStep
    moments: Int32s
    before: Int32s
    """[n] first moment that the node is or always precedes; the number of moments if there is none."""
    after: Int32s
    """[n] last moment that the node is or always follows; -1 if there is none."""
    large: Bools
    """[s] mask of the tensors that are not negligibly small."""

    @classmethod
    def of(cls, problem: Problem, limit: int, loops: Collection[int]) -> Chain:
        """Choose the moments that matter under a limit; none if nothing needs to leave memory."""
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
    """Return the path with most nodes, preferably through loops."""
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
    """Return [n] the first index on the path of which each node is an ancestor (or the node itself), and the last index
    of which it is a descendant (or itself)."""
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
    """Return [s] the last index on the path at or after which some reader always runs; -1: none does."""
    reach = np.full(problem.n_storages, -1, dtype=np.int32)
    np.maximum.at(reach, problem.inputs.idx, after[problem.inputs.places()])
    reach[problem.to_end] = np.iinfo(np.int32).max
    return reach


def _levels(problem: Problem, path: Int32s, before: Int32s, after: Int32s) -> Int64s:
    """Return [path] the bytes in memory at each node of the path in every order without recomputation and swaps."""
    change = np.zeros(len(path) + 1, dtype=np.int64)
    made = before[problem.producer]
    reach = np.minimum(last_readers(problem, after), len(path) - 1)
    reach = np.maximum(reach, np.where(after[problem.producer] == made, made, -1))  # outputs of nodes on the path
    over = reach >= made
    np.add.at(change, made[over], problem.nbytes[over])
    np.add.at(change, reach[over] + 1, -problem.nbytes[over])
    levels: Int64s = np.cumsum(change)[:-1] + problem.node_ws[path] + problem.persistent_bytes
    return levels


def _chosen(levels: Int64s, limit: int, count: int) -> Int64s:
    """Choose up to ``count`` indices of the path above the limit: the highest in each of as many equal intervals."""
    above = np.flatnonzero(levels > limit)
    if not len(above):
        return above
    found = [int(part[np.argmax(levels[part])]) for part in np.array_split(above, min(count, len(above)))]
    return np.unique(found)
