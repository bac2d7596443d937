"""Kernels of a call on lists: full of tensors, full of pieces, and what a GPU and a CPU are charged for it."""

from __future__ import annotations

import pytest

from magis.cost.devices import find_device
from magis.cost.flops import CHUNK, MOST_BLOCKS, tensors_and_kernels
from magis.cost.operator_latency import roofline_ns
from magis.graph.nodes import Op, Ref, Value


def on(target: str, sizes: list[int], lists: int, *numbers: float) -> tuple[Op, dict[int, Value]]:
    values = {
        number: Value(number, (size,), (1,), "float32", number)
        for number, size in enumerate(size for _ in range(lists) for size in sizes)
    }
    args = [tuple(Ref(each * len(sizes) + at) for at in range(len(sizes))) for each in range(lists)]
    return Op(0, f"aten.{target}", (*args, *numbers), (), ()), values


@pytest.mark.parametrize(
    ("target", "sizes", "lists", "kernels"),
    [
        ("_foreach_mul_.Scalar", [8] * 110, 1, 1),
        ("_foreach_mul_.Scalar", [8] * 111, 1, 2),
        ("_foreach_mul_.Scalar", [8, 0] * 110, 1, 1),  # empty tensors take no place
        ("_foreach_div_.ScalarList", [8] * 97, 1, 2),
        ("_foreach_lerp_.Scalar", [8] * 64, 2, 1),
        ("_foreach_addcmul_.Scalar", [8] * 96, 3, 2),
        ("_foreach_add_.List", [CHUNK * MOST_BLOCKS], 2, 1),
        ("_foreach_add_.List", [CHUNK * MOST_BLOCKS + 1], 2, 2),
        ("_foreach_add_.List", [CHUNK * (MOST_BLOCKS - 1), CHUNK + 1], 2, 2),
        ("mul_.Tensor", [8], 1, 1),
    ],
)
def test_a_kernel_takes_so_many_tensors_and_pieces(target: str, sizes: list[int], lists: int, kernels: int) -> None:
    op, values = on(target, sizes, lists)
    if target == "mul_.Tensor":
        op = Op(0, "aten.mul_.Tensor", (Ref(0), 2.0), (), ())
    assert tensors_and_kernels(op, values) == (len(sizes), kernels)


def test_one_call_on_a_list_moves_what_single_calls_move_but_launches_less() -> None:
    many, values = on("_foreach_add_.List", [1 << 20] * 8, 2)
    one, alone = on("_foreach_add_.List", [1 << 20], 2)
    gpu, cpu = find_device("sim:h200"), find_device("cpu")
    launches = (8 - tensors_and_kernels(many, values)[1]) * gpu.launch_ns
    assert roofline_ns(gpu, many, values) < 8 * roofline_ns(gpu, one, alone) - launches
    assert roofline_ns(cpu, many, values) == pytest.approx(8 * roofline_ns(cpu, one, alone), rel=1e-3)
