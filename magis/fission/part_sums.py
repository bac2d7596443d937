"""Sums over the parts of a loop: float32 accumulators for half precision, and products added without their parts.

    for each part:  p = mm(a, b);  magis.reduce(w, p, "sum")      ->      for each part:  magis.addmm(w, a, b)
    for each part:  p = sum(x, 0);  magis.reduce(w, p, "sum")     ->      for each part:  magis.addsum(w, x, 0)

A sum in bfloat16 loses a part as soon as it is 256 times smaller than the whole: with 64 parts, weight gradients were
4.8 times as far from float64 as eager's. So the whole is float32 while the loop runs, and is rounded once behind it,
as eager's kernels do within one call. Products and sums in half precision add to it without being rounded before. A
matrix product adds to its whole directly in any dtype, as GEMM's ``beta`` allows: a part of a weight's gradient is as
large as the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from magis.cost.shapes import bytes_of
from magis.fission.region import Region, leavings, roots
from magis.graph import Arg, Const, Graph, Op, Ref, Storage, Value
from magis.graph.hazards import is_pure_view, row_major
from magis.graph.loop_rules import ADDMM, ADDSUM, REDUCE, merged_dtype

ROUND, PRODUCT, SUM = "aten._to_copy.default", "aten.mm.default", "aten.sum.dim_IntList"
_DIRECT = {PRODUCT: ADDMM, SUM: ADDSUM, ROUND: REDUCE}
_APART = {ADDMM: PRODUCT, ADDSUM: SUM}


def with_float32_sums(graph: Graph, region: Region) -> tuple[Graph, Region]:
    """Return graph and region with each sum in half precision that leaves the region as float32, rounded behind it.

    The makers of these sums keep their half-precision inputs. Views of a sum leave the region: they are opened on the
    rounded tensor. Sums that the region writes in place stay as they are.
    """
    written = {storage for position in region.cuts for storage, _ in graph.ops[position].writes}
    narrow = {
        each.value: each.maker
        for each in leavings(graph, region)
        if merged_dtype(graph.values[each.value].dtype, each.how) != graph.values[each.value].dtype
        and graph.values[each.value].storage not in written
    }
    if not narrow:
        return graph, region
    values, storages, wide = dict(graph.values), dict(graph.storages), dict[int, int]()
    for number in narrow:
        value, storage = values[number], Storage(max(storages) + 1, 0, "temporary")
        wide[number] = max(values) + 1
        values[wide[number]] = replace(value, id=wide[number], dtype="float32", storage=storage.id, name="")
        storages[storage.id] = replace(storage, nbytes=bytes_of(value.shape, "float32"))
    root, free = roots(graph), max(op.id for op in graph.ops) + 1
    ops, cuts = list[Op](), {}
    for position, op in enumerate(graph.ops):
        viewed = root.get(next(iter(op.made()), -1)) in narrow and is_pure_view(graph, op)
        if position in region.cuts and not viewed:
            cuts[len(ops)] = region.cuts[position]
        ops.append(replace(op, outputs=tuple(each if each is None else wide.get(each, each) for each in op.outputs)))
        for number in (value for value, maker in narrow.items() if maker == position):
            kwargs = (("dtype", Const("dtype", values[number].dtype)),)
            reads = ((values[wide[number]].storage, 0),)
            rounding = Op(free, ROUND, (Ref(wide[number]),), kwargs, (number,), reads=reads)
            ops.append(replace(rounding, phase=op.phase, module=op.module, line=op.line))
            free += 1
    return replace(graph, values=values, storages=storages, ops=tuple(ops)), Region(cuts, region.parts)


def is_rounding(op: Op, dtype: str) -> bool:
    """Return True for the operator that rounds a float32 sum to a dtype."""
    plain = len(op.args) == len(op.outputs) == 1 and not (op.writes or op.random or op.many)
    return op.target == ROUND and plain and op.kwargs == (("dtype", Const("dtype", dtype)),)


def with_direct_sums(body: Graph) -> Graph:
    """Return a loop's body in which products and sums, and float32 sums of inner loops, add to their whole directly."""
    uses = Counter(value for op in body.ops for value in op.inputs())
    ops, gone = list[Op](), set[int]()
    for op in body.ops:
        part = op.inputs()[1] if op.target == REDUCE and op.args[2] == "sum" else None
        if part is None or uses[part] != 1 or ops[-1].made() != (part,) or not _adds(ops[-1], op, body.values):
            ops.append(op)
            continue
        before = ops.pop()
        rest: list[Arg] = ["sum"] if before.target == ROUND else [False] if before.target == SUM else []
        args = (op.args[0], *before.args, *rest)[:4]
        met = dict((*before.reads, *op.reads))
        del met[body.values[part].storage]
        gone.add(part)
        new = replace(before, target=_DIRECT[before.target], args=args, kwargs=(), outputs=(), reads=tuple(met.items()))
        ops.append(replace(new, writes=op.writes))
    if not gone:
        return body
    values = {number: value for number, value in body.values.items() if number not in gone}
    unused = {body.values[number].storage for number in gone}
    storages = {number: storage for number, storage in body.storages.items() if number not in unused}
    return Graph(storages, values, tuple(replace(op, id=at) for at, op in enumerate(ops)), body.inputs, body.outputs)


def _adds(maker: Op, merge: Op, values: Mapping[int, Value]) -> bool:
    """Return True if the maker of a part can add to the whole directly."""
    taken, whole = (values[each.inputs()[0]].dtype for each in (maker, merge))
    if maker.target == ROUND:
        return taken == whole
    if maker.target == SUM:  # others are summed in their own dtype anyway
        return taken != whole and not maker.kwargs and len(maker.args) > 1 and bool(maker.args[1])
    return maker.target == PRODUCT


def with_sums_apart(body: Graph) -> Graph:
    """Return a loop's body with each ``magis.addmm`` and ``magis.addsum`` as a call of torch and a reduction."""
    if not any(op.target in _APART for op in body.ops):
        return body
    values, storages, ops = dict(body.values), dict(body.storages), list[Op]()
    for op in body.ops:
        if op.target not in _APART:
            ops.append(op)
            continue
        whole, taken, memory = values[op.inputs()[0]], values[op.inputs()[1]], max(storages) + 1
        part = Value(max(values) + 1, whole.shape, row_major(whole.shape), taken.dtype, memory)
        values[part.id], storages[memory] = part, Storage(memory, part.nbytes, "temporary")
        own = tuple(each for each in op.reads if each[0] == whole.storage)
        others = tuple(each for each in op.reads if each[0] != whole.storage)
        made = replace(op, target=_APART[op.target], args=op.args[1:], outputs=(part.id,), reads=others, writes=())
        merge = replace(op, target=REDUCE, args=(op.args[0], Ref(part.id), "sum"), origin=None)
        ops += [made, replace(merge, reads=(*own, (memory, 0)))]
    return Graph(storages, values, tuple(replace(op, id=at) for at, op in enumerate(ops)), body.inputs, body.outputs)
