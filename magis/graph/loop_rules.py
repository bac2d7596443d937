"""Invariants of loops (``magis.graph.nodes.Loop``): agreement of body and operator, and memory that a body may touch.

That the parts together compute the whole operator is checked in ``magis.fission``, which knows the labels of
dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from magis.graph.nodes import HALF, Arg, Graph, Loop, Op, Ref, Storage, Value, side_by_side

LOOP, PART, JOIN, REDUCE = "magis.loop", "magis.part", "magis.join", "magis.reduce"
ADDMM, ADDSUM = "magis.addmm", "magis.addsum"
MERGES = (JOIN, REDUCE, ADDMM, ADDSUM)
"""Operators of a body that write a part, or the product or sum that is the part, into the whole, their first
argument."""
REDUCTIONS = ("sum", "mean", "max", "min", "same")


def summed(op: Op) -> list[int]:
    """Return the tensors that a loop takes to add to them: sums that a loop around it makes."""
    if op.body is None:
        return []
    added: set[int] = set()
    for each in op.body.graph.ops:
        adds = each.target in (ADDMM, ADDSUM) or (each.target == REDUCE and each.args[2:] == ("sum",))
        added.update(each.inputs()[:1] if adds else summed(each))
    return [outside for outside, inside in zip(op.inputs(), op.body.graph.inputs, strict=False) if inside in added]


def rows_around(op: Op) -> tuple[int, int]:
    """Return the halo rows before and behind the slice of a ``magis.part`` or ``magis.join``; (0, 0) otherwise."""
    match op.args[1 if op.target == PART else 2 :]:
        case (int(), int(before), int(after)) if op.target in (PART, JOIN):
            return before, after
    return 0, 0


def scale(loop: Loop) -> Fraction:
    """Return the sizes of cut dimensions as multiples of those in the body: the number of parts, if these are equal."""
    for op in loop.graph.ops:
        if op.target in (PART, JOIN) and not any(rows_around(op)):
            looks = [loop.graph.values[value] for value in (*op.inputs(), *op.made()) if value in loop.graph.values]
            dim = op.args[-1] if op.args else None
            if len(looks) == 2 and isinstance(dim, int) and 0 <= dim < min(len(each.shape) for each in looks):
                size, each = (value.shape[dim] for value in looks)
                if (loop.parts - 1) * each < size < loop.parts * each:
                    return Fraction(size, each)
                break
    return Fraction(loop.parts)


def loop_problems(graph: Graph, op: Op, where: str) -> Iterator[str]:
    """Yield every violated invariant of an operator's loop; nothing for operators that are no loop."""
    if (op.target == LOOP) != (op.body is not None):
        yield f"{where}: a loop is called {LOOP} and has a body, anything else has none"
    if op.body is None:
        return
    body = op.body.graph
    made = op.made()
    if op.kwargs or not all(isinstance(arg, Ref) for arg in op.args) or len(made) != len(op.outputs):
        yield f"{where}: a loop takes and makes nothing but tensors"
        return
    outside = (*op.inputs(), *made)
    if len(outside) != len(body.inputs) or not set(outside) <= set(graph.values) or body.outputs or body.constants:
        yield f"{where}: its body has {len(body.inputs)} inputs for {len(outside)} tensors, or outputs or constants"
        return
    if op.body.parts < 1 or len(set(body.inputs)) != len(body.inputs):
        yield f"{where}: runs {op.body.parts} parts, or its body has one input twice"
        return
    if any(value.storage not in body.storages for value in body.values.values()):
        return  # said by the rules of every graph, as are the next ones
    if not set(body.inputs) <= set(body.values) or any(graph.values[v].storage not in graph.storages for v in outside):
        return
    for value in summed(op):
        if graph.storages[graph.values[value].storage].kind != "outer":
            yield f"{where}: adds to value {value}, which no loop around it makes"
    yield from _pairing_problems(graph, op, body, where)
    yield from _made_problems(graph, op, where)
    yield from _body_problems(op, op.body, where)


