"""What the schemas of ATen operators say, and what they leave out: views, writes, in-place forms.

Targets are strings such as ``"aten.mm.default"``. Nothing here needs torch, so that rewriting and simulating a
graph stay independent of it. Sources: the operators' schemas (``native_functions.yaml``), and kernels for the writes
that schemas do not declare.
"""

from __future__ import annotations

from collections.abc import Mapping

from magis.graph.nodes import Arg

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "t.default", "transpose.int", "permute.default",
        "expand.default", "slice.Tensor", "select.int", "unsqueeze.default", "squeeze.default", "squeeze.dim",
        "squeeze.dims", "detach.default", "alias.default", "as_strided.default", "split.Tensor",
        "split_with_sizes.default", "unbind.int", "diagonal.default", "unfold.default", "view.dtype",
        "view_as_real.default", "view_as_complex.default", "chunk.default", "narrow.default", "lift_fresh.default",
        "swapaxes.default", "movedim.int", "flatten.using_ints", "real.default", "_reshape_alias.default",
        "select.Dimname", "numpy_T.default", "_conj.default", "_neg_view.default",
    )
)  # fmt: skip
"""Operators that may return a window on their input. Whether a call did is read off the storages at capture."""

VIEW_FORM: dict[str, str] = {
    "aten.squeeze_.default": "aten.squeeze.default",
    "aten.squeeze_.dim": "aten.squeeze.dim",
    "aten.squeeze_.dims": "aten.squeeze.dims",
    "aten.unsqueeze_.default": "aten.unsqueeze.default",
    "aten.t_.default": "aten.t.default",
    "aten.transpose_.default": "aten.transpose.int",
    "aten.as_strided_.default": "aten.as_strided.default",
    "aten.detach_.default": "aten.detach.default",
}
"""In-place operators that change how a tensor looks at its memory but no data: in a graph, whose values never change,
the view that has the new looks."""

UNDECLARED_WRITES: dict[str, tuple[int, ...]] = {
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
}
"""Arguments (by position) that an operator writes in training although its schema does not say so."""

SCALED_GRADIENTS: dict[str, int] = {
    f"aten._fused_{name}_.default": 1 for name in ("adam", "adamw", "sgd", "adagrad")
}  # fmt: skip
"""Arguments (by position) that an operator's schema says are written, which they are only with a ``grad_scale``."""

STATISTICS_FLAG: dict[str, int] = {
    "aten.native_batch_norm.default": 5,
    "aten.cudnn_batch_norm.default": 5,
    "aten.miopen_batch_norm.default": 5,
}
"""Position of the ``training`` argument: the undeclared writes happen only where it is True."""

FUNCTIONAL_FORM: dict[str, str] = {
    "aten.relu_.default": "aten.relu.default",
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten.add_.Scalar": "aten.add.Scalar",
    "aten.sub_.Tensor": "aten.sub.Tensor",
    "aten.mul_.Tensor": "aten.mul.Tensor",
    "aten.div_.Tensor": "aten.div.Tensor",
    "aten.div_.Scalar": "aten.div.Scalar",
    "aten.gelu_.default": "aten.gelu.default",
    "aten.silu_.default": "aten.silu.default",
    "aten.tanh_.default": "aten.tanh.default",
    "aten.sigmoid_.default": "aten.sigmoid.default",
    "aten.leaky_relu_.default": "aten.leaky_relu.default",
    "aten.elu_.default": "aten.elu.default",
    "aten.hardtanh_.default": "aten.hardtanh.default",
    "aten.hardswish_.default": "aten.hardswish.default",
    "aten.exp_.default": "aten.exp.default",
    "aten.neg_.default": "aten.neg.default",
    "aten.sqrt_.default": "aten.sqrt.default",
    "aten.masked_fill_.Scalar": "aten.masked_fill.Scalar",
    "aten.masked_fill_.Tensor": "aten.masked_fill.Tensor",
    "aten.clamp_.default": "aten.clamp.default",
    "aten.pow_.Scalar": "aten.pow.Tensor_Scalar",
}
"""In-place operator -> the operator that writes a fresh output instead; same arguments, same numbers."""

IN_PLACE_FORM: dict[str, str] = {
    **{functional: inplace for inplace, functional in FUNCTIONAL_FORM.items()},
    "aten.mul.Scalar": "aten.mul_.Tensor",  # `mul_.Scalar` rounds the number to the tensor's type first
}
"""Functional operator -> in-place operator on its first argument; same arguments, same numbers."""

