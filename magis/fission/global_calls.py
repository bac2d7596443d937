"""Whole calls that an operator in a loop is a part of, as the labels of ATen calls say."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias

from magis.cost.shapes import describe
from magis.cost.signature import parse
from magis.errors import VerifyError
from magis.graph import Arg, Op, Ref, Value
from magis.ops.splits import Halo, How, Overlap, Path, dimension, part, splits

MOST_LITERALS = 2
"""Size literals of one call that may stand for the same axis: sizes of a bias and groups, groups and channels."""

TensorLayout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], str, tuple[str, ...]]
"""Shape, strides, data type and bits of a whole tensor."""
Literals: TypeAlias = tuple[tuple[Path, int], ...]
"""Paths of literals, and their values."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A whole tensor, and the way in which a value of the body is a part of it.

    ``how``: the dimension along which the parts lie side by side, with rows of other parts or not; "same" where each
    part has all of it; or how parts combine (``COMBINATIONS``, rows that overlap).
    """

    how: int | str | Halo | Overlap
    whole: TensorLayout


@dataclass(frozen=True, slots=True)
class GlobalCall:
    """A whole call that an operator is a part of: the literals in which it differs, and its results."""

    literals: Literals
    outputs: tuple[Placement | None, ...]


@functools.lru_cache(maxsize=65536)
def global_calls(text: str, facts: tuple[Placement, ...], parts: int, rows: tuple[int, ...]) -> tuple[GlobalCall, ...]:
    """Find the whole calls that a call (its signature) is one of ``parts`` parts of, given the facts of its inputs.

    Where every part takes the same tensors, the call may be whole itself; with larger literals it may also be cut (a
    factory, an expansion). Otherwise the labels decide; of two readings ([1, 4] as part of [2, 4] or of [1, 8]) both
    are returned. Where windows overlap, a part has 0 rows of padding and the whole has as many as rows are taken
    before some stretch, or added to (``rows``).
    """
    op, small = parse(text)
    values = {number: value_of(number, fact.whole) for number, fact in enumerate(facts)}
    if any(part_shape(fact, parts) != small[number].shape for number, fact in enumerate(facts)):
        return ()
    found: list[GlobalCall] = []
    same = all(fact.how == "same" for fact in facts)
    made = _with_results(op, values) if same else None
    if made is not None and made[0].outputs:
        found.append(GlobalCall((), _placed(*made, ["same"] * len(made[0].outputs))))
    for count in range(MOST_LITERALS + 1):
        for literals in _candidates(op, count, parts, () if same else rows):
            way = _call_with_literals(op, literals, values, facts, parts)
            found += [] if way is None else [way]
        if found and not same:
            break  # the fewer literals are other ones, the better
    return tuple(dict.fromkeys(found))


def _candidates(op: Op, count: int, parts: int, rows: Sequence[int]) -> Iterator[Literals]:
    """Yield the ways in which ``count`` literals of the whole call may differ."""
    numbers = list(_literals(_arguments(op), ()))
    larger = [(path, number * parts) for path, number in numbers if number > 0]
    yield from combinations(larger, count)
    for padding in ((path, before) for path, number in numbers if number == 0 for before in rows if count):
        yield from ((*literals, padding) for literals in combinations(larger, count - 1))


def _call_with_literals(
    small: Op, literals: Literals, values: Mapping[int, Value], facts: tuple[Placement, ...], parts: int
) -> GlobalCall | None:
    """Return the whole call with these literals, if one of its splits takes the inputs as the facts say and makes just
    this call of it."""
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
    """Return the call with its results, laid out as the operator makes them, and all values; None if it refuses its
    arguments."""
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
    """Place the call's results as wholes that are made up of parts."""
    pairs = zip(op.outputs, hows, strict=True)
    return tuple(None if v is None or how is None else Placement(how, layout_of(known[v])) for v, how in pairs)


def _literals(arg: Arg, path: Path) -> Iterator[tuple[Path, int]]:
    if isinstance(arg, tuple):
        for at, item in enumerate(arg):
            yield from _literals(item, (*path, at))
    elif isinstance(arg, int) and not isinstance(arg, bool):
        yield path, arg


def value_of(number: int, looks: TensorLayout) -> Value:
    """Return a tensor of this layout, on a storage of its own."""
    shape, stride, dtype, bits = looks
    return Value(number, shape, stride, dtype, number, bits=bits)


def layout_of(value: Value) -> TensorLayout:
    """Return shape, strides, data type and bits of a tensor."""
    return value.shape, value.stride, value.dtype, value.bits


def part_shape(fact: Placement, parts: int) -> tuple[int, ...] | None:
    """Return the shape of one of the parts; None where there are none of equal size."""
    shape, cut = fact.whole[0], dimension(fact.how)
    if cut is None:
        return shape
    if cut >= len(shape) or shape[cut] % parts:
        return None
    around = fact.how.before + fact.how.after if isinstance(fact.how, Halo | Overlap) else 0
    return tuple(size // parts + around if dim == cut else size for dim, size in enumerate(shape))


def with_literals(op: Op, literals: Literals, inputs: Sequence[int], outputs: tuple[int | None, ...]) -> Op:
    """Return the call with other literals, inputs and outputs."""
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
