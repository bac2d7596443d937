"""A lower bound of the latency of every plan that keeps a memory limit, whatever its order, copies and recomputations.

A linear program over *moments*: nodes that every legal order runs one after the other. What an ancestor of a moment
makes and a descendant of it reads is, at this moment, on the device (k), on the host (h), or made again afterwards:

    sum of bytes * k + what the moment itself needs <= limit            at every moment
    k(t + 1) <= k(t) + x(t) + l(t)                  x, l: made again, loaded between this moment and the next one
    k(t) + x(t) + l(t) >= 1                         for a reader between the two
    x(t) <= k(t) + x(t) + l(t)  of every input      what runs again needs its inputs
    l(t) <= h(t), k(t + 1) + h(t + 1) <= k(t) + h(t) + x(t)         what is loaded was stored
    copies until or after a moment <= time that there is for them + stalls
    least sum of x * time + stalls

Everything unclear is left out: operators that may run before or after a moment, bytes in between, small tensors, fixed
costs of copies, which direction of the link is busy. So plans with any number of copies, gaps and recomputations of a
tensor obey it, and with stalls. What is reported is not the solver's optimum but the value of its dual prices, computed
here: by weak duality a bound however exact the solver was. That value falls linearly with the limit, so that the bound
of a loop's body at a few limits is a bound at all of them (``Affine``), and part of the step's program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from magis.simulate.arrays import NodeStep, make_step
from magis.simulate.evaluator import lower_bound
from magis.simulate.problem import Bools, Int32s, Int64s, Problem

NEVER = 1 << 62
"""The bound where no plan keeps the limit."""
CELLS = 5_000
"""Tensors times moments at most, about: what a second of the solver is good for."""
MOMENTS = 24
SMALL = 4_000
"""Tensors below this share of the limit are taken to be there for nothing."""
SCALE = 1000.0
"""The limit, and the step's time, as the solver sees them: far from its tolerances."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Affine:
    """Latency >= ns - per_byte * (bytes - at) at every limit of so many bytes."""

    at: int
    ns: float
    per_byte: float


@dataclass(frozen=True)
class LoopFigures:
    """What is known of a loop's body: no plan of it is below ``peak`` bytes, or ``ns`` in each of its ``parts``, or a
    cut."""

    parts: int
    peak: int
    ns: int
    cuts: tuple[Affine, ...]


def latency_lower_bound(problem: Problem, memory_limit: int) -> int:
    """Nanoseconds that no plan of the problem beats within so many bytes; `NEVER` where there is none."""
    return _rounded(bound_at(problem, memory_limit))


def _rounded(found: Affine | None) -> int:
    return NEVER if found is None else int(found.ns)


def bound_at(problem: Problem, memory_limit: int, loops: Mapping[int, LoopFigures] | None = None) -> Affine | None:
    """The bound at a limit, as a function of it; None where no plan keeps it. ``loops`` are nodes that stand for planned
    bodies; their time in the problem must be that of ``LoopFigures``."""
    base = int(problem.node_ns.sum() + problem.blk_ns.sum())
    if memory_limit < lower_bound(problem):
        return None
    if not problem.n_nodes:
        return Affine(memory_limit, base, 0.0)
    chain = _Chain.of(problem, make_step(problem), memory_limit, loops or {})
    if not len(chain.moments):
        return Affine(memory_limit, base, 0.0)
    return _Relaxation(chain, memory_limit, base, loops or {}).solve()


