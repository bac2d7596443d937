"""Splits of an operator into parts, derived from labels of dimensions, as in an einsum.

A rule gives a label to every dimension that can be split; dimensions with one label are split together.

    mm(a, b):  a: (rows, inner), b: (inner, columns) -> (rows, columns); inner combines by "sum"

Every label defines one split: of all dimensions and size literals with that label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd
from typing import Any, TypeAlias

from magis.errors import MagisError
from magis.graph.nodes import Arg, Op, Ref, Value
from magis.ops.operators import op_info

Path: TypeAlias = tuple[int, ...]
"""Position of a literal or a tensor in a call: index among the arguments (keyword arguments follow positional ones),
then indices inside of nested tuples."""

COMBINATIONS = ("sum", "mean", "max", "min", "same")
"""Reductions of full-size results of the parts: sum, mean, element-wise maximum or minimum; "same": all parts give
equal results."""


@dataclass(frozen=True, slots=True)
class Halo:
    """Cut of an input with overlapping windows: a slice of dimension `dim` with halo rows before and behind it.

    Halo rows outside of the tensor are zeros, so that all slices have one size. A halo may span several parts.
    """

    dim: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Merge of parts into an output with overlapping windows: each part adds its slice of dimension `dim` and the
    halo rows before and behind it; rows outside of the tensor are dropped."""

    dim: int
    before: int
    after: int


Cut: TypeAlias = int | Halo | None
"""Cut of an input for a part: a slice of a dimension, a slice with a halo, or the whole input (None)."""

How: TypeAlias = int | str | Overlap | None
"""Merge of parts into an output: concatenation along a dimension, one of COMBINATIONS, or an Overlap; None if the
operator returned None."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split a call into n parts that run one after another and together compute the call's result.

    Part i works on the i-th of n equal slices of every cut dimension. Dimensions are counted from 0.
    """

    inputs: tuple[Cut, ...]
    """Cut of each entry of `op.inputs()`."""
    outputs: tuple[How, ...]
    """Merge of each entry of `op.outputs`."""
    sizes: tuple[Path, ...] = ()
    """Positions of integer literals that are divided by n in a part."""
    extent: int = 1
    """Number that n must divide: the greatest common divisor of all cut sizes and literals."""
    replaced: tuple[tuple[Path, int], ...] = ()
    """Positions and values of integer literals that a part replaces: no padding where a halo includes it."""


def dimension(how: Cut | How) -> int | None:
    """Return the dimension of a cut or merge; None without one."""
    if isinstance(how, Halo | Overlap):
        return how.dim
    return how if isinstance(how, int) else None


