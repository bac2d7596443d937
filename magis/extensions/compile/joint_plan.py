"""Search for a plan of a joint graph under a limit, and code generation as two fx modules in the plan's order."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from magis.cost.cost_model import RooflineCosts, device_model
from magis.errors import VerifyError
from magis.extensions.compile.compile_options import CompileReport, Options
from magis.extensions.compile.joint_graph import TURN, Joint, kernel_layouts, placeholders
from magis.extensions.compile.joint_swaps import SavedOnHost, over_host
from magis.graph import Arg, Const, Graph, Op, Ref, Value, verify
from magis.ops.call import constant, resolve
from magis.planner.plans import Plan, approached
from magis.planner.traced_model import redo_graph, signatures
from magis.results import Memory
from magis.rewrite.functionalize import functionalize
from magis.rewrite.realize import realize
from magis.runtime.measure import collector_spared
from magis.runtime.scratch import measure_workspaces
from magis.runtime.swap_streams import GeneratorStates
from magis.search.budgeted_evaluator import DEFAULT_BUDGET, Deadline, JudgedPlan, Objective
from magis.search.driver import SearchResult, search
from magis.simulate.compiled_problem import Compiled, compile_problem
from magis.simulate.evaluator import Evaluator, evaluate, expand
from magis.simulate.peak_breakdown import repeats
from magis.simulate.problem import KEEP, RECOMPUTE
from magis.simulate.simulator import MemoryProfile, replay
from magis.units import share_of


@dataclass(frozen=True)
class _Costs:
    """Costs of the device, with 0 for `magis.turn`, which is only a marker."""

    device: RooflineCosts

    @property
    def rounding(self) -> int:
        return self.device.rounding

    @property
    def link_bytes_per_s(self) -> float:
        return self.device.link_bytes_per_s

    @property
    def copy_ns(self) -> int:
        return self.device.copy_ns

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return 0 if op.target == TURN else self.device.nanoseconds(op, values)

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        return 0 if op.target == TURN else self.device.workspace(op, values)


class _Scratch:
    """Workspaces of operators: measured once per signature on a CPU, estimated on other devices."""

    def __init__(self, device: str, options: Options) -> None:
        self._device = device
        self._gpu = torch.cuda.get_device_name() if device == "cuda" else ""
        self._options = options
        self._known: dict[str, int] = {}

    def costs(self, *graphs: Graph) -> _Costs:
        """Return costs that include the workspace of every operator of the graphs."""
        if self._device == "cpu":
            found = {key: item for graph in graphs for key, item in signatures(graph).items()}
            missing = [item for key, item in found.items() if key not in self._known]
            if missing:
                with _disable_current_modes():
                    self._known.update(measure_workspaces(missing))
        costs = device_model(self._device, gpu=self._gpu, workspaces=dict(self._known))
        link = costs.device.link_bytes_per_s if self._options.link is None else self._options.link
        device = replace(costs.device, link_bytes_per_s=link)
        return _Costs(replace(costs, device=device, slack=self._options.limits.slack if link else 0.0))


def turn_of(graph: Graph) -> int:
    """Return the index of the operator `magis.turn`."""
    return next(number for number, op in enumerate(graph.ops) if op.target == TURN)


@collector_spared()
def plan_joint(joint: Joint, options: Options) -> tuple[Graph, CompileReport]:
    """Search for a plan under the limit, and return its verified graph and its report."""
    started = time.perf_counter()
    scratch = _Scratch(joint.device, options)
    source = functionalize(joint.graph)
    costs = scratch.costs(joint.graph, source, redo_graph(source))  # measured at once: each time costs some 0.2 s
    original = replay(joint.graph, costs.workspace, rounding=costs.rounding)
    compiled = _compiled(source, costs, joint, redraw=True)
    written = _as_written(compiled, joint)
    original_bytes = min(original.peak_bytes, written.peak) if written.flags.any() else original.peak_bytes
    limits = options.limits
    goal = Objective(limits.bytes_of(original_bytes), share_of(limits.latency_ratio, written.latency_ns))

    best = approached(goal, partial(_search_plan, compiled, scratch, options, written))
    if best.peak > (goal.memory_limit or original_bytes) and any(op.target in RNG for op in best.graph.ops):
        # RNG states alone may exceed the limit of a tiny graph: plan without recomputing random operators.
        compiled = _compiled(source, costs, joint, redraw=False)
        written = _as_written(compiled, joint)
        other = approached(goal, partial(_search_plan, compiled, scratch, options, written))
        best = min(best, other, key=lambda plan: (not plan.feasible, plan.peak))
    profile = replay(best.graph, scratch.costs(best.graph).workspace, rounding=costs.rounding)
    report = CompileReport(
        original_bytes=original_bytes,
        planned_bytes=best.peak,
        limit_bytes=goal.memory_limit,
        feasible=best.feasible,
        saved_bytes=_saved_bytes(best.graph, profile),
        latency_ratio=best.latency_ns / max(1, written.latency_ns),
        recomputed=_repeated(best.graph),
        swapped_bytes=repeats(best.graph)[1],
        seconds=time.perf_counter() - started,
        outside=options.outside,
    )
    return best.graph, report


def _compiled(graph: Graph, costs: _Costs, joint: Joint, *, redraw: bool) -> Compiled:
    """Compile a joint graph into arrays, excluding from recomputation the turn, values saved by the user and, without
    ``redraw``, random operators."""
    compiled = compile_problem(graph, costs)
    once = [
        any(op.target == TURN or (op.random and not redraw) or not joint.once.isdisjoint(op.made()) for op in group)
        for group in compiled.nodes
    ]
    redo_ok = compiled.problem.redo_ok & ~np.array(once, dtype=np.bool_)
    return replace(compiled, problem=replace(compiled.problem, redo_ok=redo_ok))


def _as_written(compiled: Compiled, joint: Joint) -> JudgedPlan:
    """Return the plan with the user's own checkpointing: values of checkpointed blocks are recomputed, others kept."""
    problem, values = compiled.problem, compiled.graph.values
    known = {value: values[value].storage for value in joint.nodes if value in values}
    kept = {storage for value, storage in known.items() if value not in joint.again}
    redo = {each for node in np.flatnonzero(problem.redo_ok) for each in problem.outputs(int(node)).tolist()}
    again = {storage for value, storage in known.items() if value in joint.again} - kept
    flags = [RECOMPUTE if at in redo and each in again else KEEP for at, each in enumerate(compiled.storages)]
    plan = np.arange(problem.n_nodes, dtype=np.int32), np.array(flags, dtype=np.int8)
    judged = evaluate(problem, *plan)
    return JudgedPlan(*plan, judged.peak, judged.latency_ns)


