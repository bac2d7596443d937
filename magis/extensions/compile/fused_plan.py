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
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magis.cost.signature import signature
from magis.errors import UsageError
from magis.extensions.compile.fused_stretches import FusedStretch, stretches_of
from magis.fission.proof import last_part
from magis.graph import STRETCH, Arg, Graph, Op, Ref, Scalar, Value
from magis.graph.hazards import is_pure_view
from magis.ops.call import resolve, to_torch
from magis.ops.raising import may_raise
from magis.runtime.codegen import CompiledPlan, CompiledStretch
from magis.runtime.measure import window_peak

KEPT = 1024
"""Most functions that a compiler keeps for its next plan."""


@dataclass(frozen=True)
class _Function:
    """A compiled stretch, the bytes that it allocates for each of its outputs, and its scratch."""

    call: CompiledStretch
    sizes: tuple[int, ...]
    scratch: int


class PlanCompiler:
    """Compiler of plans, which keeps the functions of their stretches: plans of one step have many in common."""

    def __init__(self) -> None:
        self._functions: OrderedDict[str, _Function | None] = OrderedDict()

    def __call__(self, graph: Graph) -> CompiledPlan:
        """Return a plan with its stretches compiled. Raises UsageError where inductor cannot compile here."""
        builder = _PlanBuilder(self)
        fused = builder.fused(graph)
        return CompiledPlan(fused, builder.functions, builder.scratch, builder.operators, builder.count)

    def function(self, graph: Graph, stretch: FusedStretch) -> _Function | None:
        """Return the function of a stretch, compiled if it is the first of its kind; None if results of inductor's
        code lie otherwise than the plan's, or share memory with each other or with inputs that are used later."""
        key = f"{torch.get_num_threads()} threads\n{stretch.key(graph)}"  # in the code
        if key not in self._functions:
            self._functions[key] = _function(graph, stretch)
        self._functions.move_to_end(key)
        while len(self._functions) > KEPT:
            self._functions.popitem(last=False)
        return self._functions[key]


class _PlanBuilder:
    """The functions of one plan's stretches by name, and their scratch by signature."""

    def __init__(self, compiler: PlanCompiler) -> None:
        self.functions: dict[str, CompiledStretch] = {}
        self.scratch: dict[str, int] = {}
        self.operators = self.count = 0
        self._compiler = compiler
        self._names: dict[int, str] = {}  # id of a function -> its name

    def fused(self, graph: Graph) -> Graph:
        """Return the graph with stretches as operators, in the bodies of loops as well."""
        ops: list[Op] = []
        storages = dict(graph.storages)
        for part in stretches_of(graph, may_raise(graph)):
            if isinstance(part, FusedStretch):
                function = self._compiler.function(graph, part)
                if function is None:
                    ops += part.ops
                    continue
                for value, nbytes in zip(part.outputs, function.sizes, strict=True):
                    storage = graph.values[value].storage
                    storages[storage] = replace(storages[storage], nbytes=nbytes)
                name = self._names.setdefault(id(function), f"{STRETCH}{len(self._names)}")
                self.functions[name] = function.call
                ops += [_operator(part, name), *part.behind]
                self.scratch[signature(ops[-1 - len(part.behind)], graph.values)] = function.scratch
                self.operators += sum(not is_pure_view(graph.values, op) for op in part.ops)
                self.count += 1
            elif part.body is not None and last_part(part, graph.values) is None:
                ops.append(replace(part, body=replace(part.body, graph=self.fused(part.body.graph))))
            else:
                ops.append(part)
        return replace(graph, storages=storages, ops=tuple(replace(op, id=number) for number, op in enumerate(ops)))


def _operator(stretch: FusedStretch, name: str) -> Op:
    """Return the operator that stands for a stretch in the plan."""
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for op in stretch.ops:
        for storage, version in op.reads:
            reads.setdefault(storage, version)
        writes.update(op.writes)
    first = next((op for op in stretch.ops if op.phase == "update"), stretch.ops[0])
    return Op(
        0, name, (*map(Ref, stretch.inputs), *map(Scalar, stretch.numbers)), (), tuple(stretch.outputs), many=True,
        reads=tuple(reads.items()), writes=tuple(writes.items()), phase=first.phase, module=first.module,
    )  # fmt: skip


def _function(graph: Graph, stretch: FusedStretch) -> _Function | None:
    """Compile a stretch and look at its results on made-up tensors; return None if these cannot take the plan's
    place."""
    call = _compiled(graph.values, stretch)
    given = _given(graph, stretch, {})
    kept = {
        each.untyped_storage().data_ptr()
        for value, each in zip(stretch.inputs, given, strict=False)
        if value not in stretch.given
    }
    results = call([*given])
    alike = all(
        (tuple(each.shape), each.stride(), each.dtype) == (value.shape, value.stride, getattr(torch, value.dtype))
        for each, value in zip(results, map(graph.values.__getitem__, stretch.outputs), strict=True)
    )
    own = {each.untyped_storage().data_ptr() for each in results}
    if not alike or len(own) < len(results) or not own.isdisjoint(kept):
        return None
    sizes = tuple(each.untyped_storage().nbytes() for each in results)
    del given, results
    return _Function(call, sizes, _scratch(graph, stretch, call, sum(sizes)))


def _compiled(values: Mapping[int, Value], stretch: FusedStretch) -> CompiledStretch:
    """Compile a stretch: the function takes a list of its inputs and numbers, which it empties."""
    try:
        traced, given, mode = _traced(values, stretch)
        (end,) = traced.graph.find_nodes(op="output")
        end.meta["user_visible_output_idxs"] = list(range(len(stretch.outputs)))  # these keep the plan's strides
        context = TracingContext(mode)
        taken = [number for number, value in enumerate(stretch.inputs) if value in stretch.given]
        context.fw_metadata = ViewAndMutationMeta([], [], 0, False, [], [], [], [], [], bw_donated_idxs=taken)
        with torch.no_grad(), tracing(context), inductor.patch(size_asserts=False, cpp_wrapper=False):
            found: Any = compile_fx_inner(traced, given, is_inference=True, is_backward=True, layout_opt=False)
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
    freed = {place for place, value in zip(places, stretch.inputs, strict=False) if value in stretch.freed}
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if node.args[0] in freed:
            traced.graph.erase_node(node)
    for place, value in zip(places, stretch.inputs, strict=False):
        if value in stretch.given:  # named otherwise, as inductor's cache of code does not know it else
            place.name = place.target = f"given_{place.name}"
    traced.graph.eliminate_dead_code()
    traced.recompile()
    with mode:
        joint_graph_passes(traced)
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


def _scratch(graph: Graph, stretch: FusedStretch, call: CompiledStretch, made: int) -> int:
    """Return the bytes that a stretch needs at its peak beyond its inputs and the bytes that it makes, measured on
    made-up tensors; less than 0 if inputs are freed before outputs are made, or become outputs."""
    storage_of = {value: graph.values[value].storage for value in stretch.inputs}
    dying = {storage_of[value] for value in stretch.freed}
    kept = {
        storage_of[value]: tensor.untyped_storage()
        for value, tensor in zip(stretch.inputs, _given(graph, stretch, {}), strict=False)
        if storage_of[value] not in dying
    }
    peak = window_peak(lambda: call(_given(graph, stretch, kept))).peak_bytes
    return peak - made - sum(graph.storages[each].nbytes for each in dying)
