"""Minimum cuts: which tensors to keep and which to make again, at given prices of memory.

Dinic's algorithm on compressed arrays, integer capacities, deterministic.
"""

from __future__ import annotations

import numba
import numpy as np

from magis.simulate.problem import Bools, Int32s, Int64s

__all__ = ["min_cut"]


@numba.njit(cache=True)
def _levels(start: Int32s, to: Int32s, left: Int64s, source: int, sink: int, level: Int32s, queue: Int32s) -> bool:
    """Distances from the source over edges with capacity left (-1: none); is the sink within reach?"""
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


@numba.njit(cache=True)
def _residual(
    tail: Int32s, head: Int32s, capacity: Int64s, start: Int32s, to: Int32s, back: Int32s, left: Int64s
) -> None:
    """The residual network as compressed rows: each edge and its reverse know each other by ``back``."""
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
    """[n_vertices] which vertices lie on the source's side of the smallest minimum cut (closest to the source)."""
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
        arc[:] = start[:-1]
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
