"""Halo rows: regions that take rows of other parts from outside, and rows that overlap where they leave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from magis.errors import VerifyError
from magis.fission.candidates import connected, grow, regions_around
from magis.fission.expand import expand
from magis.fission.loss_suffix import axes, places, suffix
from magis.fission.lower_bound import lower_bound
from magis.fission.proof import verify_fission
from magis.fission.region import Region, region_problems
from magis.graph import Graph, Loop, Op, Ref, Value, dump, parse, verify
from magis.graph.hazards import dependency_graph
from magis.graph.loop_rules import JOIN, PART
from magis.ops.splits import Halo, Overlap, Split, splits
from magis.rewrite.functionalize import functionalize, untangle
from magis.runtime.codegen import generate
from magis.simulate.simulator import replay
from tests.fission.cutout import check_same, in_float64, loops
from tests.fission.draws import Fission, expanded, position_of_loop, regions
from tests.fission.halo_nets import NETS
from tests.golden.golden import HERE, before_and_after, check_golden
from tests.oracles import captured

TRIES, MET = 80, 7
CONVOLUTION, BACKWARD = "aten.convolution.default", "aten.convolution_backward.default"


def form(name: str) -> Graph:
    """The step of a network in double precision, as fission works on it."""
    return in_float64(untangle(functionalize(captured(NETS[name]().build()).graph)))


def haloed(split: Split) -> bool:
    return any(isinstance(how, Halo | Overlap) for how in (*split.inputs, *split.outputs))


def found(graph: Graph, *targets: str) -> list[int]:
    return [at for at, op in enumerate(graph.ops) if op.target in targets]


def check(graph: Graph, region: Region) -> Graph:
    """The step with a loop for the region: sound, proven, equal, and with the bytes that it says."""
    assert list(region_problems(graph, region)) == []
    looped = expand(graph, region, in_place=True)
    assert parse(dump(looped)) == looped
    check_same(graph, looped)
    return looped


def along(graph: Graph, at: int, dim: int) -> Split:
    """How the operator is cut along that dimension of what it makes, or of what its gradient is."""
    ways = [s for s in splits(graph.ops[at], graph.values) if dim in (s.outputs[0], s.inputs[0]) and haloed(s)]
    (way,) = ways
    return way


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "parts"), [(2, 2), (2, 4), (2, 8), (3, 2), (3, 3), (3, 12)])
def test_one_convolution_and_its_backward(dim: int, parts: int) -> None:
    """In eight parts of a row each, with three rows on both sides."""
    graph = form("convnext")
    cut = [
        (at, split)
        for at in found(graph, CONVOLUTION, BACKWARD)
        for split in splits(graph.ops[at], graph.values)
        if haloed(split) and split.extent % parts == 0 and dim in (split.outputs[0], split.inputs[0])
    ]
    assert len(cut) == 4
    for at, split in cut:
        check(graph, Region({at: split}, parts))


def test_what_a_loop_takes_and_adds() -> None:
    graph = form("super-resolution")
    (at, *_) = found(graph, BACKWARD)
    looped = check(graph, Region({at: along(graph, at, 2)}, 4))
    (loop,) = loops(looped)
    assert loop.body is not None
    body = loop.body.graph
    taken = [op.args for op in body.ops if op.target == PART]
    joined = [op.args[2:] for op in body.ops if op.target == JOIN]
    assert (2, 1, 1) in [args[1:] for args in taken]
    assert joined == [(2, 1, 1)]
    (call,) = (op for op in body.ops if op.target == BACKWARD)
    assert call.args[5] == (0, 1)
    assert [body.values[v].shape[2] for v in call.inputs()[:2]] == [2, 4]


def test_a_region_with_a_halo_as_a_reader_sees_it() -> None:
    """The last convolution, what follows, the loss and back: forward and backward rows of other parts, one loop."""
    graph = untangle(functionalize(captured(NETS["super-resolution"]().build()).graph))
    last = found(graph, CONVOLUTION)[-1]
    cuts = grow(graph, {graph.ops[last].inputs()[0]: 2}, range(last, len(graph.ops)))
    region = Region(connected(graph, cuts)[0], 4)
    assert {graph.ops[at].target for at in region.cuts} >= {CONVOLUTION, BACKWARD, "aten.sum.default"}
    looped = expand(graph, region)
    verify(looped)
    verify_fission(looped, graph)
    check_golden("fission_halo.txt", before_and_after(graph, looped))
    check_golden("fission_halo.py.txt", generate(looped))


def test_the_golden_graph_generates_the_golden_step() -> None:
    """Whatever torch captures today: the code belongs to the graph beside it."""
    _, _, after = (HERE / "fission_halo.txt").read_text(encoding="utf-8").partition("# after\n")
    assert generate(parse(after)) == (HERE / "fission_halo.py.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["convnext", "super-resolution"])
@pytest.mark.parametrize("parts", [2, 4])
def test_from_the_last_overlapping_windows_to_the_loss_and_back(name: str, parts: int) -> None:
    """All of the last block, its seven by seven windows included; in memory there is less."""

    def none(_op: Op, _values: object) -> int:
        return 0

    graph = form(name)
    axis = next(axes(graph))
    cuts = connected(graph, suffix(graph, axis, places(graph, axis, 8)[0]))[0]
    looped = check(graph, Region(cuts, parts))
    assert {BACKWARD, "aten.sum.default"} <= {graph.ops[at].target for at in cuts}
    assert replay(looped, none).peak_bytes < replay(graph, none).peak_bytes


# --- what is no region ------------------------------------------------------------------------------------------------


# --- growing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_random_regions_compute_the_same_in_the_bytes_said(name: str) -> None:
    graph = form(name)
    met = 0
    for region in regions(graph, dependency_graph(graph), random.Random(name), TRIES):
        looped = expanded(graph, region)
        if looped is None or not any(haloed(split) for split in region.cuts.values()):
            continue
        met += 1
        verify(looped)
        verify_fission(looped, graph)
        check_same(*Fission(graph, region, looped, position_of_loop(looped)).pair, met)
    assert met >= MET


@pytest.mark.parametrize("name", NETS)
def test_no_loop_is_below_the_lower_bound(name: str) -> None:
    def none(_op: Op, _values: object) -> int:
        return 0

    graph = form(name)
    bound = lower_bound(graph, none).nbytes
    for at in found(graph, CONVOLUTION, BACKWARD):
        for cuts in regions_around(graph, at, most=8):
            looped = expanded(graph, Region(cuts, 2))
            assert looped is None or replay(looped, none).peak_bytes >= bound


# --- wrong halos ------------------------------------------------------------------------------------------------------


def body_changes(loop: Op) -> Iterator[Op]:
    """The loop with other rows around one stretch: one row less on one side and one more on the other, or another
    dimension of the same size."""
    assert loop.body is not None
    body = loop.body.graph
    for at, op in enumerate(body.ops):
        head = 1 if op.target == PART else 2
        if op.target not in (PART, JOIN) or len(op.args) <= head + 1:
            continue
        dim, before, after = (arg for arg in op.args[head:] if isinstance(arg, int))
        for rows in ((dim, before - 1, after + 1), (dim, before + 1, after - 1), (5 - dim, before, after)):
            new = replace(op, args=(*op.args[:head], *rows))
            changed = replace(body, ops=(*body.ops[:at], new, *body.ops[at + 1 :]))
            yield replace(loop, body=Loop(loop.body.parts, changed))


@pytest.mark.parametrize("target", [CONVOLUTION, BACKWARD])
def test_other_rows_are_not_proven(target: str) -> None:
    graph = form("super-resolution")
    at = found(graph, target)[1 if target == CONVOLUTION else 0]
    looped = expand(graph, Region({at: along(graph, at, 2)}, 2))
    place = position_of_loop(looped)
    count = 0
    for wrong in body_changes(looped.ops[place]):
        mutant = replace(looped, ops=(*looped.ops[:place], wrong, *looped.ops[place + 1 :]))
        count += 1
        with pytest.raises(VerifyError):
            verify_fission(mutant, graph)
    assert count == (3 if target == CONVOLUTION else 6)


def test_a_stretch_with_rows_is_no_part_that_overlaps() -> None:
    """Taken with rows and added with the same rows: every row near a border would count twice."""
    graph = form("super-resolution")
    at = found(graph, BACKWARD)[0]
    looped = expand(graph, Region({at: along(graph, at, 2)}, 2))
    place = position_of_loop(looped)
    loop = looped.ops[place]
    assert loop.body is not None
    body = loop.body.graph
    taken = next(op for op in body.ops if op.target == PART and len(op.args) == 4)
    ops = tuple(
        replace(op, args=(op.args[0], Ref(taken.made()[0]), *op.args[2:])) if op.target == JOIN else op
        for op in body.ops
    )
    wrong = replace(loop, body=Loop(loop.body.parts, replace(body, ops=ops)))
    with pytest.raises(VerifyError, match="rows that overlap along 2 with 1 rows before and 1 behind of"):
        verify_fission(replace(looped, ops=(*looped.ops[:place], wrong, *looped.ops[place + 1 :])), graph)


def test_padding_in_a_part_is_not_proven() -> None:
    """With the padding of the whole, or of another dimension, a part would be of another size: caught by its shape.
    With a halo one row smaller and as much padding it has the right one, and zeros where rows of other parts are."""
    graph = form("super-resolution")
    at = found(graph, CONVOLUTION)[0]
    split = along(graph, at, 2)
    assert split.inputs[0] == Halo(2, 2, 2)
    looped = expand(graph, Region({at: split}, 2))
    place = position_of_loop(looped)
    loop = looped.ops[place]
    assert loop.body is not None
    body = loop.body.graph
    part_at = next(p for p, op in enumerate(body.ops) if op.target == PART)
    call_at = next(p for p, op in enumerate(body.ops) if op.target == CONVOLUTION)
    (made,) = body.ops[part_at].made()
    narrower = with_rows(body.values[made], 2, -2)
    part = replace(body.ops[part_at], args=(*body.ops[part_at].args[:2], 1, 1))
    args = body.ops[call_at].args
    call = replace(body.ops[call_at], args=(*args[:4], (1, 2), *args[5:]))
    ops = tuple({part_at: part, call_at: call}.get(p, op) for p, op in enumerate(body.ops))
    storages = dict(body.storages)
    storages[narrower.storage] = replace(storages[narrower.storage], nbytes=narrower.nbytes)
    inner = replace(body, ops=ops, values={**body.values, made: narrower}, storages=storages)
    mutant = replace(looped, ops=(*looped.ops[:place], replace(loop, body=Loop(2, inner)), *looped.ops[place + 1 :]))
    verify(mutant)
    with pytest.raises(VerifyError, match="is a part of no whole call"):
        verify_fission(mutant, graph)


def with_rows(value: Value, dim: int, more: int) -> Value:
    """A dense tensor with more rows."""
    shape = tuple(size + more if at == dim else size for at, size in enumerate(value.shape))
    stride, step = [0] * len(shape), 1
    for at in reversed(range(len(shape))):
        stride[at], step = step, step * shape[at]
    return replace(value, shape=shape, stride=tuple(stride))