_EXACT_FOR_COMPLEX = frozenset(
    f"aten.{name}"
    for name in ("add.Tensor", "sub.Tensor", "neg.default", "mul.Tensor", "mul.Scalar", "masked_fill.Scalar")
)
"""Operators on complex numbers whose in-place form computes the same bits, for add and sub without ``alpha``, for mul
by a real number. The others multiply complex numbers: whether the compiled loop fuses a product and a sum (and so
rounds once) depends on whether result and input share memory, and on which factor is the first."""

COMMUTATIVE = frozenset({"aten.add.Tensor", "aten.mul.Tensor"})
"""The in-place form may as well take over the second argument (for add only without ``alpha``)."""

OUT_FORM: dict[str, tuple[str, str]] = {
    "aten.threshold_backward.default": ("aten.threshold_backward.grad_input", "grad_input"),
    "aten.gelu_backward.default": ("aten.gelu_backward.grad_input", "grad_input"),
    "aten.silu_backward.default": ("aten.silu_backward.grad_input", "grad_input"),
    "aten.tanh_backward.default": ("aten.tanh_backward.grad_input", "grad_input"),
    "aten.sigmoid_backward.default": ("aten.sigmoid_backward.grad_input", "grad_input"),
    "aten.hardswish_backward.default": ("aten.hardswish_backward.out", "out"),
    "aten.hardtanh_backward.default": ("aten.hardtanh_backward.grad_input", "grad_input"),
    "aten.leaky_relu_backward.default": ("aten.leaky_relu_backward.grad_input", "grad_input"),
    "aten.elu_backward.default": ("aten.elu_backward.grad_input", "grad_input"),
}
"""Point-wise operators without in-place form, with the out variant (and its keyword) that may write over an input.

They are all built on TensorIterator, which allows an output that is exactly one of the inputs."""


KEEPS_INPUT_SIZE = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "col2im", "im2col",
    )
)  # fmt: skip
"""Operators that allocate their result as large as their input and then shrink it (to the mean, say): the memory
stays, while fake tensors know the final shape only."""

ELEMENT_WISE = frozenset(
    f"aten.{name}.default"
    for name in (
        "elu_backward", "hardsigmoid_backward", "hardtanh_backward", "hardswish_backward", "softplus_backward",
    )
)  # fmt: skip
"""Operators whose result is laid out by all of their operands, where torch's shape functions follow one of them."""

ROW_BY_ROW = frozenset({"aten.log_sigmoid_forward.default"})
"""Operators all of whose results are laid out row by row."""

ONE_MORE: dict[str, int] = {"aten._embedding_bag.default": 1, "aten._embedding_bag_forward_only.default": 1}
"""Operators whose result at this position, where it has elements, was made with one more."""


def least_bytes(target: str, position: int, count: int, item: int, largest: int) -> int:
    """Bytes of the memory behind a fresh result of `count` elements of `item` bytes, if it is more than they take;
    `largest` is the size of the largest input."""
    if ONE_MORE.get(target) == position and count:
        return (count + 1) * item
    return largest if target in KEEPS_INPUT_SIZE else 0


CONTIGUOUS_RESULT = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss_backward", "huber_loss_backward", "_log_softmax_backward_data", "log_sigmoid_forward",
        "smooth_l1_loss_backward", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward",
        "rrelu_with_noise", "rrelu_with_noise_backward", "glu_backward",
    )
)  # fmt: skip
"""Operators whose first result is laid out row by row (or channels last) whatever the layout of the input, which
torch's shape functions for fake tensors copy."""


def may_change_place(target: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], *, dtype: str) -> bool:
    """Whether the functional operator ``target``, its in-place form or out variant make the same bits of ``dtype``."""
    if not dtype.startswith("complex"):
        return True
    real = not target.startswith("aten.mul.") or isinstance(args[1], (int, float))
    return target in _EXACT_FOR_COMPLEX and real and not kwargs


def is_view(target: str) -> bool:
    """Whether calls of the operator may return a window on an input."""
    return target in VIEWS


def undeclared_writes(target: str, args: tuple[object, ...]) -> tuple[int, ...]:
    """Positions of the arguments that this call writes without saying so."""
    positions = UNDECLARED_WRITES.get(target, ())
    if positions and args[STATISTICS_FLAG[target]] is not True:
        return ()
    return positions


def spared(target: str, kwargs: Mapping[str, object]) -> int | None:
    """Position of the argument that this call leaves as it is although its schema says otherwise."""
    return SCALED_GRADIENTS.get(target) if kwargs.get("grad_scale") is None else None


def without_statistics(target: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """Arguments of the call that computes the same outputs without updating running statistics a second time."""
    positions = UNDECLARED_WRITES.get(target, ())
    return tuple(None if index in positions else arg for index, arg in enumerate(args))
