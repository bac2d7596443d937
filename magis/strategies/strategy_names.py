"""Names of strategies and their families. Does not import torch: the plugin lists names.

A strategy of one rank is named by parts joined by "+", at most one of each kind: "amp+checkpoint". In front of them
"accumulate4+", or "accumulate4" alone, adds up the gradients of four parts of the batch.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from magis import registry
from magis.errors import UsageError
from magis.simulate.allocator_settings import allocator_text
from magis.strategies.distributed_names import (
    DISTRIBUTED,
    PLANNED,
    accumulated,
    check_planned,
    group_of,
    is_distributed,
)

__all__ = [
    "ACCUMULATES",
    "BLOCK",
    "BY_HAND",
    "CHUNKED_LOSS",
    "EARLY_UPDATE",
    "KINDS",
    "LIMITS_OF",
    "LISTED",
    "ORIGINAL",
    "PLANNED",
    "PLANNED_CODE",
    "PLANS",
    "RESERVED",
    "SEARCHES",
    "OrtName",
    "accumulated",
    "allocator_text",
    "check_installed",
    "check_limit_of",
    "check_parts",
    "check_planned",
    "family",
    "group_of",
    "is_local",
    "ort_name",
]

ORIGINAL = "eager"
BLOCK = "peak"
"""Pseudo-strategy of code measured by `magis.peak`: no training step, hence in no list."""
PLANS = ("magis", "magis+amp")
SEARCHES = ("magis", "paper")
"""Names of the searches, the default one first."""
RESERVED = "reserved"
LIMITS_OF = ("peak", RESERVED)
"""Bases of a memory limit: the peak of tensors and scratch, or the bytes reserved by a GPU's caching allocator."""
PLANNED_CODE = "magis+compile"
"""Strategy that compiles with inductor and saves for the backward the tensors that a plan saves; not combined."""
BY_HAND = "by-hand"
"""Strategy of checkpointed blocks, a loss in chunks, and weights updated in the backward."""
CHUNKED_LOSS, EARLY_UPDATE = "chunked-loss", "early-update"
"""Parts of "by-hand" that are strategies, too; not part of "all"."""
KINDS = (
    ("amp", "amp-bfloat16", "amp-float16"),
    ("checkpoint", "selective-checkpoint", BY_HAND),
    ("offload",),
    ("compile", "compile-budget"),
    (CHUNKED_LOSS,),
    (EARLY_UPDATE,),
)
"""Parts of names by kind; parts of one kind exclude each other."""
ACCUMULATES = re.compile(r"accumulate([1-9]\d*)(?:\+(?=.)|$)")
"""Pattern of a strategy's prefix: gradients of so many parts of the batch are added up."""
_LOCAL = ("amp", "checkpoint", "selective-checkpoint", BY_HAND, "offload", "compile", "compile-budget")

_ORT = re.compile(r"(?P<amp>amp\+)?ort(?:-(?P<what>unoptimized|inference))?")
"""Pattern of ONNX Runtime's strategies: "ort", "amp+ort-unoptimized", "ort-inference"."""

LISTED = (ORIGINAL, *PLANS, *_LOCAL, "ort", "ort-unoptimized", "amp+ort", "ort-inference", *DISTRIBUTED)
"""Strategies selected by "all"; further combinations are valid as well."""


def is_local(name: str) -> bool:
    """Return True for the name of a strategy of one rank."""
    known = {part for kind in KINDS for part in kind}
    inner = ACCUMULATES.sub("", name, count=1)
    return name == PLANNED_CODE or inner == "" != name or all(part in known for part in inner.split("+"))


def check_limit_of(what: str, strategy: str, device: str) -> None:
    """Raise UsageError if ``what`` cannot be the base of a memory limit."""
    if what not in LIMITS_OF:
        raise UsageError(f"a memory limit of {what!r}", hint=f"choose from {', '.join(LIMITS_OF)}")
    if what != RESERVED:
        return
    if strategy not in PLANS:
        raise UsageError(f"strategy {strategy!r} has no memory limit of reserved bytes", hint="limit the peak")
    if device == "cpu":
        raise UsageError(
            "a memory limit of reserved bytes needs a GPU: a CPU has no caching allocator",
            hint="name a device such as sim:h100, or limit the peak (memory_limit_of='peak')",
        )


def check_parts(name: str) -> None:
    """Raise UsageError if parts of a strategy's name exclude each other."""
    for kind in KINDS:
        taken = [part for part in name.split("+") if part in kind]
        if len(taken) > 1:
            raise UsageError(f"strategy {name!r}: {' and '.join(taken)} exclude each other", hint="use one of them")


class OrtName(NamedTuple):
    """Settings parsed from the name of an ONNX Runtime strategy."""

    precision: str
    optimized: bool
    inference: bool


def ort_name(name: str) -> OrtName:
    """Return the settings of a name of the family "ort". Raises ValueError for other names."""
    found = _ORT.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no strategy of ONNX Runtime")
    precision = "amp-float16" if found["amp"] else "float32"
    return OrtName(precision, found["what"] != "unoptimized", found["what"] == "inference")


def check_installed(strategy: str, search: str) -> None:
    """Raise UsageError if the neighbour of a strategy or of a search is not installed."""
    kind = family(strategy)
    if kind in ("ort", "distributed"):
        registry.check("strategy", kind)
    if search != SEARCHES[0] and strategy in PLANS:
        registry.check("search", search)


def family(name: str) -> str | None:
    """Return the family of a strategy: "original", "plan", "local", "ort" or "distributed"; None for unknown names."""
    if name == ORIGINAL:
        return "original"
    if name in PLANS:
        return "plan"
    if is_local(name):
        return "local"
    if _ORT.fullmatch(name):
        return "ort"
    return "distributed" if is_distributed(name) else None
