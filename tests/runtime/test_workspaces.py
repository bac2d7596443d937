"""Workspaces in isolation: known scratch to the byte, whole steps predicted, exact repetition, the known traps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 (as everywhere)

from magis.cost.signature import parse, signature
from magis.graph.nodes import Op, Ref, Scalar, Value
from magis.runtime.isolated_scratch import make_tensors, measure_workspaces
from magis.runtime.measure import window_peak
from tests.cost.recording import Recording, record


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


@pytest.fixture(scope="module")
def steps() -> dict[str, Recording]:
    """A convolution network's and a transformer's step, forward, backward and update, as recorded calls."""
    torch.manual_seed(0)
    image, words = torch.rand(2, 3, 16, 16), torch.zeros(2, 8, dtype=torch.int64)
    vision = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(8, 8, 3, groups=2), torch.nn.Upsample(scale_factor=2), torch.nn.Dropout(0.1),
        torch.nn.Flatten(), torch.nn.Linear(800, 5),
    )  # fmt: skip
    table = torch.nn.Embedding(30, 16)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
    targets = torch.zeros(2, dtype=torch.int64)

    def see() -> None:
        F.cross_entropy(vision(image), targets).backward()
        torch.optim.AdamW(vision.parameters(), foreach=False).step()

    def read() -> None:
        layer(table(words)).square().mean().backward()
        torch.optim.SGD([*layer.parameters(), *table.parameters()], lr=0.1, momentum=0.9, foreach=False).step()

    return {"vision": record(see), "language": record(read)}


def items(recording: Recording) -> Iterator[tuple[Op, dict[int, Value]]]:
    return ((op, recording.values) for op in recording.calls)


@pytest.mark.parametrize("name", ["vision", "language"])
def test_whole_steps_are_measured_and_repeat_exactly(steps: dict[str, Recording], name: str) -> None:
    found = measure_workspaces(items(steps[name]))
    assert found.keys() == {signature(*item) for item in items(steps[name])}, "some operator refused"
    assert any(found.values())
    assert all(nbytes >= 0 for nbytes in found.values())
    backwards = measure_workspaces(reversed(list(items(steps[name]))))
    assert backwards == found
    key = max(found, key=lambda key: found[key])
    assert measure_workspaces([parse(key)]) == {key: found[key]}, "alone as among others"


def test_threads_are_part_of_the_answer(steps: dict[str, Recording]) -> None:
    threads = torch.get_num_threads()
    norm = [item for item in items(steps["language"]) if "native_layer_norm_backward" in item[0].target]
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(sum(measure_workspaces(norm).values()))
    finally:
        torch.set_num_threads(threads)
    assert found[1] == 2 * found[0] > 0


def test_the_random_state_is_left_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    workspace("aten.native_dropout.default(float32[64]{1}, 0.5, True)")
    assert torch.equal(torch.rand(3), expected)


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


def test_a_value_that_comes_twice_is_one_tensor() -> None:
    value = Value(3, (4,), (1,), "float32", 3)
    op = Op(0, "aten.mul.Tensor", (Ref(3), Ref(3)), (("out", (Ref(3), Scalar("b"), (Scalar("a"), Scalar("b")))),), ())
    assert list(make_tensors(op, {3: value})) == [3]
    assert set(op.scalars()) == {"a", "b"}
