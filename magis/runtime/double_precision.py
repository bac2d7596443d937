"""Runs of a step in double precision, as a reference for rounding errors; and the first operator at which measured and
simulated bytes differ.

A plan with fission sums in another order than eager, so that its numbers differ in the last bits. They are accepted if
they are as close to the exact numbers as eager's. The exact numbers come from running the captured operators one by one
in float64, with random numbers drawn in the step's own dtype, so that all three draw equal numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import rustworkx as rx
import torch
from torch import Tensor

from magis.graph import Arg, Const, Graph, Op, Value
from magis.graph.hazards import is_pure_view
from magis.ops.call import call, made_generators, only_acts
from magis.ops.fake_results import IN_TRAINING
from magis.ops.operators import op_info
from magis.runtime.measure import allocations, logged, memory_profile
from magis.simulate.compiled_problem import nodes_and_blocks
from magis.simulate.simulator import MemoryProfile


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if shapes, dtypes and all elements of two tensors are equal; nan equals nan."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(ours, theirs) or bool(agreeing(ours, theirs).all())


def agreeing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a boolean tensor that is True where two tensors are equal; nan equals nan."""
    return (ours == theirs) | (ours.isnan() & theirs.isnan())


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference of unequal elements; nan if one of them is nan."""
    wide = torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64
    apart = ~agreeing(ours, theirs)
    difference = (ours[apart].to(wide) - theirs[apart].to(wide)).abs()
    return float(difference.max()) if difference.numel() else 0.0


def off_by(ours: float, theirs: float) -> float:
    """Return the difference of two numbers as a share of `theirs`; infinity if only one of them is finite."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
    return difference if math.isfinite(difference) else math.inf


SLACK = 2.0
RELATIVE = 1e-6


def least_error(graph: Graph) -> float:
    """Return the relative error of rounding to a step's lowest-precision dtype, at least `RELATIVE`. Eager's own error
    cannot serve as measure for a single number, a loss: it may be 0 by chance."""
    types = {getattr(torch, value.dtype) for value in graph.values.values()}
    return max([RELATIVE, *(torch.finfo(each).eps for each in types if each in (torch.bfloat16, torch.float16))])


def gradient_values(graph: Graph) -> dict[str, int]:
    """Return the value of each parameter's gradient, as the weight update reads it, by parameter name."""
    found = {}
    # an update makes views (of complex tensors as pairs of real numbers): map each to its base
    shown: dict[int, int] = {}
    for op in graph.ops:
        if op.phase == "update" and is_pure_view(graph.values, op):
            shown |= {value: shown.get(op.inputs()[0], op.inputs()[0]) for value in op.made()}
    inputs = (graph.values[value] for value in graph.inputs)
    parameters = {_where_it_lies(each): each.name for each in inputs if each.name.startswith("parameter:")}
    for block in _update_groups(graph):
        made = {value for op in block for value in op.made()}
        written = {storage for op in block for storage, _ in op.writes}
        taken = [shown.get(value, value) for op in block for value in op.inputs()]
        looks = (graph.values[value] for value in taken if graph.values[value].storage in written)
        names = {  # by layout, as a forward that writes to a parameter makes a new value
            parameters[_where_it_lies(each)].removeprefix("parameter:")
            for each in looks
            if _where_it_lies(each) in parameters
        }
        given = {
            value: graph.values[value].storage
            for value in taken
            if value not in made and graph.storages[graph.values[value].storage].kind == "temporary"
        }
        if len(names) == 1 and len(set(given.values())) == 1:
            found[names.pop()] = min(given)
    return found


def _where_it_lies(value: Value) -> tuple[object, ...]:
    return value.storage, value.offset, value.shape, value.stride, value.dtype


def _update_groups(graph: Graph) -> list[list[Op]]:
    """Return the operators that update each parameter, grouped by the values of parameter and optimizer state they
    share. A shared storage of parameters or gradients (``magis.rewrite.rules.merged_weights``) does not join groups."""
    _, blocks = nodes_and_blocks(graph)
    links: rx.PyGraph[int, None] = rx.PyGraph()
    ops = [op for block in blocks for op in block]
    links.add_nodes_from(range(len(ops)))
    made = {value for op in ops for value in op.made()}
    owner: dict[int, int] = {}
    for index, op in enumerate(ops):
        for value in (*op.inputs(), *op.made()):
            if value in made or graph.storages[graph.values[value].storage].persistent:
                links.add_edge(owner.setdefault(value, index), index, None)
    return [[ops[index] for index in sorted(group)] for group in rx.connected_components(links)]


