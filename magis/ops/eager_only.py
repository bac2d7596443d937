"""Eager's behaviour that a dispatch mode hides: other formulas, in-place gradient sums, fused layers.

Under a dispatch mode (`isTensorSubclassLike` in torch's sources) or a function mode
(`torch.overrides.has_torch_function`), torch takes other code paths in some composite operators and formulas. Where
these round differently, this module restores eager's path while a step is recorded:

* `prod` and `cumprod` divide by each factor if none is zero, a truth value read from data: a guard in the graph;
* `max_pool1d` of an input without gradient is one kernel, which keeps no indices;
* a `cross_entropy` with label smoothing and weights sums the weights of counted labels only;
* `one_hot` reads the smallest and largest class, to raise an error: bounds that become guards.

One operator needs less memory where nothing watches: `linear` adds its bias in place to a product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from magis.errors import CaptureError
from magis.graph.nodes import side_by_side
from magis.ops.call import ExpectationError

_ATEN = torch.ops.aten


@contextmanager
def formulas_as_eager() -> Iterator[None]:
    """Make composite CPU operators and their gradients decompose in the block as without a dispatch mode."""
    library, outer = torch.library.Library("aten", "IMPL"), vars(Tensor).get("__new__")  # blocks lie within blocks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for name, plain, graded in _KERNELS:
                library.impl(name, _either(plain, graded), "AutogradCPU", allow_override=True)
            for name, kernel in (("cross_entropy_loss", _cross_entropy), ("one_hot", _one_hot), ("linear", _linear)):
                library.impl(name, kernel, "AutogradCPU", allow_override=True)
        Tensor.__new__ = _new_tensor  # type: ignore[method-assign, assignment]
        yield
    finally:
        if outer is None:
            del Tensor.__new__
        else:
            Tensor.__new__ = outer  # type: ignore[method-assign]
        library._destroy()


def _new_tensor(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Construct a tensor; a subclass outside of all modes, since torch refuses memory that a mode made."""
    with nullcontext() if kind is Tensor else _disable_current_modes():
        return torch._C.TensorBase.__new__(kind, *args, **kwargs)


class _Product(torch.autograd.Function):
    """`prod` over all elements or along a dimension, with eager's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
        result: Tensor = _ATEN.prod(x, dtype=dtype) if dim is None else _ATEN.prod(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, result = ctx.saved_tensors
        return _product_gradient(grad, x.to(grad.dtype), result, ctx.dim, keepdim=ctx.keepdim), None, None, None


def _product_gradient(grad: Tensor, x: Tensor, result: Tensor, dim: int | None, *, keepdim: bool) -> Tensor:
    if x.dim() == 0:
        return grad
    if dim is not None and not keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    if dim is None:
        if not bool((x == 0).any()):
            return grad * (result / x).conj()
        if bool((x == 0).sum() > 1):
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        return _times_other_factors(grad, x.contiguous().view(-1), 0).view_as(x)
    zeros = x == 0
    counts = zeros.sum(dim, keepdim=True)  # allocated until the end of the formula, as in eager
    if bool(counts.sum() != 0):
        return _times_other_factors(grad, x, dim)
    return grad * (result / x).conj()


def _times_other_factors(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return the gradient times, for each element, the product of all other elements along the dimension."""
    size = x.shape[dim]
    if x.numel() == 0:
        return grad.expand_as(x)
    if size == 1:
        return grad
    ones = torch.ones([1 if at == dim % x.dim() else n for at, n in enumerate(x.shape)], dtype=grad.dtype)
    shifted = torch.cat([ones, x.narrow(dim, 0, size - 1)], dim)
    before = shifted.cumprod(dim)
    turned = x.narrow(dim, 1, size - 1).flip(dim)
    back = torch.cat([ones, turned], dim)
    del ones, turned
    behind = back.cumprod(dim).flip(dim)
    return grad * (before * behind).conj()


