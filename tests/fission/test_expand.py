"""Regions by hand: what a loop is made of, and what makes a region illegal."""

from __future__ import annotations

import pytest

from magis.errors import VerifyError
from magis.fission.expand import expand
from magis.fission.region import Region, region_problems
from magis.graph import Graph
from magis.ops.splits import Split, splits
from tests.fission.cutout import check_same, loops
from tests.fission.rows import step


def cut(graph: Graph, parts: int, **dims: int) -> Region:
    """The operators named (``op3=1``: operator 3), each with its split number so and so."""
    chosen = {int(name.removeprefix("op")): number for name, number in dims.items()}
    return Region({at: splits(graph.ops[at], graph.values)[number] for at, number in chosen.items()}, parts)


def looped(graph: Graph, region: Region) -> Graph:
    """The step with a loop for the region: sound, proven, equal, and with the bytes that it says."""
    assert list(region_problems(graph, region)) == []
    found = expand(graph, region)
    check_same(graph, found)
    return found


def reasons(graph: Graph, region: Region) -> list[str]:
    """Why the region is refused."""
    found = list(region_problems(graph, region))
    with pytest.raises(VerifyError) as caught:
        expand(graph, region)
    assert str(caught.value) == found[0]
    return found


PRODUCT = (
    "storage 1 batch 128",
    "storage 2 temporary 128",
    "storage 3 temporary 128",
    "value 1 @1 float64 [4, 4] {4, 1} +0",
    "value 2 @2 float64 [4, 4] {4, 1} +0",
    "value 3 @3 float64 [4, 4] {4, 1} +0",
    "input 1",
)


def test_one_tensor_may_be_taken_whole_and_in_parts() -> None:
    graph = step(
        *PRODUCT,
        "op 0 %2 = aten.mm.default(%1, %1) reads 1:0 phase forward",
        "op 1 %3 = aten.relu.default(%2) reads 2:0 phase forward",
        "output 3",
    )
    for split in splits(graph.ops[0], graph.values):
        if "sum" in split.outputs:
            continue
        (after,) = (other for other in splits(graph.ops[1], graph.values) if other.inputs == split.outputs)
        (loop,) = loops(looped(graph, Region({0: split, 1: after}, 2)))
        assert loop.body is not None
        assert loop.inputs() == (1,)
        assert [op.target for op in loop.body.graph.ops] == [
            "magis.part", "aten.mm.default", "aten.relu.default", "magis.join"
        ]  # fmt: skip


def test_what_leaves_by_a_view_is_opened_again_behind_the_loop() -> None:
    graph = step(
        *PRODUCT,
        "value 4 @3 float64 [4, 4] {1, 4} +0",
        "value 5 @3 float64 [2, 4] {4, 1} +8",
        "op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward",
        "op 1 %3 = aten.relu.default(%2) reads 2:0 phase forward",
        "op 2 %4 = aten.t.default(%3) phase forward",
        "op 3 %5 = aten.slice.Tensor(%3, 0, 2, 4) phase forward",
        "output 2",
        "output 4",
        "output 5",
    )
    found = looped(graph, cut(graph, 4, op0=0, op1=0, op2=0))
    assert [op.target for op in found.ops] == ["magis.loop", "aten.t.default", "aten.slice.Tensor"]
    assert found.ops[0].made() == (2, 3)


CHAIN = (
    *PRODUCT,
    "storage 4 temporary 128",
    "value 4 @4 float64 [4, 4] {4, 1} +0",
    "op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward",
    "op 1 %3 = aten.relu.default(%2) reads 2:0 phase forward",
    "op 2 %4 = aten.mul.Tensor(%2, %3) reads 2:0 3:0 phase forward",
    "output 4",
)


def test_what_lies_between_belongs_to_the_region() -> None:
    graph = step(*CHAIN)
    assert reasons(graph, cut(graph, 2, op0=0, op2=0)) == [
        "operator 2 (aten.mul.Tensor): depends on an operator that needs the region's result"
    ]