def with_gradients(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """Return the step with its gradients as further outputs, and the names of their parameters."""
    gradients = gradient_values(graph)
    outputs = (*graph.outputs, *gradients.values())
    return replace(graph, outputs=outputs), tuple(gradients)


def exact(
    graph: Graph,
    tensors: Sequence[Tensor],
    outputs: Sequence[int],
    generators: Mapping[str, torch.Generator] | None = None,
    numbers: Mapping[str, float] | None = None,
) -> tuple[list[Tensor], list[float]]:
    """Run the step without its update in float64; return the values of ``outputs``, and a size of the terms of each.

    ``tensors`` are those of ``graph.inputs``, left unchanged, and ``numbers`` the values of its named scalars. The
    second list holds, for each output, the largest root of a sum of squares among the sums that made it; 0 if no sum
    did. The rounding error of a sum is proportional to this root, however small the sum. Random numbers come from the
    default generator and from ``generators``, the step's own.
    """
    drawn_from = {**made_generators(graph), **(generators or {})}
    storages = [graph.values[number].storage for number in graph.inputs]
    known = dict(zip(graph.inputs, _wide_copies(storages, tensors), strict=True))
    ops = [op for op in graph.ops if op.phase != "update" and not only_acts(op.target)]
    last = {number: op.id for op in ops for number in (*op.inputs(), *op.made())}
    kept = set(outputs)
    terms = dict.fromkeys((graph.values[number].storage for number in outputs), 0.0)
    with torch.no_grad():
        for op in ops:
            for storage in terms.keys() & {graph.values[number].storage for number in op.made()}:
                terms[storage] = max(terms[storage], _largest_sum(op, known))
            results = _call_wide(op, known, graph.values, drawn_from, numbers or {})
            known.update(
                {
                    number: wide(made)
                    for number, made in zip(op.outputs, results, strict=True)
                    if number is not None and made is not None
                }
            )
            for number in {*op.inputs(), *op.made()}:
                if last[number] == op.id and number not in kept:
                    known.pop(number, None)
    return [known[number] for number in outputs], [terms[graph.values[number].storage] for number in outputs]


def _largest_sum(op: Op, known: Mapping[int, Tensor]) -> float:
    """Return the largest root of a sum of squares among the sums that an operator computes; 0 if it computes none."""
    given, labels = op.inputs(), op_info(op.target).product
    if op.target == "aten.sum.dim_IntList":
        total = _squares(known[given[0]]).sum(op.args[1])  # type: ignore[arg-type]
    elif len(labels) == 3 and len({len(each) for each in labels}) == 1 and "k" in labels[0]:
        # a product of matrices, or of batches of them, whose last two tensors are the factors
        total = _squares(known[given[-2]]) @ _squares(known[given[-1]])
    else:
        return 0.0
    return float(total.max().sqrt()) if total.numel() else 0.0


def _squares(tensor: Tensor) -> Tensor:
    return wide(tensor).abs().square()


def _wide_copies(storages: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield copies in double precision; copies share storages where the tensors do."""
    counts = Counter(storages)
    memory: dict[tuple[int, torch.dtype], Tensor] = {}
    for storage, tensor in zip(storages, tensors, strict=True):
        if counts[storage] == 1:
            yield wide(tensor.detach().clone())
            continue
        key = storage, tensor.dtype
        if key not in memory:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            memory[key] = wide(tensor.detach().as_strided((elements,), (1,), 0).clone())
        yield memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


_WIDE = {
    **dict.fromkeys(("float32", "bfloat16", "float16"), "float64"),
    **dict.fromkeys(("complex32", "complex64"), "complex128"),
}  # fmt: skip


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def widened(op: Op) -> Op:
    """Return an operator call with float64 and complex128 in place of the floating-point and complex dtypes it
    names."""

    def wide_arg(arg: Arg) -> Arg:
        if isinstance(arg, Const) and arg.kind == "dtype":
            return Const("dtype", _WIDE.get(arg.name, arg.name))
        return tuple(wide_arg(item) for item in arg) if isinstance(arg, tuple) else arg

    args = tuple(wide_arg(arg) for arg in op.args)
    return replace(op, args=args, kwargs=tuple((name, wide_arg(arg)) for name, arg in op.kwargs))


def _call_wide(
    op: Op,
    known: Mapping[int, Tensor],
    values: Mapping[int, Value],
    generators: Mapping[str, torch.Generator],
    numbers: Mapping[str, float],
) -> tuple[Tensor | None, ...]:
    """Call an operator in double precision; in the step's own dtype if it draws random numbers, or has no kernel for
    doubles. In-place writes are then copied back to the wide tensor."""
    if not op.random:
        with suppress(NotImplementedError, RuntimeError):  # a product of groups of rows, say
            return call(widened(op), known, numbers)
    narrow = {number: known[number].to(getattr(torch, values[number].dtype)) for number in dict.fromkeys(op.inputs())}
    with torch.set_grad_enabled(op.target in IN_TRAINING):
        results = call(op, narrow, numbers, generators=generators)
    written = {storage for storage, _ in op.writes}
    for number, tensor in narrow.items():
        if values[number].storage in written:
            known[number].copy_(tensor)
    return tuple(next((known[number] for number, tensor in narrow.items() if tensor is made), made) for made in results)


@dataclass(frozen=True)
class Closeness:
    """Error of a tensor as a ``share`` of the allowed error."""

    name: str
    share: float


def closeness(
    name: str,
    ours: Tensor,
    theirs: Tensor,
    reference: Tensor,
    relative: float = RELATIVE,
    terms: float = 0.0,
) -> Closeness:
    """Compare |ours - exact| with 2 |eager - exact|, or 2 eps `terms` if that is more, + `relative` max |exact|. If
    terms cancel, as in the gradient of the bias of attention's keys, the result is their rounding error only, and
    eager's may be small by chance."""
    if ours.is_floating_point() or ours.is_complex():
        terms *= torch.finfo(ours.dtype).eps
    numbers = theirs.isfinite() | ~agreeing(ours, theirs)  # overflow is eager's, too
    ours, theirs, reference = wide(ours[numbers]), wide(theirs[numbers]), reference[numbers]
    error = (ours - reference).abs().max().item() if ours.numel() else 0.0
    allowed = (theirs - reference).abs().max().item() if ours.numel() else 0.0
    largest = reference.abs().max().item() if ours.numel() else 0.0
    limit = SLACK * max(allowed, terms) + relative * largest
    if not error <= limit:
        return Closeness(name, float("inf") if limit == 0.0 or error != error else error / limit)  # noqa: PLR0124
    return Closeness(name, error / limit if limit else 0.0)


# The first operator at which a step's measured and simulated bytes differ.
# The profiler logs operators and allocations of the step without a dispatch mode. Operators of the graph are matched
# with the log by name and order; the log also has nested calls, and calls that the graph leaves out.

_WITHIN = 60
"""Number of logged calls among which the next operator is searched."""


@dataclass(frozen=True)
class FirstDifference:
    """The first operator whose measured bytes differ from the simulated ones."""

    op: Op
    simulated: int
    measured: int
    """Peak bytes above the step's start while the operator runs."""

    def __str__(self) -> str:
        module = f"module {self.op.module!r}" if self.op.module else "the loss or the root module"
        where = f" ({self.op.line})" if self.op.line else ""
        return (
            f"{self.op.target} in the {self.op.phase} of {module}{where}, "
            f"simulated {self.simulated:,}, measured {self.measured:,} ({self.simulated - self.measured:+,})"
        )


def first_difference(run: Callable[[], object], graph: Graph, profile: MemoryProfile) -> FirstDifference | None:
    """Run the step and return the first logged operator whose bytes differ from `profile`; None if all are equal."""
    with memory_profile() as log:
        kept = run()
    # Times of allocator events, and the bytes allocated after each; frees of older memory do not count.
    live: dict[int, int] = {}
    moments, levels = [-1], [0]
    for event in allocations(log):
        freed = live.pop(event.address, 0)
        if event.nbytes > 0:
            live[event.address] = event.nbytes
        moments.append(event.time_ns)
        levels.append(levels[-1] + max(event.nbytes, 0) - freed)
    del kept
    nodes = (node for node in logged(log) if node.typed[0].name == "TorchOp")
    calls = sorted((node.start_time_ns, node.end_time_ns, node.name) for node in nodes)
    for position, start, end in _positions_in_log(graph, calls):
        measured = max(levels[bisect_left(moments, start) - 1 : bisect_right(moments, end)])
        simulated = profile.peaks[position] - profile.persistent_bytes
        if measured != simulated:
            return FirstDifference(graph.ops[position], simulated, measured)
    return None


def _positions_in_log(graph: Graph, calls: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, int]]:
    """Yield position, start and end of the graph's operators that make or write tensors and are in the log."""
    at, free = 0, 0
    for position, op in enumerate(graph.ops):
        given = {graph.values[value].storage for value in op.inputs()}
        if not op.writes and all(graph.values[value].storage in given for value in op.made()):
            continue  # a view, which may be logged under another operator
        name = "::".join(op.target.split(".")[:2])
        for here in range(at, min(at + _WITHIN, len(calls))):
            start, end, called = calls[here]
            if called == name and start >= free:
                yield position, start, end
                at, free = here + 1, end
                break