def _search_plan(compiled: Compiled, scratch: _Scratch, options: Options, written: JudgedPlan, aim: Objective) -> Plan:
    problem = compiled.problem
    limits = options.limits
    searched = partial(search, problem, aim, budget=limits.budget or DEFAULT_BUDGET)
    found = searched(over=Deadline(limits.seconds).over, allow_swap=False)
    if not found.feasible and written.flags.any():  # never worse than what the user wrote
        other = searched(over=Deadline(limits.seconds).over, allow_swap=False, starts=(written,))
        found = min(found, other, key=lambda each: aim.key(each.peak, each.latency_ns))
    cheap = found.feasible and aim.memory_limit is not None and found.latency_ns <= written.latency_ns
    if problem.xfer_ns_per_byte > 0.0 and not cheap:  # swaps are taken only if they win
        other = _fewer_swaps(searched(over=Deadline(limits.seconds).over), aim)
        found = min(found, other, key=lambda each: aim.key(each.peak, each.latency_ns))
    events = expand(problem, found.order, found.flags)
    graph = realize(compiled, events)
    verify(graph)
    costs = scratch.costs(graph)
    profile = replay(graph, costs.workspace, rounding=costs.rounding)
    return Plan(
        graph=graph,
        planned=Memory(profile.tensor_bytes, profile.peak_bytes),
        latency_ns=found.latency_ns,
        states=found.states,
        stopped_by_seconds=found.stopped_by_seconds,
        feasible=found.feasible,
        workspaces={},
    )


