"""The data types of a case, by name.

"float32", "bfloat16", "float16", "float64": dtype of all floating-point tensors. "tf32": float32 tensors whose matrix
products may be rounded to 10 bits of mantissa (GPUs only). "amp-bfloat16", "amp-float16": weights, gradients and
optimizer state in float32, forward and loss under autocast, without a GradScaler.
"""

from __future__ import annotations

from magis.errors import UsageError, nearest

__all__ = ["DTYPES", "autocast_type", "check_dtype", "tensor_type"]

_AUTOCAST = {"amp-bfloat16": "bfloat16", "amp-float16": "float16"}
DTYPES = ("float32", "tf32", "bfloat16", "float16", "float64", *_AUTOCAST)


def tensor_type(dtype: str) -> str:
    """Return torch's dtype name of weights and batch."""
    return "float32" if dtype == "tf32" or dtype in _AUTOCAST else dtype


def autocast_type(dtype: str) -> str | None:
    """Return the name of the dtype that autocast casts to; None without autocast."""
    return _AUTOCAST.get(dtype)


def check_dtype(dtype: str, device: str) -> None:
    """Raise UsageError for an unknown data type, and for "tf32" on the device "cpu"."""
    if dtype not in DTYPES:
        raise UsageError(f"unknown data type {dtype!r}", hint=nearest(dtype, DTYPES))
    if dtype == "tf32" and device == "cpu":
        raise UsageError("data type 'tf32' does nothing on device 'cpu'", hint="use float32, or a GPU (sim:<name>)")
