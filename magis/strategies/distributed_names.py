"""From the name of a distributed strategy to the strategy. Imports torch only when one is made.

A name is a plain one, or "amp+" and a plain one, or "half+" and one of ddp, tp and pp. `tp` and `pp` take the number of
ranks of a group ("tp4"; 2 without one) and go together ("tp4+pp2"); "tp4+sp" is tensor parallelism with sequence
parallelism; "pp4+interleaved", "pp4+zb" and "pp4+zbv" are pipelines with two stages on each rank.
"accumulate4+" in front: gradients of four micro-batches. A strategy of the user's own goes by "package.module:factory".
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from magis import registry
from magis.errors import UsageError

if TYPE_CHECKING:
    from magis.strategies.rank_step import RankStrategy

DISTRIBUTED: tuple[str, ...] = (
    "ddp",
    "oss",
    "oss+sdp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "tp",
    "tp+sp",
    "pp",
    "pp+interleaved",
    "pp+zb",
    "pp+zbv",
    "tp+pp",
)
"""Plain names, in the order in which reports list them."""

_REPLICATED = ("ddp", "oss", "oss+sdp")
_HALVED = ("ddp", "tp", "tp+sp", "pp", "tp+pp")
_ACCUMULATED = ("ddp", "oss", "fsdp", "tp", "tp+sp", "pp", "tp+pp")
"""Strategies that take several micro-batches. All others reduce gradients in ways that a second micro-batch would meet
again."""
_ACCUMULATES = re.compile(r"accumulate([1-9]\d*)\+")
_PARTITIONED = {"zero1": 1, "zero2": 2, "zero3": 3}
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PLANNED = ("magis+ddp", "magis+fsdp", "magis+tp2", "magis+pp2")
"""Examples of strategies whose ranks run plans."""
_PLANNED = re.compile(r"magis\+(ddp|fsdp|tp\d*(\+sp)?|pp\d*)")
"""Names of strategies that `magis/extensions/ranks/plans/planned_ranks.py` makes."""
_GROUPS = re.compile(
    r"(?:tp(?P<tp>\d*)(?P<sequence>\+sp$)?)?(?P<both>\+)?(?:pp(?P<pp>\d*)(?:\+(?P<schedule>interleaved|zbv?))?)?"
)


@dataclass(frozen=True)
class _ParsedName:
    plain: str
    amp: bool
    tensor: int = 1
    """Ranks that share each block."""
    stages: int = 1
    half: bool = False
    sequence: bool = False
    micro_batches: int | None = None
    schedule: str = ""
    """Schedule of a pipeline with two stages on each rank."""


def distributed_strategy(name: str) -> RankStrategy:
    """Return the distributed strategy called ``name``, or that of the callable at "package.module:factory". Raises
    UsageError, with the nearest names, for any other name, and for a factory that cannot be called."""
    if is_own(name):
        return _call_factory(name)
    parsed = _parse(name)
    if parsed is None:
        every = [*DISTRIBUTED, *(f"amp+{plain}" for plain in DISTRIBUTED)]
        near = difflib.get_close_matches(name, every, n=3, cutoff=0.4) or list(DISTRIBUTED)
        raise UsageError(
            f"{name!r} is no distributed strategy",
            hint=f"did you mean {' or '.join(near)}? tp and pp take a number of at least 2, as in tp4+pp2",
        )
    if parsed.micro_batches is not None:
        inner = distributed_strategy(_ACCUMULATES.sub("", name, count=1))
        return _load_strategy("accumulated", inner, parsed.micro_batches)
    if parsed.half:
        return _load_strategy("halved", distributed_strategy(name.removeprefix("half+")))
    if parsed.plain in _REPLICATED:
        return _load_strategy("replicated", parsed.plain, amp=parsed.amp)
    if parsed.plain in _PARTITIONED:
        return _load_strategy("partitioned", _PARTITIONED[parsed.plain], amp=parsed.amp)
    if parsed.plain == "fsdp":
        return _load_strategy("fully sharded", amp=parsed.amp)
    return _load_strategy(
        "model parallel",
        parsed.tensor,
        parsed.stages,
        amp=parsed.amp,
        sequence=parsed.sequence,
        schedule=parsed.schedule,
    )


def _load_strategy(name: str, *arguments: Any, **keywords: Any) -> RankStrategy:
    made: RankStrategy = registry.load("ranks", name)(*arguments, **keywords)
    return made


def is_distributed(name: str) -> bool:
    """Return True if a name is that of a distributed strategy, or written as a user's factory of one."""
    return is_planned(name) or is_own(name) or _parse(name) is not None


def is_low_precision(name: str) -> bool:
    """Return True if a name is that of a strategy in mixed or half precision."""
    return any(part in ("amp", "half") for part in name.split("+"))


def is_planned(name: str) -> bool:
    """Return True if a name is that of a strategy whose ranks run a plan: "magis+fsdp"."""
    return _PLANNED.fullmatch(name) is not None and _parse(plain_of(name)) is not None


