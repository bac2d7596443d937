"""Data model of a graph: storages, values, operators and their arguments.

A *storage* is a block of memory, a *value* a strided view of one storage, an *operator* (``Op``) reads and makes
values. In-place operators stay in-place: they write a storage and make a new value on it. Storage *versions* (see
``Op``) pin what an operator reads and writes: an order is legal exactly if each operator meets the versions that it met
in program order. This one rule covers read-after-write, write-after-read and write-after-write, and random numbers,
since a generator counts as a storage. The paper's published implementation has neither storages nor order constraints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

ITEM_SIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex32": 4, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Element size in bytes by dtype name (``torch.float32`` is ``"float32"``)."""

HALF = ("bfloat16", "float16")
"""Dtypes of half precision."""

BITS = ("conj", "neg")
"""Lazy bits of torch's views (``x.conj()``, ``x.conj().imag``): the elements are the conjugates, or the negatives, of
the stored numbers."""

PERSISTENT_KINDS = ("parameter", "buffer", "state", "batch", "constant")
"""Kinds of storages that exist before and after the step; they count towards the peak for the whole step."""


GENERATOR = 0
"""Id of the storage that represents the device's default random generator; a step's own generators have further ids."""


NUMBER = "number_"
"""Prefix of the names of scalars computed from the user's own Python numbers."""


HOST_COPIES = ("magis.store", "magis.wait", "magis.load")
"""Operators of a copy to host memory, the wait for it, and the copy back."""
ARRIVED = "magis.arrived"
"""Operator that waits for an asynchronous collective."""
STRETCH = "magis.stretch"
"""Prefix of the names of operators that stand for a compiled stretch of others."""
BESIDE = tuple(
    f"_c10d_functional.{name}.default" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)
"""Collectives that run asynchronously, from their call to the operator that waits for them."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument, by the id of its value."""

    value: int


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number argument known only when the step runs (step size, bias correction), by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """A constant argument: kind is "dtype", "device", "layout" or "memory_format", with torch's name; or "generator",
    one of the step's own, with the path to it."""

    kind: str
    name: str


Arg: TypeAlias = "Ref | Scalar | Const | int | float | complex | bool | str | tuple[Arg, ...] | None"


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of ``nbytes`` bytes. Kind: one of PERSISTENT_KINDS, "temporary", "host", "generator" (0 bytes), or
    "outer" in a loop's body: memory of the surrounding graph, which counts it."""

    id: int
    nbytes: int
    kind: str

    @property
    def persistent(self) -> bool:
        return self.kind in PERSISTENT_KINDS


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: a strided view of one storage. Shape, stride and offset are in elements; ``bits`` are the lazy bits
    that are set, in the order of BITS."""

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
        """Return the bytes of the elements, not of the storage."""
        return self.numel * ITEM_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

    ``outputs`` holds one value id per returned tensor (None where the operator returned None); ``many`` says that the
    call returns a tuple or list even if it has one element. ``reads`` are the (storage, version) pairs that the call
    must meet, ``writes`` the pairs after the call (of storages that existed before; a fresh storage starts at version
    0). ``phase`` is "forward", "backward" or "update"; ``module`` the path of the calling sub-module; ``origin`` the id
    of the operator that this one recomputes or replaces. ``body`` is the loop's body of a ``magis.loop``, None for
    other operators. ``line`` is the line of the user's code ("net.py:31"), for reports only: it is not part of
    comparison, text form or digest.
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
        """Return the ids of the input values in order, duplicates kept."""
        return self._taken

    def made(self) -> tuple[int, ...]:
        """Return the ids of the output values."""
        return self._made

    def scalars(self) -> tuple[str, ...]:
        """Return the names of the call's ``Scalar`` arguments, in order, without duplicates."""
        return tuple(dict.fromkeys(_scalars((self.args, tuple(arg for _, arg in self.kwargs)))))


@dataclass(frozen=True, slots=True)
class Graph:
    """A step: storages, values, and operators in execution order (the schedule).

    ``inputs`` are the values that exist before the step, ``outputs`` the values returned to the caller (the loss, say).
    ``constants`` maps value ids to the data of small tensors that the module made from Python numbers; an element is a
    ``Scalar`` if its number is known only when the step runs.
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
    """The body of a ``magis.loop``, run ``parts`` times, on one slice of its inputs after another (paper, F-Trans).

    Where the parts do not divide the cut dimensions, the last one is smaller; the body has the sizes of the others.

    The inputs of ``graph`` correspond to the loop's inputs, then to the loop's outputs, which are allocated before the
    first part runs. Operators of our own cut tensors into slices, and merge slices:

        %p = magis.part(%x, dim)         the part's slice along a dimension: a view where that is dense, else a copy
        magis.join(%whole, %p, dim)      writes the part's slice
        magis.reduce(%whole, %p, "sum")  accumulates the part (or "mean", "max", "min"; "same": keeps the first)
        magis.addmm(%whole, %a, %b)      accumulates the part ``a @ b`` without holding it
        magis.addsum(%whole, %x, [0], True)  accumulates the part ``x.sum([0], True)`` without rounding it

    Sums of half precision accumulate in a float32 tensor, which an operator behind the loop rounds once.

    Overlapping windows need halo rows:

        %p = magis.part(%x, dim, 3, 2)   a copy of the slice with 3 rows before and 2 behind it; zeros outside of %x
        magis.join(%whole, %p, dim, 3, 2)  adds these rows to the whole, which starts at zero; drops rows outside of it
    """

    parts: int
    graph: Graph


def side_by_side(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True for strides of a dense, non-overlapping tensor, in some order of the dimensions."""
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= size
    return True


def every_op(graph: Graph) -> Iterator[tuple[Op, Mapping[int, Value]]]:
    """Yield every operator and the values of its graph, bodies of loops included; a loop precedes its body."""
    for op in graph.ops:
        yield op, graph.values
        if op.body is not None:
            yield from every_op(op.body.graph)


def _note_refs(arg: Arg, found: list[int]) -> None:
    """Append the value ids in an argument to ``found``."""
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


def replace_refs(arg: Arg, mapping: Mapping[int, int]) -> Arg:
    """Return the argument with value ids replaced as ``mapping`` says; other ids stay."""
    if isinstance(arg, Ref):
        return Ref(mapping.get(arg.value, arg.value))
    if isinstance(arg, tuple):
        return tuple(replace_refs(item, mapping) for item in arg)
    return arg


def with_inputs(op: Op, mapping: Mapping[int, int]) -> Op:
    """Return the operator with the value ids of its arguments replaced as ``mapping`` says; other ids stay."""
    kwargs = tuple((name, replace_refs(arg, mapping)) for name, arg in op.kwargs)
    return replace(op, args=tuple(replace_refs(arg, mapping) for arg in op.args), kwargs=kwargs)


def with_scalars(arg: Arg, numbers: Mapping[str, float]) -> Any:
    """Return the argument with scalars replaced by their ``numbers``, by name; other scalars stay."""
    if isinstance(arg, tuple):
        return tuple(with_scalars(item, numbers) for item in arg)
    return numbers.get(arg.name, arg) if isinstance(arg, Scalar) else arg


def named_numbers(graph: Graph) -> set[str]:
    """Return the names of the graph's scalars that are computed from the user's own numbers."""
    found = {name for op, _ in every_op(graph) for name in op.scalars()}
    return {name for name in found.union(*map(_scalars, graph.constants.values())) if name.startswith(NUMBER)}
