"""The right-hand side of a rule as calls of a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from magis.ir import Graph
from magis.rewrite.rules.draft import Draft, Refused
from magis.rewrite.rules.forms import BRINGS_LITERALS, made_call, made_like
from magis.rewrite.rules.language import Call, Each, Pattern, Var, calls
from magis.rewrite.rules.matching import Bound
from magis.rewrite.rules.merged import is_weight, merge

__all__ = ["build", "with_merged_weights"]

Built: TypeAlias = int | tuple[int, ...]
"""A value, or a list of them."""


def build(draft: Draft, pattern: Pattern, bound: Bound) -> Built:
    """Add the pattern's calls; returns what they make. Refused where the sizes do not fit."""
    match pattern:
        case Var(name=name):
            return bound.values[name]
        case Each(of=Var(name=name)):
            return bound.lists[name]
        case Each(of=inner):
            return build(draft, inner, bound)
        case Call(form="cat"):
            members = _flat([build(draft, arg, bound) for arg in pattern.args])
            return draft.cat(members, _dim(draft, pattern, bound, members[0]))
        case Call(form="split"):
            (tensor,) = _flat([build(draft, pattern.args[0], bound)])
            dim = _dim(draft, pattern, bound, tensor)
            sizes = _sizes(draft, pattern, bound, dim - len(draft.values[tensor].shape))
            target, args, kwargs = made_call("split", (tensor,), dim, draft.values, sizes)
            return draft.emit(target, args, kwargs)
        case Call():
            return _calls(draft, pattern, bound)


def _calls(draft: Draft, pattern: Call, bound: Bound) -> Built:
    """One call, or one for each member of the lists among its arguments."""
    args = [build(draft, arg, bound) for arg in pattern.args]
    counts = {len(arg) for arg in args if isinstance(arg, tuple)}
    if not counts:
        return _one(draft, pattern, bound, tuple(arg for arg in args if isinstance(arg, int)))
    if len(counts) > 1:
        raise Refused("lists of several lengths")
    return tuple(
        _one(draft, pattern, bound, tuple(arg[at] if isinstance(arg, tuple) else arg for arg in args))
        for at in range(counts.pop())
    )


def _one(draft: Draft, pattern: Call, bound: Bound, tensors: tuple[int, ...]) -> int:
    if pattern.form in BRINGS_LITERALS:
        target, args, kwargs = made_like(bound.like[pattern.form], tensors)
    else:
        target, args, kwargs = made_call(pattern.form, tensors, None, draft.values, ())
    return draft.emit(target, args, kwargs)[0]


def _flat(found: Sequence[Built]) -> list[int]:
    return [value for each in found for value in (each if isinstance(each, tuple) else (each,))]


def _dim(draft: Draft, pattern: Call, bound: Bound, tensor: int) -> int:
    """The dimension that the pattern names, counted from 0."""
    dim = bound.dims[pattern.dim] if isinstance(pattern.dim, str) else pattern.dim
    rank = len(draft.values[tensor].shape)
    if dim is None or not -rank <= dim < 0:
        raise Refused(f"a tensor of {rank} dimensions has no dimension {dim}")
    return dim + rank


def _sizes(draft: Draft, pattern: Call, bound: Bound, dim: int) -> tuple[int, ...]:
    """As large as the members of the list that the pattern names, along the last dimensions' ``dim`` or, of weights of
    a convolution, along the channels that they make; else as the split that was matched."""
    for arg in pattern.args[1:]:
        if isinstance(arg, Each) and isinstance(arg.of, Var):
            at = dim if pattern.dim != CHANNELS or arg.of.name != "w" else -4
            return tuple(draft.values[value].shape[at] for value in bound.lists[arg.of.name])
    return bound.sizes


CHANNELS = -3
"""The dimension of an image's channels; those of the result are the first dimension, -4, of a convolution's weight."""


def with_merged_weights(graph: Graph, pattern: Pattern, bound: Bound) -> Graph:
    """The graph with those weights side by side that the pattern concatenates; Refused if they cannot be.

    What the pattern concatenates from results of its own is no weight.
    """
    for call in calls(pattern):
        if call.form != "cat" or not isinstance(call.dim, (int, str)):
            continue
        members = _leaves(call, bound)
        looks = [graph.values[value] for value in members]
        if len(looks) < 2 or not all(is_weight(graph.storages, each) for each in looks):
            continue
        dim = bound.dims[call.dim] if isinstance(call.dim, str) else call.dim
        if len(looks[0].shape) + dim < 0:
            raise Refused("the weights have too few dimensions")
        found = merge(graph, looks, dim + len(looks[0].shape))
        if found is None:
            raise Refused("these weights cannot lie side by side")
        graph = found[0]
    return graph


def _leaves(call: Call, bound: Bound) -> Sequence[int]:
    """The tensors of a concatenation, if it takes nothing but names."""
    found: list[int] = []
    known: Mapping[str, int] = bound.values
    for arg in call.args:
        if isinstance(arg, Var):
            found.append(known[arg.name])
        elif isinstance(arg, Each) and isinstance(arg.of, Var):
            found.extend(bound.lists[arg.of.name])
        else:
            return ()
    return found
