"""The conjugate and negative bits of torch's tensors: views that change no shape, stride or offset, but the numbers.

`x.conj()`, `x.mH` and `x.conj().imag` touch no memory. Some operators (products, copies, views) take such a tensor as
it is and others a resolved copy, so two tensors on one window that differ in a bit are two values.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bits_of", "with_bits"]


def bits_of(tensor: Tensor) -> tuple[str, ...]:
    """The bits that are set, as `Value.bits` has them."""
    return ("conj",) * tensor.is_conj() + ("neg",) * tensor.is_neg()


def with_bits(tensor: Tensor, bits: tuple[str, ...]) -> Tensor:
    """The window of a tensor without bits, seen through these."""
    if "conj" in bits:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if "neg" in bits else tensor
