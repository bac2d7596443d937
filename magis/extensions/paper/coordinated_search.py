"""Coordinated search of the paper (Algorithm 3), selected by `--magis-search=paper`.

A state is an F-Tree, decisions (recompute, swap) on tensors of the step with its enabled loops, and an order. States
wait in a priority queue, ordered by the goal's key; known states are skipped; the F-Tree is analysed again unless the
last change was under fission; every rule is applied and every child simulated; a child enters the queue if its key is
smaller than 1.1 times the best key.

Rules: the four mutations of the F-Tree; rematerialization, swap and their inverses on memory hot-spots; reordering of
windows around the peak. After a change of loops the order is updated incrementally (Algorithm 2,
`incremental_schedule`), or, if ``incremental`` is False, restarts from program order. There are no TASO rules, minimum
cuts, annealing or hill climbing.

Deviations from the paper, beside its errors (order constraints, bytes, unverified graphs): the budget counts simulated
states (about 1000 a minute in the paper) instead of time; a tensor has one recomputed copy for all uses after its
longest gap, not one per use; a swap that the link cannot hide is not made, where the paper's simulator would stall;
windows are reordered only in leading states; a decision on a tensor keeps the order, and the evaluator recomputes as
late as possible. ``most`` limits the tensors tried per expanded state, most bytes per nanosecond first: the paper's
search simulated about 100 children of each state (924 of nine).
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from magis.errors import VerifyError
from magis.extensions.paper.ftree import LEVELS, Analysis, FTree, Node, mutations
from magis.extensions.paper.incremental_schedule import rescheduled, survivors
from magis.extensions.paper.nested_loops import (
    LoopFrame,
    Refusal,
    flags_of,
    frame_of,
    judge,
    loops_for_tree,
    realized,
    step_with_loops,
    view_at_peak,
)
from magis.graph import Graph
from magis.search.budgeted_evaluator import Objective, Over, check_request, never
from magis.search.loop_nest import level
from magis.search.window import window_orders
from magis.simulate.compiled_problem import Costs
from magis.simulate.evaluator import Evaluation

STATES = 3000
"""Default budget in simulated states: three minutes at about 1000 states a minute (paper: 924 in one minute of ViT)."""
RELAXED_NUM, RELAXED_DEN = 11, 10
FRAMES_KEPT = 24

Loops = frozenset[Node]


@dataclass(frozen=True)
class SearchState:
    """State of the search. ``decided`` are pairs (storage, flag); ``order`` is None for program order."""

    tree: FTree
    decided: frozenset[tuple[int, int]] = frozenset()
    order: tuple[int, ...] | None = None
    stale: bool = field(default=True, compare=False)
    """True if the F-Tree must be analysed again, since the last change was not under fission."""

    @property
    def loops(self) -> Loops:
        """Enabled nodes of the F-Tree, which are loops in the graph."""
        return frozenset(node for node in self.tree.nodes if node.enabled)

    @property
    def mark(self) -> tuple[Loops, frozenset[tuple[int, int]], tuple[int, ...] | None]:
        """Hashable key of a state, equal for equal graphs and orders."""
        return self.loops, self.decided, self.order


@dataclass(frozen=True)
class SearchPoint:
    """Figures of the best state, with the number of simulated states and the CPU seconds when it was found."""

    states: int
    figures: Evaluation
    seconds: float = field(default=0.0, compare=False)


class PaperSearch:
    """Search that starts from the unchanged step: its queue, its caches and, after `run`, the best state.

    ``graph`` must be functional and untangled (``rewrite.untangle``); at most ``states`` states are simulated. Raises
    UsageError unless the goal has exactly one limit.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        goal: Objective,
        *,
        reuse: bool = True,
        states: int = STATES,
        levels: int = LEVELS,
        most: int | None = None,
        incremental: bool = True,
        over: Over = never,
    ) -> None:
        check_request(goal, states)
        self.analysis, self.costs, self.goal = Analysis(graph), costs, goal
        self.reuse, self.budget, self.levels, self.most = reuse, states, levels, most
        self.incremental, self.over = incremental, over
        self.frames: OrderedDict[Loops, LoopFrame | None] = OrderedDict()
        self.queue: list[tuple[tuple[int, int], int, SearchState]] = []
        self.stopped = False
        """True if ``over`` ended the search before its budget was used up."""
        self.began = time.process_time()
        self.best = SearchState(FTree())
        self.start = self.figures = judge(self._legal_frame(self.best), {})
        """Figures of the unchanged step, and of the best state."""
        self.states = 1
        self.seen = {self.best.mark}
        self.curve = [self._point(self.start)]
        self._push(self.best, self.start)

    @property
    def loops(self) -> tuple[Node, ...]:
        """Enabled nodes of the best state, in the order of its F-Tree."""
        return tuple(node for node in self.best.tree.nodes if node.enabled)

    @property
    def frame(self) -> LoopFrame:
        """Compiled step of the best state."""
        return self._legal_frame(self.best)

    def realized(self) -> Graph:
        """Return the best state as a graph."""
        return realized(self.frame, dict(self.best.decided), _order(self.best))

    def run(self) -> PaperSearch:
        """Search until the budget is used up, the queue is empty, or ``over`` returns True; returns itself."""
        while self.queue and self.states < self.budget:
            _, _, state = heapq.heappop(self.queue)
            for child in self._children(state):
                if child.mark in self.seen:
                    continue
                self.seen.add(child.mark)
                self._simulate(self._scheduled(state, child))
                self.stopped = self.over()
                if self.stopped or self.states >= self.budget:
                    return self
        return self

    def _scheduled(self, parent: SearchState, child: SearchState) -> SearchState:
        """Give a child with other loops the parent's order, rescheduled around the changed nodes."""
        new = self._frame(child)
        if not self.incremental or child.loops == parent.loops or new is None:
            return child
        old = self._legal_frame(parent)
        problem = new.nest.compiled.problem
        before = old.evaluator.order if parent.order is None else np.array(parent.order, dtype=np.int32)
        rank = survivors(old.nest.compiled, before, new.nest.compiled)
        flags = flags_of(new, dict(child.decided))
        _, order = rescheduled(problem, rank, flags, step=step_with_loops(new, dict(child.decided)))
        return replace(child, order=tuple(order.tolist()))

    def _key(self, figures: Evaluation) -> tuple[int, int]:
        return self.goal.key(figures.peak, figures.latency_ns)

    def _simulate(self, state: SearchState) -> None:
        """Evaluate a state; record it if it is the best, and queue it if its key is within 1.1 times the best."""
        level = self._frame(state)
        if level is None:  # its enabled nodes cannot all be loops
            return
        self.states += 1
        found = judge(level, dict(state.decided), _order(state))
        key, best = self._key(found), self._key(self.figures)
        if key < best:
            self.best, self.figures = state, found
            self.curve.append(self._point(found))
        if tuple(RELAXED_DEN * mine for mine in key) < tuple(RELAXED_NUM * its for its in best):
            self._push(state, found)

    def _point(self, figures: Evaluation) -> SearchPoint:
        return SearchPoint(self.states, figures, time.process_time() - self.began)

    def _push(self, state: SearchState, figures: Evaluation) -> None:
        heapq.heappush(self.queue, (self._key(figures), self.states, state))

    def _frame(self, state: SearchState) -> LoopFrame | None:
        """Return the compiled step with the loops of a state; None for illegal loops. The last results are cached."""
        loops = state.loops
        if loops in self.frames:
            self.frames.move_to_end(loops)
            return self.frames[loops]
        graph = self.analysis.graph
        found: LoopFrame | None = None
        with contextlib.suppress(Refusal):
            found = frame_of(level(loops_for_tree(graph, state.tree), self.costs, reuse=self.reuse), graph)
        self.frames[loops] = found
        if len(self.frames) > FRAMES_KEPT:
            self.frames.popitem(last=False)
        return found

    def _legal_frame(self, state: SearchState) -> LoopFrame:
        """Return the compiled step of a state that was evaluated before."""
        level = self._frame(state)
        if level is None:
            raise VerifyError("a judged state has loops that cannot be")
        return level

    def _children(self, state: SearchState) -> Iterator[SearchState]:
        """Yield every state that one rule makes from a state."""
        view = view_at_peak(self._legal_frame(state), dict(state.decided), _order(state))
        tree = state.tree
        if state.stale:
            kept = [node for node in tree.nodes if node.enabled]
            tree = self.analysis.tree(view.hot, levels=self.levels, kept=kept)
        for mutation in mutations(tree):
            yield SearchState(mutation.tree, state.decided, None, stale=False)
        decided = dict(state.decided)
        for move in view.moves[: self.most]:
            yield replace(
                state,
                tree=tree,
                decided=frozenset({**decided, move.storage: move.flag}.items()) - {(move.storage, 0)},
                stale=not move.inside,
            )
        if self._key(view.figures) <= self._key(self.figures):  # a leading state: order windows around its peak anew
            for order in window_orders(view.evaluator):
                yield replace(state, tree=tree, order=tuple(order.tolist()), stale=True)


def _order(state: SearchState) -> np.ndarray[tuple[int], np.dtype[np.int32]] | None:
    return None if state.order is None else np.array(state.order, dtype=np.int32)
