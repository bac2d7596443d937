"""Corrections of torch's fake kernels: layouts, masked outputs, lazy bits, packed workspaces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

from magis.graph.nodes import Op
from magis.ops.call import resolve
from magis.ops.operators import op_info

_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def as_made(op: Op, results: tuple[Tensor | None, ...], tensors: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
    """Return the fake results of ``op`` on ``tensors`` (by value id) with the real kernel's layout and outputs."""
    results = laid_out(op.target, [tensors[value] for value in op.inputs()], results)
    return tuple(masked(resolve(op.target), op.args, results))


def masked(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Return the results with None for those that the call masks out (``output_mask``, ``need_weights``)."""
    if not isinstance(out, tuple):
        return out
    for argument, mask in zip(func._schema.arguments, args, strict=False):
        if argument.name == "output_mask":
            return tuple(item if wanted else None for item, wanted in zip(out, mask, strict=True))
        if argument.name == "need_weights" and not mask:  # of fused attention
            return (*out[:-1], None)
    return out


def laid_out(target: str, args: Sequence[Any], out: Any) -> Any:
    """Return a call's fake results in the layout of the real kernel (`OpInfo.layout`).

    Torch's fake kernels often are chains of operators, whose layout depends on the operands' order.
    """
    wanted = op_info(target).layout
    if not wanted or any(argument.is_out for argument in resolve(target)._schema.arguments):
        return out
    first, *rest = out if isinstance(out, tuple) else (out,)
    match wanted:
        case "operands" | "last operand first":
            operands = [arg for arg in args if isinstance(arg, Tensor)]
            if wanted != "operands":
                operands.reverse()
            if len(operands) > 1 and first.stride() != (strides := _strides_by_operands(operands, first)):
                first = torch.empty_strided(first.shape, strides, dtype=first.dtype)
        case "rows" if isinstance(first, Tensor):
            formats = (torch.contiguous_format, *_CHANNELS_LAST.get(first.dim(), ()))
            if not any(first.is_contiguous(memory_format=layout) for layout in formats):
                first = first.contiguous()
        case "second" if isinstance(first, Tensor):
            first = torch.empty_like(first, memory_format=suggest_memory_format(args[1]))
        case "all rows":
            first, rest = first.contiguous(), [item.contiguous() for item in rest]
    return (first, *rest) if isinstance(out, tuple) else first


def _strides_by_operands(operands: Sequence[Tensor], result: Tensor) -> tuple[int, ...]:
    """Return the strides of an element-wise operator's result. A CPU's kernel works on copies of the operands whose
    dtype is not the common one; torch's fake kernels also copy all operands of half precision."""
    wide = [each for each in operands if each.dim()] + [result] * result.is_floating_point()
    common = functools.reduce(torch.promote_types, (each.dtype for each in wide or operands))
    lie = (each if each.dtype == common else torch.empty_like(each, dtype=common) for each in operands)
    return _strides_in_order(tuple(result.shape), tuple((tuple(each.shape), each.stride()) for each in lie))


@functools.lru_cache(maxsize=4096)
def _strides_in_order(
    shape: tuple[int, ...], operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
) -> tuple[int, ...]:
    """Return the strides of a result of `shape` from the operands' shapes and strides, by torch's rule."""
    with _disable_current_modes():
        spread = list[Tensor]()
        for sizes, strides in operands:
            new = len(shape) - len(sizes)
            steps = (0 if size == 1 != shape[new + at] else strides[at] for at, size in enumerate(sizes))
            spread += [torch.empty_strided(shape, (*(0,) * new, *steps), device="meta")] * bool(sizes)
        return compute_elementwise_output_strides(*spread) if spread else ()


# The lazy conjugate and negative bits of torch's tensors: `x.conj()`, `x.mH` and `x.conj().imag` are views that change
# the numbers, but not shape, stride or offset. Some operators (products, copies, views) take such a tensor directly
# and others a resolved copy, so two views of the same elements that differ in a bit are two values.


def bits_of(tensor: Tensor) -> tuple[str, ...]:
    """Return the lazy bits of a tensor that are set, in the form of `Value.bits`."""
    return ("conj",) * tensor.is_conj() + ("neg",) * tensor.is_neg()


def with_bits(tensor: Tensor, bits: tuple[str, ...]) -> Tensor:
    """Return a view with these lazy bits set of a tensor that has none."""
    if "conj" in bits:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if "neg" in bits else tensor


# Results of operators without a fake kernel, since their sizes depend on the contents of tensors.

Read = Callable[[Tensor], object]
"""Callback for a read of a tensor's contents; raises if the contents are unknown."""


def unfaked(func: Any, args: Sequence[Any], read: Read) -> tuple[Tensor, ...] | None:
    """Return fake results of a CTC loss, forward or backward, which has no fake kernel; None for other operators."""
    match str(func):
        case "aten._ctc_loss.default" | "aten._ctc_loss.Tensor":
            scores, lengths = args[0], args[3]
            if isinstance(lengths, Tensor):
                read(lengths)
                with _disable_current_modes():
                    lengths = lengths.tolist()
            steps, batch = scores.shape[0], scores.shape[1]
            states = (batch, steps, 2 * max(lengths, default=0) + 1)
            return torch.empty(batch, dtype=scores.dtype), torch.empty(states, dtype=scores.dtype)
        case "aten._ctc_loss_backward.default" | "aten._ctc_loss_backward.Tensor":
            return (torch.empty(args[1].shape, dtype=args[1].dtype),)
        case _:
            return None


def has_minimum_size(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Return True for a `bincount` whose output has ``minlength`` elements, as most contents give."""
    return str(func) == "aten.bincount.default" and len(args) > 2 and out.shape == (args[2],)


def known_results(func: Any, args: Sequence[Any], made: Any, read: Read) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs (fake result, real tensor) for outputs in `made` whose contents depend only on known numbers.

    Recurrent layers read the sizes of packed batches directly from memory.
    """
    if str(func) == "aten._pack_padded_sequence.default":
        padded, lengths, batch_first = args
        read(lengths)
        with _disable_current_modes():
            rows = torch.zeros((*padded.shape[:2], 1))
            yield made[1], torch._VF._pack_padded_sequence(rows, lengths, batch_first)[1]


# Kernels of recurrent layers pack a workspace for their own backward, of a size that only the kernel knows.

IN_TRAINING = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators that return a packed workspace for the backward if gradients are enabled, else an empty one."""

_BACKWARD = "aten.mkldnn_rnn_layer_backward.default"


def as_packed(target: str, args: Sequence[Any], out: Any) -> Any:
    """Return the fake results of a recurrent kernel with its packed workspace at the real kernel's size."""
    if target == _BACKWARD:  # the gradients of both biases are equal, and the fake ones the same tensor
        return (*out[:4], torch.empty_like(out[4]), *out[5:])
    if target not in IN_TRAINING or not torch.is_grad_enabled():
        return out
    return (*out[:-1], out[-1].new_empty(_packed_of_any_size(target, tuple(map(_hashable, args)))))


_ASKED = 32
_MOST_ASKED = 1 << 28
"""Limit on the bytes of a call that measures packed bytes. For larger calls, packed bytes are extrapolated, linear in
steps and samples (exact but for some pages), from two sizes of either, _ASKED apart."""


def _packed_of_any_size(target: str, given: tuple[Any, ...]) -> int:
    """Return the bytes that the kernel packs, extrapolated from small calls for a long sequence or a large batch."""
    (length, batch), hidden = given[0][0][:2], given[5][0][-1]
    if 8 * length * batch * hidden * given[0][2].itemsize <= _MOST_ASKED:
        return _packed_bytes(target, given)
    short, few = (size if size <= 3 * _ASKED else size % _ASKED + _ASKED for size in (length, batch))

    def at(steps: int, samples: int) -> int:
        resized = list(given)
        for position in (0, *range(5, 7)):  # the sequence, and its initial states
            shape, _, dtype = given[position]
            other = (steps, samples, *shape[2:]) if position == 0 else (*shape[:-2], samples, shape[-1])
            resized[position] = (other, torch.empty(other, device="meta").stride(), dtype)
        return _packed_bytes(target, tuple(resized))

    def of_batch(steps: int) -> int:
        base = at(steps, few)
        more = (batch - few) // _ASKED
        return base + more * (at(steps, few + _ASKED) - base) if more else base

    base, more = of_batch(short), (length - short) // _ASKED
    return base + more * (of_batch(short + _ASKED) - base) if more else base


def _hashable(arg: Any) -> Any:
    """Return an argument as a cache key: (shape, stride, dtype) of a tensor, a tuple for a list."""
    if isinstance(arg, Tensor):
        return tuple(arg.shape), tuple(arg.stride()), arg.dtype
    return tuple(arg) if isinstance(arg, (list, tuple)) else arg


@functools.lru_cache(maxsize=256)
def _packed_bytes(target: str, given: tuple[Any, ...]) -> int:
    """Run the real kernel on zeros and return the bytes that it packs, which do not depend on contents."""
    with _disable_current_modes(), torch.enable_grad():
        args: list[Any] = []
        for arg in given:
            if isinstance(arg, tuple) and arg and isinstance(arg[-1], torch.dtype):  # a tensor
                args.append(_zeros(*arg))
            else:
                args.append(list(arg) if isinstance(arg, tuple) else arg)
        return int(resolve(target)(*args)[-1].numel())


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()
