"""One mistake for every rule of loops, with the line that names it."""

from __future__ import annotations

from dataclasses import replace

from magis.graph import Op, Ref, Storage
from tests.graph.loop_graphs import Spoil, added, both, change_op, inner, op, parts, storage, value, within, without

LOOP = "operator 0 (magis.loop)"
INNER = f"{LOOP}: operator 2 (magis.loop)"
STRETCH, JOIN, REDUCE, WRITE = (
    f"{LOOP}, operator {number}"
    for number in ("0 (magis.part)", "3 (magis.join)", "5 (magis.reduce)", "7 (aten.mul_.Scalar)")
)
NOTHING_ELSE = "a loop is called magis.loop and has a body, anything else has none"
KINDS = "which is no dimension, or none of sum, mean, max, min, same"
NOT_OWN = "takes memory from outside that parts write, other than its own stretch"
NOT_ALL = "makes value 4, which is not all of a storage of its own"
EARLY = Op(8, "aten.neg.default", (Ref(1),), (), (10,), reads=((1, 0),))
EARLIER = Op(9, "aten.sum.dim_IntList", (Ref(1), (0,)), (), (6,), reads=((1, 0),))
EARLY_READ = both(
    lambda g: replace(g, storages={**g.storages, 7: Storage(7, 16, "temporary")}),
    lambda g: replace(g, values={**g.values, 10: replace(g.values[1], id=10, storage=7)}),
    lambda g: replace(g, ops=(EARLY, *g.ops)),
)
"""The body reads all of the buffer before its own part of it is written: the second part finds half of it changed."""

