"""The linear program of keep, swap and recompute for a whole step in program order: a guide, not a certified bound.

Every storage that lies idle may be kept (k), swapped (w) or made again (r), in shares between 0 and 1; a node that runs
again (x) needs its inputs. Memory is counted at the worst position of each of so many stretches of the order:

    k + w + r >= 1                              for what is touched again after its gap
    r <= x of its producer <= k + w + r         of every input that is not in memory anyway at that time
    fixed + sum bytes * (k, or copies made early) + Z + Y <= M          at each position looked at
    Z(b) >= Z(b-1) + out(b) - link * time(b), Y(b) >= Y(b+1) + in(b) - link * time(b + 1); Z, Y >= 0
                                                bytes that are not out yet, and that had to come back before
    least sum of x * time under a limit of M; or least M under a limit of that sum

``fixed`` is exact: the bytes at the position in the plan without any recomputation, less what may be away there. No
plan that the evaluator judges waits for the link, so that there are no stalls here. What is unclear is taken the cheap
way: workspace of what runs again, weight updates between two positions, how long a tensor without a gap is kept for
the node that runs again. So the optimum is about what fractions of decisions could reach, usually below every plan of
this order without fission; another order, or fission, may be below it. It is no proof: gaps are those of the order, and
a plan that makes a tensor again much earlier than its first reader asks for is not described.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from magis.search.budgeted_evaluator import Objective
from magis.simulate.evaluator import Evaluator, lower_bound
from magis.simulate.problem import DROP, FIRST, Bools, Int32s, Int64s, Problem

from .solver import Program

__all__ = ["POINTS", "Optimum", "Relaxation", "optimum"]

POINTS = 48
"""Positions at which memory is counted."""
SCALE = 1000.0
"""The step's peak, and its time, as the solver sees them: far from its tolerances."""
TIE = 1e-6
"""What time of the link costs: of equally good swaps the smallest."""
NEVER = -1


@dataclass(frozen=True)
class Optimum:
    """What the relaxed program reaches: bytes and nanoseconds."""

    peak: int
    latency_ns: int

    def met(self, goal: Objective) -> bool:
        return goal.met(self.peak, self.latency_ns)


def optimum(problem: Problem, goal: Objective, points: int = POINTS) -> Optimum | None:
    """The least latency under a memory limit, or the least peak under a latency limit; None: not even in fractions."""
    return Relaxation(problem, points).solve(goal)


@dataclass
class _Shares:
    """The variables of a program by what they decide: kept, swapped, made again by storage; run again by node."""

    kept: dict[int, int] = field(default_factory=dict)
    swapped: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    run: dict[int, int] = field(default_factory=dict)

    def present(self, storage: int) -> list[tuple[int, float]]:
        """The ways to have a storage when a node runs again."""
        return [(table[storage], 1.0) for table in (self.kept, self.swapped, self.made) if storage in table]