class _CumulativeProduct(torch.autograd.Function):
    """`cumprod`, with eager's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        result: Tensor = _ATEN.cumprod(x, dim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, result = ctx.saved_tensors
        return _cumprod_gradient(grad.to(x.dtype), x, result, ctx.dim), None, None


def _cumprod_gradient(grad: Tensor, x: Tensor, result: Tensor, dim: int) -> Tensor:
    if x.numel() <= 1 or x.shape[dim] == 1:
        return grad
    weights, zeros = result.conj() * grad, x == 0
    if bool(zeros.any()):
        del weights, zeros
        made: Tensor = _ATEN.cumprod_backward(grad, x, dim, result)
        return made
    return _reversed_cumsum(weights, dim).div(x.conj())


def _reversed_cumsum(weights: Tensor, dim: int) -> Tensor:
    """Return the reversed cumulative sum; intermediate results stay allocated to the end, as in eager."""
    turned = weights.flip(dim)
    sums = turned.cumsum(dim)
    return sums.flip(dim)


def _refuse_cumprod_(*_: Any, **__: Any) -> Tensor:
    raise CaptureError(
        "cumprod_ is called on a tensor that has a gradient, and its formula looks for zeros", hint="use cumprod"
    )


def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute cross-entropy; with smoothing, class weights and "mean", the divisor depends on which labels occur."""
    weighted = weight is not None and not weight.requires_grad and reduction == 1 and x.shape != target.shape
    if weight is None or not weighted or label_smoothing <= 0:
        plain: Tensor = _ATEN.cross_entropy_loss.default.decompose(
            x, target, weight, reduction, ignore_index, label_smoothing
        )
        return plain
    dim = 0 if x.dim() == 1 else 1
    scores = torch.log_softmax(x, dim, x.dtype)
    loss = torch.nn.functional.nll_loss(scores, target, weight, ignore_index=ignore_index)
    shape = [-1 if at == dim else 1 for at in range(x.dim())]
    smooth = -(scores * weight.view(shape)).sum(dim)
    smooth.masked_fill_(target == ignore_index, 0.0)
    mean: Tensor = smooth.sum() / torch.ops.magis.weight_of_labels(weight, target, ignore_index)
    share = label_smoothing / x.shape[dim]
    return loss * (1 - label_smoothing) + mean * share


