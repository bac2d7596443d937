"""The least latency of a small step within a memory limit, by CP-SAT: recomputed, not swapped, in any order or one.

Every node runs once, and up to so many times again. A run takes a whole moment of its own; each run that makes a tensor
opens a copy of it, a stretch of moments that ends where the plan likes, and each reader reads an open copy:

    runs do not overlap, first runs keep the step's order constraints, what runs again comes behind the first run
    a reader at moment m needs a copy with begin < m <= end
    bytes of open copies and of what runs <= limit, at every moment
    least sum of the time of what runs again

A result that takes over the memory of an input which dies opens its copy one moment later. An update block runs once,
behind the gradients that it reads and all runs of nodes that read its weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from magis.search.latency_bound import NEVER
from magis.simulate.arrays import make_step
from magis.simulate.problem import Int32s, Problem

__all__ = ["Exact", "solve"]


@dataclass(frozen=True)
class Exact:
    """What the solver knows: a plan's nanoseconds (None: it has none), and a bound of all plans; ``proven`` where these
    are equal, or where there is no plan at all."""

    latency_ns: int | None
    bound_ns: int
    proven: bool


def solve(
    problem: Problem,
    limit: int,
    order: Int32s | None = None,
    *,
    again: int = 2,
    seconds: float = 60.0,
    least_ns: int = 0,
    known_ns: int | None = None,
) -> Exact:
    """The optimum, or what was known about it after so many seconds; each node runs at most ``again`` times more, first
    runs come in the ``order``, if one is given. No plan is faster than ``least_ns``; ``known_ns`` is the latency of a
    plan that is known: no slower ones are looked for."""
    from ortools.sat.python import cp_model

    base = int(problem.node_ns.sum() + problem.blk_ns.sum())
    program = _Program(cp_model.CpModel(), problem, again, None if known_ns is None else known_ns - base)
    program.build(limit, least_ns - base)
    for earlier, later in pairwise(() if order is None else order.tolist()):
        program.model.add(program.runs[earlier][0].at < program.runs[later][0].at)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(program.model)
    if status == cp_model.INFEASIBLE:
        return Exact(None, NEVER, proven=True)
    bound = max(least_ns, base + max(0, round(solver.best_objective_bound)))
    found = base + round(solver.objective_value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else known_ns
    return Exact(found, bound, proven=status == cp_model.OPTIMAL)


@dataclass(frozen=True)
class _Run:
    """A moment, and whether there is such a run at all."""

    at: Any
    there: Any


@dataclass(frozen=True)
class _Copy:
    run: _Run
    end: Any


class _Program:
    """The program of one step; ``room`` is the time for what runs again, where it is known."""

    def __init__(self, model: Any, problem: Problem, again: int, room: int | None) -> None:
        self.model, self.problem, self.step, self.room = model, problem, make_step(problem), room
        redoes = [bool(self.step.redoable[problem.outputs(node)].any()) for node in range(problem.n_nodes)]
        self.most = problem.n_nodes + problem.n_blocks + sum(redoes) * again
        affordable = [room is None or int(ns) <= room for ns in problem.redo_ns]
        self.runs = [
            [self._run(again=number > 0) for number in range(1 + again * (may and redoes[node]))]
            for node, may in enumerate(affordable)
        ]
        self.blocks = [self._run() for _ in range(problem.n_blocks)]
        self.copies: list[list[_Copy]] = [[] for _ in range(problem.n_storages)]
        self.stretches: list[Any] = []
        self.weights: list[int] = []

    def build(self, limit: int, least: int) -> None:
        """Everything, under a limit; so many nanoseconds run again at least."""
        model, problem = self.model, self.problem
        for node, runs in enumerate(self.runs):
            for earlier, later in pairwise(runs):
                model.add(later.at > earlier.at).only_enforce_if(later.there)
                model.add_implication(later.there, earlier.there)
            for tensor in problem.outputs(node).tolist():
                self._copies(tensor, runs)
        for node, runs in enumerate(self.runs):
            for earlier in problem.extras(node).tolist():
                model.add(runs[0].at > self.runs[earlier][0].at)
            for number, run in enumerate(runs):
                self._weigh(run, run.at, run.at + 1, int((problem.redo_ws if number else problem.node_ws)[node]))
                self._makes(node, run, {t: self._reads(run, self.copies[t]) for t in problem.inputs(node).tolist()})
        for block, run in enumerate(self.blocks):
            self._block(block, run)
        every = [*chain.from_iterable(self.runs), *self.blocks]
        model.add_no_overlap([model.new_optional_interval_var(r.at, 1, r.at + 1, r.there, "") for r in every])
        unit = max(1, limit // 1_000_000)  # rounded in the plan's favour
        free = -(-(limit - problem.persistent_bytes) // unit)
        model.add_cumulative(self.stretches, [weight // unit for weight in self.weights], free)
        spent = sum(int(problem.redo_ns[node]) * run.there for node, runs in enumerate(self.runs) for run in runs[1:])
        model.add(spent >= max(0, least))
        if self.room is not None:
            model.add(spent <= self.room)
        model.minimize(spent)

    def _run(self, *, again: bool = False) -> _Run:
        there = self.model.new_bool_var("") if again else self.model.new_constant(1)
        return _Run(self.model.new_int_var(0, self.most - 1, ""), there)

    def _copies(self, tensor: int, runs: list[_Run]) -> None:
        """A copy of each run; of what is not made again, of the first run alone."""
        for run in runs if self.step.redoable[tensor] else runs[:1]:
            end = self.model.new_int_var(0, self.most, "")
            self.model.add(end >= run.at)
            if self.problem.to_end[tensor]:
                self.model.add(end == self.most)
            self.copies[tensor].append(_Copy(run, end))

    def _reads(self, run: _Run, copies: list[_Copy]) -> list[Any]:
        """A reader has an open copy; for each of these, whether it dies with the reader."""
        model = self.model
        reads = [model.new_bool_var("") for _ in copies]
        lasts = [model.new_bool_var("") for _ in copies]
        for copy, read, last in zip(copies, reads, lasts, strict=True):
            model.add(copy.run.at < run.at).only_enforce_if(read)
            model.add(copy.end >= run.at).only_enforce_if(read)
            model.add_implication(read, copy.run.there)
            model.add_implication(last, read)
            model.add(copy.end == run.at).only_enforce_if(last)
        model.add_bool_or(reads).only_enforce_if(run.there)
        return lasts

    def _makes(self, node: int, run: _Run, dying: dict[int, list[Any]]) -> None:
        """Bytes of what a run makes, for as long as the plan likes."""
        model, problem = self.model, self.problem
        taken = [last for used in problem.reuses(node).tolist() for last in dying[used]]
        for tensor in problem.outputs(node).tolist():
            copy = next((copy for copy in self.copies[tensor] if copy.run is run), None)
            begin = model.new_int_var(0, self.most, "")
            if taken and copy is not None:  # it may begin where an input ends
                over = model.new_bool_var("")
                model.add_bool_or([*taken, over.negated()])
                model.add(begin == run.at + over)
            else:
                model.add(begin == run.at)
            until = (run.at if copy is None else copy.end) + 1
            self._weigh(run, begin, until, int(problem.nbytes[tensor]))

    def _block(self, block: int, run: _Run) -> None:
        model, problem = self.model, self.problem
        inputs = problem.block_inputs(block)
        for tensor in inputs.tolist():
            self._reads(run, self.copies[tensor])
            model.add(run.at > self.runs[int(problem.last_write[tensor])][0].at)
        for other in chain.from_iterable(self.runs[node] for node in self.step.block_after(block).tolist()):
            model.add(run.at > other.at).only_enforce_if(other.there)
        late = int(problem.blk_late_ws[block] - problem.nbytes[inputs].sum())  # when its inputs are gone
        self._weigh(run, run.at, run.at + 1, max(int(problem.blk_ws[block]), late))

    def _weigh(self, run: _Run, begin: Any, until: Any, nbytes: int) -> None:
        """So many bytes from a moment on until another."""
        if nbytes > 0:
            length = self.model.new_int_var(0, self.most + 1, "")
            self.stretches.append(self.model.new_optional_interval_var(begin, length, until, run.there, ""))
            self.weights.append(nbytes)
