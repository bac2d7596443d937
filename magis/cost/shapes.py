"""Outputs of a call with other sizes: shapes, strides and storage sizes, computed on fake tensors."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from magis.cost.signature import parse, signature
from magis.errors import VerifyError
from magis.graph import ITEM_SIZE, Op, Value
from magis.ops.call import call, registered
from magis.ops.fake_results import as_made, bits_of, with_bits
from magis.ops.operators import op_info


@dataclass(frozen=True)
class Made:
    """One output tensor of a call; shape, stride and offset in elements.

    ``base`` is the index in ``op.inputs()`` of the tensor whose storage the output shares; ``offset`` is then relative
    to it (see ``offset_on``). None: the output is on a new storage of ``nbytes`` bytes.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int
    base: int | None
    nbytes: int
    bits: tuple[str, ...] = ()

    def offset_on(self, base: Value) -> int:
        """Return the output's offset on the storage of ``base``, in elements of the output's dtype."""
        return base.offset * ITEM_SIZE[base.dtype] // ITEM_SIZE[self.dtype] + self.offset


def results(op: Op, values: Mapping[int, Value]) -> Iterator[tuple[Value, int | None]]:
    """Yield the results of a call, which are among the values, with the sizes that it makes, and the bytes of their
    storages; None for a result on the storage of an input."""
    for number, each in zip(op.outputs, describe(op, values), strict=True):
        if number is not None and each is not None:
            base = None if each.base is None else values[op.inputs()[each.base]]
            lies = (values[number].storage, each.offset) if base is None else (base.storage, each.offset_on(base))
            looks = replace(values[number], shape=each.shape, stride=each.stride, dtype=each.dtype)
            yield replace(looks, storage=lies[0], offset=lies[1]), each.nbytes if base is None else None


def parse_with_outputs(text: str) -> tuple[Op, dict[int, Value]]:
    """Return the call of a signature with its outputs, unlike `parse`, which returns inputs only.

    Raises SignatureError if the text is not a signature, CallError or VerifyError if the installed torch rejects the
    call.
    """
    op, values = parse(text)
    inputs = op.inputs()
    outputs: list[int | None] = []
    for found in _describe(text, registered(op.target)):
        if found is None:
            outputs.append(None)
            continue
        number = len(values)
        storage = number if found.base is None else values[inputs[found.base]].storage
        values[number] = Value(number, found.shape, found.stride, found.dtype, storage, bits=found.bits)
        outputs.append(number)
    return replace(op, outputs=tuple(outputs)), values


def describe(op: Op, values: Mapping[int, Value]) -> tuple[Made | None, ...]:
    """Return the output tensors of ``op`` for its inputs in ``values``. Raises VerifyError if the operator rejects
    those."""
    return _describe(signature(op, values), registered(op.target))


@functools.lru_cache(maxsize=65536)
def _describe(text: str, _overload: OpOverload | None) -> tuple[Made | None, ...]:
    """Return the output tensors of a signature, cached for the operator that is registered."""
    op, values = parse(text)
    with _unlogged(), FakeTensorMode(), torch.no_grad():
        try:
            tensors = {number: _fake_tensor(value) for number, value in values.items()}
            made = as_made(op, call(op, tensors, {"$": 1.0}), tensors)
        except Exception as error:  # kernels, meta functions and decompositions raise different types
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise VerifyError(f"{op.target} refuses the sizes of a part: {reason}") from error
        owners = {tensors[number].untyped_storage()._cdata: at for at, number in reversed([*enumerate(op.inputs())])}
        largest = max((values[number].nbytes for number in op.inputs()), default=0)
        return tuple(_describe_result(op, at, tensor, owners, largest) for at, tensor in enumerate(made))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence torch's log of rejected sizes within the block, and turn the resizing of an output into an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "An output with one or more elements was resized", UserWarning)
            yield
    finally:
        logger.disabled = before


def _fake_tensor(value: Value) -> torch.Tensor:
    flat = torch.empty(reach(value.shape, value.stride), dtype=getattr(torch, value.dtype))
    return with_bits(flat.as_strided(value.shape, value.stride), value.bits)


def _describe_result(
    op: Op, at: int, tensor: torch.Tensor | None, owners: Mapping[int, int], largest: int
) -> Made | None:
    if tensor is None:
        return None
    storage = tensor.untyped_storage()
    least = op_info(op.target).least_bytes(at, tensor, largest)
    dtype = str(tensor.dtype).removeprefix("torch.")
    base = owners.get(storage._cdata)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    offset, nbytes = int(tensor.storage_offset()), max(least, storage.nbytes())
    return Made(shape, stride, dtype, offset, base, nbytes, bits_of(tensor))


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a dense tensor."""
    return prod(shape) * ITEM_SIZE[dtype]


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last in memory, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
