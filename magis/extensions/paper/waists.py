"""Narrow waists: nodes at which a step can be cut into parts that are ordered one after another (paper, Algorithm 2).

    nw(v) = |V| - |ancestors of v| - |descendants of v| - 1

is the number of nodes that are incomparable to v: they may run before or after v. If it is 0, every order runs v's
ancestors, v, and then its descendants. Weight gradients have no descendants and constants no ancestors, so they are
incomparable to most nodes and would hide every waist of a training step. So only the *core* counts: nodes on paths
between the ends of the step's longest path. Other nodes join the first part that they can run in, or the last part that
they must run in.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from magis.simulate.problem import Bools, Int32s, Int64s, Problem, Rows

NARROW = 1
"""Maximum number of incomparable nodes of a waist (paper)."""
OUTSIDE = 2**31
"""Narrowness of nodes outside of the core, larger than that of any node in it."""
WORD = 62
"""Nodes per word of a bit set; words stay positive, compiled or not."""


class Waists(NamedTuple):
    """Narrowness and ancestors of a problem's nodes."""

    beside: Int64s
    """[v] Number of other core nodes that may run before or after v."""
    core: Bools
    ancestors: Int64s
    """[v, word] Ancestors as bit sets of nodes."""

    def narrowness(self) -> Int64s:
        """Return [v] nw; OUTSIDE for nodes outside of the core, so that no cut is made there."""
        return np.where(self.core, self.beside, OUTSIDE)


def precedence(problem: Problem) -> Rows:
    """Return the nodes that must precede each node, ascending, without duplicates: data flow and order constraints."""
    after = np.concatenate([problem.inputs.places(), problem.extras.places()])
    before = np.concatenate([problem.producer[problem.inputs.idx], problem.extras.idx])
    pairs = np.unique(after.astype(np.int64) * problem.n_nodes + before)
    after, before = np.divmod(pairs, max(1, problem.n_nodes))
    ptr = np.searchsorted(after, np.arange(problem.n_nodes + 1)).astype(np.int32)
    return Rows(ptr, before.astype(np.int32))


def waists(needs: Rows, counted: Bools | None = None) -> Waists:
    """Return the waists of a problem; ``counted`` replaces its core."""
    counted = core(needs) if counted is None else counted
    ancestors = _ancestors(needs)
    return Waists(_beside(needs, ancestors, counted), counted, ancestors)


@numba.njit(cache=True)
def _ancestors(needs: Rows) -> Int64s:
    nodes = len(needs.ptr) - 1
    words = (nodes + WORD - 1) // WORD
    found = np.zeros((nodes, words), dtype=np.int64)
    for node in range(nodes):
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            other = int(needs.idx[k])  # wide enough to shift by
            for word in range(words):
                found[node, word] |= found[other, word]
            found[node, other // WORD] |= 1 << (other % WORD)
    return found


@numba.njit(cache=True)
def _ones(word: int) -> int:
    """Return the number of bits set in a non-negative word."""
    word -= word >> 1 & 0x5555555555555555
    word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333)
    word = word + (word >> 4) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8
    word += word >> 16
    word += word >> 32
    return word & 0x7F


@numba.njit(cache=True)
def _beside(needs: Rows, ancestors: Int64s, counted: Bools) -> Int64s:
    nodes, words = ancestors.shape
    mask = np.zeros(words, dtype=np.int64)
    total = 0
    for node in range(nodes):
        if counted[node]:
            mask[node // WORD] |= 1 << (node % WORD)
            total += 1
    descendants = np.zeros((nodes, words), dtype=np.int64)
    beside = np.zeros(nodes, dtype=np.int64)
    for node in range(nodes - 1, -1, -1):  # a node's set is complete once all later nodes are done
        related = 0
        for word in range(words):
            related += _ones((ancestors[node, word] | descendants[node, word]) & mask[word])
        beside[node] = total - related - (1 if counted[node] else 0)
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            other = needs.idx[k]
            for word in range(words):
                descendants[other, word] |= descendants[node, word]
            descendants[other, node // WORD] |= 1 << (node % WORD)
    return beside


@numba.njit(cache=True)
def core(needs: Rows) -> Bools:
    """Return [v] True for nodes on paths between the ends of the longest path; of several longest paths, the first."""
    nodes = len(needs.ptr) - 1
    depth = np.zeros(nodes, dtype=np.int64)
    start = np.arange(nodes)
    end = 0
    for node in range(nodes):
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            if depth[needs.idx[k]] >= depth[node]:
                depth[node] = depth[needs.idx[k]] + 1
                start[node] = start[needs.idx[k]]
        if depth[node] > depth[end]:
            end = node
    behind = np.zeros(nodes, dtype=np.bool_)  # the start
    ahead = np.zeros(nodes, dtype=np.bool_)  # of the end
    if nodes:
        behind[start[end]] = True
        ahead[end] = True
    for node in range(nodes):
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            behind[node] |= behind[needs.idx[k]]
    for node in range(nodes - 1, -1, -1):
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            ahead[needs.idx[k]] |= ahead[node]
    return behind & ahead


def in_parts(needs: Rows, found: Waists, order: Int32s) -> Int32s:
    """Sort an order by the parts between waists, keeping it legal; other nodes join the part where they may run."""
    hangs = _hanging(needs, found.core)
    part = _parts(needs, found.ancestors, found.core, hangs, found.beside <= NARROW)
    return order[np.argsort(part[order], kind="stable")]


@numba.njit(cache=True)
def _hanging(needs: Rows, core: Bools) -> Bools:
    """Return [v] True for nodes outside of the core that depend on it."""
    hangs = np.zeros(len(core), dtype=np.bool_)
    for node in range(len(core)):
        if not core[node]:
            for k in range(needs.ptr[node], needs.ptr[node + 1]):
                hangs[node] |= core[needs.idx[k]] or hangs[needs.idx[k]]
    return hangs


@numba.njit(cache=True)
def _parts(  # noqa: C901 (compiled, and plain: pass by pass)
    needs: Rows, ancestors: Int64s, core: Bools, hangs: Bools, narrow: Bools
) -> Int64s:
    """Return [v] the part of each node: one part per waist of a chain, and one after the last waist."""
    nodes = len(needs.ptr) - 1
    parts = 0
    last = -1
    far = 1 << 62
    part = np.full(nodes, far, dtype=np.int64)
    for node in range(nodes):
        chain = last < 0 or ancestors[node, last // WORD] >> (last % WORD) & 1
        if core[node] and narrow[node] and chain:
            part[node] = parts
            parts += 1
            last = node
    for node in range(nodes - 1, -1, -1):
        if hangs[node]:
            continue
        if core[node] and part[node] == far:
            part[node] = parts  # needed by no waist
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            part[needs.idx[k]] = min(part[needs.idx[k]], part[node])
    for node in range(nodes):
        if hangs[node]:
            part[node] = 0
            for k in range(needs.ptr[node], needs.ptr[node + 1]):
                if part[needs.idx[k]] < far:
                    part[node] = max(part[node], part[needs.idx[k]])
    for node in range(nodes - 1, -1, -1):  # constants that only such nodes need
        if part[node] == far:
            part[node] = parts
        for k in range(needs.ptr[node], needs.ptr[node + 1]):
            if not core[needs.idx[k]] and not hangs[needs.idx[k]]:
                part[needs.idx[k]] = min(part[needs.idx[k]], part[node])
    return part
