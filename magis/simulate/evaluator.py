"""Evaluation of plans for the search: peak memory and latency.

``evaluate`` and ``expand`` check and evaluate one plan; an ``Evaluator`` evaluates many on one order (about 20 thousand
per second at 1500 nodes). ``problem`` defines plans and events; the compiled passes are in ``kernel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from magis.errors import VerifyError
from magis.simulate import kernel, message_passes
from magis.simulate.arrays import NodeStep, make_scratch, make_step
from magis.simulate.gaps import find_gaps
from magis.simulate.messages import MessageArrays, MessageStep, make_message_arrays, messages_of
from magis.simulate.problem import (
    ARRIVE,
    BLOCK,
    FIRST,
    KEEP,
    LOAD,
    REDO,
    REPEAT,
    STORE,
    SWAP,
    WAIT,
    Bools,
    Events,
    Int8s,
    Int32s,
    Int64s,
    Problem,
    rows_of,
)


@dataclass(frozen=True)
class Evaluation:
    """Costs of a plan."""

    peak: int
    """Peak bytes, with persistent storages and workspace."""
    tensor_peak: int
    """Peak bytes, with persistent storages, without workspace."""
    latency_ns: int
    """Nanoseconds of all nodes, recomputations and blocks, and of waits for collectives; copies are fully
    overlapped."""
    redos: int
    """Number of recomputations."""
    swaps: int
    """Number of storages that leave the device; swaps that cannot free memory in time are skipped."""


class Evaluator:
    """Evaluates plans of one problem on one legal order, with reused working memory.

    Not thread-safe. Returned arrays are fresh copies. *Runs* are the events without update blocks and swaps: first runs
    and recomputations of nodes.
    """

    def __init__(self, problem: Problem, order: Int32s, step: NodeStep | None = None) -> None:
        self.problem = problem
        self.order = np.ascontiguousarray(order, dtype=np.int32)
        self.step = make_step(problem) if step is None else step
        self.gaps = find_gaps(self.step, self.order)
        self._messages = messages_of(problem)
        self._run = kernel.run_linked_plan if self.step.swappable.any() else kernel.run_plan
        self._make_room(1)
        self._persistent = problem.persistent_bytes

    def quick(self, flags: Int8s) -> tuple[int, int]:
        """Return peak bytes and latency in ns of a plan; the other methods and properties then describe this plan."""
        if not self._judge(flags):
            self._make_room(kernel.MOST_COPIES)  # only few plans need this, and allocation is slow
            self._judge(flags)
        # -1: the plan has no nodes
        return max(int(self._result[kernel.PEAK]), 0) + self._persistent, int(self._result[kernel.LATENCY])

    def _make_room(self, copies: int) -> None:
        self._scratch = make_scratch(self.step, copies)
        self._result = self._scratch.result
        self._beside = None if self._messages is None else make_message_arrays(self._scratch)

    def _judge(self, flags: Int8s) -> bool:
        """Evaluate a plan; return False if the working memory is too small."""
        if self._messages is None or self._beside is None:
            return bool(self._run(self.step, self.order, self.gaps, flags, self._scratch))
        highest = self._judge_with_messages(flags, self._messages, self._beside, None)
        peak = self._result[kernel.PEAK]
        if highest is not None and peak > highest:
            self._judge_with_messages(flags, self._messages, self._beside, 0)
            if self._result[kernel.PEAK] >= peak:  # swaps are placed by time, so that this may not lower the peak
                self._judge_with_messages(flags, self._messages, self._beside, None)
        return highest is not None

    def _judge_with_messages(
        self, flags: Int8s, messages: MessageStep, beside: MessageArrays, highest: int | None
    ) -> int | None:
        """Evaluate a plan with overlapped collectives; return the limit in bytes up to which overlap may extend
        lifetimes.

        Returns None if the working memory is too small. ``highest`` None: the limit is the larger of the problem's
        ceiling and the peak with blocking collectives.
        """
        step, scratch = self.step, self._scratch
        if kernel.begin_plan(step, self.order, self.gaps, flags, scratch) < 0:
            return None
        swaps = bool(np.any(flags == SWAP))
        message_passes.remember(scratch, beside)
        kernel.finish_plan(step, flags, scratch, swaps)
        highest = max(messages.ceiling, int(self._result[kernel.PEAK])) if highest is None else highest
        message_passes.place_messages(step, messages, scratch, beside, highest)
        scratch.result[kernel.TIMED] = 1
        kernel.finish_plan(step, flags, scratch, swaps)
        return highest

    def evaluate(self, flags: Int8s) -> Evaluation:
        """Evaluate a plan and return all of its costs."""
        peak, latency = self.quick(flags)
        return Evaluation(
            peak=peak,
            tensor_peak=max(int(self._result[kernel.TENSOR_PEAK]), 0) + self._persistent,
            latency_ns=latency,
            redos=int(self._result[kernel.N_REDOS]),
            swaps=int(self._result[kernel.N_SWAPS]),
        )

    @property
    def peak_run(self) -> int:
        """Index of the run at the peak, or of the run before the update block at the peak."""
        return int(self._result[kernel.PEAK_EVENT])

    @property
    def runs(self) -> Int32s:
        """[r] 2 * node for a first run, 2 * node + 1 for a recomputation."""
        return self._scratch.event[: int(self._result[kernel.N_EVENTS])].copy()

    @property
    def levels(self) -> Int64s:
        """[r] peak bytes during each run and the blocks after it, persistent storages included."""
        levels: Int64s = self._scratch.level[: int(self._result[kernel.N_EVENTS])] + self._persistent
        return levels

    def lifetimes(self) -> tuple[Int32s, Int32s]:
        """Return first and last run, [3, s] each, of the first, the last recomputed and the loaded copy; -1: none."""
        scratch, step = self._scratch, self.step
        storages = len(step.nbytes)
        birth = np.full((3, storages), -1, dtype=np.int32)
        death = birth.copy()
        birth[0] = scratch.first_at[step.producer]
        death[0] = scratch.last_use[:storages]
        held = scratch.held_by >= 0
        death[0, held] = np.maximum(death[0, held], scratch.blk_place[scratch.held_by[held]])
        death[0, step.to_end] = int(self._result[kernel.N_EVENTS]) - 1
        again = self.recomputed()
        birth[1, again] = scratch.redo_at[again]
        death[1, again] = scratch.last_use[storages:][again]
        swapped = self.swapped()
        birth[2, swapped] = scratch.load_at[swapped]
        death[2, swapped] = death[0, swapped]
        death[0, swapped] = scratch.wait_at[swapped] - 1
        return birth, death

    def swapped(self) -> Bools:
        """Return a mask [s] of the storages that leave the device."""
        if not self._result[kernel.N_SWAPS]:
            return np.zeros(self.problem.n_storages, dtype=np.bool_)
        leaves: Bools = self._scratch.wait_at >= 0
        return leaves

    @property
    def between(self) -> Int32s:
        """[c, 3] storage, first and last run of recomputed copies that are recomputed again later."""
        return self._scratch.between[: int(self._result[kernel.N_BETWEEN])].copy()

    def recomputed(self) -> Bools:
        """Return a mask [s] of the storages that are recomputed."""
        made: Bools = self._scratch.redo_at >= 0
        return made

    def events(self) -> Events:
        """Return the schedule of the plan evaluated last."""
        scratch = self._scratch
        swaps = bool(self._result[kernel.N_SWAPS])
        made = {*map(tuple, self.between[:, :2].tolist()), *enumerate(scratch.redo_at.tolist())}
        arrivals: dict[int, list[int]] = {}  # outputs of collectives, by the run after which they are waited for
        if self._messages is not None and self._beside is not None:
            for run, wait_at in zip(self.runs.tolist(), self._beside.wait_at.tolist(), strict=False):
                if wait_at >= 0:
                    arrivals.setdefault(wait_at, []).append(int(self._messages.gives[run >> 1]))
        found: list[tuple[int, int, int, list[int]]] = []  # kind, argument, storage reused, storages renewed
        for at, run in enumerate(self.runs.tolist()):
            node, again = run >> 1, run & 1
            if swaps:
                found += [(WAIT, storage, -1, []) for storage in _chain(scratch.wait_head[at], scratch.wait_next)]
                found += [(LOAD, storage, -1, []) for storage in _chain(scratch.load_head[at], scratch.load_next)]
            renewed = [s for s in self.problem.outputs(node).tolist() if (s, at) in made] if again else []
            found.append((REDO if again else FIRST, node, int(scratch.reuse[at]), renewed))
            if swaps:
                found += [(STORE, storage, -1, []) for storage in _chain(scratch.store_head[at], scratch.store_next)]
            found += [(ARRIVE, storage, -1, []) for storage in arrivals.get(at, ())]
            found += [(BLOCK, block, -1, []) for block in _chain(scratch.blk_head[at], scratch.blk_next)]
        return Events(
            kind=np.array([kind for kind, *_ in found], dtype=np.int8),
            arg=np.array([arg for _, arg, *_ in found], dtype=np.int32),
            reuse=np.array([taken for *_, taken, _ in found], dtype=np.int32),
            renews=rows_of(renewed for *_, renewed in found),
        )


def _chain(head: int, link: Int32s) -> Iterator[int]:
    """Yield the members of a linked list."""
    while head >= 0:
        yield int(head)
        head = link[head]


def check_order(problem: Problem, order: Int32s) -> None:
    """Raise VerifyError unless ``order`` is a legal permutation of the nodes."""
    if sorted(order.tolist()) != list(range(problem.n_nodes)):
        raise VerifyError(f"an order must name each of {problem.n_nodes} nodes once; this one does not")
    position = np.empty(problem.n_nodes, dtype=np.int64)
    position[order] = np.arange(problem.n_nodes)
    for node in range(problem.n_nodes):
        for other in (*problem.extras(node), *problem.producer[problem.inputs(node)]):
            if position[other] >= position[node]:
                raise VerifyError(f"illegal order: node {node} stands before node {other}, which must precede it")


def evaluate(problem: Problem, order: Int32s, flags: Int8s) -> Evaluation:
    """Evaluate one plan. Raises VerifyError if the plan is not legal."""
    return _evaluator_of_legal_plan(problem, order, flags).evaluate(np.ascontiguousarray(flags, dtype=np.int8))


def expand(problem: Problem, order: Int32s, flags: Int8s) -> Events:
    """Return the complete schedule of a plan. Raises VerifyError if the plan is not legal."""
    evaluator = _evaluator_of_legal_plan(problem, order, flags)
    evaluator.quick(np.ascontiguousarray(flags, dtype=np.int8))
    return evaluator.events()


def lower_bound(problem: Problem) -> int:
    """Return a lower bound of all plans' peak in bytes: persistent storages plus one operator's largest working set."""
    largest = 0
    for node in range(problem.n_nodes):
        outputs = int(problem.nbytes[problem.outputs(node)].sum())
        if len(problem.reuses(node)):
            outputs = 0  # the node may run in place
        inputs = int(problem.nbytes[problem.inputs(node)].sum())
        largest = max(largest, inputs + outputs + int(problem.node_ws[node]))
    for block in range(problem.n_blocks):
        inputs = int(problem.nbytes[problem.block_inputs(block)].sum())
        largest = max(largest, inputs + int(problem.blk_ws[block]), int(problem.blk_late_ws[block]))
    return problem.persistent_bytes + largest


def _evaluator_of_legal_plan(problem: Problem, order: Int32s, flags: Int8s) -> Evaluator:
    check_order(problem, order)
    if len(flags) != problem.n_storages or np.any((flags < KEEP) | (flags > REPEAT)):
        raise VerifyError(f"a plan needs one flag in {KEEP}..{REPEAT} for each of {problem.n_storages} storages")
    return Evaluator(problem, order)
