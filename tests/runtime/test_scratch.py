"""Workspaces in isolation: known scratch to the byte, whole steps predicted, exact repetition, the known traps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from magis.cost.signature import parse, signature
from magis.graph.nodes import Op, Ref, Value
from magis.runtime import scratch
from magis.runtime.measure import window_peak
from magis.runtime.scratch import make_tensors, measure_aside, measure_workspaces
from tests.cost.recording import Recording, steps


def workspace(text: str) -> int:
    return measure_workspaces([parse(text)])[text]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("aten.mm.default(float32[64,64]{64,1}, float32[64,64]{1,64})", 0),
        ("aten.relu_.default(float32[64]{1})", 0),
        ("aten.view.default(float32[64]{1}, [8, 8])", 0),
        ("aten.split.Tensor(float32[64]{1}, 16)", 0),
        ("aten.clone.default(float32[8,64]{0,1}, memory_format=memory_format:contiguous_format)", 0),
        ("aten.cat.default([float32[4]{1}, float32[4]{1}])", 0),
        ("aten.add_.Scalar(float32[64]{1}, 1)", 12),
        ("aten.native_dropout.default(float32[1024]{1}, 0.5, True)", 4096),
    ],
)
def test_known_scratch(text: str, nbytes: int) -> None:
    assert workspace(text) == nbytes


def test_layer_norm_keeps_two_rows_of_partial_sums_a_thread() -> None:
    image, row, column = "float32[64,256]{256,1}", "float32[256]{1}", "float32[64,1]{1,1}"
    rest = f"[256], {column}, {column}, {row}, {row}, [True, True, True]"
    nbytes = 2 * 4 * 256 * torch.get_num_threads()
    assert workspace(f"aten.native_layer_norm_backward.default({image}, {image}, {rest})") == nbytes


def in_the_open(op: Op, tensors: dict[int, torch.Tensor]) -> int:
    """Scratch of a call by hand: its peak, less what it returns."""
    call = torch.ops.aten.convolution.default
    arguments = [tensors[arg.value] if isinstance(arg, Ref) else arg for arg in op.args]
    for _ in range(2):
        call(*arguments)
    found = window_peak(lambda: call(*arguments))
    return found.peak_bytes - found.kept_bytes


@pytest.mark.parametrize("channels", [3, 8, 20])
def test_convolutions_take_scratch_and_it_is_found(channels: int) -> None:
    text = (
        f"aten.convolution.default(float32[2,{channels},16,16]{{{256 * channels},256,16,1}}, "
        f"float32[12,{channels},3,3]{{{9 * channels},9,3,1}}, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)"
    )
    op, values = parse(text)
    with torch.no_grad():
        assert workspace(text) == in_the_open(op, make_tensors(op, values)) > 0


def items(recording: Recording) -> Iterator[tuple[Op, dict[int, Value]]]:
    return ((op, recording.values) for op in recording.calls)


@pytest.mark.parametrize("name", ["vision", "language"])
def test_whole_steps_are_measured_and_repeat_exactly(name: str) -> None:
    found = measure_workspaces(items(steps()[name]))
    assert found.keys() == {signature(*item) for item in items(steps()[name])}, "some operator refused"
    assert any(found.values())
    assert all(nbytes >= 0 for nbytes in found.values())
    backwards = measure_workspaces(reversed(list(items(steps()[name]))))
    assert backwards == found
    key = max(found, key=lambda key: found[key])
    assert measure_workspaces([parse(key)]) == {key: found[key]}, "alone as among others"


def test_refusals_and_giants_are_left_out() -> None:
    small, large = "aten.relu.default(float32[8]{1})", "aten.relu.default(float32[4096]{1})"
    bad = "aten.mm.default(float32[2,3]{3,1}, float32[2,3]{3,1})"
    calls = [parse(text) for text in (bad, small, large)]
    for _, values in calls[1:]:
        values[9] = values[0]
    with_outputs = [(Op(0, op.target, op.args, (), (9,) if 9 in values else ()), values) for op, values in calls]
    assert measure_workspaces(with_outputs) == {small: 0, large: 0}
    assert measure_workspaces(with_outputs, limit_bytes=1024) == {small: 0}
    assert measure_workspaces([]) == {}


def test_made_up_tensors_are_exact_and_harmless() -> None:
    text = "aten.x.default(float32[2,3]{1,4}, bool[100]{1}, int64[5]{1}, bfloat16[4,3]{0,1}, float32[0,3]{3,1})"
    op, values = parse(text)
    tensors = make_tensors(op, values)
    for number, tensor in tensors.items():
        assert (tuple(tensor.shape), tensor.stride()) == (values[number].shape, values[number].stride)
        assert str(tensor.dtype) == f"torch.{values[number].dtype}"
    assert 0.5 <= tensors[0].min() <= tensors[0].max() < 1.5
    assert 0 < tensors[1].sum() < 100
    assert tensors[2].tolist() == [0] * 5
    assert tensors[3].untyped_storage().nbytes() == 3 * 2
    assert all(torch.equal(tensor, tensors[number]) for number, tensor in make_tensors(op, values).items())


# --- what operators' tensors must hold, and calls that end their process ----------------------------------------------

ADD = "aten.add_.Scalar(float32[64]{1}, 1)"
BAGS = "aten._embedding_bag.default(float32[50,8]{8,1}, int64[32]{1}, int64[4]{1}, False, 0, False, None, False, -1)"
ROW, BIAS, GATES = "float32[128,64,128]{8192,128,1}", "float32[512]{1}", "float32[512,128]{128,1}"
STATE = "float32[1,64,128]{8192,128,1}"
# a workspace of 64 bytes where the kernel takes 17 MB for granted: far beyond any memory that happens to lie there
DEADLY = (
    f"aten.mkldnn_rnn_layer_backward.default({ROW}, {GATES}, {GATES}, {BIAS}, {BIAS}, {STATE}, {STATE}, {ROW}, {STATE},"
    f" {STATE}, {ROW}, None, None, False, 2, 128, 1, True, True, False, [], False, uint8[64]{{1}})"
)


def test_a_call_that_ends_its_process_is_left_out_and_nothing_else() -> None:
    bad = "aten.mm.default(float32[2,3]{3,1}, float32[2,3]{3,1})"
    found = measure_aside([ADD, DEADLY, bad, BAGS])
    assert found.keys() == {ADD, BAGS}
    assert found[ADD] == 12


def test_a_call_that_never_comes_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "PATIENCE_SECONDS", 0.0)
    assert measure_aside([ADD]) == {}
    assert torch.ones(1).item() == 1.0
