"""Operators timed by themselves: every one in every round, cold, on arguments that do not drift, refusals left out."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from magis.cost.profile_store import Entry
from magis.runtime import profiler as cuda_profile
from magis.runtime.profiler import (
    CallBatch,
    EventWatch,
    PreparedCall,
    ProfilingEffort,
    Wall,
    prepared,
    record,
)
from magis.units import MIB
from tests.runtime.simulated_gpu import EventDevice

CPU = torch.device("cpu")
MM = "aten.mm.default(float32[64,64]{64,1}, float32[64,64]{64,1})"
ADD = "aten.add_.Tensor(float32[1000]{1}, float32[1000]{1}, alpha=$)"
SHRINK = "aten.mul_.Tensor(float32[1000]{1}, 1e-12)"
BIG = "aten.gelu.default(float32[4194304]{1})"  # 16 MiB in, 16 MiB out


class Script:
    """Says which call ran when, and gives times by a plan."""

    def __init__(self, plan: Callable[[int], int]) -> None:
        self.calls: list[object] = []
        self._plan = plan
        self._asked = 0

    def time(self, call: Callable[[], object]) -> object:
        self.calls.append(call)
        return call()

    def times(self) -> Sequence[int]:
        found = [self._plan(number) for number in range(self._asked, len(self.calls))]
        self._asked = len(self.calls)
        return found


def test_rounds_run_every_call_once_and_the_median_counts() -> None:
    script = Script(lambda number: 1000 * (number // 2) + number % 2)  # round r: r thousand, and one more
    found = record(CallBatch((MM, ADD), 10**6), ProfilingEffort(rounds=7), CPU, script, lambda _key: 9)
    assert len(script.calls) == 14
    assert script.calls[0::2] == [script.calls[0]] * 7  # in turn, never twice running
    assert script.calls[0] is not script.calls[1]
    assert found == {MM: Entry(3000, 2000, 9, 7), ADD: Entry(3001, 2000, 9, 7)}


def test_every_call_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch is made up for by memory that is written between rounds; results live until they are replaced."""
    scrubbed = []
    zero = torch.Tensor.zero_

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        scrubbed.append(tensor.numel())
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", seen)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Watch(Script):
        def time(self, call: Callable[[], object]) -> object:
            alive.append(sum(each() is not None for each in held))
            result = super().time(call)
            held.append(weakref.ref(result))  # type: ignore[arg-type]
            return result

    effort = ProfilingEffort(batch_bytes=4 * MIB, rounds=5)
    record(CallBatch((MM, MM.replace("64", "32")), 1000), effort, CPU, Watch(lambda _number: 5), lambda _key: 0)
    assert scrubbed == [MIB - 1000] * 5
    assert alive == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]  # the other's result, and the call's own of the round before


def test_real_times_and_workspaces_of_the_cpu() -> None:
    keys = (MM, BIG, "aten.native_dropout.default(float32[1000]{1}, 0.5, True)")
    found = record(CallBatch(keys, 1), ProfilingEffort(rounds=5), CPU, Wall())
    assert list(found) == list(keys)
    assert all(entry.ns > 0 and entry.samples == 5 for entry in found.values())
    assert (found[MM].workspace, found[keys[2]].workspace) == (0, 4000)  # dropout draws its mask in float32


def test_what_is_written_in_place_is_filled_anew_before_every_round() -> None:
    """Without it this product is 0 after four rounds, having been a denormal number before."""
    call = prepared(SHRINK, CPU)
    assert call is not None
    seen = []
    for _ in range(6):
        call.refill()
        call.run()
        seen.append(float(call.changed[0][0]))
    assert seen == [pytest.approx(0.75e-12, rel=1e-6, abs=0)] * 6


def test_on_a_gpu_the_larger_of_kernel_and_host_time_counts() -> None:
    cuda = EventDevice()
    watch = EventWatch(cuda)

    def kernel() -> str:
        cuda.now_ms += 2.5e6  # far above the host's time, even where another process has the core
        return "result"

    def slow_to_issue() -> None:
        cuda.now_ms += 0.001
        until = time.perf_counter_ns() + 20_000_000  # by the clock that measures: a sleep has another one
        while time.perf_counter_ns() < until:
            pass

    assert watch.time(kernel) == "result"
    watch.time(slow_to_issue)
    first, second = watch.times()
    assert first == 2_500_000_000_000
    assert second >= 20_000_000
    assert cuda.log.count("synchronize") == 2  # before the first, and for the answer
    assert watch.times() == []


class FakeAllocator(EventDevice):
    """Counts bytes as a GPU's allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 1000

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def memory_allocated(self, _device: object) -> int:
        return self.now

    def max_memory_allocated(self, _device: object) -> int:
        return self.peak

    def reset_peak_memory_stats(self, _device: object) -> None:
        self.peak = self.now


def test_workspace_of_a_gpu_is_what_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator()
    allocator.peak = 10**9  # of somebody else, before

    def run() -> str:
        allocator.take(512)  # the result
        allocator.take(4096)  # scratch
        allocator.now -= 4096
        return "result"

    call = PreparedCall("k", run, ())
    monkeypatch.setattr(cuda_profile, "prepared", lambda _key, _device: call)
    monkeypatch.setattr(torch, "cuda", allocator)
    assert cuda_profile.cuda_workspace("k", CPU) == 4096
    monkeypatch.setattr(cuda_profile, "prepared", lambda _key, _device: None)
    assert cuda_profile.cuda_workspace("k", CPU) == 0


def test_the_slower_direction_of_the_link_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = EventDevice()
    empty = torch.empty

    class Copied(torch.Tensor):
        """Takes 10 ms to the device, 40 ms back."""

        def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
            assert non_blocking
            cuda.now_ms += 40 if getattr(self, "on_host", False) else 10
            return self

    def made(*sizes: int, pin_memory: bool = False, **_: object) -> torch.Tensor:
        found = empty(1).as_subclass(Copied)
        found.on_host = pin_memory  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch, "cuda", cuda)
    assert cuda_profile.link_speed(CPU) == pytest.approx(cuda_profile.LINK_BYTES / 0.040, rel=1e-6)
    assert cuda_profile.copy_overhead(CPU) == pytest.approx(40e6, rel=1e-6)