def _pairing_problems(graph: Graph, op: Op, body: Graph, where: str) -> Iterator[str]:
    """Yield inputs of the body whose storage or layout differs from the loop's tensor."""
    inner_of: dict[int, int] = {}
    outer_of: dict[int, int] = {}
    for outside, inside in zip((*op.inputs(), *op.made()), body.inputs, strict=True):
        theirs, ours = graph.values[outside], body.values[inside]
        if _geometry(theirs) != _geometry(ours):
            yield f"{where}: value {outside} is {_geometry(theirs)}, in the body {_geometry(ours)}"
        storage, given = body.storages[ours.storage], graph.storages[theirs.storage]
        same = inner_of.setdefault(theirs.storage, ours.storage) == ours.storage
        same &= outer_of.setdefault(ours.storage, theirs.storage) == theirs.storage
        if storage.kind != "outer" or storage.nbytes != given.nbytes or not same:
            yield f"{where}: the storage of value {outside} is another one in the body"
    for storage in body.storages.values():
        if storage.kind == "outer" and storage.id not in outer_of:
            yield f"{where}: storage {storage.id} of the body is nobody's outside"
    written = _outer_writes(body)
    made = {graph.values[value].storage for value in op.made()}
    expected = {outer_of[inner] for inner in written if inner in outer_of} - (made - taken_over(graph, op))
    if expected != {storage for storage, _ in op.writes}:
        yield f"{where}: the body writes other storages than the loop says, {sorted(expected)}"
    if len(made) != len(op.made()):
        yield f"{where}: makes values that share a storage with each other"


def taken_over(graph: Graph, op: Op) -> set[int]:
    """Return the storages of input tensors that the loop overwrites, part by part, with its outputs."""
    taken = {graph.values[value].storage for value in op.inputs()}
    return taken & {graph.values[value].storage for value in op.made()}


def _made_problems(graph: Graph, op: Op, where: str) -> Iterator[str]:
    """Yield outputs of the loop that do not cover a storage that the loop itself allocates."""
    earlier = {graph.values[value].storage for value in graph.inputs if value in graph.values}
    for each in graph.ops:
        if each is op:
            break
        earlier.update(graph.values[value].storage for value in each.made() if value in graph.values)
    over = taken_over(graph, op)
    for number in op.made():
        value = graph.values[number]
        storage = graph.storages[value.storage]
        if storage.id in over:
            taken = [graph.values[each] for each in op.inputs() if graph.values[each].storage == storage.id]
            same = {_geometry(each) for each in taken} == {_geometry(value)}
            if not same or storage.kind != "temporary" or not _fills(value, storage):
                yield f"{where}: makes value {number} in place of one that it takes, but it is not all of the same"
            continue
        if storage.id in earlier or storage.kind != "temporary" or not _fills(value, storage):
            yield f"{where}: makes value {number}, which is not all of a storage of its own"


def _fills(value: Value, storage: Storage) -> bool:
    """Return True if the value covers each byte of the storage exactly once, without lazy bits."""
    if 0 in value.shape:
        return storage.nbytes == 0 and not value.bits
    dense = value.offset == 0 and side_by_side(value.shape, value.stride)
    return dense and value.nbytes == storage.nbytes and not value.bits


def _geometry(value: Value) -> tuple[object, ...]:
    return value.shape, value.stride, value.dtype, value.offset, *value.bits


def _outer_writes(body: Graph) -> set[int]:
    """Return the outer storages that operators of the body write."""
    outer = {storage.id for storage in body.storages.values() if storage.kind == "outer"}
    return outer.intersection(storage for op in body.ops for storage, _ in op.writes)


def _body_problems(op: Op, loop: Loop, where: str) -> Iterator[str]:
    """Yield operators of the body that draw random numbers, or slice or merge tensors in an illegal way."""
    body = loop.graph
    wholes = {*body.inputs[len(op.inputs()) :], *_sums_of_others(op, body)}
    finished: list[int] = []
    known = {body.values[value].storage for value in body.inputs}
    sizes = scale(loop)
    even = sizes == loop.parts
    for each in body.ops:
        inside = f"{where}, operator {each.id} ({each.target})"
        if each.random:
            yield f"{inside}: draws random numbers, which would be others than those of the whole"
        values = [value for value in each.inputs() if value in body.values]
        if each.target in MERGES:
            yield from (f"{inside}: {problem}" for problem in _merge_problems(body, each, sizes))
            finished += values[:1]
            values = values[1:]
        elif each.body is not None:
            finished += summed(each)
            values = [value for value in values if value not in summed(each)]
        elif each.target == PART:
            yield from (f"{inside}: {problem}" for problem in _part_problems(body, each, sizes, known))
        if any(value in wholes for value in values):
            yield f"{inside}: takes a tensor that the loop is still making"
        if not even and (any(rows_around(each)) or each.body is not None or each.args[2:] == ("mean",)):
            yield f"{inside}: needs parts of equal sizes"
        known.update(body.values[value].storage for value in each.made() if value in body.values)
    if sorted(finished) != sorted(wholes):
        yield f"{where}: each tensor that the loop makes is joined or reduced by one operator of its body"
    yield from _write_problems(op, body, where)


