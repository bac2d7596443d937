"""Order constraints that are none in truth, taken out of a step so that more of it can be split or moved.

    ones_like(loss)           ->  full([], 1)                      only the shape of ``loss`` mattered
    nll_loss(x, t) by mean    ->  nll_loss(x, t) by sum / (t != ignored).sum()

The second lets the loss and its gradient be split together: how many targets count depends on the targets alone, so the
backward pass of a part need not wait for the loss of the others. Both compute what the original computes, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from magis.analysis.windows import row_major
from magis.ir import Arg, Const, Graph, Op, Ref, Storage, Value

_FILL: dict[str, float] = {"aten.ones_like.default": 1, "aten.zeros_like.default": 0}
_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
MEAN, SUM = 1, 2


def untangle(graph: Graph) -> Graph:
    """The same step without needless constraints."""
    found = _Rewritten(dict(graph.storages), dict(graph.values))
    for op in graph.ops:
        if _only_shape(graph, op):
            found.ops.append(_factory(graph, op))
        elif op.target in _LOSSES and _mean_of_counted(op):
            found.loss(op)
        else:
            found.ops.append(op)
    ops = tuple(replace(op, id=number) for number, op in enumerate(found.ops))
    return replace(graph, storages=found.storages, values=found.values, ops=ops)


def _only_shape(graph: Graph, op: Op) -> bool:
    """Whether a factory looks at nothing but the shape of its input, and lays its result out row by row."""
    if op.target not in (*_FILL, "aten.empty_like.default", "aten.full_like.default"):
        return False
    value = graph.values[op.made()[0]]
    return value.stride == row_major(value.shape) and not op.writes


def _factory(graph: Graph, op: Op) -> Op:
    value = graph.values[op.made()[0]]
    given = dict(op.kwargs)
    order = tuple(pair for pair in op.reads if graph.storages[pair[0]].kind == "generator")
    kwargs: tuple[tuple[str, Arg], ...] = (
        ("device", given.get("device") or Const("device", "cpu")),
        ("dtype", Const("dtype", value.dtype)),
    )
    if op.target == "aten.empty_like.default":
        return replace(op, target="aten.empty.memory_format", args=(value.shape,), kwargs=kwargs, reads=order)
    fill: Arg = op.args[1] if op.target == "aten.full_like.default" else _FILL[op.target]
    return replace(op, target="aten.full.default", args=(value.shape, fill), kwargs=kwargs, reads=order)


def _mean_of_counted(op: Op) -> bool:
    """A mean over targets that all weigh the same."""
    return op.args[2] is None and op.args[3] == MEAN and len(op.made()) == 2


@dataclass
class _Rewritten:
    """The step while it is being rewritten."""

    storages: dict[int, Storage]
    values: dict[int, Value]
    ops: list[Op] = field(default_factory=list)

    def loss(self, op: Op) -> None:
        """The mean as a sum divided by the number of targets that count, which is known ahead."""
        loss, weight = (value for value in op.outputs if value is not None)
        target = op.args[1]
        ignored = op.args[4]
        if not isinstance(target, Ref):
            self.ops.append(op)
            return
        labels, total = self.values[target.value], self.values[weight]
        counted = self._fresh(labels.shape, "bool")
        reads = tuple(pair for pair in op.reads if pair[0] == labels.storage)
        self._emit(op, "aten.ne.Scalar", (target, ignored), (counted,), reads)
        met: tuple[tuple[int, int], ...] = ((self.values[counted].storage, 0),)
        exact = total.dtype in ("float32", "float64")
        count = weight if exact else self._fresh((), "float32")
        dtype: tuple[tuple[str, Arg], ...] = (("dtype", Const("dtype", self.values[count].dtype)),)
        self._emit(op, "aten.sum.default", (Ref(counted),), (count,), met, dtype)
        if not exact:
            met = ((self.values[count].storage, 0),)
            dtype = (("dtype", Const("dtype", total.dtype)),)
            self._emit(op, "aten._to_copy.default", (Ref(count),), (weight,), met, dtype)
        looks = self.values[loss]
        parts, unused = self._fresh(looks.shape, looks.dtype), self._fresh((), total.dtype)
        args = (*op.args[:3], SUM, *op.args[4:])
        self.ops.append(replace(op, args=args, outputs=(parts, unused)))
        met = ((self.values[parts].storage, 0), (total.storage, 0))
        self._emit(op, "aten.div.Tensor", (Ref(parts), Ref(weight)), (loss,), met)

    def _emit(
        self,
        like: Op,
        target: str,
        args: tuple[Arg, ...],
        outputs: tuple[int, ...],
        reads: tuple[tuple[int, int], ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> None:
        self.ops.append(
            Op(
                0, target, args, kwargs, outputs,
                reads=tuple(sorted(reads)), phase=like.phase, module=like.module, line=like.line,
            )
        )  # fmt: skip

    def _fresh(self, shape: tuple[int, ...], dtype: str) -> int:
        storage, value = max(self.storages) + 1, max(self.values) + 1
        self.values[value] = Value(value, shape, row_major(shape), dtype, storage)
        self.storages[storage] = Storage(storage, self.values[value].nbytes, "temporary")
        return value
