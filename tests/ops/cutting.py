"""Cuts real tensors as splits say, runs the parts, puts the results together, and compares with the whole call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import TypeAlias

import torch
from torch import Tensor

from magis.cost.signature import signature
from magis.graph import Arg, Graph, Op, Ref, Value
from magis.ops.call import call, to_torch
from magis.ops.fake_results import with_bits
from magis.ops.operators import name_of
from magis.ops.splits import COMBINATIONS, Cut, Halo, How, Overlap, Split, dimension, part, splits
from magis.runtime.double_precision import wide, widened
from tests.ops.kernels import KERNELS

POSITIVE = (
    "sqrt", "rsqrt", "log", "log2", "log10", "log1p", "pow", "div", "reciprocal", "addcdiv", "binary_cross_entropy",
    "native_batch_norm", "native_batch_norm_backward", "native_layer_norm_backward", "native_group_norm_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional",
    "_batch_norm_with_update", "_batch_norm_no_update", "_batch_norm_with_update_functional", "batch_norm_backward",
    "_fused_rms_norm_backward", "lgamma", "xlogy", "log_sigmoid_backward", "logit", "logit_backward",
    "binary_cross_entropy_backward", "erfinv", "acos", "asin", "prod", "cumprod", "remainder", "fmod",
)  # fmt: skip
"""Operators whose arguments are drawn from (0.25, 0.75): variances, probabilities, divisors."""

UNSPECIFIED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operators that leave their result's contents open."""

NUMBERS = {"neg_lr": -0.25, "neg_step_size": -0.375, "decay": 0.75, "bias_correction2_sqrt": 0.625}


Layout: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One call, with the values that its inputs and outputs have."""

    op: Op
    values: Mapping[int, Value]


def draw(case: Case, seed: int = 0) -> list[Tensor]:
    """A tensor for every input of the call, in order, laid out as its value says; the same value, the same tensor."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Tensor] = {}
    for number in case.op.inputs():
        if number not in made:
            made[number] = _laid_out(case.values[number], _contents(case, number, generator))
    return [made[number] for number in case.op.inputs()]


def _contents(case: Case, number: int, generator: torch.Generator) -> Tensor:
    value = case.values[number]
    if value.dtype == "bool":
        return torch.rand(value.shape, generator=generator) < 0.5
    if value.dtype.startswith("complex"):
        return torch.randn(value.shape, generator=generator, dtype=torch.complex128)
    if not value.dtype.startswith(("float", "bfloat")):
        return torch.randint(_largest_index(case), value.shape, generator=generator).to(getattr(torch, value.dtype))
    drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    return drawn / 2 + 0.25 if name_of(case.op.target) in POSITIVE else 2 * drawn - 1


def _largest_index(case: Case) -> int:
    """How many indices the call allows."""
    op, shape = case.op, [case.values[number].shape for number in case.op.inputs()]
    match name_of(op.target):
        case "embedding":
            return shape[0][0]
        case "embedding_dense_backward":
            return int(op.args[2])  # type: ignore[arg-type]
        case "nll_loss_forward" | "nll_loss2d_forward":
            return shape[0][min(1, len(shape[0]) - 1)]
        case "nll_loss_backward" | "nll_loss2d_backward":
            return shape[1][min(1, len(shape[1]) - 1)]
        case "max_pool2d_with_indices_backward" | "adaptive_max_pool2d_backward" | "max_pool3d_with_indices_backward":
            return shape[1][-1] * shape[1][-2]
        case name if name.startswith(("index", "_index", "_unsafe_index", "gather", "scatter")):
            return min(shape[0], default=1)
        case _:
            return 7


def _laid_out(value: Value, contents: Tensor) -> Tensor:
    """The contents with the value's strides, on a storage of their own."""
    if value.numel == 0:
        return contents
    if value.bits:  # stored in such a way that the window shows the contents
        return with_bits(with_bits(contents, value.bits).clone().as_strided(value.shape, value.stride), value.bits)
    reach = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))
    flat = torch.zeros(reach, dtype=contents.dtype)
    window = flat.as_strided(value.shape, value.stride)
    if 0 in value.stride:  # expanded: fill what is there, whatever the order
        flat.copy_(contents.flatten()[0] if contents.numel() < reach else contents.flatten()[:reach])
    else:
        window.copy_(contents)
    return window