def _sums_of_others(op: Op, body: Graph) -> list[int]:
    """Return the inputs of a loop's body to which it adds for a loop around it."""
    into = summed(op)
    return [inside for outside, inside in zip(op.inputs(), body.inputs, strict=False) if outside in into]


def _write_problems(op: Op, body: Graph, where: str) -> Iterator[str]:
    """Yield operators that read or write outer memory beyond their part's slice, if parts write that memory.

    No part may read what another part has written or freed. Storages that a loop allocates are exempt.
    """
    count = len(op.inputs())
    given = {body.values[value].storage for value in body.inputs[:count]}
    made = {body.values[value].storage for value in body.inputs[count:]}
    written = _outer_writes(body) - (made - given) - {body.values[value].storage for value in _sums_of_others(op, body)}
    finished: set[int] = set()
    cuts: dict[int, set[object]] = {}
    stretches: set[int] = set()
    for each in body.ops:
        inside = f"{where}, operator {each.id} ({each.target})"
        values = [value for value in each.inputs() if value in body.values]
        around = any(rows_around(each))
        if each.target == PART and values and isinstance(each.args[-1], int) and not around:
            whole, dim = body.values[values[0]], each.args[-1]
            cuts.setdefault(whole.storage, set()).add((_geometry(whole), dim))
            stretches.update(each.made() if 0 in whole.shape or any(whole.stride[dim : dim + 1]) else ())
            values = []
        if each.target == JOIN and values and body.values[values[0]].storage in written:
            whole = body.values[values[0]]  # in-place on an input of the loop
            if around:
                yield f"{inside}: adds to memory whose stretches are read"
            cuts.setdefault(whole.storage, set()).add((_geometry(whole), each.args[-1]))
            values = values[1:]
            finished.add(whole.storage)
            if any(body.values[value].storage == whole.storage for value in values):
                yield f"{inside}: joins a stretch of memory into itself"
        elif any(body.values[value].storage in finished for value in each.inputs() if value in body.values):
            yield f"{inside}: takes memory whose stretch has been written already"
        taken = [value for value in values if body.values[value].storage in written]
        if any(value not in stretches for value in taken):
            yield f"{inside}: takes memory from outside that parts write, other than its own stretch"
        if each.target != JOIN and {s for s, _ in each.writes} & written - {body.values[v].storage for v in taken}:
            yield f"{inside}: writes memory from outside that it does not take"
        if taken and not each.writes and stretches.issuperset(taken):
            stretches.update(each.made())  # windows on stretches
        if each.target == "magis.wait" and any(body.storages[body.values[v].storage].kind == "outer" for v in values):
            yield f"{inside}: frees memory from outside"
    for storage in sorted(written):
        if len(cuts.get(storage, ())) > 1:
            yield f"{where}: storage {storage} of the body is written, and cut in several ways"


def _part_problems(body: Graph, op: Op, parts: Fraction, known: set[int]) -> Iterator[str]:
    """Yield violated invariants of ``magis.part(%whole, dim)`` and ``magis.part(%whole, dim, before, after)``."""
    match op.args, op.made():
        case (Ref(whole), int(dim), *rows), (made,) if _are_rows(rows) and not (op.kwargs or op.writes or op.many):
            if made in body.values and whole in body.values:
                yield from _stretch_problems(body.values[whole], body.values[made], dim, parts, sum(rows_around(op)))
                ours, theirs = body.values[made], body.values[whole]
                if ours.storage == theirs.storage and rows:
                    yield "a stretch with rows around it is a copy"
                elif ours.storage == theirs.storage:
                    if (ours.stride, ours.offset, ours.bits) != (theirs.stride, theirs.offset, theirs.bits):
                        yield "a view of a stretch has the strides, the offset and the bits of the whole"
                elif ours.storage in known or not _fills(ours, body.storages[ours.storage]):
                    yield "a copy of a stretch is all of a storage of its own"
        case _:
            yield "needs a tensor and a dimension, makes one tensor, writes nothing"


