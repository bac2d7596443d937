"""Loops that write over what they take: which tensors may be taken over, and that only bytes change."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from magis.errors import VerifyError
from magis.fission.expand import expand, reparted
from magis.fission.proof import verify_fission
from magis.fission.region import Region, region_problems
from magis.graph import Graph, Op, Ref, dump, verify
from magis.graph.loop_rules import taken_over
from tests.fission.cutout import check_same, loops, simulated
from tests.fission.draws import NETWORKS, Fission, footprint, normal, position_of_loop, regions
from tests.fission.rows import HEAD, MADE, PRODUCT, SQUARE, SUMMED, in_place, rows, step, victims

MIB = 1 << 20
FRESH = 10**6
"""Added to ids of values and storages that a cut-out gets on top of its own."""
QUICK, MANY = 1, 30
PATIENCE = 40
"""Legal regions without anything to take over that are passed by."""


# --- random regions ---------------------------------------------------------------------------------------------------


def taking_over(name: str, seed: int, most_bytes: int) -> Fission | None:
    """A region of a network whose loop takes memory over; None if none was found soon."""
    graph, dag = normal(name)
    seen = 0
    for region in regions(graph, dag, random.Random(f"in place {name} {seed}"), 4000):
        if footprint(graph, region) > most_bytes or list(region_problems(graph, region)):
            continue
        try:
            looped = expand(graph, region, in_place=True)
        except VerifyError:  # a kernel refuses the sizes of a part
            continue
        at = position_of_loop(looped)
        if taken_over(looped, looped.ops[at]):
            return Fission(graph, region, looped, at)
        seen += 1
        if seen == PATIENCE:
            return None
    return None


def owning(graph: Graph, taken: Collection[int]) -> Graph:
    """A cut-out that first copies these storages from its inputs, so that they are its own to be taken over."""
    values, storages, inputs = dict(graph.values), dict(graph.storages), list(graph.inputs)
    copies = []
    for storage in sorted(taken):
        (value,) = {each for each in graph.inputs if values[each].storage == storage}
        storages[FRESH + storage] = replace(storages[storage], id=FRESH + storage, kind="batch")
        storages[storage] = replace(storages[storage], kind="temporary")
        values[FRESH + value] = replace(values[value], id=FRESH + value, storage=FRESH + storage)
        inputs[inputs.index(value)] = FRESH + value
        reads = ((FRESH + storage, 0),)
        copies.append(Op(0, "aten.clone.default", (Ref(FRESH + value),), (), (value,), reads=reads))
    ops = tuple(replace(op, id=number) for number, op in enumerate([*copies, *graph.ops]))
    return replace(graph, ops=ops, values=values, storages=storages, inputs=tuple(inputs))


def check_seed(name: str, seed: int, most_bytes: int) -> bool:
    """Whether a region was found; its loop is sound, computes the same, and takes the simulated bytes."""
    fission = taking_over(name, seed, most_bytes)
    if fission is None:
        return False
    verify(fission.looped)
    verify_fission(fission.looped, fission.graph)
    over = taken_over(fission.looped, fission.looped.ops[fission.at])
    whole, looped = (owning(each, over) for each in fission.pair)
    verify(whole)
    check_same(whole, looped, seed)
    return True


def test_regions_in_place_compute_the_same_in_the_bytes_said() -> None:
    found = [name for name in NETWORKS for seed in range(QUICK) if check_seed(name, seed, 4 * MIB)]
    assert len(found) > len(NETWORKS) // 2


@pytest.mark.soak
@pytest.mark.parametrize("name", NETWORKS)
def test_many_regions_in_place_compute_the_same_in_the_bytes_said(name: str) -> None:
    assert sum(check_seed(name, 1000 + seed, 30 * MIB) for seed in range(MANY)) >= MANY // 3


# --- by hand ----------------------------------------------------------------------------------------------------------


def assert_apart(graph: Graph, region: Region) -> None:
    """Nothing can be taken over: the loop is the one that makes everything beside what it takes."""
    found = in_place(graph, region)
    assert victims(found) == []
    assert dump(found) == dump(expand(graph, region))


def test_a_product_lies_on_what_it_was_made_of() -> None:
    graph = step(*HEAD, MADE, PRODUCT, SUMMED, "output 4")
    region = rows(graph, 1)
    found, beside = in_place(graph, region), expand(graph, region)
    assert victims(found) == [2]
    assert 3 not in found.storages
    assert found.values[3].storage == 2
    # batch, the matrix, and a part of the product, which is copied over the stretch that has been read
    assert simulated(found)[1] == 128 + 128 + 64
    assert simulated(beside)[1] == 128 + 128 + 128 + 64
    assert simulated(expand(graph, replace(region, parts=4), in_place=True))[1] == 128 + 128 + 32


def test_what_is_merged_late_leaves_in_its_own_place() -> None:
    """The first result waits for the last reader of the memory that it takes over; the second one does not."""
    graph = step(
        *HEAD,
        "storage 5 temporary 128",
        "storage 6 temporary 128",
        f"value 5 @5 {SQUARE}",
        f"value 6 @6 {SQUARE}",
        MADE,
        PRODUCT,
        "op 2 %5 = aten.mm.default(%3, %1) reads 1:0 3:0 phase forward",
        "op 3 %6 = aten.mul.Tensor(%2, %5) reads 2:0 5:0 phase forward",
        "op 4 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
        "output 5",
        "output 6",
    )
    region = rows(graph, 1, 2, 3)
    found = in_place(graph, region)
    assert victims(found) == [2]
    assert found.values[3].storage == 2
    four = expand(graph, replace(region, parts=4), in_place=True)
    (loop,) = loops(four)
    assert loop.body == reparted(graph, replace(region, parts=4), in_place=True)


def test_the_same_twice_in_a_row() -> None:
    """What took memory over is a victim like any other."""
    again = (
        "storage 5 temporary 128",
        f"value 5 @5 {SQUARE}",
        MADE,
        PRODUCT,
        "op 2 %5 = aten.mm.default(%3, %1) reads 1:0 3:0 phase forward",
        "op 3 %4 = aten.sum.dim_IntList(%5, [1]) reads 5:0 phase forward",
        "output 4",
    )
    graph = step(*HEAD, *again)
    once = in_place(graph, rows(graph, 1))
    at = next(position for position, op in enumerate(once.ops) if op.target == "aten.mm.default")
    twice = in_place(once, rows(once, at))
    verify_fission(twice, graph)
    assert victims(twice) == [2, 2]
    assert {value.storage for value in twice.values.values()} == {1, 2, 4}


def test_what_was_written_before_goes_on_from_its_version() -> None:
    graph = step(
        *HEAD,
        f"value 5 @2 {SQUARE}",
        MADE,
        "op 1 %5 = aten.neg_.default(%2) reads 2:0 writes 2:1 phase forward",
        "op 2 %3 = aten.mm.default(%5, %1) reads 1:0 2:1 phase forward",
        "op 3 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
    )
    found = in_place(graph, rows(graph, 2))
    assert [dict(op.writes) for op in found.ops] == [{}, {2: 1}, {2: 2}, {}]
    assert dict(found.ops[-1].reads) == {2: 2}


@pytest.mark.parametrize("taken", [3, 5])
def test_what_the_region_writes_itself_has_memory_of_its_own(taken: int) -> None:
    """Whichever name it has afterwards, what leaves is what it was written to last."""
    graph = step(
        *HEAD,
        f"value 5 @3 {SQUARE}",
        MADE,
        PRODUCT,
        "op 2 %5 = aten.neg_.default(%3) reads 3:0 writes 3:1 phase forward",
        f"op 3 %4 = aten.sum.dim_IntList(%{taken}, [1]) reads 3:1 phase forward",
        "output 4",
    )
    assert_apart(graph, rows(graph, 1, 2))


def test_a_reader_between_maker_and_region_comes_first() -> None:
    """It stood behind the place at which the loop will be."""
    graph = step(
        *HEAD,
        "storage 5 temporary 32",
        "value 5 @5 float64 [4] {1} +0",
        MADE,
        "op 1 %5 = aten.sum.dim_IntList(%2, [0]) reads 2:0 phase forward",
        "op 2 %3 = aten.mm.default(%2, %1) reads 1:0 2:0 phase forward",
        "op 3 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
        "output 5",
    )
    assert victims(in_place(graph, rows(graph, 2))) == [2]


def test_a_tensor_that_somebody_reads_later_is_left_alone() -> None:
    graph = step(
        *HEAD,
        "storage 5 temporary 128",
        f"value 5 @5 {SQUARE}",
        MADE,
        PRODUCT,
        "op 2 %5 = aten.add.Tensor(%3, %2) reads 2:0 3:0 phase forward",
        "output 5",
    )
    assert_apart(graph, rows(graph, 1))


def test_a_tensor_that_somebody_looks_at_later_by_a_view_is_left_alone() -> None:
    graph = step(
        *HEAD,
        "value 5 @2 float64 [4, 4] {1, 4} +0",
        "storage 6 temporary 128",
        f"value 6 @6 {SQUARE}",
        MADE,
        "op 1 %5 = aten.t.default(%2) phase forward",
        "op 2 %3 = aten.mm.default(%2, %1) reads 1:0 2:0 phase forward",
        "op 3 %6 = aten.mm.default(%5, %3) reads 2:0 3:0 phase forward",
        "output 6",
    )
    assert_apart(graph, rows(graph, 2))


@pytest.mark.parametrize("returned", [2, 3])
def test_what_is_returned_has_memory_of_its_own(returned: int) -> None:
    graph = step(*HEAD, MADE, PRODUCT, SUMMED, "output 4", f"output {returned}")
    assert_apart(graph, rows(graph, 1))


@pytest.mark.parametrize("kind", ["batch", "parameter", "buffer", "state"])
def test_memory_of_the_caller_is_left_alone(kind: str) -> None:
    head = (line.replace("storage 1 batch", f"storage 1 {kind}") for line in HEAD)
    graph = step(
        *(line for line in head if not line.startswith(("storage 2", "value 2"))),
        "op 0 %3 = aten.exp.default(%1) reads 1:0 phase forward",
        "op 1 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
    )
    assert_apart(graph, rows(graph, 0))


def test_other_strides_are_no_match() -> None:
    transposed = (line.replace(f"value 2 @2 {SQUARE}", "value 2 @2 float64 [4, 4] {1, 4} +0") for line in HEAD)
    graph = step(
        *transposed,
        "value 5 @1 float64 [4, 4] {1, 4} +0",
        "op 0 %5 = aten.t.default(%1) phase forward",
        "op 1 %2 = aten.exp.default(%5) reads 1:0 phase forward",
        "op 2 %3 = aten.mm.default(%2, %1) reads 1:0 2:0 phase forward",
        "op 3 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
    )
    assert_apart(graph, rows(graph, 2))


def test_another_dimension_is_no_match() -> None:
    """Columns are read where rows are written: the second part would find the first one's rows."""
    graph = step(
        *HEAD,
        "value 5 @2 float64 [4, 4] {1, 4} +0",
        MADE,
        "op 1 %5 = aten.t.default(%2) phase forward",
        "op 2 %3 = aten.mm.default(%5, %1) reads 1:0 2:0 phase forward",
        "op 3 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
    )
    assert_apart(graph, rows(graph, 1, 2))


