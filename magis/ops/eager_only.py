"""What eager mode does and a dispatch mode does not see: other formulas, in-place writes, layers in one kernel.

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
    """While it lasts, operators on the CPU are taken apart as eager does it, and so are their gradients."""
    library, outer = torch.library.Library("aten", "IMPL"), vars(Tensor).get("__new__")  # blocks lie within blocks
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for name, plain, graded in _KERNELS:
                library.impl(name, _either(plain, graded), "AutogradCPU")
            library.impl("cross_entropy_loss", _smoothed, "AutogradCPU")
            library.impl("one_hot", _one_hot, "AutogradCPU")
        Tensor.__new__ = _made_unwatched  # type: ignore[method-assign, assignment]
        yield
    finally:
        if outer is None:
            del Tensor.__new__
        else:
            Tensor.__new__ = outer  # type: ignore[method-assign]
        library._destroy()


def _made_unwatched(kind: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A tensor by its constructor. Of a user's type it is refused where a mode has made its memory."""
    with nullcontext() if kind is Tensor else _disable_current_modes():
        return torch._C.TensorBase.__new__(kind, *args, **kwargs)


class _Product(torch.autograd.Function):
    """The product of everything, or along a dimension (with or without it in the result)."""

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
        return _by_others(grad, x.contiguous().view(-1), 0).view_as(x)
    zeros = x == 0
    counts = zeros.sum(dim, keepdim=True)  # memory that eager holds to the end of its formula
    if bool(counts.sum() != 0):
        return _by_others(grad, x, dim)
    return grad * (result / x).conj()


def _by_others(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """By the product of those before and those behind, for each factor."""
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


class _Running(torch.autograd.Function):
    """Products up to each element along a dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        result: Tensor = _ATEN.cumprod(x, dim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, result = ctx.saved_tensors
        return _running_gradient(grad.to(x.dtype), x, result, ctx.dim), None, None


def _running_gradient(grad: Tensor, x: Tensor, result: Tensor, dim: int) -> Tensor:
    if x.numel() <= 1 or x.shape[dim] == 1:
        return grad
    weights, zeros = result.conj() * grad, x == 0
    if bool(zeros.any()):
        del weights, zeros
        made: Tensor = _ATEN.cumprod_backward(grad, x, dim, result)
        return made
    return _sums_behind(weights, dim).div(x.conj())


def _sums_behind(weights: Tensor, dim: int) -> Tensor:
    """Of each element and those behind it. Eager frees what it makes on the way at the end."""
    turned = weights.flip(dim)
    sums = turned.cumsum(dim)
    return sums.flip(dim)


def _refused(*_: Any, **__: Any) -> Tensor:
    raise CaptureError(
        "cumprod_ is called on a tensor that has a gradient, and its formula looks for zeros", hint="use cumprod"
    )


def _smoothed(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Cross-entropy. With smoothing, class weights and a mean, the loss is divided by what Python cannot know."""
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
_running: Any = _Running.apply
_KERNELS: tuple[tuple[str, Any, Callable[..., Any]], ...] = (
    ("prod", _ATEN.prod.default, lambda x, dtype=None: _product(x, None, False, dtype)),
    ("prod.dim_int", _ATEN.prod.dim_int, lambda x, dim, keepdim=False, dtype=None: _product(x, dim, keepdim, dtype)),
    ("cumprod", _ATEN.cumprod.default, lambda x, dim, dtype=None: _running(x, dim, dtype)),
    ("cumprod_", _ATEN.cumprod_.default, _refused),
    ("max_pool1d", _ATEN.max_pool1d.default, lambda x, *window: _ATEN.max_pool1d_with_indices(x, *window)[0]),
)
"""Operator, what it is, and what it is where a gradient is asked for."""


def _either(plain: Any, graded: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and x.requires_grad:
            return graded(x, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():  # an in-place one tells autograd that the tensor is another by now
            return plain(x, *args, **kwargs)

    return run


_PLAIN = (Tensor, torch.nn.Parameter)
_plain_has_torch_function = torch.overrides.has_torch_function


def _overridden(args: Any) -> bool:
    """`torch.overrides.has_torch_function` of the arguments alone, whatever modes are in force."""
    own = (getattr(type(arg), "__torch_function__", None) for arg in args if type(arg) not in _PLAIN)
    return any(each not in (None, torch._C._disabled_torch_function_impl) for each in own)


@contextmanager
def layers_as_eager() -> Iterator[None]:
    """While it lasts, a function mode does not keep torch's fused layers (a frozen `nn.TransformerEncoderLayer`) from
    running as one kernel. Of the whole process, hence of short duration."""
    torch.overrides.has_torch_function = _overridden
    try:
        yield
    finally:
        torch.overrides.has_torch_function = _plain_has_torch_function


# What eager writes in place, but not while it is watched.
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
    """Tells from within a dispatch mode what eager would do without it. Make one with ``unwatched`` beforehand."""

    alone: tuple[int, int]
    """References on a gradient and on its storage where autograd holds the only one."""
    _before: Any = field(default=None, init=False)
    """The operator that was asked about before."""

    def form(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The operator that autograd would have called in place of ``func``; mostly ``func`` itself."""
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
    """References on a tensor and on its storage, with those that asking from a dispatch mode adds."""
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
    """Finds out how many references a dispatch mode sees on a gradient that only autograd holds: it adds up two."""
    watch = _Watch()
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        x = torch.ones(2, requires_grad=True) * 1
        y = (x.exp() + x.sin()).sum()
        with watch:
            torch.autograd.backward(y)
    return Unwatched(watch.seen)