@dataclass(frozen=True, eq=False)
class _Chain:
    """Moments of a step: nodes v(0), v(1), ... each of which comes before the next one in every order."""

    problem: Problem
    step: NodeStep
    moments: Int32s
    before: Int32s
    """[n] first moment that the node surely runs before, or is; how many there are where there is none."""
    after: Int32s
    """[n] last moment that the node surely runs behind, or is; -1: there is none."""
    large: Bools
    """[s] tensors that count."""

    @classmethod
    def of(cls, problem: Problem, step: NodeStep, limit: int, loops: Mapping[int, LoopFigures]) -> _Chain:
        """Moments that matter under a limit; none where everything may stay."""
        path = _longest_path(problem, loops)
        before, after = _ranks(problem, path)
        large = problem.nbytes * SMALL >= limit
        levels = _levels(problem, path, before, after)
        tensors = int(np.count_nonzero(_reach(problem, after) > before[problem.producer]))
        count = max(4, min(MOMENTS, CELLS // max(1, tensors)))
        chosen = _chosen(levels, limit, count)
        first = np.searchsorted(chosen, before).astype(np.int32)
        last = (np.searchsorted(chosen, after, side="right") - 1).astype(np.int32)
        return cls(problem, step, path[chosen], first, last, large)


def _predecessors(problem: Problem, node: int) -> list[int]:
    return [*problem.extras(node).tolist(), *problem.producer[problem.inputs(node)].tolist()]


def _longest_path(problem: Problem, loops: Mapping[int, LoopFigures]) -> Int32s:
    """The path through most nodes; through loops where that is possible."""
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
    """[n] first node of the path that each is an ancestor of, or is; last one that it descends from, or is."""
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


def _reach(problem: Problem, after: Int32s) -> Int32s:
    """[s] last place of the path at or behind which some reader surely runs; -1: none does."""
    reach = np.full(problem.n_storages, -1, dtype=np.int32)
    np.maximum.at(reach, problem.inputs.idx, after[problem.inputs.places()])
    reach[problem.to_end] = np.iinfo(np.int32).max
    return reach


def _levels(problem: Problem, path: Int32s, before: Int32s, after: Int32s) -> Int64s:
    """[path] bytes at each node of the path that no order avoids without recomputing or swapping."""
    change = np.zeros(len(path) + 1, dtype=np.int64)
    made = before[problem.producer]
    reach = np.minimum(_reach(problem, after), len(path) - 1)
    reach = np.maximum(reach, np.where(after[problem.producer] == made, made, -1))  # outputs of the path itself
    over = reach >= made
    np.add.at(change, made[over], problem.nbytes[over])
    np.add.at(change, reach[over] + 1, -problem.nbytes[over])
    levels: Int64s = np.cumsum(change)[:-1] + problem.node_ws[path] + problem.persistent_bytes
    return levels


def _chosen(levels: Int64s, limit: int, count: int) -> Int64s:
    """Places to look at: of those above the limit the highest in each of so many stretches, and the last one."""
    above = np.flatnonzero(levels > limit)
    if not len(above):
        return above
    found = [int(part[np.argmax(levels[part])]) for part in np.array_split(above, min(count, len(above)))]
    return np.unique(found)


@dataclass
class _Rows:
    """A linear program under construction: rows of coefficients, each at most a number."""

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
    """The program of a chain under a limit. Bytes are multiples of the limit / SCALE, times of the step's / SCALE."""

    def __init__(self, chain: _Chain, limit: int, base: int, loops: Mapping[int, LoopFigures]) -> None:
        self.chain, self.limit, self.base, self.loops = chain, limit, base, loops
        self.byte, self.ns = SCALE / max(1, limit), SCALE / max(1, base)
        self.rows = _Rows()
        problem, step, count = chain.problem, chain.step, len(chain.moments)
        made = chain.before[problem.producer]
        reach = _reach(problem, chain.after)
        moves = step.redoable | step.swappable
        counted = chain.large & (made < count)
        self.made, self.reach, self.horizon = made, reach, reach.copy()
        wanted = counted & moves & (reach >= made)
        self._extend_horizons(wanted, counted)
        self.tensors = np.flatnonzero(wanted)
        self.stays = counted & ~moves
        self.fixed = self.stays & ~wanted
        self.kept: dict[tuple[int, int], int] = {}
        self.run: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.load: dict[tuple[int, int], int] = {}
        self.stalls = [self.rows.variable(1.0, upper=SCALE) for _ in range(count + 1)]  # the first: before all
        self.extra: dict[int, int] = {}
        self.room: dict[int, int] = {}

    def _extend_horizons(self, wanted: Bools, counted: Bools) -> None:
        """A tensor is of use for as long as what can be made of it; those which then count are ``wanted``, too."""
        problem, step = self.chain.problem, self.chain.step
        for node in range(problem.n_nodes - 1, -1, -1):
            outputs = problem.outputs(node)
            again = outputs[wanted[outputs] & step.redoable[outputs]]
            if len(again):
                inputs = problem.inputs(node)
                self.horizon[inputs] = np.maximum(self.horizon[inputs], self.horizon[again].max())
                wanted[inputs] |= counted[inputs]

    def solve(self) -> Affine | None:
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        self._variables()
        self._decisions()
        self._loops()
        for at in range(len(self.chain.moments)):
            self._memory(at)
        self._link()
        rows = self.rows
        shape = len(rows.limits), len(rows.costs)
        matrix = csr_matrix((rows.value, (rows.row, rows.column)), shape=shape)
        costs, limits = np.array(rows.costs), np.array(rows.limits)
        lower, upper = np.array(rows.lower), np.array(rows.upper)
        found = linprog(costs, matrix, limits, bounds=np.stack([lower, upper], axis=1), method="highs-ds")
        import os
        if os.environ.get("LBD"): print(found.status, found.message, found.fun); self.found=found
        if found.status == 2:
            return None
        prices: Floats = np.zeros(shape[0]) if found.ineqlin is None else np.minimum(found.ineqlin.marginals, 0.0)
        return self._value(prices, costs - matrix.T @ prices, lower, upper)

    def _value(self, prices: Floats, reduced: Floats, lower: Floats, upper: Floats) -> Affine:
        """The Lagrangian at prices of rows: no solution is below it."""
        rows = self.rows
        limits = np.array(rows.limits)
        value = float(limits @ prices + np.where(reduced > 0, reduced * lower, reduced * upper).sum()) / self.ns
        rooms = list(self.room.values())
        per_byte = -float(prices[rows.of_memory].sum() + np.minimum(reduced[rooms], 0.0).sum()) * self.byte / self.ns
        ns = self.base + max(0.0, value)
        return Affine(self.limit, ns, per_byte if value > 0 else 0.0)

    # -- variables and what binds them ----------------------------------------------------------------------------

    def _variables(self) -> None:
        chain, rows, count = self.chain, self.rows, len(self.chain.moments)
        problem, step = chain.problem, chain.step
        for tensor in self.tensors.tolist():
            for at in range(int(self.made[tensor]), min(count - 1, int(self.horizon[tensor])) + 1):
                stays = self.stays[tensor] and at <= self.reach[tensor]
                self.kept[tensor, at] = rows.variable(lower=1.0 if stays else 0.0)
                if step.swappable[tensor]:
                    self.host[tensor, at] = rows.variable()
                    self.load[tensor, at] = rows.variable()
                maker = int(problem.producer[tensor])
                if step.redoable[tensor] and (maker, at) not in self.run:
                    self.run[maker, at] = rows.variable(int(problem.redo_ns[maker]) * self.ns)

    def _ways(self, tensor: int, at: int) -> list[int]:
        """How a tensor comes to be on the device between a moment and the next."""
        maker = int(self.chain.problem.producer[tensor])
        again = self.run.get((maker, at)) if self.chain.step.redoable[tensor] else None
        found = (self.kept.get((tensor, at)), self.load.get((tensor, at)), again)
        return [variable for variable in found if variable is not None]

    def _decisions(self) -> None:
        rows, problem, chain = self.rows, self.chain.problem, self.chain
        count = len(chain.moments)
        needs = self._needs()
        for tensor in self.tensors.tolist():
            for at in range(int(self.made[tensor]), count):
                if (tensor, at) not in self.kept:
                    break
                ways = [(each, -1.0) for each in self._ways(tensor, at)]
                following = self.kept.get((tensor, at + 1))
                if following is not None:
                    rows.at_most([(following, 1.0), *ways], 0.0)
                host = self.host.get((tensor, at))
                if host is not None:
                    rows.at_most([(self.load[tensor, at], 1.0), (host, -1.0)], 0.0)
                    if following is not None:
                        apart = [way for way in ways if way[0] != self.load[tensor, at]]
                        later = self.host[tensor, at + 1]
                        rows.at_most([(following, 1.0), (later, 1.0), (host, -1.0), *apart], 0.0)
            for at, until in needs.get(tensor, ()):
                ways = [(self.kept[tensor, at], -1.0)]
                for each in range(at, until):
                    if (tensor, each) in self.kept:
                        ways += [(way, -1.0) for way in self._ways(tensor, each) if way != self.kept[tensor, each]]
                rows.at_most(ways, -1.0)
        there = np.zeros(problem.n_storages, dtype=np.bool_)
        there[self.tensors] = True
        for (node, at), variable in self.run.items():
            for tensor in problem.inputs(node).tolist():
                if there[tensor]:
                    rows.at_most([(variable, 1.0), *((way, -1.0) for way in self._ways(tensor, at))], 0.0)

    def _needs(self) -> dict[int, list[tuple[int, int]]]:
        """Of each tensor the stretches of moments in which some reader surely runs: (behind which, up to which)."""
        chain, problem = self.chain, self.chain.problem
        place = {node: at for at, node in enumerate(chain.moments.tolist())}
        shortest: dict[int, dict[int, int]] = {}
        for node in range(problem.n_nodes):
            at, until = int(chain.after[node]), int(chain.before[node])
            if at < 0:
                continue
            for tensor in problem.inputs(node).tolist():
                if node in place:  # it is there at this moment: what lies before it is said by k
                    continue
                if (tensor, at) in self.kept:
                    known = shortest.setdefault(tensor, {})
                    known[at] = min(known.get(at, until), until)
        return {tensor: sorted(found.items()) for tensor, found in shortest.items()}

    def _loops(self) -> None:
        """The room that a loop's body has, and the time that it takes beyond its least."""
        for node, loop in self.loops.items():
            room = self.rows.variable(lower=0.0, upper=max(0, self.limit - loop.peak) * self.byte)
            extra = self.rows.variable(float(loop.parts), upper=SCALE)
            self.room[node], self.extra[node] = room, extra
            for cut in loop.cuts:  # extra >= cut.ns - per_byte * (peak + room - at) - ns
                steep = cut.per_byte * self.ns / self.byte
                known = cut.ns - cut.per_byte * (loop.peak - cut.at) - loop.ns
                self.rows.at_most([(extra, -1.0), (room, -steep)], -known * self.ns)

    # -- memory and link ------------------------------------------------------------------------------------------

    def _memory(self, at: int) -> None:
        """Bytes while a moment's node runs."""
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
            if len(reusable) == 1 and (reusable[0], at) in self.kept:  # its memory is free only if it is not kept
                terms.append((self.kept[reusable[0], at], size * self.byte))
        inside = {*own, *problem.outputs(node).tolist()}
        for tensor in self.tensors.tolist():
            variable = self.kept.get((tensor, at))
            if variable is not None and tensor not in inside:
                terms.append((variable, int(problem.nbytes[tensor]) * self.byte))
        if node in self.room:
            terms.append((self.room[node], 1.0))
        for tensor in own:  # what is read now was brought back before
            if at and self.made[tensor] < at and (tensor, at - 1) in self.kept:
                self.rows.at_most([(way, -1.0) for way in self._ways(tensor, at - 1)], -1.0)
        self.rows.of_memory.append(len(self.rows.limits))
        self.rows.at_most(terms, (self.limit - fixed) * self.byte)

    def _link(self) -> None:
        """What is on the host was stored before; what is loaded afterwards takes time then."""
        chain, problem = self.chain, self.chain.problem
        if problem.xfer_ns_per_byte <= 0.0 or not self.host:
            return
        count = len(chain.moments)
        times = problem.nbytes * (problem.xfer_ns_per_byte * self.ns)
        stored: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        loaded: list[tuple[int, float]] = []
        for (tensor, at), variable in self.host.items():
            stored[at].append((int(chain.after[problem.producer[tensor]]), variable))
        tensor_of = {variable: float(times[tensor]) for (tensor, _), variable in self.host.items()}
        block_after = self._block_after()
        for at in range(count):
            for since in range(-1, at):
                copies = [(variable, tensor_of[variable]) for made, variable in stored[at] if made >= since]
                if copies:
                    self._in_time(copies, self._spent(since, at, block_after), since, at)
        by_moment: list[list[tuple[int, float]]] = [[] for _ in range(count)]
        for (tensor, at), variable in self.load.items():
            by_moment[at].append((variable, float(times[tensor])))
        for at in reversed(range(count)):
            loaded += by_moment[at]
            self._in_time(loaded, self._spent(at, count, block_after, within=True), at, count)

    def _in_time(self, copies: list[tuple[int, float]], spent: tuple[int, Bools], since: int, until: int) -> None:
        """Copies take no longer than the nodes between two moments, what runs again there, and stalls."""
        time, ran = spent
        terms = [*copies, *((self.stalls[at + 1], -1.0) for at in range(since, until))]
        for (node, at), variable in self.run.items():
            if since <= at < until:
                terms.append((variable, -int(self.chain.problem.redo_ns[node]) * self.ns))
        terms += [(extra, -float(self.loops[node].parts)) for node, extra in self.extra.items() if ran[node]]
        self.rows.at_most(terms, time * self.ns)

    def _spent(self, since: int, until: int, block_after: Int32s, *, within: bool = False) -> tuple[int, Bools]:
        """Time of all that may run behind one moment and before another one; with the first one if ``within``."""
        chain, problem = self.chain, self.chain.problem
        ran: Bools = (chain.before > since) & (chain.after < until)
        if within:
            ran[chain.moments[since]] = True
        return int(problem.node_ns[ran].sum() + problem.blk_ns[block_after < until].sum()), ran

    def _block_after(self) -> Int32s:
        """[b] last moment that each update block surely runs behind."""
        chain, problem = self.chain, self.chain.problem
        found = np.full(problem.n_blocks, -1, dtype=np.int32)
        writers = chain.after[chain.step.last_write[problem.block_inputs.idx]]
        np.maximum.at(found, problem.block_inputs.places(), writers)
        readers = chain.step.block_after
        np.maximum.at(found, readers.places(), chain.after[readers.idx])
        return found