def test_a_tensor_taken_whole_too_is_left_alone() -> None:
    product = PRODUCT.replace("(%2, %1) reads 1:0 2:0", "(%2, %2) reads 2:0")
    graph = step(*HEAD, MADE, product, SUMMED, "output 4")
    assert_apart(graph, rows(graph, 1))


def test_another_data_type_is_no_match() -> None:
    """As many bytes, even."""
    graph = step(
        *(line.replace(f"value 3 @3 {SQUARE}", "value 3 @3 int64 [4, 4] {4, 1} +0") for line in HEAD[:7]),
        "input 1",
        MADE,
        "op 1 %3 = aten._to_copy.default(%2, dtype=<dtype int64>) reads 2:0 phase forward",
        f"storage 5 temporary 128\nvalue 5 @5 {SQUARE.replace('float64', 'int64')}",
        "op 2 %5 = aten.neg.default(%3) reads 3:0 phase forward",
        "output 5",
    )
    assert_apart(graph, rows(graph, 1))


def test_a_part_of_a_storage_is_no_match() -> None:
    graph = step(
        "storage 1 batch 256",
        "storage 2 temporary 256",
        "storage 3 temporary 128",
        "storage 4 temporary 32",
        "value 1 @1 float64 [8, 4] {4, 1} +0",
        "value 2 @2 float64 [8, 4] {4, 1} +0",
        f"value 3 @3 {SQUARE}",
        "value 4 @4 float64 [4] {1} +0",
        f"value 5 @2 {SQUARE}",
        "value 6 @1 float64 [4, 4] {4, 1} +16",
        "input 1",
        MADE,
        "op 1 %5 = aten.slice.Tensor(%2, 0, 0, 4) phase forward",
        "op 2 %6 = aten.slice.Tensor(%1, 0, 4, 8) phase forward",
        "op 3 %3 = aten.mm.default(%5, %6) reads 1:0 2:0 phase forward",
        "op 4 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
    )
    assert_apart(graph, rows(graph, 3))


