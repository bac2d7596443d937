"""Where a peak that is measured in a pytest test is gated: the plugin says it, the library asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

__all__ = ["BLOCK_GATE"]

BLOCK_GATE: ContextVar[Callable[[Any, str, float], None] | None] = ContextVar("magis gate", default=None)
"""Called with a peak, the block's name and its tolerance; None outside of a test."""