def test_one_component_of_the_dimension_graph() -> None:
    graph = step(*CHAIN)
    assert reasons(graph, cut(graph, 2, op0=0, op1=1)) == [
        "operator 1 (aten.relu.default): takes value 2 cut along 1, which its maker gives by 0"
    ]


def test_a_sum_of_parts_is_not_ready_within_the_region() -> None:
    graph = step(
        *CHAIN[:8],
        "value 4 @4 float64 [4, 4] {4, 1} +0",
        "op 0 %2 = aten.mm.default(%1, %1) reads 1:0 phase forward",
        "op 1 %3 = aten.relu.default(%2) reads 2:0 phase forward",
        "output 3",
    )
    (inner,) = (n for n, split in enumerate(splits(graph.ops[0], graph.values)) if split.outputs == ("sum",))
    assert reasons(graph, cut(graph, 2, op0=inner, op1=0)) == [
        "operator 1 (aten.relu.default): takes value 2 cut along 0, which its maker gives by 'sum'"
    ]


def test_random_numbers_are_not_cut() -> None:
    graph = step(
        "storage 0 generator 0",
        *PRODUCT,
        "value 4 @2 float64 [4, 4] {4, 1} +0",
        "op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward",
        "op 1 %4 = aten.bernoulli_.float(%2, 0.5) reads 0:0 2:0 writes 0:1 2:1 random phase forward",
        "output 4",
    )
    region = Region({0: splits(graph.ops[0], graph.values)[0], 1: Split((0,), (0,), (), 4)}, 2)
    assert reasons(graph, region) == [
        "operator 1 (aten.bernoulli_.float): draws random numbers, which would be others in parts"
    ]


# --- memory from outside that a region writes -------------------------------------------------------------------------

NORM = (
    "storage 1 batch 384",
    "storage 2 buffer 32",
    "storage 3 buffer 32",
    "storage 4 temporary 384",
    "storage 5 temporary 32",
    "storage 6 temporary 32",
    "storage 7 temporary 384",
    "value 1 @1 float64 [2, 4, 6] {24, 6, 1} +0",
    "value 2 @2 float64 [4] {1} +0",
    "value 3 @3 float64 [4] {1} +0",
    "value 4 @4 float64 [2, 4, 6] {24, 6, 1} +0",
    "value 5 @5 float64 [4] {1} +0",
    "value 6 @6 float64 [4] {1} +0",
    "value 7 @7 float64 [2, 4, 6] {24, 6, 1} +0",
    "value 8 @2 float64 [4, 1] {1, 1} +0",
    "input 1",
    "input 2",
    "input 3",
)
BATCH_NORM = (
    "op 0 (%4, %5, %6) = aten.native_batch_norm.default(%1, None, None, %2, %3, True, 0.1, 1e-05) "
    "reads 1:0 2:0 3:0 writes 2:1 3:1 phase forward"
)


def test_running_statistics_are_written_stretch_by_stretch() -> None:
    graph = step(*NORM, BATCH_NORM, "output 4", "output 5")
    found = looped(graph, cut(graph, 2, op0=0))
    (loop,) = loops(found)
    assert dict(loop.writes) == {2: 1, 3: 1}


def test_a_weight_is_not_updated_in_parts() -> None:
    graph = step(
        "storage 1 parameter 128",
        "storage 2 batch 128",
        "value 1 @1 float64 [4, 4] {4, 1} +0",
        "value 2 @2 float64 [4, 4] {4, 1} +0",
        "value 3 @1 float64 [4, 4] {4, 1} +0",
        "input 1",
        "input 2",
        "op 0 %3 = aten.add_.Tensor(%1, %2) reads 1:0 2:0 writes 1:1 phase update",
    )
    assert reasons(graph, cut(graph, 2, op0=0)) == [
        "operator 0 (aten.add_.Tensor): writes storage 1, which is not the region's own"
    ]
