"""Calls in half precision whose sums over the parts of a loop are made in float32.

    gx, gw = convolution_backward(g, x, w)        gx = convolution_backward(g, x, w)
    magis.reduce(whole, gw, "sum")           ->   gw = convolution_backward(g.float(), x.float(), w.float())
                                                  magis.reduce(whole, gw, "sum")

The kernels of these gradients sum in float32 and round once. With every part rounded, a gradient is up to 1.8 times as
far from float64 as eager's. No kernel takes half precision and makes float32, so a part's tensors are converted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace

from magis.cost.shapes import bytes_of, results
from magis.graph import Arg, Const, Graph, Op, Ref, Storage, Value
from magis.graph.loop_rules import REDUCE
from magis.graph.nodes import HALF, with_inputs
from magis.ops.operators import op_info

_COPY = "aten._to_copy.default"
_TO_FLOAT32 = (("dtype", Const("dtype", "float32")), ("memory_format", Const("memory_format", "preserve_format")))
"""Keywords of the conversions; those of a step have no memory format."""


def with_wide_calls(body: Graph) -> Graph:
    """Return a loop's body whose calls make sums over parts in float32, and other results in calls of their own."""
    values, storages, ops = dict(body.values), dict(body.storages), list[Op]()
    summed = _summed(body)
    for op in body.ops:
        sums = {each for each in op.made() if each in summed and values[each].dtype in HALF}
        if not makes_sums(op) or not sums:
            ops.append(op)
            continue
        others = set(op.made()) - sums
        ops += [_of_results(op, others)] if others else []
        wide: dict[int, int] = {}
        for value in (each for each in dict.fromkeys(op.inputs()) if values[each].dtype in HALF):
            looks, memory = values[value], max(storages) + 1
            made = wide[value] = max(values) + 1
            values[made] = Value(made, looks.shape, looks.stride, "float32", memory)
            storages[memory] = Storage(memory, values[made].nbytes, "temporary")
            reads = tuple(pair for pair in op.reads if pair[0] == looks.storage)
            copy = replace(op, target=_COPY, args=(Ref(value),), kwargs=_TO_FLOAT32, outputs=(made,), many=False)
            ops.append(replace(copy, reads=reads, origin=None))
            values.update([(made, looks) for looks, _ in results(ops[-1], values)])
        new = _of_results(with_inputs(op, wide), sums)
        for looks, nbytes in list(results(new, values)):
            values[looks.id] = looks
            storages[looks.storage] = replace(storages[looks.storage], nbytes=nbytes or 0)
        met, versions = dict.fromkeys(values[each].storage for each in new.inputs()), dict(op.reads)
        reads = tuple((storage, versions.get(storage, 0)) for storage in met)
        ops.append(replace(new, reads=reads, origin=None if others else op.origin))
    if len(ops) == len(body.ops):
        return body
    ops = [replace(op, id=at) for at, op in enumerate(ops)]
    return replace(body, values=values, storages=storages, ops=tuple(ops))


def with_half_calls(body: Graph) -> Graph:
    """Return a loop's body with its calls as they were before `with_wide_calls`; other operators keep their ids."""
    values, storages, calls = dict(body.values), dict(body.storages), joined(body)
    others = {value for op in body.ops if op.id not in calls for value in op.inputs()}
    ops, seen = list[Op](), set[int]()
    for op in body.ops:
        call = calls.get(op.id)
        if call is None:
            ops.append(op)
        elif is_conversion(op) and others.isdisjoint(op.made()):
            del storages[values.pop(op.made()[0]).storage]
        elif is_conversion(op):
            ops.append(op)
        elif call.id not in seen:
            ops.append(call)
            seen.add(call.id)
            dtype = body.values[call.inputs()[0]].dtype
            for each in call.made():
                own = values[each] = replace(values[each], dtype=dtype)
                storages[own.storage] = replace(storages[own.storage], nbytes=bytes_of(own.shape, dtype))
    return replace(body, values=values, storages=storages, ops=tuple(ops))


def joined(body: Graph) -> dict[int, Op]:
    """Map the operators of a body that make up one call of `with_half_calls`, by id, to that call."""
    summed, copies = _summed(body), {op.made()[0]: op for op in body.ops if is_conversion(op)}
    halves = {(op.target, op.args[:-1]): op for op in body.ops if makes_sums(op) and op.many}
    found: dict[int, Op] = {}
    for op in body.ops:
        taken = {each: copies[each].inputs()[0] for each in op.inputs() if each in copies}
        if not makes_sums(op) or not taken or not summed.issuperset(op.made()):
            continue
        owned = {body.values[each].storage for each in taken}
        met = dict.fromkeys(pair for each in (*map(copies.__getitem__, taken), op) for pair in each.reads)
        call = replace(with_inputs(op, taken), reads=tuple(pair for pair in met if pair[0] not in owned))
        half = halves.pop((call.target, call.args[:-1]), None)
        pairs = [] if half is None else [*zip(call.outputs, half.outputs, strict=True)]
        if half is not None and all(None in pair for pair in pairs):
            outputs = tuple(other if one is None else one for one, other in pairs)
            call = _of_results(replace(half, outputs=outputs), {each for each in outputs if each is not None})
        found |= dict.fromkeys((op.id, call.id, *(copies[each].id for each in taken)), call)
    return found


def makes_sums(op: Op) -> bool:
    """Return True for a call whose kernel sums in float32, whatever its dtype."""
    return op.target.endswith(".default") and op_info(op.target).wide_sums


def is_conversion(op: Op) -> bool:
    """Return True for a conversion to float32 by `with_wide_calls`."""
    return op.target == _COPY and op.kwargs == _TO_FLOAT32


def _summed(body: Graph) -> set[int]:
    """Return the values of a body that are nothing but parts of a float32 sum."""
    uses = Counter(value for op in body.ops for value in op.inputs())
    merges = (op.inputs() for op in body.ops if op.target == REDUCE and op.args[2] == "sum")
    return {part for whole, part in merges if uses[part] == 1 and body.values[whole].dtype == "float32"}


def _of_results(op: Op, wanted: Container[int | None]) -> Op:
    """Return a call that makes some of its results; without a mask of results, it makes one."""
    outputs = tuple(each if each in wanted else None for each in op.outputs)
    masked = isinstance(op.args[-1], tuple)
    mask: tuple[Arg, ...] = (tuple(each is not None for each in outputs),) if masked else op.args[-1:]
    return replace(op, args=(*op.args[:-1], *mask), outputs=outputs)
