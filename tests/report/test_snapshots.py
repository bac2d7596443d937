"""Memory snapshots: every sum of a trace is the figure that the estimate, the case or the block tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magis
from magis.errors import UsageError
from magis.extensions.snapshots import memory_snapshot
from magis.results import Case
from tests.api import own_loops
from tests.api.own_loops import Loop
from tests.report.snapshot_reader import read

SETTINGS = (
    "", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.001,per_process_memory_fraction:0.01",
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks() -> tuple[Any, ...]:
    net = nn.Sequential(*(Block() for _ in range(3)))
    batch = torch.randn(5000, 64), torch.randn(5000, 64)
    return net, batch, nn.functional.mse_loss, torch.optim.AdamW(net.parameters())


NAME = f"{__name__}:blocks"


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_step_on_a_gpu(settings: str, tmp_path: Path) -> None:
    step = magis.estimate(blocks, device="sim:h100", allocator=settings)
    step.save_snapshot(tmp_path / "step.pickle")
    found = read(tmp_path / "step.pickle")
    assert (found.peak_bytes, found.reserved_bytes) == (step.peak_bytes, step.reserved_bytes)
    assert found.ms == pytest.approx(step.latency_ms, abs=1e-3)
    assert found.found["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == settings


def test_frames_tell_operator_line_modules_and_phase(tmp_path: Path) -> None:
    magis.estimate(blocks, device="sim:h100").save_snapshot(str(tmp_path / "step.pickle"))
    made = [entry for entry in read(tmp_path / "step.pickle").entries if entry["action"] == "alloc"]
    stacks = {entry["category"]: [frame["name"] for frame in entry["frames"]] for entry in reversed(made)}
    assert stacks["parameter"] == ["parameter 0.up.weight", "0.up", "0"]
    assert stacks["state"] == ["state exp_avg:0.up.weight", "0.up", "0"]
    assert stacks["activation"] == ["aten.addmm.default", "0.up", "0", "forward"]
    assert {stacks["gradient"][-1], stacks["update"][-1]} == {"backward", "update"}
    operator = next(entry["frames"][0] for entry in made if entry["category"] == "activation")
    assert operator["filename"].endswith("test_snapshots.py")
    assert "self.down(nn.functional.gelu(self.up(x)))" in Path(__file__).read_text().splitlines()[operator["line"] - 1]
    assert len({id(entry["frames"]) for entry in made}) == len({str(entry["frames"]) for entry in made}) < len(made)


def test_a_step_on_a_cpu_with_workspaces_and_numbers(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    batch = torch.randn(8, 3, 32, 32), torch.randn(8, 8, 30, 30)
    step = magis.estimate(net, batch, lambda y, t: (3 * (y - t) ** 2).mean(), "adamw", device="cpu")
    step.save_snapshot(tmp_path / "step.pickle")
    found = read(tmp_path / "step.pickle")
    assert found.peak_bytes == step.peak_bytes
    assert {entry.get("category") for entry in found.entries} >= {"workspace", "buffer"}
    numbers = {entry["frames"][0]["name"] for entry in found.entries if entry["frames"]}
    assert "number for the backward of aten.mul.Tensor" in numbers


def test_micro_batches(tmp_path: Path) -> None:
    step = magis.estimate(blocks, device="sim:a100", accumulate=3)
    step.save_snapshot(tmp_path / "step.pickle")
    assert read(tmp_path / "step.pickle").peak_bytes == step.peak_bytes


CALLS = [
    (own_loops.carried_over, "cpu"), (own_loops.every_third, "cpu"), (own_loops.averaged, "sim:h100"),
    (own_loops.accumulated, "sim:h100"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "device"), CALLS)
def test_calls_of_a_step_function(make: Callable[[], Loop], device: str, tmp_path: Path) -> None:
    step, given = make()
    calls = magis.estimate(step, given, device=device)
    calls.save_snapshot(tmp_path / "calls.pickle")
    found = read(tmp_path / "calls.pickle")
    assert found.peak_bytes == calls.peak_bytes
    assert found.reserved_bytes == calls.reserved_bytes or device == "cpu"


def test_several_batches(tmp_path: Path) -> None:
    model = own_loops.net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(given: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(given[0]), given[1]).backward()
        optimizer.step()

    calls = magis.estimate(step, batches=[own_loops.batch(rows) for rows in (900, 30_000, 4_000)], device="sim:h100")
    calls.save_snapshot(tmp_path / "calls.pickle")
    found = read(tmp_path / "calls.pickle")
    assert (found.peak_bytes, found.reserved_bytes) == (calls.peak_bytes, calls.reserved_bytes)
    assert {entry.get("category") for entry in found.entries} >= {"batch", "state", "parameter", "gradient"}


PLANNED = [
    Case("seed-bert", "magis", "sim:h100", "small", memory_ratio=0.5, budget=300),
    Case(NAME, "checkpoint", "sim:h100", "paper"),
]


@pytest.mark.parametrize("case", PLANNED, ids=["magis", "checkpoint"])
def test_the_original_and_the_planned_step_of_a_case(case: Case, tmp_path: Path) -> None:
    result = magis.run_case(case, snapshots=lambda step: tmp_path / step)
    assert result.optimized.simulated.peak_bytes < result.original.simulated.peak_bytes
    for name, figures in (("original", result.original), ("optimized", result.optimized)):
        found = read(tmp_path / name)
        assert (found.peak_bytes, found.reserved_bytes) == (figures.simulated.peak_bytes, figures.reserved_bytes)
        assert found.ms == pytest.approx(figures.simulated_ms, abs=1e-3)
    assert case.strategy != "magis" or (result.search.fission and result.search.swapped_bytes)


def train(net: nn.Module, x: Tensor) -> None:
    with magis.phase("training"):
        net(x).square().sum().backward()


def test_a_block_as_it_ran(tmp_path: Path) -> None:
    net, x, last = blocks()[0], torch.randn(64, 64), None
    for _ in range(3):
        with magis.peak("cpu", after=last) as last:
            train(net, x)
            net.zero_grad()
        last.save_snapshot(tmp_path / "block.pickle")
        found = read(tmp_path / "block.pickle")
        assert found.peak_bytes == last.allocated_bytes
    named = {tuple(frame["name"] for frame in entry["frames"]) for entry in found.entries if entry["action"] == "alloc"}
    assert ("aten::addmm", "Sequential.0.up", "Sequential.0", "Sequential", "training") in named


def test_what_an_earlier_block_left_is_there_where_it_is_freed(tmp_path: Path) -> None:
    with magis.peak("cpu") as first:
        kept = [torch.zeros(1000), torch.zeros(2000)]
    with magis.peak("cpu", after=first) as second:
        kept.pop()
        torch.zeros(500)
    second.save_snapshot(tmp_path / "block.pickle")
    found = read(tmp_path / "block.pickle")
    assert found.peak_bytes == second.allocated_bytes == 8000
    assert found.entries[1]["frames"][0]["name"] == "carried over"


def test_what_cannot_be_saved_is_refused_in_one_line_and_writes_nothing(tmp_path: Path) -> None:
    net, batch, loss, _ = blocks()
    small = batch[0][:8], batch[1][:8]
    compiled = magis.estimate(net, small, loss, "sgd", device="sim:h100", compiled=True)
    with pytest.raises(UsageError, match=r"^save_snapshot: a compiled step is not predicted operator by operator"):
        compiled.save_snapshot(tmp_path / "step.pickle")
    block = magis.peak("cpu")
    with pytest.raises(UsageError, match="its block has not begun"):
        block.save_snapshot(tmp_path / "step.pickle")
    with torch.profiler.profile(profile_memory=True, acc_events=True), magis.peak("cpu") as profiled:
        torch.ones(10)
    with pytest.raises(UsageError, match=r"the block's allocations were not logged"):
        profiled.save_snapshot(tmp_path / "step.pickle")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "message"),
    [("", "it is a directory"), ("missing/step.pickle", "no such directory"), ("a\0b", "null"), ("file/x", "not a")],
)
def test_a_path_that_cannot_be_is_refused_in_one_line(place: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with magis.peak("cpu") as block:
        torch.ones(10)
    with pytest.raises(UsageError, match=rf"^cannot write .*{message}") as error:
        block.save_snapshot(f"{tmp_path}/{place}")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(UsageError, match=r"^cannot write 3: "):
        block.save_snapshot(3)  # type: ignore[arg-type]


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    def fails() -> bytes:
        raise KeyboardInterrupt

    (tmp_path / "step.pickle").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        memory_snapshot.save(tmp_path / "step.pickle", fails)
    assert (tmp_path / "step.pickle").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
