"""The lower bound that holds with fission: met by an operator that nothing cuts, and below plans that were found."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from magis.fission.lower_bound import LowerBound, Needed, lower_bound
from magis.graph import Graph, Op, Value, parse, verify
from magis.planner.bench import Bench
from magis.planner.fission_plan import divide
from magis.results import Case
from magis.search.budgeted_evaluator import Objective, PlanRequest
from magis.search.loop_places import divided_front
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import lower_bound as whole_bound
from magis.simulate.simulator import replay
from tests.golden.golden import check_golden

BUDGET = 300
VECTOR = "float64 [8] {1} +0"


def step(*lines: str) -> Graph:
    """Two vectors, the second made of the first by the operator 1."""
    head = (
        "magis graph 1",
        "storage 1 batch 64",
        "storage 2 temporary 64",
        "storage 3 temporary 64",
        "storage 4 temporary 64",
        *(f"value {number} @{number} {VECTOR}" for number in (1, 2, 3, 4)),
        "input 1",
        "op 0 %2 = aten.exp.default(%1) reads 1:0 phase forward",
    )
    graph = parse("\n".join([*head, *lines]) + "\n")
    verify(graph)
    return graph


def of_cumsum(op: Op, _values: Mapping[int, Value]) -> int:
    return 7 if op.target == "aten.cumsum.default" else 1000


def none(_op: Op, _values: Mapping[int, Value]) -> int:
    return 0


CUMSUM = (
    "op 1 %3 = aten.cumsum.default(%2, 0) reads 2:0 phase forward",
    "op 2 %4 = aten.neg.default(%3) reads 3:0 phase forward",
    "output 4",
)


def test_one_operator_that_nothing_cuts_is_all_that_counts() -> None:
    """Persistent bytes, its input, its output, its scratch; nothing of operators that can be cut."""
    graph = step(*CUMSUM)
    assert lower_bound(graph, of_cumsum).nbytes == 64 + 64 + 64 + 7
    assert lower_bound(graph, of_cumsum, rounding=512).nbytes == 3 * 512 + 7


def test_the_explanation_names_the_operator_and_what_it_needs_whole() -> None:
    found = lower_bound(step(*CUMSUM), of_cumsum)
    vector = Needed("", (8,), "float64", 64)
    assert found == LowerBound(
        64 + 64 + 64 + 7, (("batch", 64),), vector, "aten.cumsum.default", "", "forward", (vector, vector), 7
    )
    assert str(found) == (
        "64 B that stay: batch 64 B (largest: float64[8] 64 B); + 135 B that aten.cumsum.default (forward) "
        "needs whole: float64[8] 64 B, float64[8] 64 B, scratch 7 B"
    )


def test_a_bound_of_what_stays_says_so() -> None:
    graph = step(
        "op 1 %3 = aten.mul.Tensor(%1, %2) reads 1:0 2:0 phase forward",
        "op 2 %4 = aten.neg.default(%3) reads 3:0 phase forward",
        "output 4",
    )
    found = lower_bound(graph, of_cumsum)
    assert (found.op, found.tensors, found.persistent_bytes) == ("", (), found.nbytes)
    assert str(found) == "64 B that stay: batch 64 B (largest: float64[8] 64 B); every operator can be cut"
    assert str(lower_bound(parse("magis graph 1\n"), none)) == "0 B that stay; every operator can be cut"


@pytest.mark.parametrize("model", ["mlp", "bert", "seed-unet"])
def test_the_parts_of_a_bound_add_up(model: str) -> None:
    subject = Bench().subject(Case(model, "magis", "sim:rtx3090", "small"))
    found = subject.floor
    assert found.nbytes == subject.lower_bound
    whole = sum(tensor.nbytes for tensor in found.tensors) + found.scratch_bytes
    assert found.persistent_bytes + whole == found.nbytes
    assert found.largest is not None
    assert found.largest.name
    assert {kind for kind, _ in found.kinds} >= {"parameter", "batch"}
    if model == "bert":
        check_golden("bound_bert.txt", f"{found}\n")
    assert "\n" not in str(found)


def test_it_is_exact_where_that_operator_is_the_peak() -> None:
    graph = step(*CUMSUM)
    assert lower_bound(graph, none).nbytes == replay(graph, none).peak_bytes == 192


def test_an_operator_that_may_write_over_its_input_needs_no_second_one() -> None:
    """Random numbers are drawn whole; into memory that is there already."""
    graph = step(
        "storage 0 generator 0",
        f"value 5 @2 {VECTOR}",
        "op 1 %5 = aten.bernoulli_.float(%2, 0.5) reads 0:0 2:0 writes 0:1 2:1 random phase forward",
        "op 2 %4 = aten.neg.default(%5) reads 2:1 phase forward",
        "output 4",
    )
    assert lower_bound(graph, none).nbytes == 64 + 64


def test_an_input_that_no_way_cuts_is_needed_whole() -> None:
    """Rows are gathered from a table, which every part reads."""
    graph = parse(
        "magis graph 1\nstorage 1 batch 64\nstorage 2 temporary 64\nstorage 3 batch 32\nstorage 4 temporary 32\n"
        f"value 1 @1 {VECTOR}\nvalue 2 @2 {VECTOR}\nvalue 3 @3 int64 [4] {{1}} +0\nvalue 4 @4 float64 [4] {{1}} +0\n"
        "input 1\ninput 3\nop 0 %2 = aten.exp.default(%1) reads 1:0 phase forward\n"
        "op 1 %4 = aten.index.Tensor(%2, [%3]) reads 2:0 3:0 phase forward\noutput 4\n"
    )
    verify(graph)
    assert lower_bound(graph, none).nbytes == 64 + 32 + 64


def test_updates_and_views_need_nothing() -> None:
    graph = parse(
        "magis graph 1\nstorage 1 parameter 64\nstorage 2 batch 64\n"
        f"value 1 @1 {VECTOR}\nvalue 2 @2 {VECTOR}\nvalue 3 @1 {VECTOR}\nvalue 4 @2 float64 [2, 4] {{4, 1}} +0\n"
        "input 1\ninput 2\nop 0 %4 = aten.view.default(%2, [2, 4]) phase forward\n"
        "op 1 %3 = aten.add_.Tensor(%1, %2) reads 1:0 2:0 writes 1:1 phase update\noutput 4\n"
    )
    verify(graph)
    assert lower_bound(graph, of_cumsum).nbytes == 128


@pytest.mark.parametrize("model", ["seed-unet", "seed-resnet50"])
def test_no_plan_in_parts_is_below_it_though_below_the_bound_of_whole_operators(model: str) -> None:
    subject = Bench().subject(Case(model, "magis", "cpu", "small", memory_ratio=0.5))
    graph, costs = subject.untangled, subject.roofline
    bound = lower_bound(graph, costs.workspace, costs.rounding).nbytes
    before = whole_bound(compile_problem(graph, costs, reuse=True).problem)
    assert graph.persistent_bytes() < bound < before
    wanted = PlanRequest(Objective(memory_limit=bound), 0, BUDGET)
    found = divide(divided_front(graph, costs, wanted, reuse=True), wanted)
    assert found is not None
    assert bound <= found.solution.peak
    assert subject.lower_bound <= subject.original.peak_bytes
