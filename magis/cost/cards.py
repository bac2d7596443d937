"""Memory of GPUs as CUDA reports it, and what a step can have of it (docs/notes/cards.md has the sources).

A card has less memory than its name says, and CUDA's context takes a part before the first tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from magis.errors import UsageError
from magis.units import MIB, check_whole, parse_bytes

CONTEXT_BYTES = 600 * MIB
"""Bytes of CUDA's context and of the libraries' kernels: what processes on large cards are seen to hold at most."""

_GIB: Mapping[str, float] = MappingProxyType({
    "t4": 14.56, "v100-16gb": 15.77, "v100": 31.74, "a10": 21.99, "a30": 23.53, "rtx3090": 23.69, "rtx4090": 23.52,
    "rtx5090": 31.37, "l40": 44.40, "rtx6000ada": 44.43, "a100-40gb": 39.50, "a100": 79.25, "h100": 79.11,
    "h100-nvl": 93.00, "h200": 139.72,
})  # fmt: skip
"""GiB that out-of-memory messages name, the least of those found."""
CARDS = tuple(_GIB)


def card_bytes(name: str) -> int:
    """Return a card's memory as CUDA reports it, in whole MiB. Raises KeyError for an unknown card."""
    return int(_GIB[name] * 1024) * MIB


def limit_bytes(limit: str | int, least: int = 1) -> int:
    """Return a memory limit in bytes: an amount ("24 GiB"), or the name of a card, less its context. Raises UsageError
    for anything else, for less than `least` bytes, and for a text such as "24" that lacks its unit."""
    if isinstance(limit, str) and limit.lower() in _GIB:
        return card_bytes(limit.lower()) - CONTEXT_BYTES
    try:
        found = parse_bytes(limit) if isinstance(limit, str) else limit
    except UsageError as error:
        raise UsageError(f"{error}, or a card: {', '.join(CARDS)}") from None
    if isinstance(limit, str) and limit.strip().isdigit() and 0 < found < MIB:
        raise UsageError(f"a memory limit of {found} bytes", hint=f"write its unit: {found}GiB, {found}MiB, {found}B")
    check_whole("memory_limit", found, least)
    return found
