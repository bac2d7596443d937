"""Options of `torch.compile(..., backend="magis", options={...})`, and the report that one may ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from magis.errors import UsageError, nearest
from magis.frontends.limits import Limits, PlanFigures, limits_of
from magis.printable import printable
from magis.units import format_bytes, format_milliseconds


@dataclass(frozen=True)
class CompileReport(PlanFigures):
    """One compiled graph's plan, handed to the function in `options={"report": ...}`.

    Bytes are peaks of forward and backward: parameters, buffers, batch, results and gradients of this graph count as
    long as the loop holds them; the optimizer's state, which the graph does not see, does not.
    The original is unplanned: every operator once, in the order of autograd, all that the backward reads saved; where
    the user checkpoints blocks, these run again.
    With the option ``inductor`` all of it is of the graph before operators are fused: the code makes fewer tensors.
    """

    feasible: bool
    """True if the limit is kept; otherwise the plan is the one that exceeds it least."""
    saved_bytes: int
    """Bytes that stay in memory from forward to backward, results of the forward not counted."""
    recomputed: tuple[str, ...]
    """Operators that run again, as often as they do: "aten.gelu.default"."""
    seconds: float
    """Duration of capture and search."""
    fallback: str = ""
    """Reason why the graph is not planned but partitioned as torch does it, and all numbers are 0; "" if planned."""
    outside: str = ""
    """Place where dynamo ended the graph ahead of the function's end: from there on, code runs in eager mode, or in
    another graph, and none of its bytes are counted. "" if it did not."""

    def __str__(self) -> str:
        outside = [f"outside      {self.outside}"] if self.outside else []
        if self.fallback:
            return "\n".join(map(printable, [f"not planned: {self.fallback}", *outside]))
        peaks = f"{format_bytes(self.planned_bytes)}, unplanned {format_bytes(self.original_bytes)}"
        lines = [
            f"peak memory  {peaks} (ratio {self.memory_ratio:.3f})",
            f"saved        {format_bytes(self.saved_bytes)} from forward to backward",
            f"latency      {self.latency_ratio:.3f} times the unplanned one, predicted",
            f"recomputed   {len(self.recomputed)} operators",
            f"search       {format_milliseconds(1000 * self.seconds)}",
        ]
        return "\n".join(map(printable, [*lines, *outside]))


DEFAULT_RATIO = 0.8
"""Memory ratio where no limit is given: what most networks reach at almost no cost."""
LIMITS = ("memory_ratio", "memory_limit", "latency_ratio")
KNOWN = (*LIMITS, "budget", "seconds", "report", "inductor")


class OptionError(UsageError, ShortenTraceback):
    """An invalid option of the backend.

    Dynamo hands its own ShortenTraceback to the caller as it is; any other exception in a backend becomes a report of
    many lines.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        RuntimeError.__init__(self, str(UsageError(message, hint=hint)))  # the two kinds' own disagree on arguments
        self.first_useful_frame = None


@dataclass(frozen=True)
class Options:
    """One limit, the effort of the search, and the function that is told about each plan."""

    limits: Limits
    report: Callable[[CompileReport], object] | None = None
    inductor: bool = False
    """True if inductor generates the code, in its own order; only the saved values are then the plan's."""
    outside: str = ""
    """Place where the graph at hand ends early, in one line."""


def as_options(given: Mapping[str, Any] | None) -> Options:
    """Return the options that a user wrote; raises OptionError, one line, for unknown names and invalid values."""
    options = dict(given or {})
    for name in options:
        if name not in KNOWN:
            raise OptionError(f"backend magis has no option {name!r}", hint=nearest(str(name), KNOWN))
    named = [name for name in LIMITS if options.get(name) is not None]
    if len(named) > 1:
        raise OptionError(f"backend magis was given {' and '.join(named)}", hint="give one limit")
    if not named:
        options["memory_ratio"] = DEFAULT_RATIO
    report = options.get("report")
    if report is not None and not callable(report):
        raise OptionError(f"backend magis: report={report!r}", hint="pass a function of one Report")
    inductor = options.get("inductor", False)
    if not isinstance(inductor, bool):
        raise OptionError(f"backend magis: inductor={inductor!r}", hint="use True or False")
    try:
        limits = limits_of(options)
    except UsageError as error:
        what = str(error) if str(error).startswith(KNOWN) else f"memory_limit: {error}"
        raise OptionError(f"backend magis: {what}") from None
    return Options(limits, report, inductor)
