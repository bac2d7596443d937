"""Records of one step over time: its calls, and every tensor with its birth and its death."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Span", "TensorLives", "Timelines"]


@dataclass(frozen=True)
class Span:
    """One operator call on the simulated time line of a step."""

    KINDS: ClassVar = (
        "parameters", "optimizer state", "batch and buffers", "activations", "gradients", "updates", "scratch",
    )  # fmt: skip
    op: str
    module: str
    phase: str
    line: str
    start_ms: float
    ms: float
    nbytes: int
    """Peak bytes in memory during the call, tensors and scratch."""
    stream: str = "compute"
    """Stream: "compute", or concurrently "to host" and "from host" (copies of swaps) or "messages" (collectives)."""
    again: bool = False
    """True if the call recomputes an earlier one."""
    kinds: tuple[int, ...] = ()
    """`nbytes` by `KINDS`: activations are made by the forward, gradients by the backward, updates by the weight
    update. Empty if a neighbour simulated the step."""


@dataclass(frozen=True)
class TensorLives:
    """Every tensor of a simulated step and every call that runs, in columns, for pages that look them up.

    Calls have numbers from 0 on, in the order in which they run; parts of loops run one after the other. Texts are
    indices of ``words``.
    """

    words: tuple[str, ...]
    calls: tuple[tuple[int, ...], ...]
    """Distinct calls: operator, module, phase, line of code (words), and 1 if it recomputes an earlier one."""
    run: tuple[int, ...]
    """Index in ``calls`` of each call that runs."""
    ends: tuple[int, ...]
    """Time in ns at which it ends."""
    scratch: tuple[int, ...]
    """Bytes that it needs besides tensors."""
    born: tuple[int, ...]
    """Number of the first call during which a tensor is in memory."""
    dies: tuple[int, ...]
    """Number of the last one."""
    nbytes: tuple[int, ...]
    kind: tuple[int, ...]
    """Word: "parameter", "activation", ... as in `ModuleBytes.kind`."""
    module: tuple[int, ...]
    label: tuple[int, ...]
    """Word: operator that makes the tensor; name of one that exists before the step."""
    line: tuple[int, ...]
    shape: tuple[int, ...]
    """Word: type and shape, "bfloat16[1, 2048]"."""


@dataclass(frozen=True)
class Timelines:
    """Simulated calls of the original and the optimized step, by start time within each stream."""

    original: tuple[Span, ...]
    optimized: tuple[Span, ...]
    original_lives: TensorLives | None = None
    optimized_lives: TensorLives | None = None
