"""The contract of splits, and that the comparison with real tensors notices wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magis.errors import MagisError
from magis.graph import Op, Ref, Value
from magis.ops.splits import Halo, Overlap, Split, has_rule, part, splits, why_opaque
from tests.ops.calls import call_of, case_of
from tests.ops.cutting import problems

BATCH_NORM = "native_batch_norm.default(f[4,6,3,2], f[6], f[6], f[6], f[6], True, 0.1, 1e-05)"
CONVOLUTION = "convolution.default(f[4,6,8,8], f[8,6,3,3], f[8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)"
BACKWARD = (
    "convolution_backward.default(f[4,8,8,8], f[4,6,8,8], f[8,6,3,3], [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,"
    " [True, True, True])"
)
LAYER_NORM = "native_layer_norm.default(f[4,6,8], [8], f[8], f[8], 1e-05)"
CAUSAL = "_scaled_dot_product_flash_attention_for_cpu.default(f[2,4,6,8], f[2,4,6,8], f[2,4,6,8], 0.0, True)"


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("_softmax.default(f[4,6], -1, False)", Split((1,), (1,), (), 6)),
        ("cumsum.default(f[4,6], 1)", Split((1,), (1,), (), 6)),
        ("mm.default(f[4,6], f[6,8])", Split((1, 0), ("mean",), (), 6)),
        ("mm.default(f[4,6], f[6,8])", Split((0, None), ("sum",), (), 4)),
        ("mean.default(f[4,6])", Split((0,), ("sum",), (), 4)),
        ("sum.default(f[4,6])", Split((0,), ("mean",), (), 4)),
        ("amax.default(f[4,6])", Split((0,), ("min",), (), 4)),
        ("amin.default(f[4,6])", Split((0,), ("max",), (), 4)),
        ("sum.default(f[4,6])", Split((0,), ("same",), (), 4)),
        ("addmm.default(f[8], f[4,6], f[6,8])", Split((None, 1, 0), ("sum",), (), 6)),
        ("view.default(f[36], [3, 2, 6])", Split((0,), (1,), ((1, 1),), 2)),
        ("view.default(f[36], [3, 2, 6])", Split((0,), (0,), (), 3)),
        ("expand.default(f[4,1], [4, 6])", Split((None,), (1,), (), 6)),
        ("full.default([4, 6], 0.5)", Split((), (0,), ((0, 1),), 2)),
        ("add.Tensor(f[4,6], f[4,6])", Split((0, None), (0,), (), 4)),
        ("add_.Tensor(f[4,6], f[6])", Split((0, None), (1,), (), 2)),
        ("tril.default(f[4,4])", Split((0,), (0,), (), 4)),
        ("flip.default(f[4,6], [0])", Split((0,), (0,), (), 4)),
        ("gather.default(f[4,6], 1, i[4,6])", Split((1, 1), (1,), (), 6)),
        ("embedding.default(f[8,6], i[4])", Split((0, 0), (0,), (), 4)),
        ("squeeze.dim(f[4,1,6], 0)", Split((0,), (0,), (), 4)),
        ("nll_loss_forward.default(f[8,6], i[8], f[6], 1, -100)", Split((0, 0, None), ("mean", "sum"), (), 8)),
        ("nll_loss_forward.default(f[8,6], i[8], None, 1, 3)", Split((0, 0), ("mean", "sum"), (), 8)),
        ("mse_loss_backward.default(f[], f[4,6], f[4,6], 1)", Split((None, 0, 0), (0,), (), 4)),
        ("max_pool2d_with_indices.default(f[2,2,4,4], [2, 2])", Split((2,), (2, 2), (), 2)),
        ("upsample_bilinear2d.default(f[2,2,4,4], [8, 8], False)", Split((2,), (2,), ((1, 0),), 4)),
        (CONVOLUTION, Split((2, None, None), (2,), (), 8)),
        (CONVOLUTION, Split((1, 1, None), ("sum",), (), 6)),
        (CONVOLUTION, Split((Halo(2, 1, 1), None, None), (2,), (), 8)),
        (CONVOLUTION, Split((Halo(2, 0, 2), None, None), (2,), (), 8, (((4, 0), 0),))),
        (CONVOLUTION, Split((Halo(2, 2, 1), None, None), (2,), (), 8, (((4, 0), 0),))),
        (CONVOLUTION, Split((Halo(3, 1, 1), None, None), (2,), (), 8, (((4, 0), 0),))),
        (BACKWARD, Split((2, Halo(2, 1, 1), None), (Overlap(2, 2, 0), "sum", "sum"), (), 8, (((5, 0), 0),))),
        (BACKWARD, Split((2, Halo(2, 1, 1), None), (Overlap(2, 1, 1), "mean", "sum"), (), 8, (((5, 0), 0),))),
        (BACKWARD, Split((Halo(2, 1, 1), Halo(2, 2, 2), None), (2, "sum", "sum"), (), 8, (((5, 0), 0),))),
        (BACKWARD, Split((None, 1, 1), (1, 1, "sum"), (), 6)),
        (BACKWARD, Split((0, 0, None), (0, "sum", "same"), (), 4)),
        (BATCH_NORM, Split((0, None, None, None, None), (0, "mean", "mean"), (), 4)),
        (BATCH_NORM, Split((1, 0, 0, None, None), (1, 0, 0), (), 6)),
        (LAYER_NORM, Split((2, 0, 0), (2, "mean", "mean"), (), 8)),
        (CAUSAL, Split((2, None, None), (2, 2), (), 6)),
    ],
)
def test_wrong_splits_are_noticed(line: str, split: Split) -> None:
    """The comparison that all rules have to pass fails for these."""
    assert problems(case_of(line), [split])


def test_a_part_divides_its_literals() -> None:
    op, _ = call_of("upsample_nearest2d_backward.default(f[4,6,8,8], [8, 8], [4, 6, 4, 4], scales_h=2.0)")
    small = part(op, Split((0,), (0,), ((2, 0), (1, 1)), 4), 2)
    assert small.args == (op.args[0], (8, 4), (2, 6, 4, 4))
    assert small.kwargs == op.kwargs
    assert replace(small, args=op.args) == op


def test_a_part_divides_keyword_literals() -> None:
    op = Op(0, "aten.zeros.default", (), (("size", (4, 6)), ("dtype", None)), (1,))
    values = {1: Value(1, (4, 6), (6, 1), "float32", 1)}
    rows, columns = splits(op, values)
    assert (rows, columns) == (Split((), (0,), ((0, 0),), 4), Split((), (1,), ((0, 1),), 6))
    assert part(op, columns, 3).kwargs == (("size", (4, 2)), ("dtype", None))


@pytest.mark.parametrize("n", [0, -2, 3, 8])
def test_a_count_that_does_not_divide_is_refused(n: int) -> None:
    op, _ = call_of("full.default([4, 6], 0.5)")
    with pytest.raises(MagisError, match="cannot be split into"):
        part(op, Split((), (0,), ((0, 0),), 4), n)


@pytest.mark.parametrize("path", [(1,), (0,), (0, 2), (2, 0)])
def test_a_literal_that_is_no_size_is_refused(path: tuple[int, ...]) -> None:
    op, _ = call_of("full.default([4, 6], 0.5, [])")
    with pytest.raises(MagisError, match="no integer"):
        part(op, Split((), (0,), (path,), 4), 2)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("my.op.default", "no rule for my.op.default"),
        ("aten.no_such_operator.default", "no rule for aten.no_such_operator.default"),
        ("magis.rng_save", "part of the plan, not of the computation"),
        ("magis.loop", "part of the plan, not of the computation"),
        ("aten.native_dropout.default", "random numbers would change"),
    ],
)
def test_operators_that_are_never_split(target: str, reason: str) -> None:
    op = Op(0, target, (Ref(0),), (), (1,))
    values = {number: Value(number, (4, 6), (6, 1), "float32", number) for number in (0, 1)}
    assert splits(op, values) == ()
    assert why_opaque(op, values) == reason


def test_a_call_that_drew_random_numbers_is_not_split() -> None:
    case = case_of("mul.Tensor(f[4,6], f[4,6])")
    assert why_opaque(case.op, case.values) == ""
    assert why_opaque(replace(case.op, random=True), case.values) == "random numbers would change"


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention"])
def test_attention_with_dropout_is_not_split(name: str) -> None:
    shape = Value(0, (2, 4, 6, 8), (192, 48, 8, 1), "float32", 0)
    values = {number: replace(shape, id=number, storage=number) for number in range(5)}
    before = (None, True) if "cudnn" in name else ()
    refs = (Ref(0), Ref(1), Ref(2))
    for probability, reason in ((0.0, ""), (0.25, "random numbers would change")):
        op = Op(0, f"aten.{name}.default", (*refs, *before, probability), (), (3, 4))
        assert why_opaque(op, values) == reason


def test_a_call_that_no_operator_would_take_has_no_split() -> None:
    """Proofs ask for such: the gradient of an index of a dimension that the result does not have."""
    values = {
        0: Value(0, (32, 768), (768, 1), "float32", 0),
        1: Value(1, (32, 512, 768), (512 * 768, 768, 1), "float32", 1),
    }
    sound = Op(0, "aten.select_backward.default", (Ref(0), (32, 512, 768), 1, 0), (), (1,))
    assert splits(sound, values)
    assert splits(replace(sound, args=(Ref(0), (32, 512, 768), 32, 0)), values) == ()


def test_the_same_tensor_may_be_cut_differently_in_each_place() -> None:
    op = Op(0, "aten.mm.default", (Ref(0), Ref(0)), (), (1,))
    values = {number: Value(number, (4, 4), (4, 1), "float32", number) for number in (0, 1)}
    assert [(split.inputs, split.outputs) for split in splits(op, values)] == [
        ((0, None), (0,)),
        ((1, 0), ("sum",)),
        ((None, 1), (1,)),
    ]


def test_what_is_written_in_place_is_cut_with_the_result() -> None:
    """The destination of an `out=` form stands where no label is: no split may leave it whole."""
    plain = case_of("mm.default(f[4,6], f[6,8])")
    values = {**plain.values, 9: Value(9, (4, 8), (8, 1), "float64", plain.values[2].storage)}
    op = replace(plain.op, target="aten.mm.out", kwargs=(("out", Ref(9)),))
    assert splits(op, values) == ()
    values[9] = replace(values[9], storage=9)  # memory of its own: that cannot be in a graph, but would be no write
    assert len(splits(op, values)) == 3


def test_names() -> None:
    assert has_rule("aten.add_.Tensor")
    assert has_rule("aten.add.Tensor")
    assert not has_rule("aten.add")
    assert not has_rule("prims.add.default")
