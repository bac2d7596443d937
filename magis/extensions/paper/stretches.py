"""Orders cut into stretches at narrow waists, and reordered one stretch after another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from magis.extensions.paper.stretch_order import WIDEST, Stretch, best_order
from magis.extensions.paper.waists import Waists, precedence, waists
from magis.simulate.arrays import NodeStep, make_step
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import Int32s, Int64s, Problem, Rows, int64s, rows_of

MOST = 2048
"""Maximum number of sets of nodes in a layer of the dynamic program."""
LEAST = 20
"""Minimum number of nodes in a stretch, except the last one: shorter stretches save little time."""


class Steps:
    """Lazily computed tables of a problem for scheduling."""

    def __init__(self, problem: Problem, step: NodeStep | None = None) -> None:
        self.problem = problem
        self.step = make_step(problem) if step is None else step

    @cached_property
    def needs(self) -> Rows:
        return precedence(self.problem)

    @cached_property
    def waists(self) -> Waists:
        return waists(self.needs)

    @cached_property
    def narrowness(self) -> Int64s:
        return self.waists.narrowness()

    @cached_property
    def triggers(self) -> list[list[int]]:
        """[b] Nodes that each block waits for: last writers of its inputs, and readers of what it writes."""
        problem = self.problem
        return [
            sorted({*self.step.block_after(b).tolist(), *problem.last_write[problem.block_inputs(b)].tolist()})
            for b in range(problem.n_blocks)
        ]

    @cached_property
    def fires(self) -> dict[int, list[int]]:
        """Blocks that wait for each node."""
        found: dict[int, list[int]] = {}
        for block, nodes in enumerate(self.triggers):
            for node in nodes:
                found.setdefault(node, []).append(block)
        return found

    @cached_property
    def holders(self) -> Rows:
        """[s] Blocks that read each storage."""
        return self.problem.block_inputs.turned(self.problem.n_storages)

    @cached_property
    def _readers(self) -> Rows:
        """[s] Nodes that read or write a storage made before."""
        return self.problem.inputs.turned(self.problem.n_storages)

    def released_by(self, storage: int) -> list[int]:
        """Return the nodes after all of which a storage is freed."""
        touch = [int(self.problem.producer[storage]), *self._readers(storage).tolist()]
        return touch + self.held_by(storage)

    def held_by(self, storage: int) -> list[int]:
        """Return the nodes that all blocks which read a storage wait for."""
        return [node for block in self.holders(storage).tolist() for node in self.triggers[block]]


Lives = dict[int, int]
"""Storage that a plan drops or swaps -> last position in an order at which its first copy is used."""


def lives_of(evaluator: Evaluator) -> Lives:
    """Return the last uses of first copies in the plan evaluated last."""
    short = evaluator.recomputed() | evaluator.swapped()
    if not short.any():
        return {}
    runs = evaluator.runs
    placed = np.cumsum((runs & 1) == 0) - 1  # position of the node that runs last up to each run
    _, death = evaluator.lifetimes()
    return {s: int(placed[max(0, int(death[0, s]))]) for s in np.flatnonzero(short).tolist()}


def cuts(narrowness: Int64s, order: Int32s, low: int, high: int) -> list[tuple[int, int]]:
    """Cut the positions from ``low`` to ``high`` into stretches, after the narrowest nodes."""
    found = []
    while high - low > WIDEST:
        here = narrowness[order[low + LEAST - 1 : low + WIDEST]]
        end = low + WIDEST - int(np.argmin(here[::-1]))  # the last of the narrowest
        found.append((low, end))
        low = end
    if high > low:
        found.append((low, high))
    return found


def improved(
    steps: Steps, order: Int32s, stretches: list[tuple[int, int]], lives: Lives | None = None, most: int = MOST
) -> Int32s:
    """Return the order with each stretch reordered for the lowest peak."""
    order = order.copy()
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    for low, high in stretches:
        if high - low < 2:
            continue
        found = best_order(stretch(steps, order, position, low, high, lives or {}), most)
        order[low:high] = order[low:high][found]
        position[order[low:high]] = np.arange(low, high)
    return order


def stretch(steps: Steps, order: Int32s, position: Int64s, low: int, high: int, lives: Lives) -> Stretch:
    """Return the nodes at positions ``low`` to ``high`` as input of the dynamic program.

    The later copy of a recomputed or swapped storage counts as a separate storage that is alive from the start; the
    evaluator decides when it is recomputed.
    """
    problem = steps.problem
    nodes = order[low:high].tolist()
    to_end = problem.to_end
    number: dict[tuple[int, bool], int] = {}  # of a storage, of its first or its later copy
    maker: list[int] = []
    dies: list[int] = []
    held: list[int] = []
    nbytes: list[int] = []

    def copy_of(storage: int, at: int) -> tuple[int, bool]:
        """Return the index of the copy that a node at a position uses; True if it may be freed in the stretch."""
        later = at > lives.get(storage, at)
        if (storage, later) in number:
            found = number[storage, later]
            return found, dies[found] != 0
        places = [int(position[node]) for node in steps.released_by(storage)]
        if storage in lives:
            places = [place for place in places if (place > lives[storage]) == later]
        stays = bool(to_end[storage]) or max(places) >= high
        made = int(position[problem.producer[storage]]) - low
        number[storage, later] = len(nbytes)
        maker.append(made if made >= 0 and not later else -1)
        dies.append(0 if stays else _mask(places, low, high))
        held.append(0 if stays else _mask(position[steps.held_by(storage)].tolist(), low, high))
        nbytes.append(int(problem.nbytes[storage]))
        return len(nbytes) - 1, not stays

    before: list[int] = []
    kills: list[list[int]] = []
    reuses: list[list[int]] = []
    fires: list[list[int]] = []
    blocks: dict[int, int] = {}
    for at, node in enumerate(nodes, low):
        before.append(_mask(position[steps.needs(node)].tolist(), low, high))
        used = [*problem.inputs(node).tolist(), *problem.outputs(node).tolist()]
        waiting = steps.fires.get(node, ())
        for block in waiting:
            used += problem.block_inputs(block).tolist()
        copies = [copy_of(storage, at) for storage in dict.fromkeys(used)]
        kills.append([found for found, may_die in copies if may_die])
        taken = [copy_of(storage, at) for storage in problem.reuses(node).tolist()]
        reuses.append([found for found, may_die in taken if may_die])
        here = [block for block in waiting if max(int(position[n]) for n in steps.triggers[block]) < high]
        fires.append([blocks.setdefault(block, len(blocks)) for block in sorted(here)])
    fires = [sorted(row, key=list(blocks).__getitem__) for row in fires]
    inputs = [[copy_of(s, high - 1) for s in problem.block_inputs(block).tolist()] for block in blocks]
    triggers = [_mask(position[steps.triggers[block]].tolist(), low, high) for block in blocks]
    return Stretch(
        before=int64s(before),
        out_bytes=steps.step.out_bytes[nodes],
        ws=steps.step.ws[0, nodes],
        kills=rows_of(kills),
        reuses=rows_of(reuses),
        fires=rows_of(fires),
        maker=int64s(maker),
        dies=int64s(dies),
        held=int64s(held),
        nbytes=int64s(nbytes),
        trigger=int64s(triggers),
        block_inputs=rows_of([found for found, may_die in row if may_die] for row in inputs),
        blk_ws=problem.blk_ws[list(blocks)],
        blk_late_ws=problem.blk_late_ws[list(blocks)],
    )


def _mask(places: list[int], low: int, high: int) -> int:
    """Return a bit mask of those places that lie from ``low`` to ``high``."""
    mask = 0
    for place in places:
        if low <= place < high:
            mask |= 1 << place - low
    return mask


def forced(narrowness: Int64s, order: Int32s, stretches: list[tuple[int, int]], narrow: int) -> Iterator[int]:
    """Yield the positions between stretches that are wide, since no narrow node was in reach."""
    for _, end in stretches[:-1]:
        if narrowness[order[end - 1]] > narrow:
            yield end
