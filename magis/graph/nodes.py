"""Building blocks of a graph: storages, values, operators and their arguments.

A *storage* is a piece of memory, a *value* is a strided window on one storage, an *operator* (``Op``) reads and
makes values. In-place operators are kept as such: they write a storage and make a further value on it. What an
operator reads and writes is pinned by storage *versions* (see ``Op``): an order of the operators is legal exactly
when each one meets the versions that it met in program order. That one rule covers read-after-write,
write-after-read and write-after-write, and random numbers too, whose generator counts as a storage.

The published implementation of the paper has neither storages nor order constraints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

ITEM_SIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Bytes of one element by data type name (``torch.float32`` is ``"float32"``)."""

BITS = ("conj", "neg")
"""Lazy bits of torch's views: the elements are the conjugates, or the negatives, of what is stored. ``x.conj()`` and
``x.conj().imag`` are such views."""

PERSISTENT_KINDS = ("parameter", "buffer", "state", "batch", "constant")
"""Storages that exist before and after the step; they count towards the peak the whole time."""


GENERATOR = 0
"""Id of the storage that stands for the device's random-number generator. A step's own have further ones."""


NUMBER = "number_"
"""Prefix of the names of scalars that are computed from the user's own numbers."""


ARRIVED = "magis.arrived"
"""The operator that waits for a message."""
BESIDE = tuple(
    f"_c10d_functional.{name}.default" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)
"""Collectives that run beside other operators from where they are called to where they are waited for."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a tensor: the id of a value."""

    value: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """An argument that is a number known only when the step runs (step size, bias correction), by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """An argument that is one of torch's own constants: kind is "dtype", "device", "layout" or "memory_format"; or
    "generator": one of the step's own, by where it is held."""

    kind: str
    name: str


Arg: TypeAlias = "Ref | Scalar | Const | int | float | complex | bool | str | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory: ``nbytes`` bytes; kind is one of PERSISTENT_KINDS, "temporary", "host", "generator" (0 bytes), or, in the
    body of a loop, "outer": memory of the graph around it, which counts there."""

    id: int
    nbytes: int
    kind: str

    @property
    def persistent(self) -> bool:
        return self.kind in PERSISTENT_KINDS


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: a strided window on one storage. Shape, stride and offset are in elements; ``bits`` are those of BITS
    that are set, in that order."""

    id: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int
    offset: int = 0
    name: str = ""
    bits: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of the storage behind them)."""
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

    ``outputs`` holds one value id per returned tensor (None where the operator returned None); ``many`` says that
    the call returns a tuple or list even when it has one element. ``reads`` are the (storage, version) pairs that
    the call must meet, ``writes`` the pairs that it leaves behind (only storages that existed before the call; a
    fresh storage starts at version 0). ``phase`` is "forward", "backward" or "update"; ``module`` the path of the
    sub-module that it stems from; ``origin`` the id of the operator that this one recomputes or stands for. ``body``
    is what a loop runs (``magis.loop``); other operators have none. ``line`` is where in the user's code the call
    stands ("net.py:31"): for reports alone, no part of what the operator is, of its text form or its digest.
    """

    id: int
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[int | None, ...]
    many: bool = False
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    random: bool = False
    phase: str = "forward"
    module: str = ""
    origin: int | None = None
    body: Loop | None = None
    line: str = field(default="", compare=False)
    _taken: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _made: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        taken = list[int]()
        for arg in self.args:
            _note_refs(arg, taken)
        for _, arg in self.kwargs:
            _note_refs(arg, taken)
        object.__setattr__(self, "_taken", tuple(taken))  # both are asked for again and again
        object.__setattr__(self, "_made", tuple(value for value in self.outputs if value is not None))

    def inputs(self) -> tuple[int, ...]:
        """Return the value ids that the call takes, in order, repeats kept."""
        return self._taken

    def made(self) -> tuple[int, ...]:
        """Return the value ids that the call makes."""
        return self._made

    def scalars(self) -> tuple[str, ...]:
        """Return the names of the numbers that the call takes when the step runs, in order, each once."""
        return tuple(dict.fromkeys(_scalars((self.args, tuple(arg for _, arg in self.kwargs)))))


@dataclass(frozen=True, slots=True)
class Graph:
    """A step: storages, values, and operators in the order in which they run (the schedule).

    ``inputs`` are the values that exist before the step, ``outputs`` those that the caller gets back (the loss,
    say). ``constants`` holds the data of small tensors that the module made from Python numbers, by value id; among
    them scalars, where the numbers are known only when the step runs.
    """

    storages: dict[int, Storage]
    values: dict[int, Value]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[int, tuple[complex | Scalar, ...]] = field(default_factory=dict)

    def persistent_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages.values() if storage.persistent)


@dataclass(frozen=True, slots=True)
class Loop:
    """The body of a ``magis.loop``, run ``parts`` times on one stretch of its inputs after another (paper, F-Trans).

    The inputs of ``graph`` stand for the loop's inputs, in order, and then for the tensors that it makes: these are
    allocated before the first part runs. Operators of our own tie the parts to the whole, all with equal stretches:

        %p = magis.part(%x, dim)         the part's stretch of a dimension: a view where that is dense, else a copy
        magis.join(%whole, %p, dim)      writes the part's stretch
        magis.reduce(%whole, %p, "sum")  takes the part into the sum (or "mean", "max", "min"; "same": takes the first)

    Where windows overlap (halo rows), numbers of rows follow:

        %p = magis.part(%x, dim, 3, 2)   a copy of the stretch, of 3 rows before and 2 behind it; zeros outside of %x
        magis.join(%whole, %p, dim, 3, 2)  adds the same rows to the whole, zeros at first; drops those outside of it
    """

    parts: int
    graph: Graph


def side_by_side(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if the elements lie side by side without overlap, in some order of the dimensions."""
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= size
    return True


def every_op(graph: Graph) -> Iterator[tuple[Op, Mapping[int, Value]]]:
    """Yield every operator with the values of its graph; a loop comes before the operators of its body."""
    for op in graph.ops:
        yield op, graph.values
        if op.body is not None:
            yield from every_op(op.body.graph)


def _note_refs(arg: Arg, found: list[int]) -> None:
    """Append the ids of the values in an argument."""
    if isinstance(arg, Ref):
        found.append(arg.value)
    elif isinstance(arg, tuple):
        for item in arg:
            _note_refs(item, found)


def _scalars(arg: Arg) -> Iterator[str]:
    if isinstance(arg, Scalar):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _scalars(item)


def replace_refs(arg: Arg, mapping: dict[int, int]) -> Arg:
    """Return the argument with the value ids replaced that ``mapping`` knows."""
    if isinstance(arg, Ref):
        return Ref(mapping.get(arg.value, arg.value))
    if isinstance(arg, tuple):
        return tuple(replace_refs(item, mapping) for item in arg)
    return arg


def with_scalars(arg: Arg, numbers: Mapping[str, float]) -> Any:
    """Return the argument with the named scalars replaced that ``numbers`` knows."""
    if isinstance(arg, tuple):
        return tuple(with_scalars(item, numbers) for item in arg)
    return numbers.get(arg.name, arg) if isinstance(arg, Scalar) else arg


def named_numbers(graph: Graph) -> set[str]:
    """Return the names of scalars that are computed from the user's own numbers."""
    found = {name for op, _ in every_op(graph) for name in op.scalars()}
    return {name for name in found.union(*map(_scalars, graph.constants.values())) if name.startswith(NUMBER)}
