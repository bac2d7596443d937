"""What tests compare with: eager PyTorch, the allocator's own count, and interpreters that are slow and obvious."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from magis.capture import Captured, capture
from magis.cost.signature import signature
from magis.graph import Graph, Op, Value, every_op
from magis.graph.loop_rules import ADDSUM, MERGES
from magis.ops.call import call
from magis.ops.optimizers import scalars
from magis.rewrite.realize import GENERATOR_BYTES
from magis.runtime.measure import tensor_peak, window_peak
from magis.runtime.scratch import measure_workspaces
from magis.runtime.steps import EagerStep, GraphStep, Step
from magis.runtime.swap_streams import HostMemory
from magis.simulate.compiled_problem import redo_form
from tests.nets import Built
from tests.plain_allocator import PlainAllocator


class Workspaces:
    """Scratch bytes of operators, measured in isolation and remembered by signature."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def learn(self, *graphs: Graph) -> None:
        """Measure whatever operators of the graphs, or of their repetitions, are not known yet."""
        missing: dict[str, tuple[Op, Mapping[int, Value]]] = {}
        for graph in graphs:
            for once, values in every_op(graph):
                for op in (once, redo_form(once, graph)):
                    key = signature(op, values)
                    if key not in self._known and not op.target.startswith("magis."):
                        missing[key] = (op, values)
        if missing:
            self._known |= measure_workspaces(missing.values())

    def of(self, graph: Graph) -> Callable[[Op, Mapping[int, Value]], int]:
        """The workspace of each operator of the graph; a KeyError for one that refused to be measured."""
        self.learn(graph)

        def workspace(op: Op, values: Mapping[int, Value]) -> int:
            if op.target in ("magis.rng_save", "magis.rng_enter"):
                return GENERATOR_BYTES  # torch makes a tensor of the generator's state
            if op.target in MERGES:
                whole, *taken = (values[value] for value in op.inputs())
                size = sum(4 * each.numel for each in taken if each.dtype != whole.dtype)
                return size + (whole.nbytes if op.target == ADDSUM else 0)
            return 0 if op.target.startswith("magis.") else self._known[signature(op, values)]

        return workspace


def workspaces() -> Workspaces:
    """One store for the whole test run and each number of threads."""
    return _workspaces(torch.get_num_threads())


@functools.cache
def _workspaces(_threads: int) -> Workspaces:
    return Workspaces()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's operators on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Costs:
    """Measured workspaces and made-up times, for ``compile_problem``."""

    def __init__(self, graph: Graph, *, rounding: int = 1, link_bytes_per_s: float = 12e9) -> None:
        self._workspace = workspaces().of(graph)
        self.rounding = rounding
        self.link_bytes_per_s = link_bytes_per_s
        self.copy_ns = 0

    def nanoseconds(self, op: Op, values: Mapping[int, Value]) -> int:
        return 1000 + sum(values[value].nbytes for value in op.made())

    def workspace(self, op: Op, values: Mapping[int, Value]) -> int:
        return self._workspace(op, values)


def captured(net: Built) -> Captured:
    return capture(
        net.module, net.inputs, net.targets, net.loss_fn, net.rule, explicit_attention=net.explicit_attention
    )


def eager_step(net: Built) -> EagerStep:
    """Eager's step on a copy of the module."""
    module = copy.deepcopy(net.module)
    return EagerStep(module, net.inputs, net.targets, net.loss_fn, net.rule, explicit_attention=net.explicit_attention)


def graph_step(graph: Graph, net: Built) -> GraphStep:
    """The graph's step on a copy of the module."""
    return GraphStep(graph, copy.deepcopy(net.module), net.inputs, net.targets, net.rule)


def history(step: Step, count: int = 3) -> list[dict[str, Tensor]]:
    """Everything that a step leaves behind, after each of ``count`` steps; the seeds are those of every history."""
    found = []
    for number in range(count):
        torch.manual_seed(number)
        step.prepare()
        step.run()
        found.append(_left_behind(step))
    return found


def observed(step: Step, persistent: int) -> tuple[list[dict[str, Tensor]], int, int]:
    """The history of two steps, and peak and tensor bytes, as ``measured``, of the second and of the first."""
    torch.manual_seed(0)
    step.prepare()
    tensors = tensor_peak(step.run)
    found = [_left_behind(step)]
    torch.manual_seed(1)
    step.prepare()
    peak = window_peak(step.run).peak_bytes
    found.append(_left_behind(step))
    return found, peak + persistent, tensors + persistent


def _left_behind(step: Step) -> dict[str, Tensor]:
    return {
        "loss": step.results()[0].detach().clone(),
        "random": torch.get_rng_state(),
        **{name: tensor.detach().clone() for name, tensor in step.module.state_dict().items()},
        **{f"state {name}": tensor.clone() for name, tensor in step.state().items()},
    }