def _fewer_swaps(found: SearchResult, aim: Objective) -> SearchResult:
    """Keep swapped tensors on the device, large ones first, as long as the plan stays as good."""
    problem = found.judge.problem
    evaluator = Evaluator(problem, found.order)
    flags, best = found.flags.copy(), evaluator.quick(found.flags)
    for storage in sorted(np.flatnonzero(evaluator.swapped()).tolist(), key=lambda each: -int(problem.nbytes[each])):
        before, flags[storage] = flags[storage], KEEP
        without = evaluator.quick(flags)
        if aim.key(*without) <= aim.key(*best):
            best = without
        else:
            flags[storage] = before
    return replace(found, flags=flags, peak=best[0], latency_ns=best[1])


def _repeated(graph: Graph) -> tuple[str, ...]:
    """Return the targets of recomputed operators, in order, without views."""
    seen: set[int] = set()
    found = []
    for op in graph.ops:
        made = {graph.values[value].storage for value in op.made()}
        view = not op.writes and made <= {graph.values[value].storage for value in op.inputs()}
        if op.origin is None or view:
            continue
        if op.origin in seen:
            found.append(op.target)
        seen.add(op.origin)
    return tuple(found)


def _saved_bytes(graph: Graph, profile: MemoryProfile) -> int:
    """Return the bytes alive at the turn, without persistent storages, results and tangents, which the caller holds."""
    at = turn_of(graph)
    made = {graph.values[value].storage for op in graph.ops[: at + 1] for value in op.made()}
    held = made & {graph.values[value].storage for value in (*graph.outputs, *graph.ops[at].made())}
    held_bytes = sum(graph.storages[s].nbytes for s in held if not graph.storages[s].persistent)
    return profile.tensors[at] - profile.persistent_bytes - held_bytes


# A planned joint graph as two fx modules, in exactly its order: forward up to the turn, backward after it. Values that
# the backward needs from the forward are extra results of the forward, which autograd saves. Generated code deletes
# every tensor after its last use; both modules take their arguments as a list that they empty, so no other reference
# keeps a saved tensor alive.


def rng_save(device: str) -> Tensor:
    """Return the RNG state as a tensor in numpy's memory, since autograd saves only tensors."""
    return over_host(GeneratorStates(device).rng_save())


def rng_enter(state: Tensor, device: str) -> Tensor:
    """Set the RNG to an earlier state, and return its current state."""
    return over_host(GeneratorStates(device).rng_enter(state.numpy()))


def rng_leave(state: Tensor, device: str) -> None:
    """Restore the RNG state that ``rng_enter`` returned."""
    GeneratorStates(device).rng_leave(state.numpy())


RNG: dict[str, Callable[..., Any]] = {
    "magis.rng_save": rng_save, "magis.rng_enter": rng_enter, "magis.rng_leave": rng_leave,
}  # fmt: skip


