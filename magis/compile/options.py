"""What `torch.compile(..., backend="magis", options={...})` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import ShortenTraceback

from magis.compile.report import Report
from magis.errors import UsageError, nearest
from magis.units import is_number, parse_bytes

__all__ = ["DEFAULT_RATIO", "OptionError", "Options", "as_options"]

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
    report: Callable[[Report], object] | None = None
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