class Relaxation:
    """The program of one step; ``whole`` decisions for comparison on small steps."""

    def __init__(self, problem: Problem, points: int = POINTS, *, whole: bool = False) -> None:
        self.problem = problem
        self.whole = whole
        self.evaluator = Evaluator(problem, np.arange(problem.n_nodes, dtype=np.int32))
        self.base_peak, self.base_ns = self.evaluator.quick(np.full(problem.n_storages, DROP, dtype=np.int8))
        self.levels = _levels(self.evaluator)
        self.byte = SCALE / max(1, self.base_peak)
        self.ns = SCALE / max(1, self.base_ns)
        self.points = _worst(self.levels, points)
        self.floor = lower_bound(problem)
        gaps, step = self.evaluator.gaps, self.evaluator.step
        self.last: Int32s = gaps.last.copy()
        self.gap: Bools = (gaps.start >= 0) & (step.redoable | step.swappable)
        self.earliest, self.latest = _needs(self.evaluator)
        self.ends_ns = np.cumsum(_position_ns(self.evaluator))

    def solve(self, goal: Objective) -> Optimum | None:
        """The optimum for a goal."""
        if goal.memory_limit is not None:
            if goal.memory_limit >= self.base_peak:
                return Optimum(self.base_peak, self.base_ns)
            if goal.memory_limit < self.floor:
                return None
        elif (goal.latency_limit_ns or 0) < self.base_ns:
            return None
        program = Program()
        shares = self._variables(program, timed=goal.memory_limit is not None)
        limited = goal.memory_limit is not None
        memory = program.variable(0.0 if limited else 1.0, upper=(goal.memory_limit or self.base_peak) * self.byte)
        if goal.memory_limit is None:
            room = ((goal.latency_limit_ns or 0) - self.base_ns) * self.ns
            program.row([(x, int(self.problem.redo_ns[node]) * self.ns) for node, x in shares.run.items()], high=room)
        early = self._inputs(program, shares)
        backlog = self._link(program, shares)
        for index, point in enumerate(self.points.tolist()):
            self._memory(program, shares, early, [(each[index], 1.0) for each in backlog], point, memory)
        found = program.solve()
        if found is None:
            return None
        spent = sum(float(found[x]) * int(self.problem.redo_ns[node]) for node, x in shares.run.items())
        peak = (
            goal.memory_limit
            if goal.memory_limit is not None
            else max(self.floor, round(float(found[memory]) / self.byte))
        )
        return Optimum(int(peak), self.base_ns + round(spent))

    def _variables(self, program: Program, *, timed: bool) -> _Shares:
        """Decisions, and what they need to be whole."""
        shares = _Shares()
        problem, step = self.problem, self.evaluator.step
        for node in np.flatnonzero(self._runs()).tolist():
            cost = int(problem.redo_ns[node]) * self.ns if timed else 0.0
            shares.run[node] = program.variable(cost, upper=1.0, whole=self.whole)
        for storage in np.flatnonzero(self.gap | (self.latest != NEVER)).tolist():
            shares.kept[storage] = program.variable(upper=1.0, whole=self.whole)
            if step.swappable[storage]:
                price = TIE * int(step.xfer_ns[storage]) * self.ns
                shares.swapped[storage] = program.variable(price, upper=1.0, whole=self.whole)
            producer = int(problem.producer[storage])
            if step.redoable[storage] and producer in shares.run:
                shares.made[storage] = program.variable(upper=1.0, whole=self.whole)
                program.row([(shares.made[storage], 1.0), (shares.run[producer], -1.0)], high=0.0)
            if self.gap[storage]:
                program.row(shares.present(storage), low=1.0)
        return shares

    def _runs(self) -> Bools:
        """[n] what may have a reason to run again."""
        problem, step = self.problem, self.evaluator.step
        runs = np.zeros(problem.n_nodes, dtype=np.bool_)
        runs[problem.producer[step.redoable & (self.latest != NEVER)]] = True
        return runs

    def _when(self, node: int) -> tuple[int, int]:
        """First and last position at which a node may be asked to run again."""
        made = self.problem.outputs(node)
        made = made[self.evaluator.step.redoable[made] & (self.latest[made] != NEVER)]
        return int(self.earliest[made].min()), int(self.latest[made].max())

    def _inputs(self, program: Program, shares: _Shares) -> dict[int, list[tuple[int, int]]]:
        """What runs again needs its inputs; by storage the (position, share) from which on it is back before its gap
        ends, since a node that ran again has read it."""
        readers: dict[int, list[tuple[int, int]]] = {}
        for node, x in shares.run.items():
            _, latest = self._when(node)
            for storage in self.problem.inputs(node).tolist():
                if storage not in shares.kept:
                    continue
                if self.gap[storage]:
                    if int(self.evaluator.gaps.end[storage]) < latest:
                        continue  # there anyway by then
                    readers.setdefault(storage, []).append((latest, x))
                program.row([*shares.present(storage), (x, -1.0)], low=0.0)
        early: dict[int, list[tuple[int, int]]] = {}
        for storage, pairs in readers.items():
            end = int(self.evaluator.gaps.end[storage])
            before = NEVER
            for latest, x in sorted(pairs):
                if not np.any((self.points >= latest) & (self.points < end)):
                    continue
                copy = program.variable(upper=1.0)
                program.row([(copy, 1.0), (x, -1.0), (shares.kept[storage], 1.0)], low=0.0)
                if before != NEVER:
                    program.row([(copy, 1.0), (before, -1.0)], low=0.0)
                before = copy
                early.setdefault(storage, []).append((latest, copy))
        return early

    def _away(self, storage: int) -> tuple[int, int]:
        """The open stretch of positions over which a storage may be away."""
        if self.gap[storage]:
            return int(self.evaluator.gaps.start[storage]), int(self.evaluator.gaps.end[storage])
        return int(self.last[storage]), int(self.latest[storage])

    def _link(self, program: Program, shares: _Shares) -> list[list[int]]:
        """Bytes on their way out and bytes back early, at each point; nothing where nothing can be swapped."""
        problem, count = self.problem, len(self.points)
        if problem.xfer_ns_per_byte <= 0.0 or not shares.swapped:
            return []
        per_ns = self.byte / problem.xfer_ns_per_byte
        leaving: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        coming: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for storage, w in shares.swapped.items():
            start, end = self._away(storage)
            covered = np.flatnonzero((self.points > start) & (self.points < end))
            if len(covered):
                size = int(problem.nbytes[storage]) * self.byte
                leaving[int(covered[0])].append((w, size))
                coming[int(covered[-1])].append((w, size))
        again: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
        for node, x in shares.run.items():
            place = int(np.searchsorted(self.points, self._when(node)[0]))
            again[place].append((x, int(problem.redo_ns[node]) * per_ns))
        out = [program.variable() for _ in range(count)]
        back = [program.variable() for _ in range(count)]
        starts = np.concatenate(([0], self.ends_ns))[self.points]
        for index in range(count):
            since = int(starts[index]) - (int(starts[index - 1]) if index else 0)
            terms = [(out[index], 1.0), *((w, -size) for w, size in leaving[index]), *again[index]]
            program.row([*terms, *([(out[index - 1], -1.0)] if index else [])], low=-since * per_ns)
            until = int(starts[index + 1]) if index + 1 < count else int(self.ends_ns[-1])
            terms = [(back[index], 1.0), *((w, -size) for w, size in coming[index]), *again[index + 1]]
            following = [(back[index + 1], -1.0)] if index + 1 < count else []
            program.row([*terms, *following], low=-(until - int(starts[index])) * per_ns)
        return [out, back]

    def _memory(
        self, program: Program, shares: _Shares, early: dict[int, list[tuple[int, int]]],
        extra: list[tuple[int, float]], point: int, memory: int,
    ) -> None:  # fmt: skip
        """The bytes at one position."""
        fixed = int(self.levels[point])
        terms = [*extra, (memory, -1.0)]
        for storage, kept in shares.kept.items():
            size = int(self.problem.nbytes[storage])
            if self.gap[storage]:
                if not self._idle_at(storage, point):
                    continue
                fixed -= size
                terms += [(copy, size * self.byte) for copy in _copy_at(early.get(storage, []), point)]
            elif not int(self.last[storage]) < point < int(self.earliest[storage]):
                continue
            terms.append((kept, size * self.byte))
        program.row(terms, high=-fixed * self.byte)

    def _idle_at(self, storage: int, point: int) -> bool:
        """In its gap, or at its beginning where its memory could be taken over if it did not stay."""
        start, end = int(self.evaluator.gaps.start[storage]), int(self.evaluator.gaps.end[storage])
        if point == start:
            return bool(np.any(self.problem.reuses(point) == storage))
        return start < point < end


