"""Arithmetic counts agree with torch's own counter; bytes with what the kernels touch; views are free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812 (as everywhere)
from torch.utils.flop_counter import FlopCounterMode

from magis.cost.flops import OperatorWork, work
from magis.ops.operators import name_of, op_info
from tests.cost.recording import record, steps
from tests.strategies import examples

MATRIX = {"matmul", "conv", "conv_backward", "attention", "attention_backward"}


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, requires_grad=True)


def ours_and_torchs(fn: Callable[[], object]) -> tuple[int, int]:
    """Floating-point operations of matrix products in `fn`: counted by magis, counted by torch."""
    with FlopCounterMode(display=False) as counter:
        fn()
    recording = record(fn)
    done = [work(op, recording.values) for op in recording.calls]
    return sum(item.flops for item in done if item.kind in MATRIX), counter.get_total_flops()


small = st.integers(1, 6)


@examples(15)
@given(small, small, small, small)
def test_products_count_as_in_torch(batch: int, rows: int, inner: int, columns: int) -> None:
    def fn() -> None:
        torch.mm(rand(rows, inner), rand(inner, columns)).sum().backward()
        torch.bmm(rand(batch, rows, inner), rand(batch, inner, columns)).sum().backward()
        torch.addmm(rand(columns), rand(rows, inner), rand(inner, columns)).sum().backward()
        torch.baddbmm(rand(batch, rows, columns), rand(batch, rows, inner), rand(batch, inner, columns))

    ours, torchs = ours_and_torchs(fn)
    assert ours == torchs


@examples(15)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans(),
    st.integers(3, 6),
)  # fmt: skip
def test_convolutions_count_as_in_torch(
    groups: int, c_in: int, c_out: int, kernel: int, stride: int, transposed: bool, size: int
) -> None:
    def fn() -> None:
        image = rand(2, groups * c_in, size, size)
        if transposed:
            weight = rand(groups * c_in, c_out, kernel, kernel)
            F.conv_transpose2d(image, weight, stride=stride, groups=groups).sum().backward()
        else:
            weight = rand(groups * c_out, c_in, kernel, kernel)
            F.conv2d(image, weight, stride=stride, padding=1, groups=groups).sum().backward()

    ours, torchs = ours_and_torchs(fn)
    if groups == 1:
        assert ours == torchs
    assert ours > 0


def test_attention_counts_as_in_torch_and_half_when_causal() -> None:
    def attend(*, causal: bool) -> Callable[[], object]:
        return lambda: (
            F.scaled_dot_product_attention(*(rand(2, 3, 16, 8) for _ in range(3)), is_causal=causal).sum().backward()
        )

    scores = 2 * 3 * 16 * 16
    full, _ = ours_and_torchs(attend(causal=False))
    assert full == (2 + 5) * 2 * scores * 8
    assert ours_and_torchs(attend(causal=True))[0] == full // 2


def done_by(fn: Callable[[], object], name: str) -> OperatorWork:
    """The work of the one call of operator `name` in `fn`."""
    recording = record(fn)
    (op,) = [op for op in recording.calls if name_of(op.target) == name]
    return work(op, recording.values)


def test_bytes_are_what_the_kernel_touches() -> None:
    image, other = torch.rand(4, 8), torch.rand(4, 8)
    done = done_by(lambda: image + other, "add")
    assert (done.read_bytes, done.written_bytes, done.fresh_bytes, done.flops) == (256, 128, 128, 32)
    done = done_by(lambda: image.add_(other), "add")
    assert (done.read_bytes, done.written_bytes, done.fresh_bytes) == (256, 128, 0)
    done = done_by(lambda: image + torch.rand(1).expand(4, 8), "add")
    assert done.read_bytes == 128 + 4
    done = done_by(lambda: image.copy_(other), "copy")
    assert (done.read_bytes, done.written_bytes) == (128, 128)
    done = done_by(lambda: torch.cat([image, other]), "cat")
    assert (done.read_bytes, done.written_bytes) == (256, 256)
    done = done_by(lambda: image * image, "mul")
    assert done.read_bytes == 128


_aten = torch.ops.aten
COPIES: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "slice_copy": (lambda x: _aten.slice_copy.Tensor(x, 0, 2, 4), 16),
    "narrow_copy": (lambda x: _aten.narrow_copy.default(x, 1, 3, 2), 16),
    "select_copy": (lambda x: _aten.select_copy.int(x, 1, 0), 8),
    "diagonal_copy": (_aten.diagonal_copy.default, 8),
    "as_strided_copy": (lambda x: _aten.as_strided_copy.default(x, [3], [2]), 3),
    "unfold_copy": (lambda x: _aten.unfold_copy.default(x, 0, 2, 6), 32),
    "split_copy": (lambda x: _aten.split_copy.Tensor(x, 2), 64),
    "split_with_sizes_copy": (lambda x: _aten.split_with_sizes_copy.default(x, [3, 5]), 64),
    "unbind_copy": (_aten.unbind_copy.int, 64),
    "t_copy": (_aten.t_copy.default, 64),
    "constant_pad_nd": (lambda x: _aten.constant_pad_nd.default(x, [-3, -1]), 32),
}
"""Copies of views on 8 x 8 numbers, and how many of them each reads."""


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_view_reads_what_it_makes(name: str) -> None:
    call, count = COPIES[name]
    image = torch.rand(8, 8)
    done = done_by(lambda: call(image), name)
    assert (done.read_bytes, done.written_bytes, done.elements, done.results) == (4 * count, 4 * count, count, count)
    assert done.kind in ("copy", "strided_copy", "permuted_copy")


def test_every_copy_of_a_view_is_a_copy() -> None:
    names = {name for name in dir(_aten) if name.endswith("_copy") and op_info(f"aten.{name[:-5]}.default").view}
    assert names > {"slice_copy", "select_copy", "permute_copy", "unsqueeze_copy", "expand_copy"}
    assert {name for name in names if op_info(f"aten.{name}.default").kind != "copy"} == set()


def test_nothing_is_charged_for_views_and_bare_allocations() -> None:
    image = torch.rand(4, 8)
    recording = record(
        lambda: (
            image.t(), image.view(32), image[1:], image.expand(2, 4, 8), image.split(2), image.unbind(),
            image.unsafe_chunk(2), image.unsafe_split_with_sizes((1, 3)),
        )
    )  # fmt: skip
    assert len(recording.calls) == 8
    for op in recording.calls:
        assert work(op, recording.values) == OperatorWork("view", name_of(op.target), "float32")
    done = done_by(lambda: torch.empty(4, 8), "empty")
    assert (done.moved_bytes, done.flops) == (0, 0)


def test_every_operator_of_a_step_is_declared() -> None:
    """Both a convolution network's and a transformer's: forward, backward, update."""
    targets = {op.target for recording in steps().values() for op in recording.calls}
    assert len(targets) > 40
    assert {target for target in targets if op_info(target).kind == "unknown" and not op_info(target).view} == set()
