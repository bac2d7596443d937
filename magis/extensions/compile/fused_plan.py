"""`magis.optimize(..., compile=True)`: the stretches of a plan as inductor's code.

Each stretch (`fused_stretches.py`) is traced to one fx graph of functional operators, and compiled by inductor once for
all stretches alike. In the plan it is then one operator, which frees its inputs itself when it is done with them. Its
scratch is measured as that of torch's kernels is: on made-up tensors, under a profile of the allocator.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magis.cost.signature import signature
from magis.errors import UsageError
from magis.extensions.compile.fused_stretches import FusedStretch, stretches_of
from magis.fission.proof import last_part
from magis.graph import STRETCH, Arg, Graph, Op, Ref, Scalar, Value
from magis.graph.hazards import is_pure_view, lifetimes
from magis.ops.call import resolve, to_torch
from magis.ops.raising import may_raise
from magis.runtime.codegen import CompiledPlan, CompiledStretch
from magis.runtime.measure import window_peak

KEPT = 1024
"""Most functions that are kept for the next plan of this process."""


@dataclass(frozen=True)
class _Function:
    """A compiled stretch, and the bytes that it allocates for each of its outputs."""

    call: CompiledStretch
    sizes: tuple[int, ...]


_functions: OrderedDict[str, _Function | None] = OrderedDict()


def compiled_plan(graph: Graph) -> CompiledPlan:
    """Return a plan with its stretches compiled. Raises UsageError where inductor cannot compile here."""
    builder = _PlanCompiler()
    fused = builder.fused(graph)
    return CompiledPlan(fused, builder.functions, builder.scratch, builder.operators, builder.count)


class _PlanCompiler:
    """Compiler of the stretches of one plan: their functions by name, and their scratch by signature."""

    def __init__(self) -> None:
        self.functions: dict[str, CompiledStretch] = {}
        self.scratch: dict[str, int] = {}
        self.operators = self.count = 0
        self._known: dict[tuple[str, tuple[bool, ...]], tuple[str, int]] = {}

    def fused(self, graph: Graph) -> Graph:
        """Return the graph with stretches as operators, in the bodies of loops as well."""
        ops: list[Op] = []
        storages = dict(graph.storages)
        placed: list[tuple[int, FusedStretch, str, CompiledStretch]] = []
        for part in stretches_of(graph, may_raise(graph)):
            if isinstance(part, FusedStretch):
                key = part.key(graph.values)
                function = _function(graph, part, key)
                if function is None:
                    ops += part.ops
                    continue
                for value, nbytes in zip(part.outputs, function.sizes, strict=True):
                    storage = graph.values[value].storage
                    storages[storage] = replace(storages[storage], nbytes=nbytes)
                placed.append((len(ops), part, key, function.call))
                ops += [_operator(part), *part.behind]
                self.operators += sum(not is_pure_view(graph.values, op) for op in part.ops)
            elif part.body is not None and last_part(part, graph.values) is None:
                ops.append(replace(part, body=replace(part.body, graph=self.fused(part.body.graph))))
            else:
                ops.append(part)
        ops = [replace(op, id=number) for number, op in enumerate(ops)]
        found = replace(graph, storages=storages, ops=tuple(ops))
        dies = lifetimes(found).dies
        for position, stretch, key, call in placed:
            freed = tuple(dies.get(graph.values[each].storage) == position for each in stretch.inputs)
            if (key, freed) not in self._known:
                name = f"{STRETCH}{len(self._known)}"
                self._known[key, freed] = name, _scratch(found, stretch, call, freed)
                self.functions[name] = call
            name, nbytes = self._known[key, freed]
            ops[position] = replace(ops[position], target=name)
            self.scratch[signature(ops[position], graph.values)] = nbytes
        self.count += len(placed)
        return replace(found, ops=tuple(ops))


def _operator(stretch: FusedStretch) -> Op:
    """Return the operator that stands for a stretch in the plan."""
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for op in stretch.ops:
        for storage, version in op.reads:
            reads.setdefault(storage, version)
        writes.update(op.writes)
    first = next((op for op in stretch.ops if op.phase == "update"), stretch.ops[0])
    return Op(
        0, STRETCH, (*map(Ref, stretch.inputs), *map(Scalar, stretch.numbers)), (), tuple(stretch.outputs), many=True,
        reads=tuple(reads.items()), writes=tuple(writes.items()), phase=first.phase, module=first.module,
    )  # fmt: skip


def _function(graph: Graph, stretch: FusedStretch, key: str) -> _Function | None:
    """Return the function of a stretch, compiled if it is the first of its kind; None if results of inductor's code
    lie otherwise than the plan's, or share memory with each other or with inputs."""
    key = f"{torch.get_num_threads()} threads\n{key}"  # in the code
    if key not in _functions:
        call = _compiled(graph.values, stretch)
        given = _given(graph, stretch, {})
        memory = {each.untyped_storage().data_ptr() for each in given if isinstance(each, Tensor)}
        results = call([*given])
        alike = all(
            (tuple(each.shape), each.stride(), each.dtype) == (value.shape, value.stride, getattr(torch, value.dtype))
            for each, value in zip(results, map(graph.values.__getitem__, stretch.outputs), strict=True)
        )
        own = {each.untyped_storage().data_ptr() for each in results}
        sizes = tuple(each.untyped_storage().nbytes() for each in results)
        new = alike and len(own) == len(results) and own.isdisjoint(memory)
        _functions[key] = _Function(call, sizes) if new else None
    _functions.move_to_end(key)
    while len(_functions) > KEPT:
        _functions.popitem(last=False)
    return _functions[key]