def part(op: Op, split: Split, n: int | Fraction) -> Op:
    """Return one of `n` parts of a call: the operator with a part's literals; ids, reads and writes are unchanged. No
    integer: the part that is that many times in the whole.

    Raises MagisError if `n` does not divide the split's extent.
    """
    if n < 1 or split.extent % n:
        raise MagisError(f"{op.target} cannot be split into {n} parts", hint=f"use a divisor of {split.extent}")
    count = len(op.args)
    args = (*op.args, *(arg for _, arg in op.kwargs))
    for path in split.sizes:
        size = _literal(args, path)
        args = _with_literal(args, path, None if size is None or size % n else size // n)
    for path, literal in split.replaced:
        args = _with_literal(args, path, None if _literal(args, path) is None else literal)
    kwargs = tuple((name, arg) for (name, _), arg in zip(op.kwargs, args[count:], strict=True))
    return replace(op, args=args[:count], kwargs=kwargs)


def _literal(arg: Arg, path: Path) -> int | None:
    """Return the integer at `path` of the arguments; None if it is no integer."""
    for position in path:
        arg = arg[position] if isinstance(arg, tuple) and 0 <= position < len(arg) else None
    return arg if isinstance(arg, int) and not isinstance(arg, bool) else None


def _with_literal(args: Arg, path: Path, new: int | None) -> Any:
    """Return the arguments with the integer `new` at `path`. Raises MagisError if `new` is None."""
    if new is None:
        raise MagisError(f"no integer that can be cut at {path} of the arguments {args!r}")
    if not path or not isinstance(args, tuple):
        return new
    head, *rest = path
    return (*args[:head], _with_literal(args[head], tuple(rest), new), *args[head + 1 :])


# -- labels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Around:
    """Label of a dimension whose slices need halo rows, since windows overlap."""

    label: str
    before: int
    after: int


Dims: TypeAlias = Sequence[str | None]
"""One label per dimension; None: never split."""

Places: TypeAlias = Sequence[str | Around | None]
"""Labels of dimensions, with halos for some of them."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one call. Unlabelled dimensions are never split."""

    inputs: Mapping[Path, Places]
    """Labels of the tensor arguments, by position in the call."""
    outputs: Sequence[Places]
    """Labels of each output, in order."""
    literals: Mapping[Path, str] = field(default_factory=dict)
    """Integer literals that are the size of a labelled dimension, by position; -1 stays."""
    combine: Mapping[str, str | Sequence[str | None]] = field(default_factory=dict)
    """Label -> reduction of outputs without that label, for all outputs or for each. A label that an output lacks and
    that is missing here gives no split."""
    replaced: Mapping[str, tuple[Path, int]] = field(default_factory=dict)
    """Label -> position and value of a literal that parts along that label replace."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Label -> number that must also be divisible by the number of parts."""
    reason: str = ""
    """Reason for reports why no label gives a split although sizes would allow one."""


class LabelledCall:
    """A call with access to its arguments by position or keyword, and to the tensors behind them."""

    def __init__(self, op: Op, values: Mapping[int, Value]) -> None:
        self.op = op
        self._values = values
        _, name, self.overload = op.target.split(".")
        self.name = name.removesuffix("_")
        self.info = op_info(op.target)
        self.outputs = tuple(None if number is None else values[number] for number in op.outputs)
        self.tensors: dict[Path, Value] = {}
        for position, arg in enumerate((*op.args, *(arg for _, arg in op.kwargs))):
            self.tensors |= {path: values[ref.value] for path, ref in _refs(arg, (position,))}

    def at(self, position: int, keyword: str = "") -> Path:
        """Return the position of an argument, given by position or else by keyword; (-1,) if the call omits it."""
        if not 0 <= position < len(self.op.args):
            for number, (name, _) in enumerate(self.op.kwargs):
                if name == keyword:
                    return (len(self.op.args) + number,)
            return (-1,)
        return (position,)

    def arg(self, position: int, keyword: str = "", default: Arg = None) -> Arg:
        """Return the argument at a position or of a keyword; `default` if the call omits it."""
        (where,) = self.at(position, keyword)
        if where < 0:
            return default
        count = len(self.op.args)
        return self.op.args[where] if where < count else self.op.kwargs[where - count][1]

    def integer(self, position: int, keyword: str = "", default: int = 0) -> int:
        """Return an integer argument; `default` if the call omits it or it is no integer."""
        found = self.arg(position, keyword, default)
        return found if isinstance(found, int) else default

    def integers(self, position: int, keyword: str = "") -> tuple[int, ...]:
        """Return an argument's integers as a tuple; () if it has none. A single integer is a list of one."""
        found = self.arg(position, keyword)
        items = found if isinstance(found, tuple) else (found,)
        return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))

    def tensor(self, position: int, keyword: str = "") -> Value | None:
        """Return the tensor argument at a position or of a keyword; None if it is no tensor."""
        return self.tensors.get(self.at(position, keyword))

    def shape(self, position: int, keyword: str = "") -> tuple[int, ...]:
        """Return the shape of a tensor argument; () if it is no tensor."""
        found = self.tensor(position, keyword)
        return found.shape if found is not None else ()

    def shape_of_output(self, position: int = 0) -> tuple[int, ...]:
        """Return the shape of an output; () without that output."""
        found = self.outputs[position] if position < len(self.outputs) else None
        return found.shape if found is not None else ()


Rule: TypeAlias = Callable[[LabelledCall], "Labels | str"]
"""Function that returns the labels of a call, or a short reason why it cannot be split."""


def derive(call: LabelledCall, labels: Labels) -> tuple[Split, ...]:
    """Return one split per label that gives equal parts, in the order of first use."""
    order: dict[str, None] = {}
    for dims in (*labels.inputs.values(), *labels.outputs):
        order |= dict.fromkeys(d.label if isinstance(d, Around) else d for d in dims if d is not None)
    # Proofs try calls that no operator would take, some of which torch's fakes let pass (the gradient of index 0 of
    # dimension 32): there tensors may lack dimensions that are labelled.
    pairs = [(value, labels.inputs.get(path, ())) for path, value in call.tensors.items()]
    pairs += [(value, dims) for value, dims in zip(call.outputs, labels.outputs, strict=False) if value is not None]
    if any(len(dims) > len(value.shape) for value, dims in pairs):
        return ()
    found = (_split(call, labels, label) for label in order)
    return tuple(dict.fromkeys(split for split in found if split is not None))