def differences(expected: Sequence[Mapping[str, Tensor]], seen: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Names of whatever is not equal, bit for bit; "step 1: weight"."""
    found = []
    for number, (left, right) in enumerate(zip(expected, seen, strict=True)):
        found += [f"step {number}: {name} only on one side" for name in sorted(left.keys() ^ right.keys())]
        found += [f"step {number}: {name}" for name in left if name in right and not same(left[name], right[name])]
    return found


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, not-a-number included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    plain = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (left, right)]
    # one element or none may keep an odd stride, which no view of bytes takes
    raw = [t.as_strided(t.shape, (1,)).view(torch.uint8) for t in plain]
    return torch.equal(*raw)


def measured(step: Step, persistent: int) -> tuple[int, int]:
    """Peak bytes and tensor bytes of a step by the allocator's count; warm, so that state exists already."""
    step.prepare()
    step.run()
    step.prepare()
    peak = window_peak(step.run).peak_bytes
    step.prepare()
    return peak + persistent, tensor_peak(step.run) + persistent


def interpret(
    graph: Graph, net: Built, order: Sequence[int] | None = None, *, all_values: bool = False
) -> dict[str, Tensor]:
    """Run the operators one by one in the given order of positions, on copies; everything named afterwards.

    Independent of the generated code: no tensor is ever forgotten. Outputs of the step are named "output 0", ...;
    with ``all_values`` the tensors of all values are returned instead, named by their ids.
    """
    bound = graph_step(graph, net)
    tensors = dict(zip(graph.inputs, bound._tensors, strict=True))
    host = HostMemory()
    kept: dict[int, Any] = {}  # what lies on the host
    torch.manual_seed(0)
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        for position in range(len(graph.ops)) if order is None else order:
            op = graph.ops[position]
            if op.target.startswith("magis."):
                given = [tensors[v] if v in tensors else kept[v] for v in op.inputs()]
                result = getattr(host, op.target.removeprefix("magis."))(*given)
                for value in op.made():
                    (tensors if isinstance(result, Tensor) else kept)[value] = result
            else:
                results = call(op, tensors, scalars(net.rule, 1))
                tensors |= {v: t for v, t in zip(op.outputs, results, strict=True) if v is not None and t is not None}
    if all_values:
        return {str(value): tensor for value, tensor in tensors.items()}
    named = {graph.values[value].name: tensors[value].detach().clone() for value in graph.inputs}
    return named | {f"output {n}": tensors[v].detach().clone() for n, v in enumerate(graph.outputs)}


def lives(graph: Graph, deaths: Mapping[int, int] | None, storage: int) -> range:
    """Positions at which a temporary storage is in memory, looked up operator by operator; ``deaths`` are eager's own
    lifetimes."""
    touched = [
        position
        for position, op in enumerate(graph.ops)
        if any(graph.values[value].storage == storage for value in (*op.inputs(), *op.made()))
    ]
    if not touched:
        return range(0)
    last = touched[-1]
    if deaths is not None:
        last = max(deaths[storage] - 1, touched[0]) if storage in deaths else len(graph.ops)
    if any(graph.values[value].storage == storage for value in graph.outputs):
        last = len(graph.ops)
    return range(touched[0], last + 1)


def no_scratch(op: Op, values: Mapping[int, Value]) -> int:
    """Operators without a workspace."""
    return 0


def plainly_reserved(
    graph: Graph, workspace: Callable[[Op, Mapping[int, Value]], int], deaths: Mapping[int, int] | None = None
) -> int:
    """What that allocator holds after two steps; ``deaths``: after how many operators eager frees a storage."""
    allocator = PlainAllocator()
    for storage in sorted(graph.storages):
        if graph.storages[storage].persistent:
            allocator.allocate(-storage - 1, graph.storages[storage].nbytes)
    for _ in range(2):
        _run_plainly(graph, workspace, deaths, allocator, 0)
    return allocator.reserved


def _run_plainly(
    graph: Graph,
    workspace: Callable[[Op, Mapping[int, Value]], int],
    deaths: Mapping[int, int] | None,
    allocator: PlainAllocator,
    base: int,
) -> None:
    """Names of allocations begin at ``base``, those of a loop's parts behind all of its surroundings."""
    above = base + max(graph.storages) + 2
    held: set[int] = set()
    returned = {graph.values[value].storage for value in graph.outputs}
    for position, op in enumerate(graph.ops):
        for value in op.made():
            storage = graph.values[value].storage
            touched = any(
                graph.values[each].storage == storage
                for earlier in graph.ops[:position]
                for each in (*earlier.inputs(), *earlier.made())
            )
            if graph.storages[storage].kind == "temporary" and storage not in held and not touched:
                held.add(storage)
                allocator.allocate(base + storage, graph.storages[storage].nbytes)
        if op.body is not None:
            for _ in range(op.body.parts):
                _run_plainly(op.body.graph, workspace, None, allocator, above)
        else:
            allocator.allocate(above, workspace(op, graph.values))
            allocator.release(above)
        later = {
            graph.values[each].storage
            for other in graph.ops[position + 1 :]
            for each in (*other.inputs(), *other.made())
        }
        for storage in sorted(held):
            over = storage not in later if deaths is None else deaths.get(storage, len(graph.ops) + 1) <= position + 1
            if over and storage not in returned:
                held.remove(storage)
                allocator.release(base + storage)
    for storage in held:
        allocator.release(base + storage)
