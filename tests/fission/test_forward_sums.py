"""Sums of a forward, and of other types, over the parts of a loop."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from magis.errors import VerifyError
from magis.fission.expand import expand
from magis.fission.proof import verify_fission
from magis.fission.region import Region
from magis.graph import ITEM_SIZE, parse, verify
from magis.graph.hazards import row_major
from magis.ops.splits import splits
from magis.planner.plan_proof import prove
from magis.runtime.codegen import compile_step
from tests.fission.rows import step


@pytest.mark.parametrize("call", ["[0]", "[-2]", "[0], True", "[0], False", "[-2], True", "[0, 1]", "[1, 0], True"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bool", "int32", "complex64"])
def test_sums_along_any_dimension_are_cut(dtype: str, call: str) -> None:
    """As they are written: with and without the dimensions that are left, counted from either end."""
    size, made = ITEM_SIZE[dtype], "int64" if dtype in ("bool", "int32") else dtype
    shape: tuple[int, ...] = {"[0": (1, 4), "[-": (1, 4), "[1": (1, 1)}[call[:2]] if call.endswith("True") else (4,)
    shape = () if call == "[0, 1]" else shape
    text = ", ".join(map(str, shape))
    steps = ", ".join(str(each) for each in row_major(shape))
    graph = step(
        f"storage 1 batch {32 * size}", f"storage 2 temporary {32 * size}",
        f"storage 3 temporary {max(1, math.prod(shape)) * ITEM_SIZE[made]}",
        f"value 1 @1 {dtype} [8, 4] {{4, 1}} +0", f"value 2 @2 {dtype} [8, 4] {{4, 1}} +0",
        f"value 3 @3 {made} [{text}] {{{steps}}} +0", "input 1",
        "op 0 %2 = aten.clone.default(%1) reads 1:0 phase forward",
        f"op 1 %3 = aten.sum.dim_IntList(%2, {call}) reads 2:0 phase forward", "output 3",
    )  # fmt: skip
    cuts = {}
    for at, op in enumerate(graph.ops):
        (cuts[at],) = [each for each in splits(op, graph.values) if each.inputs[0] == 0]
    for parts in (2, 4):
        looped = expand(graph, Region(cuts, parts))
        verify(looped)
        verify_fission(looped, graph)
        prove(looped, graph)
        (whole,), (found,) = (compile_step(each)([numbers(dtype)], {}) for each in (graph, looped))
        torch.testing.assert_close(found, whole)


def numbers(dtype: str) -> Tensor:
    drawn = torch.randint(0, 2, (8, 4), generator=torch.Generator().manual_seed(3))
    return drawn.to(getattr(torch, dtype))


READ_EARLY = """magis graph 1
storage 0 batch 64
storage 2 temporary 4
value 0 @0 bfloat16 [8, 4] {4, 1} +0 "input:0"
value 2 @2 bool [4] {1} +0
input 0
op 0 (%2) = magis.loop(%0) reads 0:0 phase forward parts 2
  storage 0 outer 64
  storage 1 temporary 16
  storage 2 outer 4
  storage 3 host 16
  storage 4 temporary 16
  storage 5 temporary 4
  value 0 @0 bfloat16 [8, 4] {4, 1} +0
  value 1 @1 float32 [4] {1} +0
  value 2 @2 bool [4] {1} +0
  value 3 @3 float32 [4] {1} +0
  value 4 @4 float32 [4] {1} +0
  value 5 @5 bool [4] {1} +0
  input 0
  input 2
  op 0 (%1) = magis.loop(%0) reads 0:0 phase forward parts 2
    storage 0 outer 64
    storage 1 outer 16
    value 0 @0 bfloat16 [8, 4] {4, 1} +0
    value 1 @0 bfloat16 [4, 4] {4, 1} +0
    value 2 @1 float32 [4] {1} +0
    input 0
    input 2
    op 0 %1 = magis.part(%0, 0) phase forward
    op 1 = magis.addsum(%2, %1, [0], False) reads 0:0 1:0 writes 1:1 phase forward
  end
  op 1 %3 = magis.store(%1) reads 1:0 phase forward
  op 2 = magis.wait(%1, %3) phase forward
  op 3 %4 = magis.load(%3) phase forward
  op 4 %5 = aten.gt.Scalar(%4, 256) reads 4:0 phase forward
  op 5 = magis.reduce(%2, %5, "same") reads 2:0 5:0 writes 2:1 phase forward
end
output 2
"""
DIRECTLY = READ_EARLY.replace("(%4, 256) reads 4:0", "(%1, 256) reads 1:0")


COPIES = re.compile(r"magis.(store|wait|load)|storage [34]|value [34] @[34] float32")
SWAPPED = {
    "swapped": READ_EARLY,
    "not swapped": "\n".join(line for line in DIRECTLY.splitlines() if not COPIES.search(line)) + "\n",
}


@pytest.mark.parametrize("text", SWAPPED.values(), ids=SWAPPED)
def test_a_float32_sum_is_read_by_nothing_but_its_rounding(text: str) -> None:
    """Half precision would round 256.75 to 256 before the comparison."""
    with pytest.raises(VerifyError, match="takes a float32 sum of an inner loop"):
        verify_fission(parse(text))


def test_a_result_that_was_overwritten_is_another_one() -> None:
    lines = (
        "storage 1 batch 16", "storage 2 temporary 16",
        "value 1 @1 float32 [4] {1} +0", "value 2 @2 float32 [4] {1} +0",
    )  # fmt: skip
    ops = "op 0 %2 = aten.neg.default(%1) reads 1:0 phase forward"
    apart = step(
        *lines, "storage 3 temporary 16", "value 3 @3 float32 [4] {1} +0", "input 1", ops,
        "op 1 %3 = aten.relu.default(%2) reads 2:0 phase forward", "output 2", "output 3",
    )  # fmt: skip
    over = step(
        *lines, "value 3 @2 float32 [4] {1} +0", "input 1", ops,
        "op 1 %3 = aten.relu_.default(%2) reads 2:0 writes 2:1 phase forward", "output 2", "output 3",
    )  # fmt: skip
    verify_fission(apart, apart)
    with pytest.raises(VerifyError):
        verify_fission(over, apart)
