"""Eager mode's own ways, which a dispatch mode does not see: other formulas, in-place sums, layers in one kernel.

Torch takes another way through some composite operators and formulas while a dispatch mode is in force
(`isTensorSubclassLike` in its sources), or a function mode (`torch.overrides.has_torch_function`). Where results round
otherwise there, eager's way stands here, for as long as a step is watched:

* `prod` and `cumprod` divide by each factor where none is zero, a truth value that Python reads: an expectation of the
  graph, as any branch on data;
* `max_pool1d` of what needs no gradient is one kernel, which keeps no indices;
* a smoothed, weighted `cross_entropy` sums the weights of those labels alone that count;
* `one_hot` reads the least and the largest class, to raise an error: bounds that the graph expects.
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
    """Decompose composite operators on the CPU, and their gradients, as eager does without a dispatch mode."""
    library, outer = torch.library.Library("aten", "IMPL"), vars(Tensor).get("__new__")  # blocks lie within blocks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for name, plain, graded in _KERNELS:
                library.impl(name, _either(plain, graded), "AutogradCPU")
            library.impl("cross_entropy_loss", _cross_entropy, "AutogradCPU")
            library.impl("one_hot", _one_hot, "AutogradCPU")
        Tensor.__new__ = _new_tensor  # type: ignore[method-assign, assignment]
        yield
    finally:
        if outer is None:
            del Tensor.__new__
        else:
            Tensor.__new__ = outer  # type: ignore[method-assign]
        library._destroy()


def _new_tensor(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Construct a tensor; one of a subclass outside of all modes, since torch refuses it memory that a mode made."""
    with nullcontext() if kind is Tensor else _disable_current_modes():
        return torch._C.TensorBase.__new__(kind, *args, **kwargs)


class _Product(torch.autograd.Function):
    """`prod` of everything, or along a dimension (with or without it in the result), with eager's gradient."""

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
    counts = zeros.sum(dim, keepdim=True)  # memory that eager holds to the end of its formula
    if bool(counts.sum() != 0):
        return _times_other_factors(grad, x, dim)
    return grad * (result / x).conj()


def _times_other_factors(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """Multiply the gradient by the product of all other factors, for each factor along the dimension."""
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
    """Return the sums of each element and those behind it; intermediate results live to the end, as in eager."""
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
    """Cross-entropy. With smoothing, class weights and a mean, the divisor depends on which labels occur."""
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
"""Operator, its kernel without a gradient, and its formula where a gradient is asked for."""


def _either(plain: Any, graded: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes the formula `graded` where autograd records, and `plain` elsewhere."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and x.requires_grad:
            return graded(x, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():  # an in-place one tells autograd that the tensor is another by now
            return plain(x, *args, **kwargs)

    return run


_PLAIN = (Tensor, torch.nn.Parameter)
_plain_has_torch_function = torch.overrides.has_torch_function


def _has_torch_function(args: Any) -> bool:
    """Stand in for `torch.overrides.has_torch_function`: look at the arguments alone, not at modes in force."""
    own = (getattr(type(arg), "__torch_function__", None) for arg in args if type(arg) not in _PLAIN)
    return any(each not in (None, torch._C._disabled_torch_function_impl) for each in own)


@contextmanager
def layers_as_eager() -> Iterator[None]:
    """Let torch's fused layers (a frozen `nn.TransformerEncoderLayer`) run as one kernel in spite of a function mode.

    This holds for the whole process, so keep the block short.
    """
    torch.overrides.has_torch_function = _has_torch_function
    try:
        yield
    finally:
        torch.overrides.has_torch_function = _plain_has_torch_function


# In-place writes of eager that it leaves out under a dispatch mode.
# Autograd adds up the gradients of a tensor with several readers in place, and scatters into the zeros that it made
# for the purpose, when it holds the only reference. Under a dispatch mode, or with fake tensors, it plays safe and
# makes a new tensor (torch/csrc/autograd/input_buffer.cpp, FunctionsManual.cpp). Whoever watches eager to learn how
# much memory it needs must undo that.

_SELECTED = ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
_IN_PLACE: dict[Any, tuple[Any, int, tuple[str, ...]]] = {
    torch.ops.aten.add.Tensor: (torch.ops.aten.add_.Tensor, 0, ()),
    torch.ops.aten.scatter_add.default: (torch.ops.aten.scatter_add_.default, 0, ("Gather", "Cummax", "Cummin")),
    torch.ops.aten.scatter.src: (torch.ops.aten.scatter_.src, 0, _SELECTED),
    torch.ops.aten.index_put.default: (torch.ops.aten.index_put_.default, 1, ("Index",)),
}
"""Operator -> its in-place form, how many references more than an addition its call itself holds, and whose backward
formulas call it on zeros of their own (empty: sums of gradients, by the engine). Other formulas, that of `index_put`
itself say, call the same operator on a gradient that they go on reading."""

_ADDING = ("VarMeanBackward", "StdMeanBackward")
"""Formulas that add the gradient through the mean, a quotient, to the other one: to a new tensor, unlike the engine."""


@dataclass
class Unwatched:
    """Eager's choice of operators without a dispatch mode, told from within one. Make one with ``unwatched`` before."""

    alone: tuple[int, int]
    """References to a gradient and to its storage where autograd holds the only one."""
    _before: Any = field(default=None, init=False)
    """Operator of the previous call of ``form``."""

    def form(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator that autograd would have called in place of ``func``; mostly ``func`` itself."""
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
    """Return the references to a tensor and to its storage, with those that asking from a dispatch mode adds."""
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
    """Find out, by adding up two gradients, how many references a dispatch mode sees where only autograd holds one."""
    watch = _Watch()
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        x = torch.ones(2, requires_grad=True) * 1
        y = (x.exp() + x.sin()).sum()
        with watch:
            torch.autograd.backward(y)
    return Unwatched(watch.seen)