def check_planned(name: str) -> None:
    """Raise UsageError for a distributed strategy that exists, with "magis+" in front, but whose ranks run no plans."""
    plain = plain_of(name)
    parsed = None if plain == name else _parse(plain)
    if parsed is None or is_planned(name):
        return
    what = f"strategy {name!r}: ranks of {plain} run no plans"
    if parsed.schedule:
        what += f", which are for one stage on each rank; {parsed.schedule} has two"
    near = f"magis+pp{parsed.stages}" if parsed.schedule and parsed.tensor == 1 else ", ".join(PLANNED)
    raise UsageError(what, hint=f"use {plain} without magis, or {near}")


def plain_of(name: str) -> str:
    """Return the strategy whose ranks a planned one plans for: "fsdp" of "magis+fsdp"."""
    return name.removeprefix("magis+")


def is_own(name: str) -> bool:
    """Return True if a name is written as that of a factory of the user's own: "package.module:factory"."""
    return _OWN.fullmatch(name) is not None


def group_of(name: str) -> int:
    """Return the ranks of one group of the strategy called ``name``: its worlds are multiples of that; 1 for other
    names. A factory of the user's own is called for it; UsageError where that fails."""
    if is_own(name):
        return _call_factory(name).group
    parsed = _parse(plain_of(name))
    return 1 if parsed is None else parsed.tensor * parsed.stages


def check_world(strategy: RankStrategy, size: int) -> None:
    """Raise UsageError unless a world of ``size`` ranks holds whole groups of the strategy."""
    if size < 1 or size % strategy.group:
        raise UsageError(
            f"{strategy.name} needs a multiple of {strategy.group} ranks, there are {size}",
            hint=f"start {max(1, -(-size // strategy.group)) * strategy.group} ranks, or make its groups smaller",
        )


def _call_factory(name: str) -> RankStrategy:
    """Call the factory of that name and return its strategy. Raises UsageError unless it can be imported, called,
    and makes a strategy."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except Exception as error:
        raise UsageError(
            f"strategy {name!r}: {error}", hint="write package.module:factory, of a module that can be imported"
        ) from error
    wanted = "it must be a callable without arguments that returns a magis.strategies.RankStrategy"
    if not callable(factory):
        raise UsageError(f"strategy {name!r}: {attribute} cannot be called", hint=wanted)
    try:
        made: RankStrategy = factory()
    except Exception as error:
        raise UsageError(
            f"strategy {name!r}: {attribute} failed: {type(error).__name__}: {error}", hint=wanted
        ) from error
    lacking = [part for part in ("name", "group", "prepare") if not hasattr(made, part)]
    if lacking:
        what = f"{type(made).__name__} has no {' and no '.join(lacking)}"
        raise UsageError(f"strategy {name!r}: {attribute} makes no strategy: {what}", hint=wanted)
    return made


def accumulated(name: str, micro_batches: int) -> str:
    """Return the name of a strategy with so many micro-batches a step. UsageError for one that takes none."""
    if micro_batches == 1:
        return name
    found = f"accumulate{micro_batches}+{name}"
    if _parse(found) is None:
        raise UsageError(
            f"strategy {name!r} does not accumulate gradients", hint=f"choose from {', '.join(_ACCUMULATED)}"
        )
    return found


def _parse(name: str) -> _ParsedName | None:
    if (several := _ACCUMULATES.match(name)) is not None:
        inner = _parse(name[several.end() :])
        fits = inner is not None and inner.micro_batches is None and inner.plain in _ACCUMULATED
        return replace(inner, micro_batches=int(several[1])) if inner is not None and fits else None
    if name.startswith("half+"):
        inner = _parse(name.removeprefix("half+"))
        plainly = inner is not None and not (inner.amp or inner.half or inner.micro_batches)
        fits = inner is not None and plainly and inner.plain in _HALVED
        return replace(inner, half=True) if inner is not None and fits else None
    plain = name.removeprefix("amp+")
    amp = plain != name
    if plain in _REPLICATED or plain in _PARTITIONED or plain == "fsdp":
        return _ParsedName(plain, amp)
    found = _GROUPS.fullmatch(plain)
    if found is None or not plain:
        return None
    sizes = {kind: int(found[kind] or 2) if found[kind] is not None else 1 for kind in ("tp", "pp")}
    both = found["tp"] is not None and found["pp"] is not None
    if (found["both"] is not None) != both or any(found[kind] is not None and sizes[kind] < 2 for kind in sizes):
        return None
    kinds = [kind for kind in sizes if found[kind] is not None]
    sequence = found["sequence"] is not None
    plain, schedule = "+".join(kinds + ["sp"] * sequence), found["schedule"] or ""
    return _ParsedName(plain, amp, sizes["tp"], sizes["pp"], sequence=sequence, schedule=schedule)
