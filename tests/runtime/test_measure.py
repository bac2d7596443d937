"""Peaks of hand-made programs to the byte: allocations, frees, views, in-place writes, scratch, older tensors."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.devices import CONSTANTS_VERSION, UnknownDevice
from magis.runtime import measure
from magis.runtime.measure import (
    Allocation,
    WindowPeak,
    collector_spared,
    device_identity,
    device_memory,
    free_device_memory,
    replay,
    tensor_peak,
    usable_memory,
    window_peak,
)
from tests.oracles import one_thread
from tests.strategies import examples

KIB = 256  # float32 elements of 1024 bytes


def kib(count: int) -> torch.Tensor:
    return torch.ones(count * KIB)


def straight() -> torch.Tensor:
    a = kib(4)
    b = a + a  # 8 alive
    del a
    return b * b  # 8 again


def in_place() -> torch.Tensor:
    a = kib(4)
    a.add_(a).relu_()
    return a


def views() -> list[torch.Tensor]:
    a = kib(4)
    parts = [a[:KIB], a.view(4, KIB).t(), *a.split(KIB)]
    del a  # its views keep all of it
    return parts


def dies_with_its_last_view() -> torch.Tensor:
    a = kib(4)
    part = a[:KIB]
    del a
    copy = part.clone()  # 5
    del part
    other = kib(3)  # 4: the 4 KiB are gone
    del other
    return copy


def grows() -> torch.Tensor:
    a = torch.empty(0)
    a.resize_(6 * KIB)
    return a


def from_python() -> torch.Tensor:
    return torch.tensor([1.0] * KIB)


HAND_MADE: dict[Callable[[], object], tuple[int, int]] = {
    straight: (8, 4), in_place: (4, 4), views: (4, 4), dies_with_its_last_view: (5, 1), grows: (6, 6),
}  # fmt: skip
hand_made = pytest.mark.parametrize(
    ("program", "peak", "kept"),
    [(fn, *kib) for fn, kib in HAND_MADE.items()],
    ids=lambda it: getattr(it, "__name__", None),
)


@hand_made
def test_hand_made_programs_to_the_byte(program: Callable[[], object], peak: int, kept: int) -> None:
    assert window_peak(program) == WindowPeak(peak * 1024, kept * 1024)
    assert tensor_peak(program) == peak * 1024


def test_numbers_from_python_become_tensors_that_count() -> None:
    assert tensor_peak(from_python) == 1024
    assert window_peak(from_python).kept_bytes == 1024


def backward() -> None:
    weight = torch.ones(16, 256, requires_grad=True)  # 16 KiB
    hidden = torch.ones(8, 16) @ weight  # 0.5 + 8
    loss = hidden.relu().sum()  # + 8 + 4 bytes
    loss.backward()


def test_autograd_is_seen_by_both() -> None:
    peak = window_peak(backward).peak_bytes
    assert peak == tensor_peak(backward)
    assert peak >= 16 * 1024 * 2  # weight and its gradient at least


def test_frees_of_older_tensors_do_not_count() -> None:
    """Neither those that no profile knows nor those that an earlier profile remembers."""
    for remember in (False, True):
        older: list[torch.Tensor] = []

        def make(older: list[torch.Tensor] = older) -> None:
            older.append(kib(64))

        if remember:
            assert window_peak(make).peak_bytes == 64 * 1024
        else:
            make()

        def program(older: list[torch.Tensor] = older) -> torch.Tensor:
            first = kib(4)
            older.clear()
            return torch.cat([first, first])

        assert window_peak(program) == WindowPeak(12 * 1024, 8 * 1024)
        make()
        assert tensor_peak(program) == 12 * 1024


def test_writing_older_tensors_makes_nothing() -> None:
    older = kib(8)
    assert tensor_peak(older.view(2, -1)[0].relu_) == 0
    assert window_peak(older.view(2, -1)[0].relu_) == WindowPeak(0, 0)


def test_scratch_inside_an_operator_counts_in_the_window_alone() -> None:
    one = kib(1)  # a Python number becomes a tensor of its own inside of the operator, twice: 8 + 4 bytes
    assert window_peak(lambda: one.add_(1)) == WindowPeak(12, 0)
    assert tensor_peak(lambda: one.add_(1)) == 0
    mask_and_output = 5 * 64 * KIB
    window = window_peak(lambda: torch.native_dropout(kib(64), 0.5, True))
    tensors = tensor_peak(lambda: torch.native_dropout(kib(64), 0.5, True))
    assert tensors == 64 * 1024 + mask_and_output
    assert window.peak_bytes > tensors
    assert window.kept_bytes == mask_and_output


def test_peaks_repeat_exactly() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 36, 10),
    )  # fmt: skip
    image = torch.rand(4, 3, 8, 8)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        net(image).square().mean().backward()

    step()
    step()
    net.zero_grad(set_to_none=True)
    found = []
    for _ in range(4):
        found.append(window_peak(step))
        net.zero_grad(set_to_none=True)
        torch.rand(random.Random(len(found)).randrange(1000))  # another state of the heap
    assert len(set(found)) == 1
    tensors = {tensor_peak(lambda: (step(), net.zero_grad(set_to_none=True))) for _ in range(3)}
    assert len(tensors) == 1
    assert tensors.pop() < found[0].peak_bytes


@examples(6)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), min_size=1, max_size=15))
def test_any_program_of_allocations_and_frees(program: list[tuple[bool, int]]) -> None:
    """The oracle is a sum that is kept by hand."""
    now = peak = 0
    sizes: list[int] = []
    for frees, size in program:
        if frees and sizes:
            now -= sizes.pop(size % len(sizes))
        else:
            sizes.append(size)
            now += size
            peak = max(peak, now)

    def run() -> list[torch.Tensor]:
        alive: list[torch.Tensor] = []
        for frees, size in program:
            if frees and alive:
                alive.pop(size % len(alive))
            else:
                alive.append(torch.empty(size, dtype=torch.uint8))
        return alive

    assert window_peak(run) == WindowPeak(peak, now)
    assert tensor_peak(run) == peak


def test_replay_of_a_log() -> None:
    events = [(1, 0xA, 100), (2, 0xB, -50), (3, 0xC, 30), (4, 0xA, -100), (5, 0xD, 60), (6, 0xD, 70)]
    assert replay(Allocation(*event) for event in events) == WindowPeak(130, 100)
    assert replay([]) == WindowPeak(0, 0)


def test_errors_come_through_and_leave_things_as_they_were(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        window_peak(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tensor_peak(lambda: 1 / 0)
    assert gc.isenabled()
    assert window_peak(straight).peak_bytes == 8 * 1024
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"


PRINTING = """
import os, sys, torch
from magis.runtime.measure import window_peak
old = [torch.ones(1000)]
def step():
    old.clear()
    print("from python")
    print("an error", file=sys.stderr)
    os.write(1, b"from below\\n")
    return torch.ones(10)
