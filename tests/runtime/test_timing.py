"""Interleaving and the ratio's interval: order, bookkeeping, coverage, robustness, a planted slow-down."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.results import RatioInterval
from magis.runtime import timing as module
from magis.runtime.timing import StoppingRule, Timing, interleave, ratio_interval
from tests.runtime.simulated_gpu import EventDevice

positive = st.floats(1e-3, 1e6)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does."""
    monkeypatch.setattr(module, "waits", dict)


class Clock:
    """A clock that only the steps advance, in nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(module.time, "perf_counter_ns", lambda: self.now)


def test_steps_alternate_and_so_does_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(monkeypatch), []

    def step(name: str, milliseconds: int) -> None:
        log.append(name)
        clock.now += milliseconds * 10**6

    found = interleave(lambda: step("a", 2), lambda: step("b", 3), StoppingRule(4, most=0), warmup=1)
    assert "".join(log) == "ab" + "abbaabba"
    assert found == Timing((2.0,) * 4, (3.0,) * 4)
    assert ratio_interval(found).ratio == 1.5


def test_the_collector_rests_and_comes_back() -> None:
    states: list[bool] = []
    interleave(lambda: states.append(gc.isenabled()), lambda: None, StoppingRule(2, most=0), warmup=0)
    assert states == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        interleave(lambda: 1 / 0, lambda: None, StoppingRule(1), warmup=0)
    assert gc.isenabled()
    gc.disable()
    try:
        interleave(lambda: None, lambda: None, StoppingRule(1, most=0))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_more_pairs_while_the_ratio_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, draw = Clock(monkeypatch), random.Random(1)

    def steady() -> None:
        clock.now += 10**8

    def noisy() -> None:
        clock.now += int(10**8 * draw.uniform(0.9, 1.1))

    def pairs(step: Callable[[], None], **limits: Any) -> int:
        return len(interleave(step, step, StoppingRule(9, **limits)).first_ms)

    assert pairs(steady, width=0.02) == 9
    assert pairs(noisy, width=0.001, seconds=100) == 6 * 9
    assert pairs(noisy, width=0.001, most=20, seconds=100) == 21  # nine, and then three at a time
    # 9 pairs take 1.8 s, three more 0.6 s: after 12 the time is up
    assert pairs(noisy, width=0.001, most=200, seconds=2.2) == 12
    assert pairs(noisy, width=0.001, most=200, seconds=0.1) == 9
    assert 37 <= pairs(noisy, width=0.001, most=200) <= 43  # 8 s
    interval = ratio_interval(interleave(noisy, noisy, StoppingRule(9, width=0.06, most=200, seconds=100)))
    assert 9 < interval.pairs < 200
    assert interval.pairs % 3 == 0
    assert interval.high - interval.low <= 0.06 * interval.ratio


def test_more_pairs_while_something_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, draw = Clock(monkeypatch), random.Random(2)

    def noisy() -> None:
        clock.now += int(10**7 * draw.uniform(0.8, 1.25))

    def timed(*bounds: float, **limits: Any) -> RatioInterval:
        return ratio_interval(interleave(noisy, noisy, StoppingRule(15, bounds, **limits)))

    clear = timed(0.5, 2.0)
    assert clear.pairs == 15  # however wide
    assert clear.high - clear.low > 0.1
    close = timed(0.5, 1.08, most=10_000)
    assert close.pairs > 15
    assert close.high < 1.08
    assert timed(1.0).pairs == 12 * 15
    assert timed(1.0, most=10_000).pairs >= 950  # 20 s of 20 ms


def times(*ratios: float, waited: tuple[float, ...] = ()) -> Timing:
    return Timing((100.0,) * len(ratios), tuple(100.0 * ratio for ratio in ratios), waited)


@pytest.mark.parametrize(("disturbed", "pairs"), [({1, 2, 3, 7}, 12), (set(range(8)), 16), (set(range(1000)), 28)])
def test_disturbed_pairs_are_repeated_until_the_machine_is_given_up(
    monkeypatch: pytest.MonkeyPatch, disturbed: set[int], pairs: int
) -> None:
    clock, calls = Clock(monkeypatch), []

    def step() -> None:
        calls.append(1)
        clock.now += 5 * 10**7

    def waits() -> dict[str, int]:
        return {"worker": sum(12 * 10**7 for pair in range(len(calls) // 2) if pair in disturbed), "main": 0}

    monkeypatch.setattr(module, "waits", waits)
    found = interleave(step, step, StoppingRule(8), warmup=0)
    assert len(found.first_ms) == pairs  # of 0.1 s; after a third of the 8 s there is no hope
    assert len(found.undisturbed().first_ms) == pairs - len(disturbed & set(range(pairs)))
    assert max(found.waited) == 1.0  # a thread may wait longer than its pair takes
    assert module.is_too_busy(found) == (len(disturbed) == 1000)


def enclosed(count: int, rank: int) -> float:
    """Probability that the rank-th smallest and largest of `count` samples enclose the median."""
    return 1 - 2 * sum(math.comb(count, heads) for heads in range(rank)) / 2**count


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=80), st.sampled_from((0.5, 0.9, 0.95, 0.99)))
def test_the_interval_is_the_narrowest_that_keeps_its_word(pairs: list[tuple[float, float]], confidence: float) -> None:
    timing = Timing(*zip(*pairs, strict=True))
    found = ratio_interval(timing, confidence)
    ratios = sorted(second / first for first, second in pairs)
    assert found.ratio == statistics.median(ratios)
    assert found.low <= found.ratio <= found.high
    assert found.pairs == len(pairs)
    if found.low == 0.0:
        assert enclosed(len(pairs), 1) < confidence
        assert found.high == math.inf
    else:
        ranks = [
            rank
            for rank in range(1, (len(pairs) + 1) // 2 + 1)
            if (ratios[rank - 1], ratios[-rank]) == (found.low, found.high)
        ]
        # with equal ratios several ranks give the same interval: the largest of them is at least the one meant
        assert any(enclosed(len(pairs), rank) >= confidence for rank in ranks)
        assert all(
            enclosed(len(pairs), rank + 1) < confidence or rank + 1 > (len(pairs) + 1) // 2 for rank in ranks[-1:]
        )


def samples(draw: random.Random, slow: float, count: int = 25, jitter: float = 0.03) -> Timing:
    """Steps of 100 ms as a machine with other work times them: drift, jitter, one call in eight interrupted."""
    first, second = [], []
    drift = 1.0
    for _ in range(count):
        drift *= math.exp(draw.gauss(0, 0.05))
        for times, factor in ((first, 1.0), (second, slow)):
            interrupted = 1 + (draw.expovariate(1) if draw.random() < 1 / 8 else 0)
            times.append(100 * drift * factor * math.exp(draw.gauss(0, jitter)) * interrupted)
    return Timing(tuple(first), tuple(second))


def test_coverage_under_drift_and_interruptions() -> None:
    draw = random.Random(7)
    intervals = [ratio_interval(samples(draw, 1.07)) for _ in range(400)]
    assert sum(found.low <= 1.07 <= found.high for found in intervals) >= 390
    assert statistics.stdev(found.ratio for found in intervals) < 0.02


def test_a_slow_down_of_ten_percent_is_seen_and_none_is_imagined() -> None:
    """The gate's verdict: red where the whole interval lies above the stored ratio by more than 3 percent."""
    draw = random.Random(11)
    stored = ratio_interval(samples(draw, 1.05, count=75)).ratio
    red = {
        slow: sum(ratio_interval(samples(draw, 1.05 * slow, count=75)).low > stored * 1.03 for _ in range(200))
        for slow in (1.0, 1.1)
    }
    assert red[1.0] == 0
    assert red[1.1] >= 196


