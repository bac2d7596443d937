"""Rules for splitting calls of ATen operators into parts (paper, F-Trans).

A rule, named in an operator's row (`magis.ops.operators`), labels the dimensions of a call's tensors and size literals;
each label is one axis along which the call can run in equal parts. A rule's docstring names the dimensions that can be
split. An operator without a rule is never split. Every rule is tested by splitting real tensors. The published method
cuts whole graphs by hand-written axis rules for a dozen operators, forward only; here backward, losses and weight
updates have rules too, since a training step is one graph.
"""

from __future__ import annotations

from collections.abc import Mapping

from magis.graph.nodes import Op, Value
from magis.ops.operators import RANDOM, op_info
from magis.ops.splits import convolution, indexing, norms, products, reductions, views
from magis.ops.splits.labels import (
    COMBINATIONS,
    Cut,
    Halo,
    How,
    LabelledCall,
    Labels,
    Overlap,
    Path,
    Rule,
    Split,
    derive,
    dimension,
    part,
)

__all__ = [
    "COMBINATIONS", "Cut", "Halo", "How", "Overlap", "Path", "Split", "dimension", "has_rule", "part", "splits",
    "why_not", "why_opaque",
]  # fmt: skip

_MODULES = {
    "convolution": convolution, "indexing": indexing, "norms": norms, "products": products, "reductions": reductions,
    "views": views,
}  # fmt: skip


def splits(op: Op, values: Mapping[int, Value]) -> tuple[Split, ...]:
    """Return the ways to split the call into equal parts, one per axis; () if there is none.

    `values` holds the call's inputs and outputs. `op.reads` and `op.writes` are ignored: for an in-place operator, the
    split says that the written argument is cut along with the result.
    """
    found = _labels(op, values)
    return () if isinstance(found, str) else derive(LabelledCall(op, values), found)


def why_opaque(op: Op, values: Mapping[int, Value]) -> str:
    """Return the reason why the call has no split, in a few words; "" if it has one."""
    found = _labels(op, values)
    if isinstance(found, str):
        return found
    call = LabelledCall(op, values)
    if derive(call, found):
        return ""
    tensors = [value for value in (*call.tensors.values(), *call.outputs) if value is not None]
    if all(size <= 1 for value in tensors for size in value.shape):
        return "no dimension is larger than 1"
    return found.reason or "no dimension can be cut into equal parts"


def why_not(op: Op, values: Mapping[int, Value], taken: int, dim: int) -> str:
    """Return the reason why the call cannot be split along `dim` of its input number `taken`; "" if it can."""
    ways = [split.inputs[taken] for split in splits(op, values)]
    if dim in ways:
        return ""
    if any(isinstance(way, Halo) and way.dim == dim for way in ways):
        return "windows reach into the next part"
    found = _labels(op, values)
    if isinstance(found, str):
        return found
    return found.reason or "not along this dimension"


def has_rule(target: str) -> bool:
    """Return True if the operator has a split rule, or a reason why it is never split."""
    info = op_info(target)
    return target.count(".") == 2 and bool(info.split or info.never_split)


def rule_of(name: str) -> Rule:
    """Return the split rule of a name "module.function", as in an operator's row."""
    module, _, function = name.partition(".")
    found: Rule = getattr(_MODULES[module], function)
    return found


def _labels(op: Op, values: Mapping[int, Value]) -> Labels | str:
    if op.target.startswith("magis."):
        return "part of the plan, not of the computation"
    if op.random:
        return RANDOM
    if not has_rule(op.target):
        return f"no rule for {op.target}"
    call = LabelledCall(op, values)
    return call.info.never_split or rule_of(call.info.split)(call)
