"""Where a peak that is measured in a pytest test is gated: the plugin says it, the library asks for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["BLOCK_GATE", "NAME"]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
"""What can name baselines."""

BLOCK_GATE: ContextVar[Callable[[Mapping[str, Any], float], None] | None] = ContextVar("magis gate", default=None)
"""Called with peaks by the names of their blocks, and their tolerance; None outside of a test."""