def _weight_of_labels(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.gather(0, target.masked_select(target != ignore_index).flatten()).sum()


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    plain = _ATEN.one_hot.default.decompose
    if num_classes <= 0 or x.numel() == 0 or x.dtype != torch.int64:
        return plain(x, num_classes)  # type: ignore[no-any-return]
    try:
        torch.ops.magis.expect(x.min(), 0, how=">=")
        torch.ops.magis.expect(x.max(), num_classes, how="<")
    except ExpectationError:  # on real tensors
        return plain(x, num_classes)  # type: ignore[no-any-return]
    made = torch.zeros((*x.shape, num_classes), dtype=x.dtype, device=x.device)
    return made.scatter_(-1, x.unsqueeze(-1), 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer. A matrix or a contiguous input takes its bias within `addmm`; any other input is
    multiplied first, and the bias is added to the product."""
    if bias is None or x.dim() == 2 or x.is_contiguous():
        return _ATEN.linear.default.decompose(x, weight, bias)  # type: ignore[no-any-return]
    return torch.matmul(x, weight.t()).add_(bias)


_LIBRARY = torch.library.Library("magis", "FRAGMENT")
_LIBRARY.define("weight_of_labels(Tensor weight, Tensor target, int ignore_index) -> Tensor")
_LIBRARY.impl("weight_of_labels", _weight_of_labels, "CPU")
_LIBRARY.impl("weight_of_labels", _weight_of_labels, "CUDA")
_LIBRARY.impl("weight_of_labels", lambda weight, _target, _ignore_index: weight.new_empty(()), "Meta")


_product: Any = _Product.apply
_cumprod: Any = _CumulativeProduct.apply
_KERNELS: tuple[tuple[str, Any, Callable[..., Any]], ...] = (
    ("prod", _ATEN.prod.default, lambda x, dtype=None: _product(x, None, False, dtype)),
    ("prod.dim_int", _ATEN.prod.dim_int, lambda x, dim, keepdim=False, dtype=None: _product(x, dim, keepdim, dtype)),
    ("cumprod", _ATEN.cumprod.default, lambda x, dim, dtype=None: _cumprod(x, dim, dtype)),
    ("cumprod_", _ATEN.cumprod_.default, _refuse_cumprod_),
    ("max_pool1d", _ATEN.max_pool1d.default, lambda x, *window: _ATEN.max_pool1d_with_indices(x, *window)[0]),
)
"""Operator, kernel without gradient, and differentiable formula."""
REGISTERED = frozenset(
    f"aten/{name}/AutogradCPU" for name in (*(name for name, *_ in _KERNELS), "cross_entropy_loss", "one_hot", "linear")
)
"""Names under which torch knows the kernels of `formulas_as_eager` while its block runs."""


def _either(plain: Any, graded: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls `graded` where autograd records, and `plain` elsewhere."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and x.requires_grad:
            return graded(x, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():  # an in-place kernel bumps the version counter
            return plain(x, *args, **kwargs)

    return run


_PLAIN = (Tensor, torch.nn.Parameter)
_plain_has_torch_function = torch.overrides.has_torch_function


def _has_torch_function(args: Any) -> bool:
    """Replace `torch.overrides.has_torch_function`: check the arguments only, not the modes that are active."""
    own = (getattr(type(arg), "__torch_function__", None) for arg in args if type(arg) not in _PLAIN)
    return any(each not in (None, torch._C._disabled_torch_function_impl) for each in own)


@contextmanager
def layers_as_eager() -> Iterator[None]:
    """Make torch's fused layers (`nn.TransformerEncoderLayer` in eval mode) run as one kernel despite a function mode.

    This patches torch for the whole process, so keep the block short.
    """
    torch.overrides.has_torch_function = _has_torch_function
    try:
        yield
    finally:
        torch.overrides.has_torch_function = _plain_has_torch_function


# In-place writes of eager's autograd that it does not do under a dispatch mode.
# Autograd accumulates gradients in-place, and scatters in-place into zeros that it has allocated, when it holds the
# only reference. Under a dispatch mode, or with fake tensors, it allocates a new tensor instead
# (torch/csrc/autograd/input_buffer.cpp, FunctionsManual.cpp). A recorder of eager's memory must undo that.

_SELECTED = ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
_IN_PLACE: dict[Any, tuple[Any, int, tuple[str, ...]]] = {
    torch.ops.aten.add.Tensor: (torch.ops.aten.add_.Tensor, 0, ()),
    torch.ops.aten.scatter_add.default: (torch.ops.aten.scatter_add_.default, 0, ("Gather", "Cummax", "Cummin")),
    torch.ops.aten.scatter.src: (torch.ops.aten.scatter_.src, 0, _SELECTED),
    torch.ops.aten.index_put.default: (torch.ops.aten.index_put_.default, 1, ("Index",)),
    torch.ops.aten.index_add.default: (torch.ops.aten.index_add_.default, 0, ("IndexSelect",)),
    torch.ops.aten.put.default: (torch.ops.aten.put_.default, 0, ("Take",)),
    torch.ops.aten.masked_scatter.default: (torch.ops.aten.masked_scatter_.default, 0, ("MaskedSelect",)),
}
"""Operator -> in-place variant, number of references that the call itself holds beyond an addition's, and backward
formulas that call the operator on zeros that they allocate (empty: the engine's sums of gradients). Other formulas,
such as `index_put`'s, call the operator on a gradient that they read afterwards."""

_ADDING = ("VarMeanBackward", "StdMeanBackward")
"""Formulas that add the mean's gradient, a quotient, to the other gradient out-of-place, unlike the engine."""


@dataclass
class Unwatched:
    """Eager's choice between in-place and out-of-place gradient sums, reproduced in a dispatch mode."""

    alone: tuple[int, int]
    """Reference counts of a gradient and of its storage when autograd holds the only reference."""
    _before: Any = field(default=None, init=False)
    """Operator of the previous call to ``form``."""

    def form(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator that autograd would call instead of ``func`` without a dispatch mode."""
        before, self._before = self._before, func
        form, held, formulas = _IN_PLACE.get(func, (None, 0, ()))
        node: Any = torch._C._current_autograd_node()
        if form is None or node is None or torch.is_grad_enabled():
            return func
        if formulas and node.name().rstrip("0123456789").removesuffix("Backward") not in formulas:
            return func
        first, others = args[0], [arg for arg in args[1:] if isinstance(arg, Tensor)]
        if func is torch.ops.aten.add.Tensor:
            plain = kwargs.get("alpha", 1) == 1 and len(others) == 1
            if not plain or (others[0].shape, others[0].dtype) != (first.shape, first.dtype):
                return func
            if before is _ATEN.div.Scalar and node.name().startswith(_ADDING):
                return func
        tensor, storage = self.alone
        alone = _references(first) == (tensor + held, storage)
        return form if alone and side_by_side(first.shape, first.stride()) else func


def _references(tensor: Any) -> tuple[int, int]:
    """Return the reference counts of a tensor and of its storage, as seen from within a dispatch mode."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and torch._C._current_autograd_node() is not None:
            self.seen = _references(args[0])
        return func(*args, **(kwargs or {}))


def unwatched() -> Unwatched:
    """Return an ``Unwatched``, calibrated by one backward that adds two gradients under a dispatch mode."""
    watch = _Watch()
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        x = torch.ones(2, requires_grad=True) * 1
        y = (x.exp() + x.sin()).sum()
        with watch:
            torch.autograd.backward(y)
    return Unwatched(watch.seen)
