"""Operators and arguments of the graph as torch takes them, and one-line errors where it does not."""

from __future__ import annotations

import pytest
import torch

from magis.graph.nodes import Arg, Const, Op, Ref, Scalar
from magis.ops.call import CallError, call, constant, from_torch, outputs, resolve, to_torch


def test_resolves_overloads() -> None:
    assert resolve("aten.mm.default") is torch.ops.aten.mm.default
    assert resolve("aten.add_.Tensor") is torch.ops.aten.add_.Tensor


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("aten.mm", "not an operator: 'aten.mm'; write namespace.operator.overload"),
        ("aten..default", "not an operator"),
        ("aten.mn.default", "has no operator aten.mn.default"),
        ("aten.mm.other", "has no operator aten.mm.other"),
        ("mylib.mm.default", "has no operator mylib.mm.default"),
        ("aten.mm.__class__", "has no operator"),
    ],
)
def test_unknown_operators_are_named(target: str, message: str) -> None:
    with pytest.raises(CallError, match=message) as error:
        resolve(target)
    assert "\n" not in str(error.value)


def test_arguments() -> None:
    tensors = {3: torch.ones(2)}
    arg: Arg = ((Ref(3), None), Scalar("lr"), 1.5, True, "none", (2, 3))
    converted = to_torch(arg, tensors, {"lr": 0.1})
    assert converted[0][0] is tensors[3]
    assert converted[0][1] is None
    assert converted[1:] == [0.1, 1.5, True, "none", [2, 3]]


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (Ref(1), "no tensor for value 1"),
        (Scalar("lr"), "no number for the scalar 'lr'; given: beta"),
        (Const("dtype", "float33"), "no dtype named 'float33'"),
        (Const("dtype", "strided"), "no dtype named 'strided'"),
        (Const("layout", "default"), "no layout named"),
    ],
)
def test_arguments_without_a_counterpart(arg: Arg, message: str) -> None:
    with pytest.raises(CallError, match=message):
        to_torch(arg, {}, {"beta": 1.0})


@pytest.mark.parametrize(
    "value",
    [
        torch.float32, torch.bfloat16, torch.bool, torch.strided, torch.contiguous_format, torch.channels_last,
        torch.preserve_format, torch.device("cpu"),
    ],
    ids=str,
)  # fmt: skip
def test_constants_there_and_back(value: object) -> None:
    const = from_torch(value)
    assert isinstance(const, Const)
    assert constant(const, "cpu") == value


def test_the_device_of_the_run_wins() -> None:
    assert constant(Const("device", "cpu"), "meta") == torch.device("meta")


def test_literals_there_and_back() -> None:
    assert from_torch([1, (2.0, None), "x", True]) == (1, (2.0, None), "x", True)
    with pytest.raises(CallError, match="an argument of type Generator"):
        from_torch(torch.Generator())


def test_calls() -> None:
    tensors = {0: torch.ones(2, 3), 1: torch.ones(3, 4)}
    (product,) = call(Op(0, "aten.mm.default", (Ref(0), Ref(1)), (), (2,)), tensors, {})
    assert product is not None
    assert product.tolist() == [[3.0] * 4] * 2
    scaled = Op(0, "aten.add.Tensor", (Ref(0), Ref(0)), (("alpha", Scalar("a")),), (2,))
    (total,) = call(scaled, tensors, {"a": 3.0})
    assert total is not None
    assert total.tolist() == [[4.0] * 3] * 2


def test_outputs_are_flat_and_keep_gaps() -> None:
    one = torch.ones(1)
    assert outputs(one) == (one,)
    assert outputs((one, None)) == (one, None)
    assert outputs([one]) == (one,)
    assert outputs(()) == ()
    assert outputs(None) == (None,)
