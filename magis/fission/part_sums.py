"""Sums over the parts of a loop: float32 accumulators for half precision, and products added without their parts.

    for each part:  p = mm(a, b);  magis.reduce(w, p, "sum")      ->      for each part:  magis.addmm(w, a, b)
    for each part:  p = sum(x, 0);  magis.reduce(w, p, "sum")     ->      for each part:  magis.addsum(w, x, 0)
    for each part:  (p) = loop(a);  magis.reduce(w, p, "sum")     ->      for each part:  loop(a, w)

A sum in bfloat16 loses a part as soon as it is 256 times smaller than the whole: with 64 parts, weight gradients were
4.8 times as far from float64 as eager's. So the whole is float32 while the loop runs, and is rounded once behind it,
as eager's kernels do within one call; a loop inside of the loop adds to the same tensor. Products and sums in half
precision add to it without being rounded before. A matrix product adds to its whole directly in any dtype, as GEMM's
``beta`` allows: a part of a weight's gradient is as large as the gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from magis.cost.shapes import bytes_of
from magis.fission.region import Region, leavings, roots
from magis.fission.wide_calls import with_half_calls, with_wide_calls
from magis.graph import Const, Graph, Op, Ref, Storage, Value
from magis.graph.hazards import is_pure_view, row_major
from magis.graph.loop_rules import ADDMM, ADDSUM, REDUCE, merged_dtype, summed
from magis.graph.nodes import HALF

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
        viewed = root.get(next(iter(op.made()), -1)) in narrow and is_pure_view(graph.values, op)
        if position in region.cuts and not viewed:
            cuts[len(ops)] = region.cuts[position]
        ops.append(replace(op, outputs=tuple(each if each is None else wide.get(each, each) for each in op.outputs)))
        for number in (value for value, maker in narrow.items() if maker == position):
            kwargs = (("dtype", Const("dtype", values[number].dtype)),)
            reads = ((values[wide[number]].storage, 0),)
            rounding = Op(free, ROUND, (Ref(wide[number]),), kwargs, (number,), reads=reads)
            ops.append(replace(rounding, phase=op.phase, module=op.module, line=op.line))
            free += 1
    return replace(graph, values=values, storages=storages, ops=tuple(ops)), replace(region, cuts=cuts)


def is_rounding(op: Op, dtype: str) -> bool:
    """Return True for the operator that rounds a float32 sum to a dtype."""
    plain = len(op.args) == len(op.outputs) == 1 and not (op.writes or op.random or op.many)
    return op.target == ROUND and plain and op.kwargs == (("dtype", Const("dtype", dtype)),)


def with_direct_sums(body: Graph) -> Graph:
    """Return a loop's body in which products and sums, and float32 sums of inner loops, add to their whole directly,
    and no part of a sum is rounded."""
    body = with_wide_calls(body)
    uses = Counter(value for op in body.ops for value in op.inputs())
    ops, gone = list[Op](), set[int]()
    for op in body.ops:
        part = op.inputs()[1] if op.target == REDUCE and op.args[2] == "sum" else None
        at = next((at for at in range(len(ops) - 1, -1, -1) if part is not None and ops[at].made() == (part,)), None)
        if part is None or at is None or uses[part] != 1 or not _adds(ops[at], op, body.values):
            ops.append(op)
            continue
        before, between = ops[at], ops[at + 1 :]  # such as the join that overwrites an input of the loop
        if any(_touches(each, body, op.inputs()[0]) for each in between):
            ops.append(op)
            continue
        args = (op.args[0], *before.args, *(["sum"] if before.target == ROUND else []))
        met = dict((*before.reads, *op.reads))
        del met[body.values[part].storage]
        gone.add(part)
        new = replace(before, target=_DIRECT[before.target], args=args, kwargs=(), outputs=(), reads=tuple(met.items()))
        ops[at] = replace(new, writes=op.writes)
    if gone:
        body = _without(replace(body, ops=tuple(ops)), gone)
    return _with_sums_of_inner_loops(body)


def _touches(op: Op, body: Graph, value: int) -> bool:
    """Return True if an operator reads or writes the memory of a value."""
    storage = body.values[value].storage
    return any(body.values[each].storage == storage for each in (*op.inputs(), *op.made()))


def _without(body: Graph, gone: set[int]) -> Graph:
    """Return a body without values and their storages, with its operators numbered."""
    values = {number: value for number, value in body.values.items() if number not in gone}
    unused = {body.values[number].storage for number in gone}
    storages = {number: storage for number, storage in body.storages.items() if number not in unused}
    ops = tuple(replace(op, id=at) for at, op in enumerate(body.ops))
    return replace(body, storages=storages, values=values, ops=ops)


def _with_sums_of_inner_loops(body: Graph) -> Graph:
    """Return a body whose inner loops add to the wholes of the loop around them, in place of sums of their own."""
    uses = Counter(value for op in body.ops for value in op.inputs())
    merges = {op.inputs()[1]: op for op in body.ops if op.target == REDUCE and op.args[2] == "sum"}
    ops, gone = list[Op](), set[int]()
    for op in body.ops:
        alone = (part for part in op.made() if op.body is not None and part in merges and uses[part] == 1)
        sums = [part for part in alone if _is_sum_of(op, part, body.values, merges[part].inputs()[0])]
        gone.update(sums)
        if sums:
            ops.append(_adding(op, sums, [merges[part] for part in sums], body.values))
        elif not (op.target == REDUCE and op.inputs()[1] in gone):
            ops.append(op)
    return _without(replace(body, ops=tuple(ops)), gone) if gone else body


def _is_sum_of(op: Op, part: int, values: Mapping[int, Value], whole: int) -> bool:
    """Return True if a loop makes a tensor by sums over its parts, in the layout of the whole to which it is added."""
    own, other = values[part], values[whole]
    if op.body is None or (own.shape, own.stride, own.dtype) != (other.shape, other.stride, other.dtype):
        return False
    inside = op.body.graph.inputs[len(op.inputs()) + op.made().index(part)]
    return all(
        each.target in _APART or inside in summed(each) or (each.target == REDUCE and each.args[2] == "sum")
        for each in op.body.graph.ops
        if inside in each.inputs()
    )


def _adding(op: Op, sums: Sequence[int], merges: Sequence[Op], values: Mapping[int, Value]) -> Op:
    """Return a loop that adds to the wholes to which its sums are merged."""
    if op.body is None:
        return op
    inner = op.body.graph.inputs
    moved = [inner[len(op.inputs()) + op.made().index(part)] for part in sums]
    kept = [each for each in inner if each not in moved]
    count = len(op.inputs())
    wholes = [merge.inputs()[0] for merge in merges]
    own = {values[whole].storage for whole in wholes}
    return replace(
        op,
        args=(*op.args, *map(Ref, wholes)),
        outputs=tuple(each for each in op.outputs if each not in sums),
        reads=(*op.reads, *(pair for merge in merges for pair in merge.reads if pair[0] in own)),
        writes=(*op.writes, *(pair for merge in merges for pair in merge.writes)),
        body=replace(op.body, graph=replace(op.body.graph, inputs=(*kept[:count], *moved, *kept[count:]))),
    )


def _adds(maker: Op, merge: Op, values: Mapping[int, Value]) -> bool:
    """Return True if the maker of a part can add to the whole directly."""
    taken, whole = (values[each.inputs()[0]].dtype for each in (maker, merge))
    if maker.target == ROUND:
        return taken == whole
    if maker.target == SUM:  # others are summed in their own dtype anyway
        return taken in HALF and whole == "float32" and not maker.kwargs and len(maker.args) > 1 and bool(maker.args[1])
    return maker.target == PRODUCT


def with_sums_apart(body: Graph) -> Graph:
    """Return a loop's body with each ``magis.addmm`` and ``magis.addsum`` as a call of torch and a reduction, and with
    inner loops that make the sums that they add to wholes; each call is in the step's own dtype."""
    body = with_half_calls(body)
    values, storages, ops = dict(body.values), dict(body.storages), list[Op]()
    free = max((op.id for op in body.ops), default=0) + 1
    for op in body.ops:
        into = summed(op) if op.body is not None else op.inputs()[:1] if op.target in _APART else ()
        made = list[int]()
        for value in into:
            looks, memory = values[value], max(storages) + 1
            dtype, stride = looks.dtype, looks.stride
            if op.body is None:
                dtype, stride = values[op.inputs()[1]].dtype, row_major(looks.shape)
            part = Value(max(values) + 1, looks.shape, stride, dtype, memory)
            values[part.id], storages[memory] = part, Storage(memory, part.nbytes, "temporary")
            made.append(part.id)
        ops.append(_making(op, into, made, values) if into else op)
        for value, number in zip(into, made, strict=True):
            own = values[value].storage
            reads = (*(pair for pair in op.reads if pair[0] == own), (values[number].storage, 0))
            merge = Op(free, REDUCE, (Ref(value), Ref(number), "sum"), (), (), reads=reads, phase=op.phase)
            free += 1
            writes = tuple(pair for pair in op.writes if pair[0] == own)
            ops.append(replace(merge, writes=writes, module=op.module, line=op.line))
    return replace(body, storages=storages, values=values, ops=tuple(ops))


def _making(op: Op, wholes: Sequence[int], made: Sequence[int], values: Mapping[int, Value]) -> Op:
    """Return an operator that makes tensors in place of adding them to wholes."""
    own = {values[whole].storage for whole in wholes}
    reads, writes = (tuple(pair for pair in pairs if pair[0] not in own) for pairs in (op.reads, op.writes))
    if op.body is None:
        new = replace(op, target=_APART[op.target], args=op.args[1:], outputs=tuple(made))
        return replace(new, reads=reads, writes=writes)
    inner = dict(zip(op.inputs(), op.body.graph.inputs, strict=False))
    moved = [inner[whole] for whole in wholes]
    order = (*(each for each in op.body.graph.inputs if each not in moved), *moved)
    return replace(
        op,
        args=tuple(Ref(value) for value in op.inputs() if value not in wholes),
        outputs=(*op.outputs, *made),
        reads=reads,
        writes=writes,
        body=replace(op.body, graph=replace(op.body.graph, inputs=order)),
    )
