"""Losses and their gradients in other operators, so that a part needs less memory and nothing of other parts.

    log_softmax_backward(nll_loss_backward(g, x, t), x)  ->  g exp(x), less g at t       (`with_lean_cross_entropy`)

Torch makes the gradient of a cross-entropy by its scores from another tensor of their size, which is zero but for one
number a row. Here it is one tensor, which overwrites the log-softmax. Its numbers differ in the last digits, as `exp`
is another kernel: only steps in parts use it. All else is bitwise exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from magis.graph import Arg, Const, Graph, Op, Ref, Storage, Value
from magis.graph.hazards import row_major

_LOSSES = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_GRADIENTS = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
_SQUARES, _SQUARES_BACK = "aten.mse_loss.default", "aten.mse_loss_backward.default"
MEAN, SUM = 1, 2


def with_lean_cross_entropy(graph: Graph) -> Graph:
    """Return the step with each gradient of a cross-entropy by its scores in one tensor of their size."""
    leans = _gradients_of_scores(graph)
    if not leans:
        return graph
    found = LossRewriter(dict(graph.storages), dict(graph.values))
    later: set[int] = set()
    """Storages that are written once more than in the graph."""
    for at, op in enumerate(graph.ops):
        if op.id in leans:
            found.scores(op, graph.ops[leans[op.id]])
            later.update(graph.values[value].storage for value in op.made())
        elif at not in leans.values():
            reads, writes = (
                tuple((storage, version + (storage in later)) for storage, version in pairs)
                for pairs in (op.reads, op.writes)
            )
            found.ops.append(replace(op, reads=reads, writes=writes))
    for at in leans.values():
        value = found.values.pop(graph.ops[at].made()[0])
        del found.storages[value.storage]
    return found.step(graph)


def _gradients_of_scores(graph: Graph) -> dict[int, int]:
    """Map the gradients of log-softmaxes (by id) to the gradients of losses by class numbers (by position) that they
    alone take."""
    uses = Counter(value for op in graph.ops for value in op.inputs())
    losses = {op.made()[0]: at for at, op in enumerate(graph.ops) if op.target == "aten.nll_loss_backward.default"}
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.target != "aten._log_softmax_backward_data.default" or op.inputs()[0] not in losses:
            continue
        (gradient, log), (made,) = op.inputs(), op.made()
        loss, looks = graph.ops[losses[gradient]], graph.values[made]
        # rows of scores in a type in which the kernels round alike, without class weights
        layouts = {(graph.values[value].shape, graph.values[value].stride) for value in (gradient, log, made)}
        rows = len(looks.shape) == 2 and layouts == {(looks.shape, row_major(looks.shape))} and op.args[2] in (1, -1)
        exact = looks.dtype in ("float32", "float64") and {graph.values[v].dtype for v in op.inputs()} == {looks.dtype}
        plain = loss.args[3] is None and uses[gradient] == 1 and loss.inputs()[1] == log
        plain &= graph.values[loss.inputs()[2]].dtype == "int64"  # the index of a scatter; a loss takes uint8 as well
        if rows and exact and plain and gradient not in graph.outputs:
            found[op.id] = losses[gradient]
    return found


def _splits_with_loss(op: Op) -> bool:
    """Return True for a mean or sum of squares, and for the gradient of a mean."""
    reductions: dict[str, tuple[Arg, ...]] = {_SQUARES: (MEAN, SUM), _SQUARES_BACK: (MEAN,)}
    return op.target in reductions and (op.args[-1] if len(op.args) > 2 else MEAN) in reductions[op.target]


@dataclass
class LossRewriter:
    """A step under construction, in which losses and their gradients are written in other operators."""

    storages: dict[int, Storage]
    values: dict[int, Value]
    ops: list[Op] = field(default_factory=list)

    def step(self, graph: Graph) -> Graph:
        """Return the step with the operators emitted."""
        ops = tuple(replace(op, id=number) for number, op in enumerate(self.ops))
        return replace(graph, storages=self.storages, values=self.values, ops=ops)

    def by_itself(self, op: Op) -> bool:
        """Emit a loss or its gradient so that a part needs nothing of other parts; return False for other operators."""
        if op.target in _LOSSES and op.args[2] is None and op.args[3] == MEAN and len(op.made()) == 2:
            self.loss(op)  # a mean without class weights
        elif op.target in _GRADIENTS and op.args[4] == SUM and len(op.args) == 7:
            self.gradient(op)
        else:
            return _splits_with_loss(op) and self.squares(op)
        return True

    def loss(self, op: Op) -> None:
        """Emit the mean loss as a sum divided by the number of targets that are not ignored."""
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

    def gradient(self, op: Op) -> None:
        """Emit the gradient of a summed loss without the total weight, of which it only needs that there is one."""
        taken = op.args[6]
        if not isinstance(taken, Ref):
            self.ops.append(op)
            return
        total = self.values[taken.value]
        weight = self._fresh((), total.dtype)
        kwargs: tuple[tuple[str, Arg], ...] = (
            ("device", Const("device", "cpu")),
            ("dtype", Const("dtype", total.dtype)),
        )
        self._emit(op, "aten.full.default", ((), 0), (weight,), (), kwargs)
        reads = {pair for pair in op.reads if pair[0] != total.storage} | {(self.values[weight].storage, 0)}
        self.ops.append(replace(op, args=(*op.args[:6], Ref(weight)), reads=tuple(sorted(reads))))

    def scores(self, op: Op, loss: Op) -> None:
        """Emit the gradient of a cross-entropy by its scores: g exp(x), less g at the target, in place."""
        (made,) = op.made()
        gradient, log, target, total = loss.inputs()
        labels, looks = self.values[target], self.values[log]
        rows, dtype, known = labels.shape, looks.dtype, dict((*loss.reads, *op.reads))

        def emit(name: str, args: tuple[Arg, ...], shape: tuple[int, ...], kind: str, base: int | None = None) -> int:
            """Emit an operator; ``base``: the value of which it opens a view."""
            number = self._fresh(shape, kind)
            taken = {self.values[arg.value].storage for arg in args if isinstance(arg, Ref)}
            reads = tuple((storage, known.get(storage, 0)) for storage in taken)
            if base is not None:
                del self.storages[self.values[number].storage]
                self.values[number] = replace(self.values[number], storage=self.values[base].storage)
            self._emit(op, f"aten.{name}", args, (number,), reads if base is None else ())
            return number

        if loss.args[4] == MEAN:
            gradient = emit("div.Tensor", (Ref(gradient), Ref(total)), (), dtype)
        counted = emit("ne.Scalar", (Ref(target), loss.args[5]), rows, "bool")
        factor = emit("where.ScalarOther", (Ref(counted), Ref(gradient), 0), rows, dtype)
        place = emit("where.ScalarOther", (Ref(counted), Ref(target), 0), rows, labels.dtype)
        less = emit("neg.default", (Ref(factor),), rows, dtype)
        column = (*rows, 1)
        factor = emit("unsqueeze.default", (Ref(factor), 1), column, dtype, factor)
        less = emit("unsqueeze.default", (Ref(less), 1), column, dtype, less)
        place = emit("unsqueeze.default", (Ref(place), 1), column, labels.dtype, place)
        shares = emit("exp.default", (Ref(log),), looks.shape, dtype)
        shares = emit("mul.Tensor", (Ref(shares), Ref(factor)), looks.shape, dtype)
        # in place, which is one write more: the kernel that copies first takes ten times as long
        storage = self.values[made].storage
        del self.storages[self.values[shares].storage]
        self.values[shares] = replace(self.values[shares], storage=storage)
        reads = tuple((self.values[value].storage, 0) for value in (shares, place, less))
        self._emit(op, "aten.scatter_add_.default", (Ref(shares), 1, Ref(place), Ref(less)), (made,), reads)
        self.ops[-1] = replace(self.ops[-1], writes=((storage, 1),))

    def squares(self, op: Op) -> bool:
        """Emit a mean or sum of squares, or the gradient of a mean, in the order of torch's kernels; return False for
        other layouts and types, whose kernels round otherwise.

        The loss gets a storage of its own size: torch's is as large as the scores.
        """
        (made,) = op.made()
        back = op.target == _SQUARES_BACK
        *gradient, left, right = op.inputs()
        looks = self.values[left]
        alike = {(each.shape, each.stride, each.dtype) for each in (looks, self.values[right])}
        if back:
            alike.add((self.values[made].shape, self.values[made].stride, self.values[made].dtype))
        plain = (
            looks.numel and looks.stride == row_major(looks.shape) and not any(self.values[g].shape for g in gradient)
        )
        if not (len(alike) == 1 and plain and looks.dtype in ("float32", "float64")):
            return False
        apart, next_one = (self._fresh(looks.shape, looks.dtype) for _ in range(2))
        storages = {self.values[value].storage for value in (left, right)}
        reads = tuple(pair for pair in op.reads if pair[0] in storages)
        self._emit(op, "aten.sub.Tensor", (Ref(left), Ref(right)), (apart,), reads)
        met, then = ((self.values[apart].storage, 0),), ((self.values[next_one].storage, 0),)
        if back:
            self._emit(op, "aten.mul.Scalar", (Ref(apart), 2.0 / looks.numel), (next_one,), met)
            own = tuple(pair for pair in op.reads if pair[0] == self.values[gradient[0]].storage)
            self._emit(op, "aten.mul.Tensor", (Ref(next_one), Ref(gradient[0])), (made,), (*then, *own))
        else:
            self._emit(op, "aten.mul.Tensor", (Ref(apart), Ref(apart)), (next_one,), met)
            reduced = "aten.sum.default" if op.args[2:] == (SUM,) else "aten.mean.default"
            self._emit(op, reduced, (Ref(next_one),), (made,), then)
            loss = self.values[made]
            self.storages[loss.storage] = replace(self.storages[loss.storage], nbytes=loss.nbytes)
        return True

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