def _split(call: LabelledCall, labels: Labels, label: str) -> Split | None:
    """Return the split of all dimensions with that label; None if the call does not allow it."""
    inputs = tuple(_cut_along(value, labels.inputs.get(path, ()), label) for path, value in call.tensors.items())
    pairs = [(value, dimension(cut)) for value, cut in zip(call.tensors.values(), inputs, strict=True)]
    sizes = [value.shape[dim] for value, dim in pairs if dim is not None]
    outputs: list[How] = []
    for index, value in enumerate(call.outputs):
        if value is None:
            outputs.append(None)
            continue
        place = _cut_along(value, labels.outputs[index], label)
        how = labels.combine.get(label) if value.numel else "same"
        how = how if how is None or isinstance(how, str) else how[index]
        joined: How = Overlap(place.dim, place.before, place.after) if isinstance(place, Halo) else place
        joined = how if joined is None else joined
        if joined is None or not _apart(call, value, joined, inputs):
            return None
        outputs.append(joined)
        sizes += [value.shape[dim] for dim in (dimension(place),) if dim is not None]
    paths = _literals(call, labels, label)
    if paths is None or all(how in (None, "same") for how in outputs):
        return None
    extent = gcd(*sizes, *paths.values(), labels.limits.get(label, 0))
    replaced = tuple(change for owner, change in labels.replaced.items() if owner == label)
    return Split(inputs, tuple(outputs), tuple(paths), extent, replaced) if extent > 1 else None


def _apart(call: LabelledCall, output: Value, joined: How, inputs: Sequence[Cut]) -> bool:
    """Return True if parts write disjoint elements of an output that aliases an input, or nothing.

    A view writes nothing. A tensor that is written in-place must be cut as the output is merged; else parts would
    overwrite each other's work.
    """
    on_input = [
        (value, cut)
        for value, cut in zip(call.tensors.values(), inputs, strict=True)
        if value.storage == output.storage
    ]
    if not isinstance(joined, int):
        return not on_input or output.numel == 0
    if call.info.view:
        return True
    return all(
        cut == joined for value, cut in on_input if value.shape == output.shape and value.offset == output.offset
    )


def _cut_along(value: Value, dims: Places, label: str) -> Cut:
    """Return the cut of the dimension with that label; None without one, or if its size is 0."""
    for index, found in enumerate(dims):
        if isinstance(found, Around) and found.label == label and value.shape[index]:
            return Halo(index, found.before, found.after)
        if found == label and value.shape[index]:
            return index
    return None


def _literals(call: LabelledCall, labels: Labels, label: str) -> dict[Path, int] | None:
    """Return the size literals of a label, by position; None if a literal is not an integer >= -1."""
    found: dict[Path, int] = {}
    everything = (*call.op.args, *(arg for _, arg in call.op.kwargs))
    for path, owner in labels.literals.items():
        if owner != label:
            continue
        arg = _literal(everything, path)
        if arg is None or arg < -1:
            return None
        if arg != -1:
            found[path] = arg
    return found


def _refs(arg: Arg, path: Path) -> Iterator[tuple[Path, Ref]]:
    if isinstance(arg, Ref):
        yield path, arg
    elif isinstance(arg, tuple):
        for position, item in enumerate(arg):
            yield from _refs(item, (*path, position))


# -- shapes ----------------------------------------------------------------------------------------------------------


def wrapped(dim: int, rank: int) -> int:
    """Return a dimension counted from 0, given one that may count from the end (negative)."""
    return dim + rank if dim < 0 else dim


def numbered(shape: Sequence[int], but: Sequence[int] = (), prefix: str = "d") -> list[str | None]:
    """Return a distinct label for every dimension; None for dimensions in `but`, which may be negative."""
    left_out = {wrapped(dim, len(shape)) for dim in but}
    return [None if index in left_out else f"{prefix}{index}" for index in range(len(shape))]


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the broadcast shape of these shapes; None if they do not broadcast."""
    rank = max((len(shape) for shape in shapes), default=0)
    common = [1] * rank
    for shape in shapes:
        for index, size in enumerate(shape, rank - len(shape)):
            if size != 1 and common[index] not in (1, size):
                return None
            common[index] = size if size != 1 else common[index]
    return tuple(common)


def aligned(shape: Sequence[int], common: Sequence[int], labels: Dims) -> list[str | None]:
    """Return the labels of a tensor that broadcasts to the labelled shape `common`; None for expanded dimensions."""
    skipped = len(common) - len(shape)
    if skipped < 0:  # only tensors without elements are left out of the common shape
        return [None] * len(shape)
    return [labels[index] if size == common[index] and size != 1 else None for index, size in enumerate(shape, skipped)]