def _copy_at(copies: list[tuple[int, int]], point: int) -> Iterator[int]:
    """The share that is back at a position: that of the last node which has read it."""
    there = [copy for latest, copy in copies if latest <= point]
    return iter(there[-1:])


def _levels(evaluator: Evaluator) -> Int64s:
    """[n] bytes while each node runs, updates behind it left out, of the plan judged last, which recomputes nothing."""
    problem, count = evaluator.problem, evaluator.problem.n_nodes
    birth, death = evaluator.lifetimes()
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, birth[0], problem.nbytes)
    np.add.at(change, death[0] + 1, -problem.nbytes)
    events = evaluator.events()
    taken = events.reuse[events.kind == FIRST]
    saved = np.where(taken >= 0, problem.nbytes[np.maximum(taken, 0)], 0) if problem.n_storages else 0
    levels: Int64s = np.cumsum(change)[:count] + problem.node_ws - saved + problem.persistent_bytes
    return levels


def _position_ns(evaluator: Evaluator) -> Int64s:
    """[n] time of each node and of the updates behind it."""
    problem = evaluator.problem
    taken = problem.node_ns.copy()
    position = -1
    events = evaluator.events()
    for kind, arg in zip(events.kind.tolist(), events.arg.tolist(), strict=True):
        if kind == FIRST:
            position += 1
        else:
            taken[position] += int(problem.blk_ns[arg])
    return taken


def _worst(levels: Int64s, count: int) -> Int64s:
    """The position of most bytes in each of so many equal stretches."""
    bounds = np.unique(np.linspace(0, len(levels), min(count, len(levels)) + 1).astype(np.int64)).tolist()
    worst = [low + int(np.argmax(levels[low:high])) for low, high in itertools.pairwise(bounds)]
    return np.array(worst, dtype=np.int64)


def _needs(evaluator: Evaluator) -> tuple[Int32s, Int32s]:
    """[s] first and last position at which a storage may be wanted again; -1: never.

    A storage with a gap at its end; one without where a node that runs again reads it after its last touch.
    """
    problem, gaps = evaluator.problem, evaluator.gaps
    idle = gaps.start >= 0
    earliest = np.where(idle, gaps.end, NEVER).astype(np.int32)
    latest = earliest.copy()
    for node in range(problem.n_nodes - 1, -1, -1):
        made = problem.outputs(node)
        made = made[evaluator.step.redoable[made] & (latest[made] != NEVER)]
        if not problem.redo_ok[node] or not len(made):
            continue
        first, last = int(earliest[made].min()), int(latest[made].max())
        for used in problem.inputs(node).tolist():
            if not idle[used] and last > gaps.last[used]:
                first_here = max(first, int(gaps.last[used]) + 1)
                earliest[used] = first_here if latest[used] == NEVER else min(int(earliest[used]), first_here)
                latest[used] = max(int(latest[used]), last)
    return earliest, latest