TWO = (
    *HEAD,
    "storage 5 temporary 128",
    "storage 6 temporary 128",
    f"value 5 @5 {SQUARE}",
    f"value 6 @6 {SQUARE}",
    MADE,
    PRODUCT,
    "op 2 %5 = aten.mul.Tensor(%3, %2) reads 2:0 3:0 phase forward",
    "op 3 %6 = aten.sub.Tensor(%3, %5) reads 3:0 5:0 phase forward",
    "output 6",
)


def test_one_tensor_is_taken_over_once() -> None:
    graph = step(*TWO)
    found = in_place(graph, rows(graph, 1, 2))
    assert victims(found) == [2]
    assert sorted(found.values[value].storage for value in (3, 5)) in ([2, 3], [2, 5])


def test_two_tensors_are_taken_over_by_two() -> None:
    graph = step(
        *TWO[:-4],
        "storage 7 temporary 128",
        f"value 7 @7 {SQUARE}",
        "op 1 %7 = aten.neg.default(%1) reads 1:0 phase forward",
        "op 2 %3 = aten.mm.default(%2, %1) reads 1:0 2:0 phase forward",
        "op 3 %5 = aten.mul.Tensor(%7, %3) reads 3:0 7:0 phase forward",
        "op 4 %6 = aten.sub.Tensor(%3, %5) reads 3:0 5:0 phase forward",
        "output 6",
    )
    found = in_place(graph, rows(graph, 2, 3))
    assert sorted(victims(found)) == [2, 7]
    assert {found.values[3].storage, found.values[5].storage} == {2, 7}