for _ in range(2):
    window_peak(step)
print("after", flush=True)
os.close(1), os.close(2)
assert window_peak(lambda: torch.ones(256)).peak_bytes == 1024
"""


def test_the_profiler_is_silent_and_the_program_is_not(repository: Path) -> None:
    """Closed descriptors do no harm."""
    done = subprocess.run([sys.executable, "-c", PRINTING], cwd=repository, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split("\n")) == sorted(["", *["from below", "from python"] * 2, "after"])
    assert done.stderr == "an error\n" * 2


def test_identities() -> None:
    with one_thread():
        found = device_identity("cpu")
    assert found == {
        "device": "cpu",
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": "1",
        "torch": torch.__version__,
    }
    assert all(type(value) is str for value in found.values())
    assert device_identity("sim:h100") == {"device": "sim:h100", "constants": str(CONSTANTS_VERSION)}
    with pytest.raises(UnknownDevice):
        device_identity("tpu")


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("ONEDNN_MAX_CPU_ISA", "MAX_CPU_ISA=SSE41"),
        ("DNNL_MAX_CPU_ISA", "MAX_CPU_ISA=SSE41"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "DEFAULT_FPMATH_MODE=SSE41"),
        ("ONEDNN_CPU_ISA_HINTS", "CPU_ISA_HINTS=SSE41"),
    ],
)
def test_what_changes_onednns_scratch_is_part_of_the_identity(
    monkeypatch: pytest.MonkeyPatch, variable: str, told: str
) -> None:
    before = device_identity("cpu")
    monkeypatch.setenv(variable, "SSE41")
    assert device_identity("cpu") == {**before, "oneDNN": told}
    torch._C._set_mkldnn_enabled(False)  # torch's context sets others, too: one that warns leaves it off
    try:
        assert device_identity("cpu")["oneDNN"] == f"{told} off"
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_memory_of_devices() -> None:
    assert 0 < free_device_memory("cpu") < device_memory("cpu") < 2**50
    assert 23 * 2**30 < free_device_memory("sim:rtx3090") < device_memory("sim:rtx3090") < 24 * 2**30
    assert usable_memory("cpu") == device_memory("cpu")
    with pytest.raises(UnknownDevice):
        free_device_memory("tpu")


@pytest.mark.parametrize(
    ("files", "limit", "used"),
    [
        ({}, 2**62, 0),
        ({"memory.max": "max\n", "memory.current": "5", "memory.stat": ""}, 2**62, 0),
        ({"memory.max": "1000\n", "memory.current": "300", "memory.stat": "anon 7\ninactive_file 100\n"}, 1000, 200),
        (
            {
                "memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "50",
                "memory/memory.stat": "cache 1\ntotal_inactive_file 20\n",
            },
            900, 30,
        ),
    ],
    ids=["none", "unlimited", "version 2", "version 1"],
)  # fmt: skip
def test_the_container_sets_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int, used: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(measure, "_CONTROL_GROUPS", tmp_path)
    assert measure._container_limit() == (limit, used)


def test_machines_without_a_memory_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_MEMORY_TABLE", tmp_path / "none")
    assert measure._meminfo("MemTotal") >= 2**28


class Allocator:
    """The figures of a caching allocator: 100 bytes in use, 1000 cached by whoever came before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.allocated, self.reserved, self.most_allocated, self.most_reserved = 100, 1100, 900, 1100
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, partial(self.call, name))
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            figure = name.replace("max_memory", "most").replace("memory_", "")
            monkeypatch.setattr(torch.cuda, name, lambda *_device, figure=figure: getattr(self, figure))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2000, 10_000))

    def call(self, name: str, *_device: object) -> None:
        self.log.append(name)
        if name == "empty_cache":
            self.reserved = 128  # blocks of 64
        if name == "reset_peak_memory_stats":
            self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def step(self) -> None:
        self.log.append("step")
        self.allocated, self.most_allocated, self.reserved, self.most_reserved = 150, 400, 512, 512


