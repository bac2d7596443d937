"""Options of `torch.compile(..., backend="magis", options={...})`, and the report of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from magis.errors import UsageError, nearest
from magis.frontends.limits import Limits, PlanFigures, limits_of
from magis.printable import printable
from magis.units import format_bytes, format_milliseconds, is_number


@dataclass(frozen=True)
class CompileReport(PlanFigures):
    """Plan of one compiled graph, passed to the callback in `options={"report": ...}`.

    Bytes are peaks of forward and backward: parameters, buffers, batch, results and gradients of this graph count as
    long as the loop holds them; the optimizer's state is outside the graph and does not count. The original is the
    unplanned graph: every operator once, in autograd's order, with all tensors saved that the backward reads; blocks
    checkpointed by the user are recomputed. With the option ``inductor`` the figures are of the graph before fusion,
    and the generated code makes fewer tensors.
    """

    feasible: bool
    """True if the plan meets the limit; else the plan is the one that exceeds the limit least."""
    saved_bytes: int
    """Bytes that stay alive from forward to backward, without results of the forward."""
    recomputed: tuple[str, ...]
    """Operators that are recomputed, one entry per recomputation: "aten.gelu.default"."""
    seconds: float
    """Duration of capture and search in seconds."""
    fallback: str = ""
    """Reason why torch's default partitioner split the graph (all numbers are then 0); "" if it is planned."""
    outside: str = ""
    """Graph break at which dynamo ended the graph, as a line; later code runs eagerly or in another graph, and its
    bytes are not counted. "" without a graph break."""
    swapped_bytes: int = 0
    """Bytes that are copied to host memory and back, which no other figure counts."""

    def __str__(self) -> str:
        outside = [f"outside      {self.outside}"] if self.outside else []
        if self.fallback:
            return "\n".join(map(printable, [f"not planned: {self.fallback}", *outside]))
        peaks = f"{format_bytes(self.planned_bytes)}, unplanned {format_bytes(self.original_bytes)}"
        swapped = f"swapped      {format_bytes(self.swapped_bytes)} to host memory and back"
        lines = [
            f"peak memory  {peaks} (ratio {self.memory_ratio:.3f})",
            f"saved        {format_bytes(self.saved_bytes)} from forward to backward",
            f"latency      {self.latency_ratio:.3f} times the unplanned one, predicted",
            f"recomputed   {len(self.recomputed)} operators",
            *([swapped] if self.swapped_bytes else []),
            f"search       {format_milliseconds(1000 * self.seconds)}",
        ]
        return "\n".join(map(printable, [*lines, *outside]))


DEFAULT_RATIO = 0.8
"""Default memory ratio, which most networks reach at almost no extra time."""
LEAST_LINK = 1e6
"""Slowest host link, in bytes per second, that an option may give."""
LIMITS = ("memory_ratio", "memory_limit", "latency_ratio")
KNOWN = (*LIMITS, "budget", "seconds", "report", "inductor", "link")


class OptionError(UsageError, ShortenTraceback):
    """Error for an invalid option of the backend.

    Dynamo re-raises its own ShortenTraceback unchanged, and wraps any other exception of a backend in a long report.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        RuntimeError.__init__(self, str(UsageError(message, hint=hint)))  # the two kinds' own disagree on arguments
        self.first_useful_frame = None


@dataclass(frozen=True)
class Options:
    """One limit, the effort of the search, and the callback for reports."""

    limits: Limits
    report: Callable[[CompileReport], object] | None = None
    inductor: bool = False
    """True if inductor generates the code, in its own order; the plan then only decides which values are saved."""
    outside: str = ""
    """Graph break that ends the graph, in one line; "" without one."""
    link: float | None = None
    """Bytes per second between host and device, in one direction; 0: no swaps; None: as fast as the device has it."""


def as_options(given: Mapping[str, Any] | None) -> Options:
    """Parse the options that a user gave. Raises OptionError, one line, for unknown names and invalid values."""
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
    link = options.get("link")
    if link is not None and not (is_number(link) and (link == 0 or link >= LEAST_LINK)):
        raise OptionError(f"backend magis: link={link!r}", hint="use bytes per second, 25e9 say, or 0 for no swaps")
    if link and inductor:
        raise OptionError("backend magis: inductor=True has no swaps", hint="leave link out")
    try:
        limits = limits_of(options)
    except UsageError as error:
        what = str(error) if str(error).startswith(KNOWN) else f"memory_limit: {error}"
        raise OptionError(f"backend magis: {what}") from None
    return Options(limits, report, inductor, link=0.0 if inductor else link)
