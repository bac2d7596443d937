"""What complex numbers need of each part: values with bits, literals, offsets, rounding, optimizers, references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from magis.cost.signature import parse as parse_call
from magis.cost.signature import signature
from magis.fission.region import Region, region_problems
from magis.graph import Graph, Op, Ref, Storage, Value, dump, parse, verify
from magis.ops.fake_results import bits_of
from magis.ops.splits import splits
from magis.runtime.double_precision import closeness
from magis.simulate.compiled_problem import reusable
from tests.nets import OPTIMIZERS, Block, Net, rows
from tests.oracles import captured, differences, eager_step, graph_step, history

COMPLEX = torch.complex64


def complex_rows(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, dtype=COMPLEX),)


def weights(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape, dtype=COMPLEX) * 0.3) for name, shape in shapes.items()}


def net(run: Callable[..., Tensor], inputs: Callable[[], tuple[Tensor, ...]] | None = None) -> Net:
    """One complex weight ``w`` of 6 x 6; the loss is what ``run`` makes of it and the batch."""
    return Net(
        lambda: Block(run, **weights(w=(6, 6))), inputs or complex_rows(4, 6), loss_fn=lambda made: made.abs().mean()
    )


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind not in ("none", "gradients")])
def test_complex_weights_beside_real_ones_are_updated_as_torch_does(kind: str) -> None:
    def run(block: Block, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(block.real(x)) @ block.w, n=6)

    step = Net(
        lambda: Block(run, real=nn.Linear(6, 6), **weights(w=(4, 4))), rows(5, 6), rows(5, 6), rule=OPTIMIZERS[kind]
    ).build()
    assert differences(history(eager_step(step)), history(graph_step(captured(step).graph, step))) == []


def test_a_conjugate_batch_is_fed_as_the_step_takes_it() -> None:
    step = net(lambda block, z: z @ block.w, lambda: (torch.randn(4, 6, dtype=COMPLEX).conj(),)).build()
    ours = graph_step(captured(step).graph, step)
    plain = torch.randn(4, 6, dtype=COMPLEX)
    ours.feed({"input:0": plain})
    assert bits_of(ours.tensors[1]) == ("conj",)
    assert torch.equal(ours.tensors[1], plain)


# -- what is written down ----------------------------------------------------------------------------------------------

CONJ = Value(0, (2, 3), (3, 1), "complex64", 0, bits=("conj",))


def test_bits_and_complex_numbers_are_written_down() -> None:
    numbers = (1 + 2j, complex(-0.0, -0.0), complex("nan"), complex("-inf-0.5j"), 1e-300j, 1e22 + 0j)
    values = {0: CONJ, 1: replace(CONJ, id=1, name="input:0", bits=("conj", "neg"))}
    op = Op(0, "aten.f.default", (Ref(0), numbers[0], numbers), (), ())
    graph = Graph({0: Storage(0, 48, "batch")}, values, (op,), (0, 1), (), {0: numbers})
    text = dump(graph)
    assert "value 0 @0 complex64 [2, 3] {3, 1} +0 conj\n" in text
    assert 'value 1 @0 complex64 [2, 3] {3, 1} +0 conj neg "input:0"\n' in text
    assert "aten.f.default(%0, 1.0+2.0j, [1.0+2.0j, -0.0-0.0j," in text
    assert dump(parse(text)) == text
    assert parse(text).values == values
    call = signature(op, values)
    assert call.startswith("aten.f.default(complex64[2,3]{3,1}~conj, 1.0+2.0j, [")
    assert signature(*parse_call(call)) == call


# -- what may be changed -----------------------------------------------------------------------------------------------


def pair(target: str, dtype: str, *rest: complex | Ref) -> tuple[Graph, Op]:
    """A call on one or two temporary tensors that die in it."""
    values = {number: Value(number, (7,), (1,), dtype, number) for number in range(3)}
    storages = {number: Storage(number, values[0].nbytes, "temporary") for number in range(3)}
    op = Op(0, target, (Ref(0), *rest), (), (2,))
    return Graph(storages, values, (op,), (), ()), op


@pytest.mark.parametrize(
    ("target", "dtype", "rest", "expected"),
    [
        ("aten.mul.Tensor", "float32", (Ref(1),), (0, 1)),
        ("aten.mul.Tensor", "complex64", (Ref(1),), ()),
        ("aten.mul.Tensor", "complex64", (1j,), ()),
        ("aten.mul.Tensor", "complex64", (0.5,), (0,)),
        ("aten.div.Tensor", "complex64", (Ref(1),), ()),
        ("aten.add.Tensor", "complex64", (Ref(1),), (0, 1)),
        ("aten.tanh_backward.default", "complex64", (Ref(1),), ()),
    ],
)
def test_products_of_complex_numbers_take_no_memory_over(
    target: str, dtype: str, rest: tuple[complex | Ref, ...], expected: tuple[int, ...]
) -> None:
    """The kernels round them otherwise in place, and with the factors swapped."""
    graph, op = pair(target, dtype, *rest)
    assert reusable(graph, op) == expected


def test_a_region_does_not_write_what_others_have_made() -> None:
    """Its result is no memory of its own if it lies on what it takes."""
    values = {n: Value(n, (4, 6), (6, 1), "float32", n // 2) for n in range(3)}
    storages = {n: Storage(n, 96, "temporary") for n in range(2)}
    ops = (
        Op(0, "aten.full.default", ((4, 6), 1), (), (0,)),
        Op(1, "aten.mul_.Scalar", (Ref(0), 2), (), (1,), reads=((0, 0),), writes=((0, 1),)),
        Op(2, "aten.exp.default", (Ref(0),), (), (2,), reads=((0, 1),)),
    )
    graph = Graph(storages, values, ops, (), (2,))
    verify(graph)
    (split, *_) = splits(ops[1], values)
    assert any("not the region's own" in problem for problem in region_problems(graph, Region({1: split}, 2)))


# -- what numbers are judged by ----------------------------------------------------------------------------------------


def test_an_error_in_the_imaginary_part_is_seen() -> None:
    exact = torch.tensor([1 + 1j], dtype=torch.complex128)
    ours, theirs = exact.to(COMPLEX) + 0.5j, exact.to(COMPLEX)
    assert closeness("w", ours, theirs, exact).share > 1
    assert closeness("w", theirs, theirs, exact).share <= 1