def test_the_window_of_a_gpu_is_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    assert window_peak(allocator.step, "cuda") == WindowPeak(300, 50, 412)
    assert allocator.log == ["synchronize", "empty_cache", "reset_peak_memory_stats", "step", "synchronize"]


def test_what_others_hold_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Allocator(monkeypatch)
    assert measure.others_memory("cuda") == 10_000 - 2000 - 1100
    assert free_device_memory("cuda") == 2000 + 1000
    assert usable_memory("cuda") == 2000 + 1100
    assert measure.others_memory("cpu") == measure.others_memory("sim:rtx3090") == 0


@pytest.mark.cuda
def test_cuda_peaks() -> None:
    def program() -> torch.Tensor:
        a = torch.ones(4 * KIB, device="cuda")
        b = a + 1
        del a
        return b * 2

    program()
    found = window_peak(program, "cuda")
    assert (found.peak_bytes, found.kept_bytes) == (8 * 1024, 4 * 1024)
    assert found.reserved_bytes is not None
    assert found.reserved_bytes >= found.peak_bytes
    assert device_identity("cuda")["gpu"] == torch.cuda.get_device_name()
    assert 0 < free_device_memory("cuda") <= device_memory("cuda")


def test_collections_pass_over_what_exists_unless_somebody_has_frozen_it() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_spared():
            assert gc.get_freeze_count() == frozen
        assert gc.get_freeze_count() == frozen > 0
        gc.unfreeze()
        with collector_spared():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as tests find it
