"""Inference of unsplit calls from an operator in a loop, through split labels."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import TypeAlias

from torch._ops import OpOverload

from magis.cost.shapes import describe
from magis.cost.signature import parse, signature
from magis.errors import VerifyError
from magis.graph import Arg, Op, Ref, Value
from magis.ops.call import registered
from magis.ops.splits import Halo, How, Overlap, Path, dimension, part, splits

MOST_LITERALS = 2
"""Number of size literals that one axis may scale in a call: sizes of a bias and groups, groups and channels."""

TensorLayout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], str, tuple[str, ...]]
"""Shape, strides, dtype and lazy bits of a tensor."""
Literals: TypeAlias = tuple[tuple[Path, int], ...]
"""Positions and values of literals."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An unsplit tensor, and its relation to a value in the loop's body, which is a part of the tensor.

    ``how``: the dimension along which parts are slices, with a halo or not; "same" if each part is the unsplit tensor;
    or the merge of parts (``COMBINATIONS``, Overlap).
    """

    how: int | str | Halo | Overlap
    whole: TensorLayout


@dataclass(frozen=True, slots=True)
class GlobalCall:
    """An unsplit call of which an operator is a part: the literals that differ, and its outputs."""

    literals: Literals
    outputs: tuple[Placement | None, ...]


def global_calls(
    op: Op, values: Mapping[int, Value], facts: tuple[Placement, ...], parts: Fraction, rows: tuple[int, ...]
) -> tuple[GlobalCall, ...]:
    """Return the unsplit calls of which a call is a part, ``parts`` times smaller, given facts on its inputs.

    If every part takes equal tensors, the call may be unsplit itself, or split by larger literals (a factory, an
    `expand`). Otherwise the split labels decide; an ambiguous call ([1, 4] as part of [2, 4] or of [1, 8]) has several
    unsplit calls. With overlapping windows, a part has no padding; the unsplit call has the padding of the halo (one of
    ``rows``).
    """
    return _global_calls(signature(op, values), registered(op.target), facts, parts, rows)


@functools.lru_cache(maxsize=65536)
def _global_calls(
    text: str, _overload: OpOverload | None, facts: tuple[Placement, ...], parts: Fraction, rows: tuple[int, ...]
) -> tuple[GlobalCall, ...]:
    op, small = parse(text)
    values = {number: value_of(number, fact.whole) for number, fact in enumerate(facts)}
    if any(part_shape(fact, parts) != small[number].shape for number, fact in enumerate(facts)):
        return ()
    found: list[GlobalCall] = []
    same = all(fact.how == "same" for fact in facts)
    folded = -1 in (number for _, number in _literals(_arguments(op), ()))  # a size that takes what others leave
    made = _with_results(op, values) if same else None
    if made is not None and made[0].outputs:
        found.append(GlobalCall((), _placed(*made, ["same"] * len(made[0].outputs))))
    for count in range(MOST_LITERALS + 1):
        for literals in _candidates(op, count, parts, () if same else rows):
            way = _call_with_literals(op, literals, values, facts, parts)
            found += [] if way is None else [way]
        if found and not same and not (count == 0 and folded):
            break  # the fewer literals are other ones, the better
    return tuple(dict.fromkeys(found))


def _candidates(op: Op, count: int, parts: Fraction, rows: Sequence[int]) -> Iterator[Literals]:
    """Yield choices of ``count`` literals that differ in the unsplit call, with their values."""
    numbers = list(_literals(_arguments(op), ()))
    scaled = [(path, number * parts) for path, number in numbers if number > 0]
    larger = [(path, int(number)) for path, number in scaled if number.denominator == 1]
    yield from combinations(larger, count)
    for padding in ((path, before) for path, number in numbers if number == 0 for before in rows if count):
        yield from ((*literals, padding) for literals in combinations(larger, count - 1))


def _call_with_literals(
    small: Op, literals: Literals, values: Mapping[int, Value], facts: tuple[Placement, ...], parts: Fraction
) -> GlobalCall | None:
    """Return the unsplit call with these literals, if one of its splits cuts the inputs as ``facts`` say and gives this
    part; else None."""
    made = _with_results(with_literals(small, literals, small.inputs(), ()), values)
    if made is None:
        return None
    whole, known = made
    wanted = tuple(None if fact.how == "same" else fact.how for fact in facts)
    for split in splits(whole, known):
        if (
            split.inputs == wanted
            and split.extent % parts == 0
            and _arguments(part(whole, split, parts)) == _arguments(small)
        ):
            return GlobalCall(literals, _placed(whole, known, split.outputs))
    return None


def _arguments(op: Op) -> tuple[Arg, ...]:
    return (*op.args, *(arg for _, arg in op.kwargs))


def _with_results(op: Op, values: Mapping[int, Value]) -> tuple[Op, dict[int, Value]] | None:
    """Return the call with its outputs, laid out as the operator makes them, and all values; None if the operator
    rejects its arguments."""
    try:
        made = describe(op, values)
    except VerifyError:
        return None
    known = dict(values)
    outputs: list[int | None] = []
    taken = op.inputs()
    for each in made:
        if each is None:
            outputs.append(None)
            continue
        key = len(known)
        storage = key if each.base is None else values[taken[each.base]].storage
        known[key] = Value(key, each.shape, each.stride, each.dtype, storage, each.offset, bits=each.bits)
        outputs.append(key)
    return replace(op, outputs=tuple(outputs)), known


def _placed(op: Op, known: Mapping[int, Value], hows: Iterable[How | None]) -> tuple[Placement | None, ...]:
    """Return a Placement for each output of an unsplit call, given the merge of its parts."""
    pairs = zip(op.outputs, hows, strict=True)
    return tuple(None if v is None or how is None else Placement(how, layout_of(known[v])) for v, how in pairs)


def _literals(arg: Arg, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(arg, tuple):
        for at, item in enumerate(arg):
            yield from _literals(item, (*path, at))
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield path, arg


def value_of(number: int, looks: TensorLayout) -> Value:
    """Return a value of this layout, on a storage of its own."""
    shape, stride, dtype, bits = looks
    return Value(number, shape, stride, dtype, number, bits=bits)


def layout_of(value: Value) -> TensorLayout:
    """Return shape, strides, dtype and lazy bits of a value."""
    return value.shape, value.stride, value.dtype, value.bits


def part_shape(fact: Placement, parts: Fraction) -> tuple[int, ...] | None:
    """Return the shape of a part; None if the parts would have unequal sizes."""
    shape, cut = fact.whole[0], dimension(fact.how)
    if cut is None:
        return shape
    if cut >= len(shape) or shape[cut] % parts:
        return None
    around = fact.how.before + fact.how.after if isinstance(fact.how, Halo | Overlap) else 0
    return tuple(size // parts + around if dim == cut else size for dim, size in enumerate(shape))


def with_literals(op: Op, literals: Literals, inputs: Sequence[int], outputs: tuple[int | None, ...]) -> Op:
    """Return the call with replaced literals, inputs and outputs."""
    queue, known = iter(inputs), dict(literals)

    def resized(arg: Arg, path: Path) -> Arg:
        if isinstance(arg, Ref):
            return Ref(next(queue))
        if isinstance(arg, tuple):
            return tuple(resized(item, (*path, at)) for at, item in enumerate(arg))
        return known.get(path, arg)

    args = tuple(resized(arg, (at,)) for at, arg in enumerate(op.args))
    kwargs = tuple((name, resized(arg, (at,))) for at, (name, arg) in enumerate(op.kwargs, len(op.args)))
    return replace(op, args=args, kwargs=kwargs, outputs=outputs)