def halves(joint: fx.GraphModule, captured: Joint, planned: Graph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward module of a planned joint graph; every node has ``meta["val"]``."""
    primals, tangents = placeholders(joint.graph)
    at = turn_of(planned)
    given = [value for value in planned.ops[at].outputs if value is not None]
    names = dict(zip((*captured.primals, *given), (node.name for node in (*primals, *tangents)), strict=True))
    results = [None if place is None else planned.outputs[place] for place in captured.forward]
    gradients = _gradients(captured, planned)
    saved = crossing(captured, planned)
    fakes = (node.meta["val"] for node in primals)
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), None) or FakeTensorMode()
    swaps = SavedOnHost(captured.device)
    forward = _Half(joint, captured, planned, names, mode, swaps, {})
    forward.take(captured.primals)
    if any(op.target == "magis.store" for op in planned.ops):
        forward.graph.call_function(swaps.join)
    forward.run(planned.ops[:at])
    backward = _Half(joint, captured, planned, names, mode, swaps, {value: forward.fakes[value] for value in saved})
    backward.take((*saved, *given))
    backward.run(planned.ops[at + 1 :])
    return forward.module((*results, *saved)), backward.module(gradients)


def crossing(captured: Joint, planned: Graph) -> tuple[int, ...]:
    """Return the values that the backward takes from the forward, in the order of their first use."""
    at = turn_of(planned)
    known = {value for value in planned.ops[at].outputs if value is not None} | set(captured.constants)
    found: dict[int, None] = {}
    for op in planned.ops[at + 1 :]:
        found.update(dict.fromkeys(value for value in op.inputs() if value not in known))
        known.update(op.made())
    gradients = _gradients(captured, planned)
    found.update(dict.fromkeys(value for value in gradients if value is not None and value not in known))
    return tuple(found)


def _gradients(captured: Joint, planned: Graph) -> list[int | None]:
    return [None if place is None else planned.outputs[place] for place in captured.backward]


@dataclass(frozen=True, eq=False)
class _Half:
    """Builder of the forward's or the backward's fx graph, with fake tensors for its values."""

    joint: fx.GraphModule
    captured: Joint
    planned: Graph
    names: Mapping[int, str]
    mode: FakeTensorMode
    swaps: SavedOnHost
    fakes: dict[int, Any]
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    arriving: dict[int, fx.Node] = field(default_factory=dict)
    """Loaded tensors that no operator has taken yet, by storage."""

    def take(self, values: Sequence[int]) -> None:
        """Add placeholders for values, in order."""
        for value in values:
            node = self.graph.placeholder(self.names.get(value, f"v{value}"))
            if value not in self.fakes:
                self.fakes[value] = self._fake(value)
            self._bind(value, node, self.fakes[value])

    def run(self, ops: Sequence[Op]) -> None:
        """Add the calls of operators, in order; what is loaded is ready for its first use, or at the end."""
        with torch.no_grad(), self.mode, kernel_layouts(self.captured.device):
            for op in ops:
                self._make_ready(self.planned.values[value].storage for value in op.inputs())
                self._add_call(op)
        self._make_ready(tuple(self.arriving))

    def module(self, outputs: Sequence[int | None]) -> fx.GraphModule:
        """Return the finished module with these outputs."""
        node = self.graph.output(tuple(None if value is None else self._node(value) for value in outputs))
        node.meta["val"] = tuple(None if value is None else self.fakes[value] for value in outputs)
        self.graph.lint()
        return fx.GraphModule(self.joint, self.graph)

    def _make_ready(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if storage in self.arriving:
                self.graph.call_function(self.swaps.ready, (self.arriving.pop(storage),))

    def _add_call(self, op: Op) -> None:
        moves = self.swaps.operators
        own = RNG.get(op.target) or moves.get(op.target)
        function: Any = resolve(op.target) if own is None else own
        args = tuple(self._to_torch(arg, self._node) for arg in op.args)
        kwargs = {name: self._to_torch(arg, self._node) for name, arg in op.kwargs}
        if own is not None:
            args = args if op.target in moves else (*args, self.captured.device)
            out: Any = torch.empty(0, dtype=torch.uint8)
            if op.target == "magis.load":
                out = self._fake(op.made()[0])
        else:
            out = function(
                *(self._to_torch(arg, self.fakes.__getitem__) for arg in op.args),
                **{name: self._to_torch(arg, self.fakes.__getitem__) for name, arg in op.kwargs},
            )
        node = self.graph.call_function(function, args, kwargs)
        node.meta["val"] = out
        if op.many:
            for place, value in enumerate(op.outputs):
                if value is not None:
                    self._bind(value, self.graph.call_function(operator.getitem, (node, place)), out[place])
        elif op.outputs and op.outputs[0] is not None:
            self._bind(op.outputs[0], node, out)
        if op.target == "magis.load":
            self.arriving[self.planned.values[op.made()[0]].storage] = node

    def _bind(self, value: int, node: fx.Node, fake: Any) -> None:
        self.nodes[value] = node
        self.fakes[value] = node.meta["val"] = fake

    def _node(self, value: int) -> fx.Node:
        if value not in self.nodes:
            name = self.captured.constants.get(value)
            if name is None:
                raise VerifyError(f"value {value} is not there on its side of the turn")
            self._bind(value, self.graph.get_attr(name), self._fake(value))
        return self.nodes[value]

    def _to_torch(self, arg: Arg, look: Callable[[int], Any]) -> Any:
        if isinstance(arg, Ref):
            self._node(arg.value)  # adds a constant at its first use
            return look(arg.value)
        if isinstance(arg, Const):
            return constant(arg, self.captured.device)
        return [self._to_torch(item, look) for item in arg] if isinstance(arg, tuple) else arg

    def _fake(self, value: int) -> Tensor:
        like = self.planned.values[value]
        with self.mode:
            return torch.empty_strided(
                like.shape, like.stride, dtype=getattr(torch, like.dtype), device=self.captured.device
            )
