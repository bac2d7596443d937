"""A lower bound of the latency of all plans within a memory limit, for every order, swap and recomputation.

A linear program over *moments*: nodes of one path, which run in sequence in every legal order. A tensor that an
ancestor of a moment makes and a descendant reads is, at this moment, on the device (k), on the host (h), or recomputed
afterwards (r), as fractions between 0 and 1:

    k + h + r >= 1                                  for a tensor that is read after the moment
    r <= k + h + r of every input, r <= x           a recomputation needs its inputs, and costs time once
    sum of bytes * k + bytes of the moment itself <= limit
    bytes * h, for tensors made after an earlier moment, or read before a later one,
              <= link * (all nodes that may run meanwhile + sum of time * x + stall)
    minimize sum of time * x + stall

Collectives take no compute time: waiting for one is stall, and all of them share one stream. The program relaxes
everything uncertain: bytes between two moments, small tensors, fixed costs of copies, both directions sharing a link,
second recomputations. So the bound holds for plans with any number of copies, gaps and recomputations of a tensor, with
or without stalls. For small steps the integer program is solved, with the solver's own bound; on steps of hundreds of
operators that gains next to nothing.

The bound of the linear program is not the solver's optimum but its dual value, computed here from the dual prices:
valid by weak duality, however inexact the solver. The dual value is linear in the limit, so bounds of a loop body at a
few limits hold at every limit (`Affine`), and become constraints of the program of the step around the loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from magis.quiet import stdout_dropped
from magis.search.loop_nest import LoopFigures, LoopNest, with_figures
from magis.search.moments import Chain, last_readers
from magis.simulate.evaluator import lower_bound
from magis.simulate.problem import Bools, Int32s, Problem

NEVER = 1 << 62
"""Bound where no plan keeps the limit."""
BODY_LIMITS = (0.1, 0.4, 1.0)
"""Memory limits for a loop body, as fractions of the way from its lower bound to all memory that is left."""
WHOLE = 3_000
"""Most variables of a program that is also solved with integers."""
NODES = 50
"""Most branch-and-bound nodes of the integer program; its bound is used even if the solver stops there."""
TOLERANCE = 1e-9
"""Tolerance of the solver and of sums, relative to the step's time."""
SCALE = 1000.0
"""Value of the limit, and of the step's time, in the solver's units: large compared with its tolerances."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Affine:
    """Bound that is linear in the memory limit: latency >= ns - per_byte * (limit in bytes - at)."""

    at: int
    ns: float
    per_byte: float


@dataclass(frozen=True)
class BodyBound:
    """Bounds of a loop body: least ``peak`` bytes, least ``ns`` per part, and ``cuts`` of the time by the memory
    limit."""

    parts: int
    peak: int
    ns: int
    cuts: tuple[Affine, ...]


def latency_lower_bound(problem: Problem, memory_limit: int) -> int:
    """Return a lower bound in ns of the latency of all plans within ``memory_limit`` bytes; `NEVER`: there is none."""
    return _bound_ns(problem, memory_limit, {})


def nest_latency_bound(nest: LoopNest, memory_limit: int) -> int:
    """Return a lower bound in ns of the latency of a step with loops, over all plans of their bodies, or `NEVER`."""
    loops = _body_bounds(nest, memory_limit)
    return _bound_ns(with_least_figures(nest.compiled.problem, loops), memory_limit, loops)


def _bound_ns(problem: Problem, memory_limit: int, loops: Mapping[int, BodyBound]) -> int:
    found = bound_at(problem, memory_limit, loops, whole=True)
    if found is None:
        return NEVER
    ns = math.ceil(found.ns * (1 - TOLERANCE))  # latencies are integers
    return max(ns, int(problem.message_ns.sum()))  # all collectives share one stream


def with_least_figures(problem: Problem, loops: Mapping[int, BodyBound]) -> Problem:
    """Return the problem with the lowest time and peak of each loop."""
    return with_figures(
        problem, {node: LoopFigures(loop.parts * loop.ns, loop.peak, 0) for node, loop in loops.items()}
    )


def _body_bounds(nest: LoopNest, memory_limit: int) -> dict[int, BodyBound]:
    """Return bounds of the loop bodies of a step within a limit, by node."""
    around, found = nest.compiled.problem, dict[int, BodyBound]()
    for node, body in nest.loops:
        beside = around.nbytes[[*around.inputs(node), *around.outputs(node)]].sum()
        most = memory_limit - around.persistent_bytes - int(beside)
        loops = _body_bounds(body, most)
        problem = with_least_figures(body.compiled.problem, loops)
        least = lower_bound(problem)
        limits = (least + int(share * (most - least)) for share in BODY_LIMITS if most > least)
        cuts = (bound_at(problem, limit, loops) for limit in limits)
        found[node] = BodyBound(body.parts, least, problem.least_ns, tuple(cut for cut in cuts if cut is not None))
    return found


def bound_at(
    problem: Problem, memory_limit: int, loops: Mapping[int, BodyBound] | None = None, *, whole: bool = False
) -> Affine | None:
    """Bound the latency at a limit, as a linear function of the limit; None if no plan keeps it.

    ``loops`` are the loop nodes of a problem ``with_least_figures``, with the bounds of their bodies. With ``whole``
    (the integer program, for small steps), the bound holds at this limit only.
    """
    loops = loops or {}
    base = problem.least_ns
    if memory_limit < lower_bound(problem):
        return None
    if not problem.n_nodes:
        return Affine(memory_limit, base, 0.0)
    chain = Chain.of(problem, memory_limit, loops)
    if not len(chain.moments):
        return Affine(memory_limit, base, 0.0)
    return _Relaxation(chain, memory_limit, base, loops).solve(whole=whole)


@dataclass
class _Rows:
    """A linear program under construction: rows of coefficients, each with an upper bound."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    column: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    of_memory: list[int] = field(default_factory=list)

    def variable(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0) -> int:
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.costs) - 1

    def at_most(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        for column, value in terms:
            self.row.append(len(self.limits))
            self.column.append(column)
            self.value.append(value)
        self.limits.append(limit)


class _Relaxation:
    """The linear program of a chain under a limit, in units of limit / SCALE bytes and of the step's time / SCALE."""

    def __init__(self, chain: Chain, limit: int, base: int, loops: Mapping[int, BodyBound]) -> None:
        self.chain, self.limit, self.base, self.loops = chain, limit, base, loops
        self.byte, self.ns = SCALE / max(1, limit), SCALE / max(1, base)
        self.rows = _Rows()
        problem, step, count = chain.problem, chain.step, len(chain.moments)
        made = chain.before[problem.producer]
        reach = last_readers(problem, chain.after)
        moves = step.redoable | step.swappable
        counted = chain.large & (made < count)
        self.made, self.reach, self.horizon = made, reach, reach.copy()
        following = chain.after.copy()  # moments count as after the previous one: their inputs are there
        following[chain.moments] -= 1
        self.behind = last_readers(problem, following)
        wanted = counted & moves & (reach >= made)
        self._extend_horizons(wanted, counted)
        self.tensors = np.flatnonzero(wanted)
        self.stays = counted & ~moves
        self.fixed = self.stays & ~wanted
        self.kept: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.run: dict[tuple[int, int], int] = {}
        self.redo: dict[int, int] = {}
        self.stall = self.rows.variable(1.0, upper=SCALE)
        self.extra: dict[int, int] = {}
        self.room: dict[int, int] = {}

    def _extend_horizons(self, wanted: Bools, counted: Bools) -> None:
        """Extend each tensor's last use to those of all tensors recomputed from it; mark its inputs ``wanted``, too."""
        problem, step = self.chain.problem, self.chain.step
        for node in range(problem.n_nodes - 1, -1, -1):
            outputs = problem.outputs(node)
            again = outputs[wanted[outputs] & step.redoable[outputs]]
            if len(again):
                inputs = problem.inputs(node)
                self.horizon[inputs] = np.maximum(self.horizon[inputs], self.horizon[again].max())
                wanted[inputs] |= counted[inputs]

    def solve(self, *, whole: bool) -> Affine | None:
        from scipy.optimize import Bounds, LinearConstraint, linprog, milp
        from scipy.sparse import csr_matrix

        self._variables()
        self._decisions()
        self._loops()
        for at in range(len(self.chain.moments)):
            self._memory_row(at)
        self._link()
        rows = self.rows
        shape = len(rows.limits), len(rows.costs)
        matrix = csr_matrix((rows.value, (rows.row, rows.column)), shape=shape)
        costs, limits = np.array(rows.costs), np.array(rows.limits)
        lower, upper = np.array(rows.lower), np.array(rows.upper)
        found = linprog(costs, matrix, limits, bounds=np.stack([lower, upper], axis=1), method="highs-ds")
        if found.status == 2:
            return None
        prices: Floats = np.zeros(shape[0]) if found.ineqlin is None else np.minimum(found.ineqlin.marginals, 0.0)
        value = self._dual_value(prices, costs - matrix.T @ prices, lower, upper)
        if not whole or len(costs) > WHOLE or value.ns == self.base:
            return value
        shares = np.ones(len(costs))
        shares[[self.stall, *self.extra.values(), *self.room.values()]] = 0
        with stdout_dropped():
            rounded = milp(
                costs,
                integrality=shares,
                bounds=Bounds(lower, upper),
                constraints=LinearConstraint(matrix, -np.inf, limits),
                options={"node_limit": NODES},
            )
        if rounded.status == 2:
            return None
        best = value.ns if rounded.mip_dual_bound is None else self.base + rounded.mip_dual_bound / self.ns
        return Affine(self.limit, max(value.ns, best), 0.0)

    def _dual_value(self, prices: Floats, reduced: Floats, lower: Floats, upper: Floats) -> Affine:
        """Return the dual value at the given row prices, a lower bound of the program's optimum."""
        rows = self.rows
        limits = np.array(rows.limits)
        value = float(limits @ prices + np.where(reduced > 0, reduced * lower, reduced * upper).sum()) / self.ns
        rooms = list(self.room.values())
        per_byte = -float(prices[rows.of_memory].sum() + np.minimum(reduced[rooms], 0.0).sum()) * self.byte / self.ns
        ns = self.base + max(0.0, value)
        return Affine(self.limit, ns, per_byte if value > 0 else 0.0)

    # -- variables and the rows that bind them --------------------------------------------------------------------

    def _variables(self) -> None:
        """Add the variables of each tensor at each moment: kept, on the host (loaded by the next use), recomputed."""
        rows, last = self.rows, len(self.chain.moments) - 1
        problem, step = self.chain.problem, self.chain.step
        for tensor in self.tensors.tolist():
            maker, swaps = int(problem.producer[tensor]), bool(step.swappable[tensor])
            if step.redoable[tensor] and maker not in self.redo:
                self.redo[maker] = rows.variable(int(problem.redo_ns[maker]) * self.ns)
            for at in range(int(self.made[tensor]), min(last, int(self.horizon[tensor])) + 1):
                stays = self.stays[tensor] and at <= self.behind[tensor]
                self.kept[tensor, at] = rows.variable(lower=1.0 if stays else 0.0)
                if swaps:
                    self.host[tensor, at] = rows.variable()
                if step.redoable[tensor] and (maker, at) not in self.run:
                    again = self.run[maker, at] = rows.variable()
                    rows.at_most([(again, 1.0), (self.redo[maker], -1.0)], 0.0)

    def _copies_at(self, tensor: int, at: int) -> list[tuple[int, float]]:
        """List the variables by which a tensor can be on the device after a moment, with coefficient -1."""
        maker = int(self.chain.problem.producer[tensor])
        again = self.run.get((maker, at)) if self.chain.step.redoable[tensor] else None
        found = (self.kept.get((tensor, at)), self.host.get((tensor, at)), again)
        return [(variable, -1.0) for variable in found if variable is not None]

    def _decisions(self) -> None:
        """Require that tensors are on the device when the step or a recomputation reads them."""
        rows, problem = self.rows, self.chain.problem
        for tensor, at in self.kept:
            if self.behind[tensor] >= at:
                rows.at_most(self._copies_at(tensor, at), -1.0)
        there = set(self.tensors.tolist())
        for (node, at), variable in self.run.items():
            for tensor in problem.inputs(node).tolist():
                if tensor in there:
                    rows.at_most([(variable, 1.0), *self._copies_at(tensor, at)], 0.0)

    def _loops(self) -> None:
        """Add a loop body's memory above its least peak, and its time above its least time."""
        for node, loop in self.loops.items():
            room = self.rows.variable(lower=0.0, upper=max(0, self.limit - loop.peak) * self.byte)
            extra = self.rows.variable(float(loop.parts), upper=SCALE)
            self.room[node], self.extra[node] = room, extra
            for cut in loop.cuts:  # extra >= cut.ns - per_byte * (peak + room - at) - ns
                steep = cut.per_byte * self.ns / self.byte
                known = cut.ns - cut.per_byte * (loop.peak - cut.at) - loop.ns
                self.rows.at_most([(extra, -1.0), (room, -steep)], -known * self.ns)

    # -- memory and link ------------------------------------------------------------------------------------------

    def _memory_row(self, at: int) -> None:
        """Limit the bytes in memory while a moment's node runs."""
        chain, problem = self.chain, self.chain.problem
        node = int(chain.moments[at])
        own = problem.inputs(node).tolist()
        fixed = problem.persistent_bytes + int(problem.node_ws[node]) + int(problem.nbytes[own].sum())
        stays = self.fixed & (self.made <= at) & (self.reach >= at)
        stays[own] = False
        stays[problem.outputs(node)] = False
        fixed += int(problem.nbytes[stays].sum()) + int(problem.nbytes[problem.outputs(node)].sum())
        terms: list[tuple[int, float]] = []
        reusable = problem.reuses(node).tolist()
        if reusable:
            size = int(problem.nbytes[reusable[0]])
            fixed -= size
            if len(reusable) == 1 and (reusable[0], at) in self.kept:  # reuse needs an input that is not kept
                terms.append((self.kept[reusable[0], at], size * self.byte))
        inside = {*own, *problem.outputs(node).tolist()}
        for tensor in self.tensors.tolist():
            variable = self.kept.get((tensor, at))
            if variable is not None and tensor not in inside:
                terms.append((variable, int(problem.nbytes[tensor]) * self.byte))
        if node in self.room:
            terms.append((self.room[node], 1.0))
        self.rows.of_memory.append(len(self.rows.limits))
        self.rows.at_most(terms, (self.limit - fixed) * self.byte)

    def _link(self) -> None:
        """Limit link time: a tensor on the host was stored after its node, and is loaded before its next reader."""
        chain, problem = self.chain, self.chain.problem
        if not self.host:
            return
        count = len(chain.moments)
        times = problem.nbytes * (problem.xfer_ns_per_byte * self.ns)
        made = chain.after[problem.producer]
        hosted: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for (tensor, at), variable in self.host.items():
            hosted[at].append((tensor, variable))
        block_after = self._block_after()
        for at, pairs in enumerate(hosted):
            due = self._deadlines(at)
            for since in range(-1, at):
                copies = [(variable, float(times[tensor])) for tensor, variable in pairs if made[tensor] >= since]
                if copies:
                    self._in_time(copies, self._spent(since, at, block_after))
            for until in range(at + 1, count + 1):
                copies = [(variable, float(times[tensor])) for tensor, variable in pairs if due[tensor] <= until]
                if copies:
                    self._in_time(copies, self._spent(at, until, block_after, within=True))

    def _deadlines(self, at: int) -> Int32s:
        """Return [s] the earliest moment by which some reader after moment ``at`` runs; for tensors without readers,
        the latest such moment of all tensors that can be recomputed from them."""
        chain, problem = self.chain, self.chain.problem
        count = len(chain.moments)
        inputs, readers = problem.inputs.idx, problem.inputs.places()
        behind = chain.after[readers] > at
        behind |= (chain.after[readers] == at) & (readers != chain.moments[at])
        due = np.full(problem.n_storages, count + 1, dtype=np.int32)
        np.minimum.at(due, inputs[behind], chain.before[readers[behind]])
        own = due <= count
        due[~own] = -1
        for node in range(problem.n_nodes - 1, -1, -1):
            outputs = problem.outputs(node)
            latest = int(due[outputs].max(initial=-1))
            if latest >= 0 and problem.redo_ok[node]:
                taken = problem.inputs(node)
                taken = taken[~own[taken]]
                due[taken] = np.maximum(due[taken], latest)
        due[due < 0] = count
        return due

    def _in_time(self, copies: list[tuple[int, float]], spent: tuple[int, Bools]) -> None:
        """Require that copies take no longer than the nodes that may run meanwhile, plus recomputations and stalls."""
        time, ran = spent
        terms = [*copies, (self.stall, -1.0)]
        terms += [(total, -int(self.chain.problem.redo_ns[node]) * self.ns) for node, total in self.redo.items()]
        terms += [(extra, -float(self.loops[node].parts)) for node, extra in self.extra.items() if ran[node]]
        self.rows.at_most(terms, time * self.ns)

    def _spent(self, since: int, until: int, block_after: Int32s, *, within: bool = False) -> tuple[int, Bools]:
        """Return total ns and a mask of the nodes that may run between two moments, with the first one if
        ``within``."""
        chain, problem = self.chain, self.chain.problem
        ran: Bools = (chain.before > since) & (chain.after < until)
        if within:
            ran[chain.moments[since]] = True
        return int(problem.node_ns[ran].sum() + problem.blk_ns[block_after < until].sum()), ran

    def _block_after(self) -> Int32s:
        """Return [b] the last moment that always runs before each update block."""
        chain, problem = self.chain, self.chain.problem
        found = np.full(problem.n_blocks, -1, dtype=np.int32)
        writers = chain.after[chain.step.last_write[problem.block_inputs.idx]]
        np.maximum.at(found, problem.block_inputs.places(), writers)
        readers = chain.step.block_after
        np.maximum.at(found, readers.places(), chain.after[readers.idx])
        return found
