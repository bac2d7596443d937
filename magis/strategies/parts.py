"""The names of strategies, and which family each belongs to. Imports no torch: the plugin lists them.

Techniques of one rank have names made of parts joined by "+", at most one of each kind: "amp+checkpoint".
"""

from __future__ import annotations

from magis.strategies.names import DISTRIBUTED, group_of, is_distributed

__all__ = ["KINDS", "LISTED", "ORIGINAL", "PLANS", "family", "group_of", "is_local"]

ORIGINAL = "eager"
PLANS = ("magis", "magis+amp")
KINDS = (
    ("amp", "amp-bfloat16", "amp-float16"),
    ("checkpoint", "selective-checkpoint"),
    ("offload",),
    ("compile", "compile-budget"),
)
"""The parts of names, of which those in a row exclude each other."""
_LOCAL = ("amp", "checkpoint", "selective-checkpoint", "offload", "compile", "compile-budget")

LISTED = (ORIGINAL, *PLANS, *_LOCAL, *DISTRIBUTED)
"""What "all" stands for; further combinations have names, too."""


def is_local(name: str) -> bool:
    """Whether all parts of a name are techniques of one rank."""
    known = {part for kind in KINDS for part in kind}
    return all(part in known for part in name.split("+"))


def family(name: str) -> str | None:
    """What runs a strategy: "original", "plan", "local" or "distributed"; None for no name of ours."""
    if name == ORIGINAL:
        return "original"
    if name in PLANS:
        return "plan"
    if is_local(name):
        return "local"
    return "distributed" if is_distributed(name) else None
