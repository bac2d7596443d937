"""Drafts: a graph with new calls, while a rule is applied.

A draft is discarded if the rule is impossible: a call rejects the sizes, a version is gone, weights cannot be merged,
or no legal order exists. ``Refused`` signals that and never leaves ``apply``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

from magis.cost.shapes import describe
from magis.errors import VerifyError
from magis.graph import Arg, Graph, Op, Ref, Storage, Value
from magis.rewrite.rules.language import CallPattern, Each, Pattern, Var, calls
from magis.rewrite.rules.matching import Bound
from magis.rewrite.rules.merged_weights import Merging, is_weight, window_of
from magis.rewrite.rules.operator_forms import BRINGS_LITERALS, made_call, made_like


class Refused(Exception):  # noqa: N818  (no error: the answer "not here")
    """Raised if a rule cannot be applied at a match."""


@dataclass
class Fresh:
    """Next unused ids of values, storages and operators."""

    value: int
    storage: int
    op: int


class Draft:
    """New calls for a graph, which replace the calls ``ops`` and take over their versions, phase and module.

    ``beside`` is another draft of the graph whose calls are added as well; both share their tables.
    """

    def __init__(self, graph: Graph, ops: Sequence[int], beside: Draft | None = None) -> None:
        self.graph = graph
        self.added: list[Op] = []
        if beside is None:
            self.storages, self.values = dict(graph.storages), dict(graph.values)
            self.position = {op.id: position for position, op in enumerate(graph.ops)}
            self.fresh = Fresh(max(self.values) + 1, max(self.storages) + 1, max(self.position) + 1)
        else:
            self.storages, self.values = beside.storages, beside.values
            self.position, self.fresh = beside.position, beside.fresh
        self._versions: dict[int, int] = {}
        if not self.position.keys() >= frozenset(ops):
            raise Refused("the calls are not there any more")
        matched = [graph.ops[at] for at in sorted({self.position[number] for number in ops})]
        for op in matched:
            for storage, version in op.reads:
                if self._versions.setdefault(storage, version) != version:
                    raise Refused(f"the calls meet several versions of storage {storage}")
        self.phase = max((op.phase for op in matched), key=_PHASES.index)
        self.module = common_module([op.module for op in matched])
        self.line = matched[-1].line

    def emit(self, target: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> tuple[int, ...]:
        """Add a call and return its outputs. Raises Refused if the operator rejects the tensors."""
        probe = Op(self.fresh.op, target, args, kwargs, ())
        try:
            made = describe(probe, self.values)
        except VerifyError as error:
            raise Refused(str(error)) from error
        results = [each for each in made if each is not None]
        outputs = tuple(range(self.fresh.value, self.fresh.value + len(results)))
        self.fresh.value += len(results)
        for number, each in zip(outputs, results, strict=True):
            if each.base is None:
                storage, offset = self.fresh.storage, each.offset
                self.fresh.storage += 1
                self.storages[storage] = Storage(storage, each.nbytes, "temporary")
                self._versions[storage] = 0
            else:
                base = self.values[probe.inputs()[each.base]]
                storage, offset = base.storage, each.offset_on(base)
            self.values[number] = Value(number, each.shape, each.stride, each.dtype, storage, offset, bits=each.bits)
        fresh = any(each.base is None for each in results)
        read = sorted({self.values[value].storage for value in probe.inputs()}) if fresh else []
        for storage in read:
            if storage not in self._versions:
                raise Refused(f"nobody says which version of storage {storage} is meant")
        reads = tuple((storage, self._versions[storage]) for storage in read)
        many = target in _MANY
        self.added.append(
            replace(
                probe, outputs=outputs, many=many, reads=reads, phase=self.phase, module=self.module, line=self.line
            )
        )
        self.fresh.op += 1
        return outputs

    def cat(self, values: Sequence[int], dim: int) -> int:
        """Concatenate tensors along a dimension (counted from 0): by a `cat`, or, for weights, by a view of memory in
        which they are adjacent (``merged_weights``). Raises Refused if weights are not adjacent."""
        if len(values) == 1:
            return values[0]
        looks = [self.values[value] for value in values]
        weights = [is_weight(self.storages, each) for each in looks]
        if not any(weights):
            return self.emit(*made_call("cat", tuple(values), dim, self.values, ()))[0]
        found = window_of(self.graph, looks, dim) if all(weights) else None
        if found is None:
            raise Refused("a weight would be copied in every step")
        # the views that lead from the merged weight to the window
        value = found.base
        if (found.low, found.high) != (0, self.values[value].shape[0]):
            (value,) = self.emit("aten.slice.Tensor", (Ref(value), 0, found.low, found.high), ())
        if found.dims == (1, 0):
            (value,) = self.emit("aten.t.default", (Ref(value),), ())
        elif found.dims != tuple(range(len(found.dims))):
            (value,) = self.emit("aten.permute.default", (Ref(value), found.dims), ())
        return value


_PHASES = ("forward", "backward", "update")
_MANY = ("aten.split_with_sizes.default", "aten.split.Tensor")


def common_module(modules: Sequence[str]) -> str:
    """Return the path of the innermost common module."""
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


# The right-hand side of a rule as calls of a draft.

Built: TypeAlias = int | tuple[int, ...]
"""A value id, or several."""


def build(draft: Draft, pattern: Pattern, bound: Bound) -> Built:
    """Add the pattern's calls and return their outputs. Raises Refused if sizes do not fit."""
    match pattern:
        case Var(name=name):
            return bound.values[name]
        case Each(of=Var(name=name)):
            return bound.lists[name]
        case Each(of=inner):
            return build(draft, inner, bound)
        case CallPattern(form="cat"):
            members = _flat([build(draft, arg, bound) for arg in pattern.args])
            return draft.cat(members, _dim(draft, pattern, bound, members[0]))
        case CallPattern(form="split"):
            (tensor,) = _flat([build(draft, pattern.args[0], bound)])
            dim = _dim(draft, pattern, bound, tensor)
            sizes = _piece_sizes(draft, pattern, bound, dim - len(draft.values[tensor].shape))
            target, args, kwargs = made_call("split", (tensor,), dim, draft.values, sizes)
            return draft.emit(target, args, kwargs)
        case CallPattern():
            return _build_calls(draft, pattern, bound)