def _merge_problems(body: Graph, op: Op, parts: Fraction) -> Iterator[str]:
    """Yield violated invariants of ``magis.join(%whole, %part, dim)``, with a halo or not, and of sums."""
    if op.target not in (JOIN, REDUCE):
        yield from _sum_problems(body, op)
        return
    match op.args:
        case (Ref(whole), Ref(part), how, *rows) if _are_rows(rows) and not (op.kwargs or op.outputs):
            if whole not in body.values or part not in body.values:
                return
            theirs, ours = body.values[whole], body.values[part]
            if [storage for storage, _ in op.writes] != [theirs.storage]:
                yield "writes the tensor that it merges into, and no other"
            if op.target == JOIN and isinstance(how, int):
                yield from _stretch_problems(theirs, ours, how, parts, sum(rows_around(op)))
            elif op.target == REDUCE and how in REDUCTIONS and not rows:
                if (theirs.shape, theirs.dtype) != (ours.shape, merged_dtype(ours.dtype, how)):
                    yield f"merges {ours.dtype}{ours.shape} into {theirs.dtype}{theirs.shape}"
            else:
                yield f"merges by {how!r}, which is no dimension, or none of {', '.join(REDUCTIONS)}"
        case _:
            yield "needs the whole, the part, and how to merge them, and makes nothing"


def merged_dtype(part: str, how: object) -> str:
    """Return the dtype in which parts of a dtype are merged: sums of half precision accumulate in float32."""
    return "float32" if part in HALF and how in ("sum", "mean") else part


def _sum_problems(body: Graph, op: Op) -> Iterator[str]:
    """Yield violated invariants of ``magis.addmm(%whole, %left, %right)`` and ``magis.addsum(%whole, %x, dims, keep)``,
    which add a part's matrix product, and its sum over dimensions."""
    match op.target, op.args:
        case "magis.addmm", (Ref(whole), Ref(factor), Ref(right)):
            left, other = (body.values[each].shape if each in body.values else () for each in (factor, right))
            fits, shape = len(left) == len(other) == 2 and left[1] == other[0], (*left[:1], *other[1:])
        case "magis.addsum", (Ref(whole), Ref(factor), tuple(dims), *rest) if rest in ([], [False], [True]):
            sizes = body.values[factor].shape if factor in body.values else ()
            gone = {dim % len(sizes) for dim in dims if isinstance(dim, int) and -len(sizes) <= dim < len(sizes)}
            kept = ((at, size) for at, size in enumerate(sizes) if rest == [True] or at not in gone)
            fits, shape = 0 < len(gone) == len(dims), tuple(1 if at in gone else size for at, size in kept)
        case _:
            yield "needs the whole, and two matrices, or a tensor with dimensions and whether to keep them"
            return
    if not set(op.inputs()) <= set(body.values):
        return
    made, taken = body.values[whole], [body.values[value] for value in op.inputs()[1:]]
    if op.kwargs or op.outputs or [storage for storage, _ in op.writes] != [made.storage]:
        yield "writes the tensor that it merges into, and no other"
    if not fits or made.shape != shape or {made.dtype} != {merged_dtype(each.dtype, "sum") for each in taken}:
        yield f"adds {' and '.join(f'{each.dtype}{each.shape}' for each in taken)} to {made.dtype}{made.shape}"


def _are_rows(rows: Sequence[Arg]) -> bool:
    """Return True if the arguments are empty, or two halo sizes: rows before and behind a slice."""
    counts = [row for row in rows if isinstance(row, int) and not isinstance(row, bool) and row >= 0]
    return not rows or (len(counts) == len(rows) == 2 and any(counts))


def _stretch_problems(whole: Value, part: Value, dim: int, parts: Fraction, around: int) -> Iterator[str]:
    """Yield why ``part`` is not one of ``parts`` slices of ``whole`` along ``dim``, plus ``around`` halo rows."""
    if isinstance(dim, bool) or not 0 <= dim < len(whole.shape):
        yield f"dimension {dim} of a tensor with {len(whole.shape)}"
        return
    expected = list(whole.shape)
    expected[dim] = expected[dim] // parts + around
    if whole.shape[dim] % parts or part.shape != tuple(expected) or part.dtype != whole.dtype:
        wider = f" with {around} rows around it" if around else ""
        yield (
            f"{part.dtype}{part.shape} is not one of {parts} stretches of {whole.dtype}{whole.shape} along {dim}{wider}"
        )
