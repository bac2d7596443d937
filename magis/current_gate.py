"""The gate of the running pytest test: set by the plugin, read by `magis.peak` and the trainers' callbacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["BLOCK_GATE", "NAME"]

NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
"""Pattern of valid names of baselines."""

BLOCK_GATE: ContextVar[Callable[[Mapping[str, Any], float], None] | None] = ContextVar("magis gate", default=None)
"""Function that compares peaks (name of a block -> bytes) with baselines within a tolerance; None outside of a test."""
