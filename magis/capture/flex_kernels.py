"""`flex_attention` on a simulated GPU: one operator that makes the buffers of the fused kernel, forward and backward.

torch has the kernel only in compiled code for a GPU; it refuses gradients on a CPU, and outside of torch.compile the
function holds all scores. Its templates (`torch/_inductor/kernel/flex`) allocate

* forward: the output, in the layout of the query, and logsumexp and largest score of each row in float32;
* backward: one float32 number for each row, and the gradients of query, key and value.

Query, key, value, output, logsumexp, the tensors of the block mask, and those that `score_mod` and `mask_mod` read are
kept for the backward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from magis.errors import CaptureError

_MODULE = "torch.nn.attention.flex_attention"
_COMPILED = "compile_wrapper"
"""Function of torch that runs compiled ones, and only these: a block under a checkpoint is called by others."""


@torch.library.custom_op("magis_flex::flex_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, read: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("flex_attention of a simulated GPU does not run")


@_forward.register_fake
def _fake_forward(query: Tensor, _key: Tensor, value: Tensor, _read: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*query.shape[:3], value.shape[3])
    order = sorted(range(3), key=query.stride().__getitem__, reverse=True)
    rows = [query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2)]
    return torch.empty_permuted(shape, (*order, 3), dtype=query.dtype, device=query.device), rows[0], rows[1]


@torch.library.custom_op("magis_flex::flex_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Tensor, read: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise NotImplementedError("flex_attention of a simulated GPU does not run")


@_backward.register_fake
def _fake_backward(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, rows: Tensor, _read: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(rows)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, read = inputs
    ctx.save_for_backward(query, key, value, output[0], output[1], *read)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_of_rows: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, rows, *read = ctx.saved_tensors
    if grad is None:
        return None, None, None, [None] * len(read)
    return (*_backward(grad, query, key, value, out, rows, read)[:3], [None] * len(read))


_forward.register_autograd(_differentiate, setup_context=_keep)


def _called(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple[Any, ...],
    *_scale_and_options: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the operator in place of torch's. Raises CaptureError for calls without torch.compile, which hold all scores,
    and for gradients of tensors that `score_mod` reads."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != _COMPILED:
        frame = frame.f_back
    if frame is None:
        raise CaptureError("flex_attention outside of torch.compile", hint="call torch.compile(flex_attention)")
    read = [each for each in block_mask if isinstance(each, Tensor)]
    seen: set[int] = set()
    bound = [each for function in (score_mod, block_mask[-1]) for each in _bound(function, seen)]
    if any(each.requires_grad for each in bound):
        raise CaptureError("flex_attention whose score_mod is trained", hint="let it read tensors without gradients")
    return _forward(query, key, value, [*read, *bound])  # type: ignore[no-any-return]


def _bound(held: Any, seen: set[int], names: Collection[str] = ()) -> Iterator[Tensor]:
    """Yield the tensors that a function, or functions within it, holds in its closure, its defaults, or its bound
    arguments; of modules those in attributes of these names."""
    if id(held) in seen:
        return
    if isinstance(held, nn.Module):
        found, inner = [getattr(held, name, None) for name in names], names
    else:
        seen.add(id(held))
        found, inner = [], ()
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, partial):
        found = [held.func, *held.args, *held.keywords.values()]
    elif isinstance(held, MethodType):
        found, inner = [held.__func__, held.__self__], held.__func__.__code__.co_names
    elif isinstance(held, FunctionType):
        found = [*inspect.getclosurevars(held).nonlocals.values(), *(held.__defaults__ or ())]
        inner = held.__code__.co_names
    for each in found:
        if each is not held:
            yield from _bound(each, seen, inner)


@contextmanager
def flex_on_gpu() -> Iterator[None]:
    """Let `flex_attention` take the operator above within the block. This patches torch's module, in the process."""
    module: Any = sys.modules.get(_MODULE)
    if module is None:  # nobody can call it
        yield
        return
    ours = {
        "_validate_device": lambda *_tensors: None,
        "flex_attention_hop": _called,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    before = {name: getattr(module, name) for name in ours}
    vars(module).update(ours)
    try:
        yield
    finally:
        vars(module).update(before)
