"""Options of `torch.compile(..., backend="magis", options={...})`, and the report that one may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from magis.errors import UsageError, nearest
from magis.units import format_bytes, format_milliseconds, is_number, parse_bytes

# What one compiled graph was planned to need; handed to the function in `options={"report": ...}`.


@dataclass(frozen=True)
class CompileReport:
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


DEFAULT_RATIO = 0.8
"""Memory ratio where no limit is given: what most networks reach at almost no cost."""
LIMITS = ("memory_ratio", "memory_limit", "latency_ratio")
KNOWN = (*LIMITS, "budget", "seconds", "report", "inductor")


class OptionError(UsageError, ShortenTraceback):
    """An option that cannot be. Also one of dynamo's own kinds, which it hands to the caller as they are: of any other
    exception in a backend it makes a report of many lines."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        RuntimeError.__init__(self, str(UsageError(message, hint=hint)))  # the two kinds' own disagree on arguments
        self.first_useful_frame = None


@dataclass(frozen=True)
class Options:
    """Exactly one limit, how long to search for what keeps it, and who is told about each plan."""

    memory_ratio: float | None = None
    memory_bytes: int | None = None
    latency_ratio: float | None = None
    budget: int | None = None
    seconds: float | None = None
    report: Callable[[CompileReport], object] | None = None
    inductor: bool = False
    """Inductor makes the code, in an order of its own; only what is saved for the backward is the plan's."""


def as_options(given: Mapping[str, Any] | None) -> Options:
    """The options that a user wrote. OptionError, one line, for unknown names and for values that cannot be."""
    options = dict(given or {})
    for name in options:
        if name not in KNOWN:
            raise OptionError(f"backend magis has no option {name!r}", hint=nearest(str(name), KNOWN))
    named = [name for name in LIMITS if options.get(name) is not None]
    if len(named) > 1:
        raise OptionError(f"backend magis was given {' and '.join(named)}", hint="give one limit")
    if not named:
        options["memory_ratio"] = DEFAULT_RATIO
    for name, least, most in (("memory_ratio", 0.0, 1.0), ("latency_ratio", 1.0, math.inf), ("seconds", 0.0, math.inf)):
        number = options.get(name)
        if number is not None and not (is_number(number) and least <= number <= most and number > 0):
            raise OptionError(f"backend magis: {name}={number!r}", hint=_RANGES[name])
    budget = options.get("budget")
    if budget is not None and not (is_number(budget) and budget > 0 and budget == int(budget)):
        raise OptionError(f"backend magis: budget={budget!r}", hint="use a whole number of plans above 0")
    report = options.get("report")
    if report is not None and not callable(report):
        raise OptionError(f"backend magis: report={report!r}", hint="pass a function of one Report")
    inductor = options.get("inductor", False)
    if not isinstance(inductor, bool):
        raise OptionError(f"backend magis: inductor={inductor!r}", hint="use True or False")
    return Options(
        memory_ratio=options.get("memory_ratio"),
        memory_bytes=_bytes(options.get("memory_limit")),
        latency_ratio=options.get("latency_ratio"),
        budget=None if budget is None else int(budget),
        seconds=options.get("seconds"),
        report=report,
        inductor=inductor,
    )


_RANGES = {
    "memory_ratio": "use a share above 0 and at most 1",
    "latency_ratio": "use a multiple of at least 1",
    "seconds": "use a number above 0",
}


def _bytes(limit: Any) -> int | None:
    if limit is None:
        return None
    try:
        nbytes = parse_bytes(limit) if isinstance(limit, str) else limit
    except UsageError as error:
        raise OptionError(f"backend magis: memory_limit: {error}") from None
    if not is_number(nbytes) or nbytes <= 0:
        raise OptionError(f"backend magis: memory_limit={limit!r}", hint='use an amount above 0, such as "8 GiB"')
    return int(nbytes)