def _compiled(values: Mapping[int, Value], stretch: FusedStretch) -> CompiledStretch:
    """Compile a stretch: the function takes a list of its inputs and numbers, which it empties."""
    try:
        traced, given, mode = _traced(values, stretch)
        (end,) = traced.graph.find_nodes(op="output")
        end.meta["user_visible_output_idxs"] = list(range(len(stretch.outputs)))  # these keep the plan's strides
        with torch.no_grad(), tracing(TracingContext(mode)), inductor.patch(size_asserts=False, cpp_wrapper=False):
            found: Any = compile_fx_inner(traced, given, is_inference=True, layout_opt=False)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"inductor cannot compile a part of this plan: {first.strip()}", hint="leave out compile=True"
        ) from error
    function: CompiledStretch = found.current_callable
    count = len(stretch.inputs)
    if not stretch.numbers:
        return function

    def with_numbers(given: list[Any]) -> Sequence[Tensor]:
        given[count:] = [torch.tensor(each, dtype=torch.float64) for each in given[count:]]
        return function(given)

    return with_numbers


def _traced(values: Mapping[int, Value], stretch: FusedStretch) -> tuple[fx.GraphModule, list[Tensor], FakeTensorMode]:
    """Return the fx graph of a stretch, in functional operators and final copies to memory that it writes."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip(stretch.inputs, given, strict=False))
        numbers = dict(zip(stretch.numbers, given[len(stretch.inputs) :], strict=True))
        for value, (view, base) in stretch.again.items():
            if view is None:
                tensors[value] = tensors[base]
            else:
                _call(view, tensors, numbers)
        for op in stretch.ops:
            _call(op, tensors, numbers)
        return tuple(tensors[value] for value in stretch.outputs)

    mode = FakeTensorMode()
    with mode, torch.no_grad():
        given = [
            torch.empty_strided(each.shape, each.stride, dtype=getattr(torch, each.dtype))
            for each in map(values.__getitem__, stretch.inputs)
        ]
        given += [torch.empty((), dtype=torch.float64) for _ in stretch.numbers]
        functional = torch.func.functionalize(run)
        traced = make_fx(functional, decomposition_table=select_decomp_table())(*given)
    places = traced.graph.find_nodes(op="placeholder")
    forgotten = {place for place, value in zip(places, stretch.inputs, strict=False) if value in stretch.forgotten}
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in forgotten:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced, given, mode


def _call(op: Op, tensors: dict[int, Tensor], numbers: Mapping[str, Tensor]) -> None:
    """Call an operator on traced tensors, with numbers as tensors without dimensions, and keep its results."""

    def torch_of(arg: Arg) -> Any:
        if isinstance(arg, Scalar):
            return numbers[arg.name]
        return to_torch(arg, tensors, {})

    args, named = [torch_of(arg) for arg in op.args], {name: torch_of(arg) for name, arg in op.kwargs}
    if op.scalars():
        made = _with_tensors(op.target.split(".")[1].rstrip("_"), *args, **named)
        made = args[0].copy_(made) if op.target.split(".")[1].endswith("_") else made
    elif op.target == "aten.native_batch_norm.default" and args[3] is not None:  # says that it writes the statistics
        made = resolve("aten._native_batch_norm_legit.default")(*args)
    else:
        made = resolve(op.target)(*args, **named)
    results = zip(op.outputs, made if op.many else [made], strict=True)
    tensors.update((value, tensor) for value, tensor in results if value is not None)


def _with_tensors(name: str, first: Tensor, *others: Any, alpha: Any = 1, value: Any = 1) -> Tensor:
    """Compute an operator of an update whose numbers are tensors, which torch's own does not take."""
    made: Any
    if name in ("add", "sub"):
        made = first + others[0] * alpha * (1 if name == "add" else -1)
    elif name in ("addcdiv", "addcmul"):
        made = first + (others[0] / others[1] if name == "addcdiv" else others[0] * others[1]) * value
    elif name == "lerp":
        made = first + (others[0] - first) * others[1]
    else:
        made = first * others[0] if name == "mul" else first / others[0]
    tensor: Tensor = made
    return tensor


def _given(graph: Graph, stretch: FusedStretch, memory: Mapping[int, torch.UntypedStorage]) -> list[Any]:
    """Return made-up arguments of a stretch, on this memory by storage, else on new memory."""
    found = dict(memory)
    given: list[Any] = []
    for value in map(graph.values.__getitem__, stretch.inputs):
        if value.storage not in found:
            zeros = torch.zeros(graph.storages[value.storage].nbytes, dtype=torch.uint8)
            found[value.storage] = zeros.untyped_storage()
        whole = torch.empty(0, dtype=getattr(torch, value.dtype))
        given.append(whole.set_(found[value.storage], value.offset, value.shape, value.stride))
    return [*given, *(1.0 for _ in stretch.numbers)]


def _scratch(graph: Graph, stretch: FusedStretch, call: CompiledStretch, freed: Sequence[bool]) -> int:
    """Return the bytes that a stretch needs at its peak beyond its inputs and outputs, measured on made-up tensors;
    less than 0 if inputs are freed before outputs are made. ``freed`` says which inputs die in it."""
    values = [graph.values[value] for value in stretch.inputs]
    dying = {value.storage for value, dies in zip(values, freed, strict=True) if dies}
    kept = {
        value.storage: tensor.untyped_storage()
        for value, tensor in zip(values, _given(graph, stretch, {}), strict=False)
        if value.storage not in dying
    }
    peak = window_peak(lambda: call(_given(graph, stretch, kept))).peak_bytes
    made = {graph.values[value].storage for value in stretch.outputs}
    return peak - sum(graph.storages[each].nbytes for each in (*dying, *made))
