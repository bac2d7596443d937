"""What one compiled graph was planned to need; handed to the function in `options={"report": ...}`."""

from __future__ import annotations

from dataclasses import dataclass

from magis.units import format_bytes, format_milliseconds

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """One graph's plan. Bytes are peaks of forward and backward: parameters, buffers, batch, results and gradients of
    this graph count as long as the loop holds them; the optimizer's state, which the graph does not see, does not.
    With the option ``inductor`` all of it is of the graph before operators are fused: the code makes fewer tensors.
    """

    original_bytes: int
    """Unplanned: every operator once, in the order of autograd, all that the backward reads saved."""
    planned_bytes: int
    limit_bytes: int | None
    feasible: bool
    """The limit is kept; otherwise the plan is the one that exceeds it least."""
    saved_bytes: int
    """Memory that stays from forward to backward, results of the forward not counted."""
    latency_ratio: float
    """Predicted, by operators' times on the device: planned / original."""
    recomputed: tuple[str, ...]
    """Operators that run again, as often as they do: "aten.gelu.default"."""
    seconds: float
    """What capture and search took."""
    fallback: str = ""
    """Why the graph is not planned but partitioned as torch does it; empty: it is planned. Then all numbers are 0."""

    @property
    def memory_ratio(self) -> float:
        return self.planned_bytes / max(1, self.original_bytes)

    def __str__(self) -> str:
        if self.fallback:
            return f"not planned: {self.fallback}"
        peaks = f"{format_bytes(self.planned_bytes)}, unplanned {format_bytes(self.original_bytes)}"
        lines = [
            f"peak memory  {peaks} (ratio {self.memory_ratio:.3f})",
            f"saved        {format_bytes(self.saved_bytes)} from forward to backward",
            f"latency      {self.latency_ratio:.3f} times the unplanned one, predicted",
            f"recomputed   {len(self.recomputed)} operators",
            f"search       {format_milliseconds(1000 * self.seconds)}",
        ]
        return "\n".join(lines)
