"""What the schemas of ATen operators say, and what they leave out: views, writes, randomness, in-place forms.

Targets are strings such as ``"aten.mm.default"``. Nothing here needs torch, so that rewriting and simulating a
graph stay independent of it. Sources: the operators' schemas (``native_functions.yaml``) and DESIGN section 3,
which lists the writes that schemas do not declare.
"""

from __future__ import annotations

from magis.ir.types import Arg

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "t.default", "transpose.int", "permute.default",
        "expand.default", "slice.Tensor", "select.int", "unsqueeze.default", "squeeze.default", "squeeze.dim",
        "squeeze.dims", "detach.default", "alias.default", "as_strided.default", "split.Tensor",
        "split_with_sizes.default", "unbind.int", "diagonal.default", "unfold.default", "view.dtype",
        "view_as_real.default", "view_as_complex.default", "chunk.default", "narrow.default", "lift_fresh.default",
        "swapaxes.default", "movedim.int", "flatten.using_ints", "real.default", "_reshape_alias.default",
        "select.Dimname", "numpy_T.default",
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

STATISTICS_FLAG: dict[str, int] = {
    "aten.native_batch_norm.default": 5,
    "aten.cudnn_batch_norm.default": 5,
    "aten.miopen_batch_norm.default": 5,
}
"""Position of the ``training`` argument: the undeclared writes happen only where it is True."""

RANDOM = frozenset(
    f"aten.{name}"
    for name in (
        "bernoulli_.float", "bernoulli.default", "bernoulli.p", "bernoulli_.Tensor", "native_dropout.default",
        "rand.default", "rand_like.default", "randn.default", "randn_like.default", "randint.default",
        "randint.low", "randint_like.default", "randint_like.low_dtype", "randperm.default", "normal_.default",
        "normal.Tensor_Tensor", "uniform_.default", "exponential_.default", "multinomial.default",
        "rrelu_with_noise.default", "rrelu_with_noise_.default", "random_.default", "random_.from", "random_.to",
        "poisson.default", "_fused_dropout.default", "log_normal_.default", "cauchy_.default", "geometric_.default",
    )
)  # fmt: skip
"""Operators that always draw random numbers. They keep their order and are never recomputed."""

DROPOUT_ARGUMENT: dict[str, int] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": 3,
    "aten._scaled_dot_product_flash_attention.default": 3,
    "aten._scaled_dot_product_efficient_attention.default": 5,
    "aten._scaled_dot_product_cudnn_attention.default": 5,
}
"""Attention kernels draw random numbers when their dropout probability, at this position, is not zero."""

FUNCTIONAL_FORM: dict[str, str] = {
    "aten.relu_.default": "aten.relu.default",
    "aten.add_.Tensor": "aten.add.Tensor",
    "aten.add_.Scalar": "aten.add.Scalar",
    "aten.sub_.Tensor": "aten.sub.Tensor",
    "aten.mul_.Tensor": "aten.mul.Tensor",
    "aten.mul_.Scalar": "aten.mul.Scalar",
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

IN_PLACE_FORM: dict[str, str] = {functional: inplace for inplace, functional in FUNCTIONAL_FORM.items()}
"""Functional operator -> in-place operator on its first argument."""

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

CONTIGUOUS_RESULT = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss_backward", "huber_loss_backward", "_log_softmax_backward_data", "log_sigmoid_forward",
        "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward", "rrelu_with_noise",
    )
)  # fmt: skip
"""Operators whose first result is laid out row by row (or channels last) whatever the layout of the input, which
torch's shape functions for fake tensors copy."""

SAVED_NUMBERS: dict[str, int] = {
    "aten.mul.Tensor": 1,
    "aten.mul_.Tensor": 1,
    "aten.div.Tensor": 1,
    "aten.div_.Tensor": 1,
}
"""Operators whose autograd formula keeps the operand at this position; where it is a Python number, eager keeps an
8-byte tensor of it (on the CPU, even for a step on a GPU) until the backward formula has run."""

NUMBER_BYTES = 8


def is_view(target: str) -> bool:
    """Whether calls of the operator may return a window on an input."""
    return target in VIEWS


def undeclared_writes(target: str, args: tuple[object, ...]) -> tuple[int, ...]:
    """Positions of the arguments that this call writes without saying so."""
    positions = UNDECLARED_WRITES.get(target, ())
    if positions and args[STATISTICS_FLAG[target]] is not True:
        return ()
    return positions


def is_random(target: str, args: tuple[object, ...]) -> bool:
    """Whether this call draws random numbers. ``args`` are the graph's arguments."""
    if target in RANDOM:
        return True
    position = DROPOUT_ARGUMENT.get(target)
    if position is None or position >= len(args):
        return False
    return args[position] != 0.0


def without_statistics(target: str, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """Arguments of the call that computes the same outputs without updating running statistics a second time."""
    positions = UNDECLARED_WRITES.get(target, ())
    return tuple(None if index in positions else arg for index, arg in enumerate(args))
