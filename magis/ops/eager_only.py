"""What eager mode does and a dispatch mode does not see: formulas of products, saved numbers, in-place writes.

Eager's formulas of products divide by each factor where none is zero. Under a dispatch mode torch does not look for
zeros, and takes a longer way that holds for them, too, and rounds otherwise. So while a step is watched, `prod` and
`cumprod` have their formulas here, with the question as a truth value that Python reads: an expectation of the graph,
as any branch on data. `max_pool1d` of what needs no gradient is one kernel in eager, which keeps no indices.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from magis.errors import CaptureError
from magis.graph.nodes import Op, Value

_ATEN = torch.ops.aten


@contextmanager
def products_as_eager() -> Iterator[None]:
    """While it lasts, gradients of products and pools on the CPU are eager's, whoever watches."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for name, plain, graded in _KERNELS:
                library.impl(name, _either(plain, graded), "AutogradCPU")
        yield
    finally:
        library._destroy()


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


# Python numbers that autograd keeps as tensors: `x * 3` makes eager keep the 3 until the backward formula has run.
# Which operators do so is asked of torch, since no schema says it: the operator is called on tensors of one
# element, and its autograd node looked at.

Kind = tuple[type, str, bool]
"""Of an argument: its Python type; for a tensor also its data type, and whether it requires a gradient."""


@dataclass(frozen=True)
class TakenNumber:
    """A call of the forward that is given a number in a tensor's place, and that autograd may keep."""

    made: int
    """Position of the operator."""
    sequence: int
    """Of its autograd node."""
    func: Any
    given: tuple[Kind, ...]
    named: tuple[tuple[str, Any], ...]
    in_place: bool


def takes_number(func: Any, args: Sequence[Any]) -> bool:
    """Whether a number stands where the operator's schema has a tensor."""
    return any(True for _ in _numbers(func, args))


def _numbers(func: Any, args: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Position and name of such arguments."""
    for position, (argument, given) in enumerate(zip(func._schema.arguments, args, strict=False)):
        if isinstance(given, (bool, int, float, complex)) and isinstance(argument.type, torch.TensorType):
            yield position, argument.name


def kinds(args: Sequence[Any]) -> tuple[Kind, ...] | None:
    """What `kept_bytes` must know of a call's positional arguments; None for one with lists or constants of torch's."""
    if not all(arg is None or isinstance(arg, (Tensor, bool, int, float, complex, str)) for arg in args):
        return None
    return tuple(_kind(arg) for arg in args)


def _kind(arg: Any) -> Kind:
    return (Tensor, str(arg.dtype)[6:], arg.requires_grad) if isinstance(arg, Tensor) else (type(arg), "", False)


@functools.lru_cache(maxsize=4096)
def kept_bytes(func: Any, given: tuple[Kind, ...], named: tuple[tuple[str, Any], ...], in_place: bool) -> int:
    """Bytes of the numbers that autograd keeps of such a call."""
    with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes():
        args = [_sample(kind, first=in_place and not at) for at, kind in enumerate(given)]
        try:
            out = func(*args, **dict(named))
        except (RuntimeError, TypeError, ValueError):  # nothing that a single element of ones is good for
            return 0
        node = out.grad_fn if isinstance(out, Tensor) else None
        saved = [getattr(node, f"_saved_{name}", None) for _, name in _numbers(func, args)]
    return sum(each.nbytes for each in saved if isinstance(each, Tensor))


def _sample(kind: Kind, *, first: bool) -> Any:
    what, dtype, grad = kind
    if what is Tensor:
        tensor = torch.ones(1, dtype=getattr(torch, dtype), requires_grad=grad)
        return tensor.clone() if first else tensor
    return None if what is type(None) else what(1)


def lives(
    numbers: Sequence[TakenNumber], uses: Mapping[int, Sequence[int]], last_of_node: Mapping[int, int], end: int
) -> tuple[tuple[int, int, int], ...]:
    """First and last position, and bytes, of each number as autograd keeps it, in a step of `end` operators.

    `uses` are the positions at which a node passes its number on, `last_of_node` that of its last operator.
    """
    found = []
    for number in numbers:
        nbytes = kept_bytes(number.func, number.given, number.named, number.in_place)
        born = number.made + 1
        for use in uses.get(number.sequence, ()):
            found.append((born, use - 1, nbytes))
            born = use + 1
        found.append((born, last_of_node.get(number.sequence, end), nbytes))
    return tuple((born, last, nbytes) for born, last, nbytes in found if born <= last and nbytes)


def end_unread(number: TakenNumber, ops: Sequence[Op], values: Mapping[int, Value], deaths: Mapping[int, int]) -> int:
    """The last position before a node that no backward runs goes, with all that the forward made of its result."""
    reached = {value for value in ops[number.made].outputs if value is not None}
    for op in ops[number.made + 1 :]:
        if op.phase == "forward" and not reached.isdisjoint(op.inputs()):
            reached.update(op.made())
    return max((deaths.get(values[value].storage, len(ops) + 1) for value in reached), default=0) - 1


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
        return form if _references(first) == (tensor + held, storage) and _dense(first) else func


def _dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side without overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


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
