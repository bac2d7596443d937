"""How float32 matrix products are rounded while a case runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def products_of(dtype: str) -> Iterator[None]:
    """For "tf32", products and convolutions of float32 tensors may run in tf32 inside, and as before afterwards.

    Other data types leave torch's settings as they are, which eager's step reads as well.
    """
    if dtype != "tf32":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, _untyped(torch.backends.cudnn)
    places = (products, convolutions.conv, convolutions.rnn)
    before = [place.fp32_precision for place in places]
    products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        # torch keeps the older and the newer form of the setting, and refuses to read them where they differ
        products.allow_tf32, convolutions.allow_tf32 = (state == "tf32" for state in before[:2])
        for place, state in zip(places, before, strict=True):
            place.fp32_precision = state


def _untyped(module: Any) -> Any:
    """torch's stubs lack some of what it holds."""
    return module