def run(op: Op, tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The call on these inputs, one per entry of `op.inputs()`."""
    # every entry gets an id of its own: parts of one value may differ from entry to entry
    numbers = iter(range(len(tensors)))

    def numbered(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(next(numbers))
        return tuple(numbered(item) for item in arg) if isinstance(arg, tuple) else arg

    args = tuple(numbered(arg) for arg in op.args)
    kwargs = tuple((name, numbered(arg)) for name, arg in op.kwargs)
    numbers_by_id, scalars = dict(enumerate(tensors)), NUMBERS | {"$": 0.5}
    kernel = KERNELS.get(op.target)
    with torch.no_grad():
        if kernel is None:
            return call(replace(op, args=args, kwargs=kwargs), numbers_by_id, scalars)
        given = [to_torch(arg, numbers_by_id, scalars) for arg in args]
        return kernel(*given, **{name: to_torch(arg, numbers_by_id, scalars) for name, arg in kwargs})


def counts(split: Split, largest: int) -> Iterator[int]:
    """Numbers of parts to try: 2, 3, 4, and as many as the extent allows (up to `largest`)."""
    best = max(n for n in range(1, min(split.extent, largest) + 1) if split.extent % n == 0)
    yield from sorted({n for n in (2, 3, 4, best) if n > 1 and split.extent % n == 0})


def problems(case: Case, found: Sequence[Split] | None = None, *, largest: int = 64, seed: int = 0) -> list[str]:
    """What is wrong with splits of the call (by default all of them), one line each: cut, run in parts, put together,
    compared.
    """
    op = widened(case.op)
    found = splits(op, case.values) if found is None else found
    if not found:
        return []
    drawn = draw(case, seed)
    whole_inputs = _copies(drawn)
    whole = run(op, whole_inputs)
    lines = []
    for split in found:
        for n, lay in product(counts(split, largest), _layouts(drawn)):
            try:
                trouble = _compare(op, split, n, drawn, whole, whole_inputs, lay)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                trouble = f"the parts raise {error}".splitlines()[0]
            if trouble:
                lines.append(f"{op.target} {split} n={n}, {lay.__name__}: {trouble}")
    return lines


def _layouts(drawn: list[Tensor]) -> list[Layout]:
    """How parts may lie in memory: row by row, or, where that is something else, as the whole does."""
    return [row_by_row] if all(tensor.is_contiguous() for tensor in drawn) else [row_by_row, as_the_whole]


def row_by_row(piece: Tensor) -> Tensor:
    return piece.clone(memory_format=torch.contiguous_format)


def as_the_whole(piece: Tensor) -> Tensor:
    """Dense, with the dimensions in the same order."""
    order = sorted(range(piece.dim()), key=lambda dim: (-piece.stride(dim), dim))
    back = [order.index(dim) for dim in range(piece.dim())]
    return row_by_row(piece.permute(order)).permute(back)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of the same strides; one per distinct tensor."""
    made: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in made:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            made[id(tensor)] = copy.copy_(tensor) if 0 not in tensor.stride() else tensor
    return [made[id(tensor)] for tensor in tensors]


def _compare(
    op: Op,
    split: Split,
    n: int,
    drawn: list[Tensor],
    whole: tuple[Tensor | None, ...],
    after: list[Tensor],
    lay: Layout,
) -> str:
    """The first difference between the parts put together and the whole; "" where there is none."""
    small = part(op, split, n)
    shared = _copies(drawn)
    once: dict[tuple[int, Cut], list[Tensor]] = {}  # what is given twice is written twice
    cut = [
        once.setdefault((id(tensor), how), _pieces(tensor, how, n, lay))
        for tensor, how in zip(shared, split.inputs, strict=True)
    ]
    results = [run(small, [pieces[index] for pieces in cut]) for index in range(n)]
    unspecified = name_of(op.target) in UNSPECIFIED
    for index, (how, expected) in enumerate(zip(split.outputs, whole, strict=True)):
        pieces = [result[index] for result in results]
        if (expected is None) != (how is None) or any((piece is None) != (how is None) for piece in pieces):
            return f"output {index}: None on one side only"
        if expected is None or how is None:
            continue
        trouble = _difference(_merged([p for p in pieces if p is not None], how, expected), expected, unspecified)
        if trouble:
            return f"output {index}: {trouble}"
    for index, (dim, pieces) in enumerate(zip(split.inputs, cut, strict=True)):
        if isinstance(dim, Halo):
            continue  # copies
        trouble = _difference(pieces[0] if dim is None else torch.cat(pieces, dim), after[index], False)
        if trouble:
            return f"input {index} after the call: {trouble}"
    return ""


def _pieces(tensor: Tensor, how: Cut, n: int, lay: Layout) -> list[Tensor]:
    if how is None:
        return [tensor] * n
    if isinstance(how, int):
        return [lay(piece) for piece in tensor.chunk(n, how)]
    size = tensor.shape[how.dim] // n
    padded = _padded(tensor, how)
    return [lay(padded.narrow(how.dim, i * size, how.before + size + how.after)) for i in range(n)]


def _padded(tensor: Tensor, how: Halo | Overlap) -> Tensor:
    """With zeros ahead of the first and behind the last row."""
    rows = [(0, 0)] * tensor.dim()
    rows[how.dim] = how.before, how.after
    return torch.nn.functional.pad(tensor, [size for pair in reversed(rows) for size in pair])


def _merged(pieces: list[Tensor], how: How, whole: Tensor) -> Tensor | str:
    if isinstance(how, int):
        return torch.cat(pieces, how)
    if isinstance(how, Overlap):
        total = _padded(torch.zeros_like(whole), how)
        size = whole.shape[how.dim] // len(pieces)
        for index, piece in enumerate(pieces):
            if piece.shape[how.dim] != how.before + size + how.after:
                return f"parts of {piece.shape[how.dim]} rows"
            total.narrow(how.dim, index * size, piece.shape[how.dim]).add_(piece)
        return total.narrow(how.dim, how.before, whole.shape[how.dim])
    if how == "same":
        different = [piece for piece in pieces[1:] if not _close(piece, pieces[0])]
        return "the parts differ" if different else pieces[0]
    stacked = torch.stack(pieces)
    if how in ("max", "min"):
        return stacked.amax(0) if how == "max" else stacked.amin(0)
    return stacked.sum(0, dtype=stacked.dtype) if how == "sum" else stacked.mean(0)


def _difference(merged: Tensor | str, whole: Tensor, unspecified: bool) -> str:
    if isinstance(merged, str):
        return merged
    if merged.shape != whole.shape or merged.dtype != whole.dtype:
        return f"{merged.dtype} {tuple(merged.shape)} instead of {whole.dtype} {tuple(whole.shape)}"
    if unspecified or _close(merged, whole):
        return ""
    return f"numbers differ by {(wide(merged) - wide(whole)).abs().max().item():.3g}"


def _close(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(found, expected)
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-10 * max(scale, 1.0), equal_nan=True)


def distinct(found: Iterable[Graph]) -> dict[str, Case]:
    """One call for each signature."""
    cases: dict[str, Case] = {}
    for graph in found:
        for op in graph.ops:
            cases.setdefault(signature(op, graph.values), Case(op, graph.values))
    return cases


def malformed(case: Case, split: Split) -> str:
    """Say what breaks the contract of Split, whatever the call computes."""
    taken = [case.values[number] for number in case.op.inputs()]
    made = [None if number is None else case.values[number] for number in case.op.outputs]
    if len(split.inputs) != len(taken) or len(split.outputs) != len(made):
        return "not one entry per tensor"
    sizes = []
    if any(isinstance(how, Overlap) for how in split.inputs) or any(isinstance(how, Halo) for how in split.outputs):
        return "a halo is taken, rows that overlap are made"
    for value, how in zip((*taken, *made), (*split.inputs, *split.outputs), strict=True):
        dim = dimension(how)
        if dim is not None:
            if value is None or not 0 <= dim < len(value.shape):
                return "no such dimension"
            sizes.append(value.shape[dim])
    owners = {value.storage for value in taken}
    for value, how in zip(made, split.outputs, strict=True):
        if (value is None) != (how is None):
            return "an output without a way to combine it, or the other way round"
        if isinstance(how, str) and (how not in COMBINATIONS or (value and value.numel and value.storage in owners)):
            return "an unknown combination, or one on memory that the parts share"
    if all(how in (None, "same") for how in split.outputs):
        return "every part does everything"
    return "" if split.extent > 1 and gcd(*sizes) % split.extent == 0 else "the extent divides not every size"