def _build_calls(draft: Draft, pattern: CallPattern, bound: Bound) -> Built:
    """Add one call, or one per member of the lists among its arguments."""
    args = [build(draft, arg, bound) for arg in pattern.args]
    counts = {len(arg) for arg in args if isinstance(arg, tuple)}
    if not counts:
        return _build_call(draft, pattern, bound, tuple(arg for arg in args if isinstance(arg, int)))
    if len(counts) > 1:
        raise Refused("lists of several lengths")
    return tuple(
        _build_call(draft, pattern, bound, tuple(arg[at] if isinstance(arg, tuple) else arg for arg in args))
        for at in range(counts.pop())
    )


def _build_call(draft: Draft, pattern: CallPattern, bound: Bound, tensors: tuple[int, ...]) -> int:
    if pattern.form in BRINGS_LITERALS:
        target, args, kwargs = made_like(bound.like[pattern.form], tensors)
    else:
        target, args, kwargs = made_call(pattern.form, tensors, None, draft.values, ())
    return draft.emit(target, args, kwargs)[0]


def _flat(found: Sequence[Built]) -> list[int]:
    return [value for each in found for value in (each if isinstance(each, tuple) else (each,))]


def _dim(draft: Draft, pattern: CallPattern, bound: Bound, tensor: int) -> int:
    """Return the dimension of the pattern, counted from 0. Raises Refused if the tensor lacks it."""
    dim = bound.dims[pattern.dim] if isinstance(pattern.dim, str) else pattern.dim
    rank = len(draft.values[tensor].shape)
    if dim is None or not -rank <= dim < 0:
        raise Refused(f"a tensor of {rank} dimensions has no dimension {dim}")
    return dim + rank


def _piece_sizes(draft: Draft, pattern: CallPattern, bound: Bound, dim: int) -> tuple[int, ...]:
    """Return the sizes of the pieces of a split: the sizes of the list that the pattern names, along ``dim`` (negative;
    along output channels for convolution weights), or without a list the sizes of the matched split."""
    for arg in pattern.args[1:]:
        if isinstance(arg, Each) and isinstance(arg.of, Var):
            at = dim if pattern.dim != CHANNELS or arg.of.name != "w" else -4
            return tuple(draft.values[value].shape[at] for value in bound.lists[arg.of.name])
    return bound.sizes


CHANNELS = -3
"""Channel dimension of an image; in a convolution's weight, output channels are dimension -4."""


def merge_weights(merging: Merging, pattern: Pattern, bound: Bound) -> None:
    """Merge the weights that the pattern concatenates. Raises Refused if that is impossible, maybe half-way.

    Concatenations of other tensors are ignored.
    """
    for call in calls(pattern):
        if call.form != "cat" or not isinstance(call.dim, (int, str)):
            continue
        members = _leaves(call, bound)
        looks = [merging.values[value] for value in members]
        if len(looks) < 2 or not all(is_weight(merging.storages, each) for each in looks):
            continue
        dim = bound.dims[call.dim] if isinstance(call.dim, str) else call.dim
        if len(looks[0].shape) + dim < 0:
            raise Refused("the weights have too few dimensions")
        if merging.merge(looks, dim + len(looks[0].shape)) is None:
            raise Refused("these weights cannot lie side by side")


def _leaves(call: CallPattern, bound: Bound) -> Sequence[int]:
    """Return the tensors of a concatenation, if it takes only names; else ()."""
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
