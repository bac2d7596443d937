"""Names of distributed strategies, and the strategies that they name. Imports torch only to build a strategy.

A name is a plain one, "amp+" and a plain one, or "half+" and one of ddp, tp and pp. `tp` and `pp` take the number of
ranks of a group ("tp4"; default 2) and can be combined ("tp4+pp2"); "tp4+sp" is tensor with sequence parallelism;
"pp4+interleaved", "pp4+zb" and "pp4+zbv" are pipelines with two stages per rank. The prefix "accumulate4+" accumulates
gradients over four micro-batches. "package.module:factory" is a user's own strategy.
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
"""Plain names, in the order of reports."""

_REPLICATED = ("ddp", "oss", "oss+sdp")
_HALVED = ("ddp", "tp", "tp+sp", "pp", "tp+pp")
_ACCUMULATED = ("ddp", "oss", "fsdp", "tp", "tp+sp", "pp", "tp+pp")
"""Strategies that support several micro-batches; the others would reduce a gradient again with each micro-batch."""
_ACCUMULATES = re.compile(r"accumulate([1-9]\d*)\+")
_PARTITIONED = {"zero1": 1, "zero2": 2, "zero3": 3}
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PLANNED = ("magis+ddp", "magis+fsdp", "magis+tp2", "magis+pp2")
"""Examples of planned strategies, whose ranks run plans."""
_PLANNED = re.compile(r"magis\+(ddp|fsdp|tp\d*(\+sp)?|pp\d*)")
"""Pattern of planned strategies, which `magis/extensions/ranks/plans/planned_ranks.py` makes."""
_GROUPS = re.compile(
    r"(?:tp(?P<tp>\d*)(?P<sequence>\+sp$)?)?(?P<both>\+)?(?:pp(?P<pp>\d*)(?:\+(?P<schedule>interleaved|zbv?))?)?"
)


@dataclass(frozen=True)
class _ParsedName:
    plain: str
    amp: bool
    tensor: int = 1
    """Number of tensor-parallel ranks."""
    stages: int = 1
    half: bool = False
    sequence: bool = False
    micro_batches: int | None = None
    schedule: str = ""
    """Pipeline schedule with two stages per rank; empty: one stage per rank."""


def distributed_strategy(name: str) -> RankStrategy:
    """Return the distributed strategy of that name, or of the factory at "package.module:factory". Raises UsageError,
    with similar names, for other names, and for a factory that fails."""
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
    """Return True for the name of a distributed strategy, or of a user's factory."""
    return is_planned(name) or is_own(name) or _parse(name) is not None


def is_low_precision(name: str) -> bool:
    """Return True for the name of a strategy in mixed or half precision."""
    return any(part in ("amp", "half") for part in name.split("+"))


def is_planned(name: str) -> bool:
    """Return True for the name of a planned strategy, whose ranks run a plan: "magis+fsdp"."""
    return _PLANNED.fullmatch(name) is not None and _parse(plain_of(name)) is not None


def check_planned(name: str) -> None:
    """Raise UsageError for "magis+" and a distributed strategy whose ranks cannot run plans."""
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
    """Return the strategy's name without "magis+": "fsdp" for "magis+fsdp"."""
    return name.removeprefix("magis+")


def is_own(name: str) -> bool:
    """Return True for a name of the form "package.module:factory": a user's own strategy."""
    return _OWN.fullmatch(name) is not None


def group_of(name: str) -> int:
    """Return the group size of a strategy, of which its world sizes are multiples; 1 for other names. Calls a user's
    factory; raises UsageError if that fails."""
    if is_own(name):
        return _call_factory(name).group
    parsed = _parse(plain_of(name))
    return 1 if parsed is None else parsed.tensor * parsed.stages


def check_world(strategy: RankStrategy, size: int) -> None:
    """Raise UsageError unless the world size is a multiple of the strategy's group size."""
    if size < 1 or size % strategy.group:
        raise UsageError(
            f"{strategy.name} needs a multiple of {strategy.group} ranks, there are {size}",
            hint=f"start {max(1, -(-size // strategy.group)) * strategy.group} ranks, or make its groups smaller",
        )


def _call_factory(name: str) -> RankStrategy:
    """Call the factory of that name and return its strategy. Raises UsageError if it cannot be imported or called, or
    returns no strategy."""
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
    """Return the name of a strategy with so many micro-batches per step. Raises UsageError if unsupported."""
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


def carried_plan(part: Any, name: str) -> Any:
    """Return the plan ("tp_plan", "sp_plan", "pp_plan") that a module or its configuration carries; None if none."""
    own = getattr(part, name, None) or getattr(part, f"_{name}", None)
    return own or getattr(getattr(part, "config", None), f"base_model_{name}", None)