BROKEN: dict[str, dict[str, Spoil]] = {
    f"{LOOP}: {NOTHING_ELSE}": {"a loop without body": op(0, body=None)},
    f"operator 1 (aten.neg.default): {NOTHING_ELSE}": {
        "a body of another operator": lambda g: change_op(g, 1, body=g.ops[0].body)
    },
    f"{LOOP}: a loop takes and makes nothing but tensors": {
        "a keyword": op(0, kwargs=(("dim", 0),)),
        "a number": op(0, args=(Ref(1), 2)),
        "a list of tensors": op(0, args=((Ref(1), Ref(2)),)),
        "a declined output": op(0, outputs=(3, 4, None)),
    },
    f"{LOOP}: its body has 3 inputs for 4 tensors, or outputs or constants": {
        "an input too few": within(lambda g: replace(g, inputs=g.inputs[:-1]))
    },
    f"{LOOP}: its body has 4 inputs for 5 tensors, or outputs or constants": {
        "an input too many": op(0, args=(Ref(1), Ref(2), Ref(1)))
    },
    f"{LOOP}: its body has 4 inputs for 4 tensors, or outputs or constants": {
        "a tensor not described": op(0, outputs=(3, 99)),
        "a body that returns": within(lambda g: replace(g, outputs=(5,))),
        "a body with constants": within(lambda g: replace(g, constants={1: (0.0,) * 4})),
    },
    f"{LOOP}: runs 0 parts, or its body has one input twice": {"no parts": parts(0)},
    f"{LOOP}: runs -2 parts, or its body has one input twice": {"fewer than no parts": parts(-2)},
    f"{LOOP}: runs 2 parts, or its body has one input twice": {
        "one input twice": within(lambda g: replace(g, inputs=(0, 1, 2, 2)))
    },
    f"{LOOP}: the step takes value 99, which is not described": {
        "an input not described": within(lambda g: replace(g, inputs=(0, 1, 2, 99)))
    },
    f"{LOOP}: value 5 lies on storage 99, which does not exist": {
        "a value on no storage": within(value(5, storage=99))
    },
    f"{LOOP}: value 1 is ((4, 6), (6, 1), 'float32', 0), in the body ((3, 6), (6, 1), 'float32', 0)": {
        "another shape": within(value(0, shape=(3, 6)))
    },
    f"{LOOP}: value 1 is ((4, 6), (6, 1), 'float32', 0), in the body ((4, 6), (1, 4), 'float32', 0)": {
        "another layout": within(value(0, stride=(1, 4)))
    },
    f"{LOOP}: value 4 is ((6,), (1,), 'float32', 0), in the body ((6,), (1,), 'int32', 0)": {
        "another data type": within(value(3, dtype="int32"))
    },
    f"{LOOP}: value 1 is ((4, 6), (6, 1), 'float32', 0), in the body ((3, 6), (6, 1), 'float32', 6)": {
        "another place": within(value(0, shape=(3, 6), offset=6))
    },
    f"{LOOP}: the storage of value 1 is another one in the body": {
        "memory that is the body's own": within(storage(0, kind="temporary")),
        "memory of another size": within(storage(0, nbytes=100)),
    },
    f"{LOOP}: the storage of value 3 is another one in the body": {"one storage for two": within(value(2, storage=1))},
    f"{LOOP}: the storage of value 2 is another one in the body": {
        "two storages for one": both(
            op(0, args=(Ref(1), Ref(2), Ref(2))),
            within(
                lambda g: replace(g, inputs=(0, 1, 10, 2, 3), values={**g.values, 10: replace(g.values[1], id=10)}),
                lambda g: replace(g, storages={**g.storages, 7: Storage(7, 16, "outer")}),
                value(10, storage=7),
            ),
        )
    },
    f"{LOOP}: storage 4 of the body is nobody's outside": {"memory from nowhere": within(storage(4, kind="outer"))},
    f"{LOOP}: storage 4 is of kind 'parameter' and has 48 bytes": {
        "memory of a step in a body": within(storage(4, kind="parameter"))
    },
    "storage 5 is of kind 'outer' and has 16 bytes": {"memory of a body in a step": storage(5, kind="outer")},
    f"{LOOP}: the body writes other storages than the loop says, [2]": {"a write not said": op(0, writes=())},
    f"{LOOP}: the body writes other storages than the loop says, []": {
        "a write that never happens": within(without(7), without(6))
    },
    f"{LOOP}: makes values that share a storage with each other": {
        "one tensor made twice": both(
            op(0, outputs=(3, 3)), within(value(3, shape=(4,), storage=2), op(5, args=(Ref(3), Ref(6), "sum")))
        ),
        "two tensors on one storage": both(
            storage(3, nbytes=24), value(4, storage=3), within(storage(2, nbytes=24), value(3, storage=2))
        ),
    },
    f"{LOOP}: makes value 3 in place of one that it takes, but it is not all of the same": {
        "a result on an input": both(value(3, storage=2), within(value(2, storage=1)))
    },
    f"{LOOP}: makes value 4 in place of one that it takes, but it is not all of the same": {
        "a result on what exists": both(value(4, storage=1), within(storage(3, nbytes=96)))
    },
    f"{LOOP}: {NOT_ALL}": {
        "a persistent result": storage(4, kind="buffer"),
        "a result on what an operator before it made": both(
            lambda g: replace(g, values={**g.values, 6: replace(g.values[4], id=6)}),
            lambda g: replace(g, ops=(EARLIER, *g.ops)),
        ),
        "a result in a corner": both(
            storage(4, nbytes=32), value(4, offset=2), within(storage(3, nbytes=32), value(3, offset=2))
        ),
        "a result with room": both(storage(4, nbytes=28), within(storage(3, nbytes=28))),
        "a result with holes": both(
            storage(4, nbytes=44), value(4, stride=(2,)), within(storage(3, nbytes=44), value(3, stride=(2,)))
        ),
        "a result that overlaps": both(value(4, stride=(0,)), within(value(3, stride=(0,)))),
    },
    f"{LOOP}, operator 1 (aten.exp.default): draws random numbers, which would be others than those of the whole": {
        "random numbers": within(op(1, random=True))
    },
    f"{LOOP}, operator 4 (aten.sum.dim_IntList): takes a tensor that the loop is still making": {
        "a result taken": within(op(4, args=(Ref(3), (0,)), reads=((3, 0),)))
    },
    f"{LOOP}, operator 6 (magis.part): takes a tensor that the loop is still making": {
        "a stretch of a result": within(op(6, args=(Ref(2), 0)), value(8, storage=2), value(9, storage=2))
    },
    f"{JOIN}: takes a tensor that the loop is still making": {
        "a result joined to another": within(op(3, args=(Ref(2), Ref(3), 0), reads=((2, 0), (3, 0))))
    },
    f"{LOOP}: each tensor that the loop makes is joined or reduced by one operator of its body": {
        "a result that is never finished": within(without(3)),
        "a result finished twice": within(
            added(Op(9, "magis.join", (Ref(2), Ref(6), 0), (), (), reads=((2, 1), (5, 0)), writes=((2, 2),)))
        ),
        "an input finished": within(op(3, args=(Ref(1), Ref(6), 0), reads=((1, 0), (5, 0)), writes=((1, 1),))),
    },
    "operator 9 (magis.part): stands outside of a loop": {
        "a stretch outside of loops": added(Op(9, "magis.part", (Ref(1), 0), (), (77,)))
    },
    "operator 9 (magis.join): stands outside of a loop": {
        "a join outside of loops": added(Op(9, "magis.join", (Ref(1), Ref(1), 0), (), ()))
    },
    "operator 9 (magis.reduce): stands outside of a loop": {
        "a reduction outside of loops": added(Op(9, "magis.reduce", (Ref(1), Ref(1), "sum"), (), ()))
    },
    f"{STRETCH}: needs a tensor and a dimension, makes one tensor, writes nothing": {
        "a stretch of what": within(op(0, args=(Ref(0),))),
        "a stretch by name": within(op(0, kwargs=(("dim", 0),))),
        "a stretch in a list": within(op(0, many=True)),
        "a stretch that writes": within(op(0, writes=((0, 1),))),
    },
    f"{STRETCH}: dimension True of a tensor with 2": {"a stretch of no dimension": within(op(0, args=(Ref(0), True)))},
    f"{STRETCH}: dimension 2 of a tensor with 2": {"a stretch along too far": within(op(0, args=(Ref(0), 2)))},
    f"{STRETCH}: dimension -2 of a tensor with 2": {"a stretch from the end": within(op(0, args=(Ref(0), -2)))},
    f"{STRETCH}: float32(2, 6) is not one of 2 stretches of float32(4, 6) along 1": {
        "another dimension's stretch": within(op(0, args=(Ref(0), 1)))
    },
    f"{STRETCH}: float32(2, 6) is not one of 3 stretches of float32(4, 6) along 0": {
        "parts that do not divide": parts(3)
    },
    f"{INNER}, operator 0 (magis.part): float32(2, 2) is not one of 2 stretches of float32(2, 6) along 1": {
        "as many parts, but of the inner loop": within(parts(2, at=2))
    },
    f"{STRETCH}: int32(2, 6) is not one of 2 stretches of float32(4, 6) along 0": {
        "a stretch of another type": within(value(4, dtype="int32"))
    },
    f"{STRETCH}: a view of a stretch has the strides, the offset and the bits of the whole": {
        "a view with strides of its own": within(value(4, stride=(1, 2))),
        "a view elsewhere": within(value(4, offset=6)),
    },
    f"{STRETCH}: a copy of a stretch is all of a storage of its own": {
        "a copy on an input": within(op(0, reads=((0, 0),)), value(4, storage=2), storage(2, nbytes=48))
    },
    f"{LOOP}, operator 6 (magis.part): a copy of a stretch is all of a storage of its own": {
        "a copy on what exists": within(op(6, reads=((1, 0),)), value(8, storage=4))
    },
    f"{INNER}, operator 0 (magis.part): a copy of a stretch is all of a storage of its own": {
        "a copy with room": inner(storage(2, nbytes=20)),
        "a copy with holes": inner(storage(2, nbytes=28), value(2, stride=(4, 2))),
    },
    f"{JOIN}: needs the whole, the part, and how to merge them, and makes nothing": {
        "a join of nothing": within(op(3, args=(Ref(2), 0))),
        "a join by name": within(op(3, kwargs=(("dim", 0),))),
    },
    f"{REDUCE}: needs the whole, the part, and how to merge them, and makes nothing": {
        "a reduction that makes something": within(op(5, outputs=(None,)))
    },
    f"{JOIN}: writes the tensor that it merges into, and no other": {
        "a join that writes nothing": within(op(3, writes=())),
        "a join that writes the part": within(op(3, writes=((2, 1), (5, 1)))),
    },
    f"{JOIN}: float32(6,) is not one of 2 stretches of float32(4,) along 0": {
        "a join of too much": within(op(3, args=(Ref(2), Ref(7), 0), reads=((2, 0), (6, 0))))
    },
    f"{JOIN}: dimension 1 of a tensor with 1": {"a join along what": within(op(3, args=(Ref(2), Ref(6), 1)))},
    f"{JOIN}: merges by 'sum', {KINDS}": {"a join by sum": within(op(3, args=(Ref(2), Ref(6), "sum")))},
    f"{REDUCE}: merges by 0, {KINDS}": {"a reduction along a dimension": within(op(5, args=(Ref(3), Ref(7), 0)))},
    f"{REDUCE}: merges by 'last', {KINDS}": {"a reduction of no kind": within(op(5, args=(Ref(3), Ref(7), "last")))},
    f"{REDUCE}: merges float32(2,) into float32(6,)": {
        "a reduction of a stretch": within(op(5, args=(Ref(3), Ref(6), "sum"), reads=((3, 0), (5, 0))))
    },
    f"{REDUCE}: merges int32(6,) into float32(6,)": {"a reduction of another type": within(value(7, dtype="int32"))},
    f"{WRITE}: {NOT_OWN}": {
        "an input written whole": within(op(7, args=(Ref(1), 0.5))),
        "an overlapping stretch written": both(
            value(2, stride=(0,)), within(value(1, stride=(0,)), value(8, stride=(0,)), value(9, stride=(0,)))
        ),
    },
    f"{LOOP}, operator 8 (aten.neg.default): {NOT_OWN}": {"a written input read whole": within(EARLY_READ)},
    f"{LOOP}: storage 1 of the body is written, and cut in several ways": {
        "a written input cut in two ways": both(
            lambda g: replace(g, values={**g.values, 6: replace(g.values[2], id=6, shape=(2,))}),
            lambda g: replace(g, inputs=(1, 2, 6)),
            op(0, args=(Ref(1), Ref(2), Ref(6))),
            within(
                lambda g: replace(g, values={**g.values, 10: replace(g.values[1], id=10, shape=(2,))}),
                lambda g: replace(g, values={**g.values, 11: replace(g.values[10], id=11, shape=(1,))}),
                lambda g: replace(g, inputs=(0, 1, 10, 2, 3)),
                added(Op(9, "magis.part", (Ref(10), 0), (), (11,))),
            ),
        )
    },
    f"{WRITE}: writes memory from outside that it does not take": {
        "a write without a stretch": within(op(7, args=(Ref(7), 0.5), reads=((6, 0),)))
    },
    f"{LOOP}, operator 9 (magis.wait): frees memory from outside": {
        "memory from outside freed": within(
            lambda g: replace(g, storages={**g.storages, 7: Storage(7, 96, "host")}),
            lambda g: replace(g, values={**g.values, 10: replace(g.values[0], id=10, storage=7)}),
            added(
                Op(8, "magis.store", (Ref(0),), (), (10,), reads=((0, 0),)),
                Op(9, "magis.wait", (Ref(0), Ref(10)), (), ()),
            ),
        )
    },
    f"{LOOP}: operator 4 (aten.sum.dim_IntList): reads version 1 of storage 4, which is at 0": {
        "old contents": within(op(4, reads=((4, 1),)))
    },
    f"{INNER}: operator 0 (magis.part): takes a value on storage 0 without saying which version it reads": {
        "a copy that says not what it reads": inner(op(0, reads=()))
    },
    f"{LOOP}: takes a value on storage 2 without saying which version it reads": {
        "an input of the loop without version": op(0, reads=((1, 0),))
    },
}
"""What is said -> mistakes of which it is said."""