def test_the_last_reader_comes_before_the_join() -> None:
    """A stretch may be overwritten once everybody in the part has read it, wherever its result was made."""
    graph = step(
        *HEAD,
        "storage 5 temporary 32",
        "value 5 @5 float64 [4] {1} +0",
        MADE,
        "storage 6 temporary 128",
        f"value 6 @6 {SQUARE}",
        PRODUCT,
        "op 2 %6 = aten.mul.Tensor(%3, %2) reads 2:0 3:0 phase forward",
        "op 3 %5 = aten.amax.default(%6, [1]) reads 6:0 phase forward",
        "op 4 %4 = aten.sum.dim_IntList(%3, [1]) reads 3:0 phase forward",
        "output 4",
        "output 5",
    )
    found = in_place(graph, rows(graph, 1, 2, 3))
    assert victims(found) == [2]
    (loop,) = loops(found)
    assert loop.body is not None
    body = loop.body.graph.ops
    (maker,) = (at for at, op in enumerate(body) if op.target == "aten.mm.default")
    (reader,) = (at for at, op in enumerate(body) if op.target == "aten.mul.Tensor")
    made = body[maker].outputs[0]
    (join,) = (at for at, op in enumerate(body) if op.target == "magis.join" and op.inputs()[1] == made)
    assert maker < reader < join
