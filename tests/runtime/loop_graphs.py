"""Loops written by hand, with what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magis.graph import ITEM_SIZE, Graph, parse
from magis.graph.loop_rules import merged_dtype

Expected = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Written:
    """A graph, its inputs, and its outputs as plain torch computes them."""

    graph: Graph
    inputs: Callable[[], list[Tensor]]
    expected: Expected


def row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim] = step
        step *= max(1, shape[dim])
    return tuple(stride)


@dataclass(frozen=True)
class Looks:
    """A tensor of a text: shape, strides (row by row if left out), data type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    dtype: str = "float32"
    offset: int = 0

    @property
    def steps(self) -> tuple[int, ...]:
        return row_by_row(self.shape) if self.stride is None else self.stride

    @property
    def nbytes(self) -> int:
        if 0 in self.shape:
            return 0
        reach = self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.steps, strict=True))
        return reach * ITEM_SIZE[self.dtype]

    def value(self, key: int, storage: int) -> str:
        shape, stride = list(self.shape), ", ".join(str(step) for step in self.steps)
        return f"value {key} @{storage} {self.dtype} {shape} {{{stride}}} +{self.offset}"

    def random(self, seed: int = 0) -> Tensor:
        """A tensor of small whole numbers that looks like that."""
        drawn = torch.Generator().manual_seed(seed)
        flat = torch.randint(-4, 5, (self.nbytes // ITEM_SIZE[self.dtype],), generator=drawn)
        return flat.to(getattr(torch, self.dtype)).as_strided(self.shape, self.steps, self.offset)


def stretch_of(whole: Looks, dim: int, parts: int, *, view: bool, more: int = 0) -> Looks:
    """A stretch as it lies, or a dense copy of it with the dimensions in the same order in memory; ``more`` rows."""
    shape = list(whole.shape)
    shape[dim] = shape[dim] // parts + more
    if view:
        return Looks(tuple(shape), whole.steps, whole.dtype, whole.offset)
    order = sorted(range(len(shape)), key=lambda at: (-whole.steps[at], at))
    dense = row_by_row([shape[at] for at in order])
    return Looks(tuple(shape), tuple(dense[order.index(at)] for at in range(len(shape))), whole.dtype)


def pointwise(
    whole: Looks, dim: int, parts: int, *, view: bool, made: Looks | None = None, around: tuple[int, ...] = ()
) -> Written:
    """``neg`` of a tensor, stretch by stretch along a dimension; the result may be laid out otherwise.

    With rows ``around`` them stretches are added where they were taken from.
    """
    made = Looks(whole.shape, None, whole.dtype) if made is None else made
    part = stretch_of(whole, dim, parts, view=view, more=sum(around))
    negated = stretch_of(Looks(whole.shape, whole.steps, whole.dtype), dim, parts, view=False, more=sum(around))
    where = ", ".join(map(str, (dim, *around)))
    graph = parse(f"""magis graph 1
storage 1 batch {whole.nbytes}
storage 2 temporary {made.nbytes}
{whole.value(1, 1)}
{made.value(2, 2)}
input 1
op 0 (%2) = magis.loop(%1) reads 1:0 phase forward parts {parts}
  storage 1 outer {whole.nbytes}
  storage 2 outer {made.nbytes}
  storage 3 temporary {part.nbytes}
  storage 4 temporary {negated.nbytes}
  {whole.value(1, 1)}
  {made.value(2, 2)}
  {part.value(3, 1 if view else 3)}
  {negated.value(4, 4)}
  input 1
  input 2
  op 0 %3 = magis.part(%1, {where}) reads 1:0 phase forward
  op 1 %4 = aten.neg.default(%3) reads {"1" if view else "3"}:0 phase forward
  op 2 = magis.join(%2, %4, {where}) reads 2:0 4:0 writes 2:1 phase forward
end
output 2
""")
    return Written(graph, lambda: [whole.random()], lambda x: [-x])


def reduction(how: str, call: str, rows: int, parts: int, dtype: str, expected: Callable[[Tensor], Tensor]) -> Written:
    """Rows taken together, stretch by stretch, by ``call`` on each and ``how`` for all; sums of half precision in
    float32."""
    size, part, whole = ITEM_SIZE[dtype], rows // parts, merged_dtype(dtype, how)
    graph = parse(f"""magis graph 1
storage 1 batch {rows * 6 * size}
storage 2 temporary {6 * ITEM_SIZE[whole]}
value 1 @1 {dtype} [{rows}, 6] {{6, 1}} +0
value 2 @2 {whole} [6] {{1}} +0
input 1
op 0 (%2) = magis.loop(%1) reads 1:0 phase forward parts {parts}
  storage 1 outer {rows * 6 * size}
  storage 2 outer {6 * ITEM_SIZE[whole]}
  storage 3 temporary {6 * size}
  value 1 @1 {dtype} [{rows}, 6] {{6, 1}} +0
  value 2 @2 {whole} [6] {{1}} +0
  value 3 @1 {dtype} [{part}, 6] {{6, 1}} +0
  value 4 @3 {dtype} [6] {{1}} +0
  input 1
  input 2
  op 0 %3 = magis.part(%1, 0) phase forward
  op 1 %4 = {call} reads 1:0 phase forward
  op 2 = magis.reduce(%2, %4, "{how}") reads 2:0 3:0 writes 2:1 phase forward
end
output 2
""")
    drawn = Looks((rows, 6), None, dtype)
    return Written(graph, lambda: [drawn.random()], lambda x: [expected(x).to(getattr(torch, whole))])


NESTED = """magis graph 1
storage 1 batch 480
storage 2 batch 40
storage 3 temporary 160
storage 4 temporary 96
storage 5 temporary 4
value 1 @1 float32 [4, 6, 5] {30, 5, 1} +0
value 2 @2 float32 [5, 2] {2, 1} +0
value 3 @3 float32 [4, 5, 2] {10, 2, 1} +0
value 4 @4 float32 [4, 6] {6, 1} +0
value 5 @5 float32 [] {} +0
input 1
input 2
op 0 (%3, %4, %5) = magis.loop(%1, %2) reads 1:0 2:0 phase forward parts 2
  storage 1 outer 480
  storage 2 outer 40
  storage 3 outer 160
  storage 4 outer 96
  storage 5 outer 4
  storage 6 temporary 240
  storage 7 temporary 40
  storage 8 temporary 80
  storage 9 temporary 48
  storage 10 temporary 4
  value 1 @1 float32 [4, 6, 5] {30, 5, 1} +0
  value 2 @2 float32 [5, 2] {2, 1} +0
  value 3 @3 float32 [4, 5, 2] {10, 2, 1} +0
  value 4 @4 float32 [4, 6] {6, 1} +0
  value 5 @5 float32 [] {} +0
  value 6 @1 float32 [2, 6, 5] {30, 5, 1} +0
  value 7 @6 float32 [2, 6, 5] {30, 5, 1} +0
  value 8 @7 float32 [2, 5] {5, 1} +0
  value 9 @8 float32 [2, 5, 2] {10, 2, 1} +0
  value 10 @9 float32 [2, 6] {6, 1} +0
  value 11 @7 float32 [2, 5, 1] {5, 1, 1} +0
  value 12 @10 float32 [] {} +0
  input 1
  input 2
  input 3
  input 4
  input 5
  op 0 %6 = magis.part(%1, 0) phase forward
  op 1 %7 = aten.abs.default(%6) reads 1:0 phase forward
  op 2 (%8, %10) = magis.loop(%7) reads 6:0 phase forward parts 3
    storage 1 outer 240
    storage 2 outer 40
    storage 3 outer 48
    storage 4 temporary 80
    storage 5 temporary 40
    storage 6 temporary 16
    value 1 @1 float32 [2, 6, 5] {30, 5, 1} +0
    value 2 @2 float32 [2, 5] {5, 1} +0
    value 3 @3 float32 [2, 6] {6, 1} +0
    value 4 @4 float32 [2, 2, 5] {10, 5, 1} +0
    value 5 @5 float32 [2, 5] {5, 1} +0
    value 6 @6 float32 [2, 2] {2, 1} +0
    input 1
    input 2
    input 3
    op 0 %4 = magis.part(%1, 1) reads 1:0 phase forward
    op 1 %5 = aten.amax.default(%4, [1]) reads 4:0 phase forward
    op 2 = magis.reduce(%2, %5, "max") reads 2:0 5:0 writes 2:1 phase forward
    op 3 (%6) = magis.loop(%4) reads 4:0 phase forward parts 5
      storage 1 outer 80
      storage 2 outer 16
      storage 3 temporary 16
      storage 4 temporary 16
      value 1 @1 float32 [2, 2, 5] {10, 5, 1} +0
      value 2 @2 float32 [2, 2] {2, 1} +0
      value 3 @3 float32 [2, 2, 1] {2, 1, 1} +0
      value 4 @4 float32 [2, 2] {2, 1} +0
      input 1
      input 2
      op 0 %3 = magis.part(%1, 2) reads 1:0 phase forward
      op 1 %4 = aten.sum.dim_IntList(%3, [2]) reads 3:0 phase forward
      op 2 = magis.reduce(%2, %4, "sum") reads 2:0 4:0 writes 2:1 phase forward
    end
    op 4 = magis.join(%3, %6, 1) reads 3:0 6:0 writes 3:1 phase forward
  end
  op 3 = magis.join(%4, %10, 0) reads 4:0 9:0 writes 4:1 phase forward
  op 4 %11 = aten.unsqueeze.default(%8, 2) phase forward
  op 5 %9 = aten.mul.Tensor(%11, %2) reads 2:0 7:0 phase forward
  op 6 = magis.join(%3, %9, 0) reads 3:0 8:0 writes 3:1 phase forward
  op 7 %12 = aten.amin.default(%9, [0, 1, 2]) reads 8:0 phase forward
  op 8 = magis.reduce(%5, %12, "min") reads 5:0 10:0 writes 5:1 phase forward
end
output 3
output 4
output 5
"""
"""Three loops in each other: rows of the first dimension, of the second, of the third; results leave from each."""


def nested() -> Written:
    def expected(x: Tensor, w: Tensor) -> list[Tensor]:
        largest = x.abs().amax(1).unsqueeze(2) * w
        return [largest, x.abs().sum(2), largest.amin()]

    drawn = [Looks((4, 6, 5)), Looks((5, 2))]
    return Written(parse(NESTED), lambda: [looks.random(seed) for seed, looks in enumerate(drawn)], expected)


VIEWS = [
    pointwise(Looks((4, 6)), 0, 2, view=True),
    pointwise(Looks((4, 6)), 0, 4, view=True),
    pointwise(Looks((4, 6)), 1, 3, view=True),
    pointwise(Looks((6, 4), (1, 6)), 1, 2, view=True),
    pointwise(Looks((4, 6), (12, 2)), 0, 2, view=True),
    pointwise(Looks((4, 6), (6, 1), "float32", 7), 0, 2, view=True),
    pointwise(Looks((4, 6), (6, 1), "int64"), 0, 2, view=True),
    pointwise(Looks((2, 3, 4, 5), (60, 1, 15, 3)), 0, 2, view=True),
]  # fmt: skip
COPIES = [
    pointwise(Looks((4, 6)), 1, 3, view=False),
    pointwise(Looks((4, 6)), 1, 6, view=False),
    pointwise(Looks((4, 6)), 0, 2, view=False),
    pointwise(Looks((6, 4), (1, 6)), 0, 3, view=False, made=Looks((6, 4), (1, 6))),
    pointwise(Looks((2, 6, 4, 5), (120, 1, 30, 6)), 1, 3, view=False, made=Looks((2, 6, 4, 5), (120, 1, 30, 6))),
    pointwise(Looks((2, 6, 4, 5)), 2, 4, view=False, made=Looks((2, 6, 4, 5), (120, 1, 30, 6))),
    pointwise(Looks((4, 6), (6, 1), "float32", 7), 1, 2, view=False),
    pointwise(Looks((4, 6), (6, 1), "float64"), 1, 2, view=False),
    pointwise(Looks((4, 6), (6, 1), "bfloat16"), 1, 2, view=False),
    pointwise(Looks((0, 6)), 1, 2, view=False),
]  # fmt: skip
_DTYPES = ("float32", "float64", "bfloat16", "int64")
REDUCTIONS = {
    f"{how}-{rows}-{parts}-{dtype}": reduction(how, call.format(rows // parts), rows, parts, dtype, expected)
    for how, call, expected in (
        ("sum", "aten.sum.dim_IntList(%3, [0])", lambda x: x.sum(0)),
        ("max", "aten.amax.default(%3, [0])", lambda x: x.amax(0)),
        ("min", "aten.amin.default(%3, [0])", lambda x: x.amin(0)),
        ("mean", "aten.mean.dim(%3, [0])", lambda x: x.mean(0)),
        ("same", "aten.new_full.default(%3, [6], {})", lambda x: torch.full_like(x[0], 2)),
    )
    for rows, parts in ((4, 2), (6, 3), (8, 8))
    for dtype in _DTYPES
    if (how != "mean" or dtype != "int64") and (how != "same" or (rows, parts) != (8, 8))
}