def test_real_time_is_measured() -> None:
    def spin(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    begun = time.perf_counter()
    found = interleave(lambda: spin(0.004), lambda: spin(0.012), StoppingRule(9, most=0), warmup=1)
    passed_ms = (time.perf_counter() - begun) * 1e3
    assert min(found.first_ms) >= 4.0
    assert min(found.second_ms) >= 12.0
    # the pairs and one more of the warm-up took what they are said to take, and no time twice
    assert sum(found.first_ms) + sum(found.second_ms) <= passed_ms - 16.0 + 1e-6  # floats of a coarse clock


def test_a_device_is_timed_by_events_around_the_step() -> None:
    device = EventDevice()
    clock = module.event_clock(device.Event, device.synchronize)
    device.now_ms = 17.0
    assert clock(lambda: device.work(2.5)) == 2.5
    assert device.log == ["synchronize", "record", "work", "record", "wait"]


def test_timing_starts_when_the_devices_clock_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = EventDevice(), []
    clock = module.event_clock(device.Event, device.synchronize)
    monkeypatch.setattr(module, "clock_of", lambda _device: clock)

    def step() -> None:
        calls.append(1)
        device.work(1.0 + max(0, 12 - len(calls)))  # twelve slow calls

    assert module.alone(step, 4, "cuda") == (1.0,) * 4
    assert len(calls) == 1 + 15 + 4  # an untimed one, threes until two of them are alike, and those timed
    calls.clear()
    found = interleave(step, step, StoppingRule(3, most=0), warmup=2, device="cuda")
    assert found == Timing((1.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ([5.0] * 6, 2),
        ([5.0, 50.0, 5.0, 5.0, 5.0, 500.0], 2),  # medians
        ([5.0] * 3 + [4.8] * 3 + [4.75] * 3, 3),
        ([float(2**n) for n in range(60, 0, -1)], 1),  # so slow that the time is up
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0] * 10, 15),  # never
        ([0.0] * 6, 2),
    ],
)
def test_a_clock_settles_or_the_time_is_up(times: list[float], count: int) -> None:
    left = iter(times)
    assert module.settle(lambda: next(left)) == count


@pytest.mark.cuda
def test_cuda_is_waited_for() -> None:
    import torch

    big = torch.rand(4096, 4096, device="cuda")
    found = interleave(lambda: big @ big, lambda: [big @ big for _ in range(3)], StoppingRule(9, most=0), device="cuda")
    assert 2.0 < ratio_interval(found).ratio < 4.0


# --- what Linux counts of threads that wait for a core ----------------------------------------------------------------
