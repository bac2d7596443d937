"""Latency ratio of two steps, with an interval that is robust to noise, on a machine that may be busy.

Both steps run alternately in one process, whole (`interleave`) or a few milliseconds each (`in_turns`), so that a
slowdown of the machine affects both; the first one alternates, too. The ratio is the *median of the pairs' ratios*
with a distribution-free interval from order statistics (a sign-test interval): it only assumes independent pairs, and
a few interrupted pairs hardly change it. Compared on 31 runs of a 75 ms step (25 pairs of whole steps each, two busy
cores): standard deviation of the estimate over the 23 calmer runs, and over all:

    median of the pairs' ratios   0.014   0.037
    ratio of medians              0.017   0.194
    ratio of minima               0.023   0.043
    ratio of lower quartiles      0.022   0.092
    Hodges-Lehmann of the pairs   0.016   0.075

Pairs during which a thread of this process waited for a core are *disturbed*, and do not count. A single *look* (a
series of pairs) is not enough either: the addresses of buffers and the cores of threads shift all its ratios alike.
`agreed` combines two looks at newly made steps into one ratio, or says why the ratio is in doubt.

See docs/notes/timing.md for how many pairs a verdict needs, and why OpenMP should wait passively.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from magis.results import RatioInterval
from magis.runtime.measure import no_collection
from magis.runtime.time_slices import Step as TurningStep
from magis.runtime.time_slices import TimeSlices

# Time for which threads of this process waited for a core: it distinguishes a busy machine from a quiet one.
# Linux counts for every thread the nanoseconds in which it was ready and did not run. On a quiet machine the longest
# wait of a thread is 0.1% of a step's time, with one other busy process 40%, at load 8 60% and more. At such loads
# wall times are meaningless: an operator of two threads ends when the later thread got its core; and the scheduler
# may place the threads of one step on two cores and those of the other on one, for seconds: ratios of 0.1 and 10 were
# seen.

_THREADS = Path("/proc/self/task")


def waits(threads: Path = _THREADS) -> dict[str, int]:
    """Return the nanoseconds that each thread has been ready without a core so far; empty if the system does not count
    them."""
    found = {}
    if not threads.is_dir():
        return {}
    for thread in threads.iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_bytes().split()[1])
        except (OSError, ValueError, IndexError):  # the thread ended, or the system does not count
            continue
    return found


Clock: TypeAlias = Callable[[Callable[[], object]], float]
"""Calls a function once; returns its milliseconds."""

CONFIDENCE = 0.99
SLICE_MS = 3.0
STEADY, SETTLING_GROUPS, SETTLING_SECONDS = 0.02, 15, 10.0
"""Largest relative difference of medians under a steady clock, and the limits of waiting for a steady clock."""
MEASURING, DECIDING = (6, 8.0), (12, 20.0)
"""Limits, as a multiple of the rounds and in seconds: for a ratio that is only shown, and for one with `bounds`."""
BRISK_SECONDS = 1.5
"""Seconds for which short steps may be timed, however many pairs that makes."""
BUSY = 0.1
"""Share of a pair's time for which a thread of the process may wait for a core (quiet: 0.001; one busy neighbour:
0.4)."""
HOPELESS, HOPE = 0.1, 1 / 3
"""Timing ends early if fewer than the first share of the pairs are undisturbed after the second share of the
seconds."""
WIDEST = 0.1
"""Largest width, as a share of the ratio, of an interval on which two looks may agree."""
FEWEST = 8
"""Least number of pairs that give an interval at confidence 0.99."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each step by round; equal positions belong to one pair."""

    first_ms: tuple[float, ...]
    second_ms: tuple[float, ...]
    waited: tuple[float, ...] = field(default=(), compare=False)
    """Share of each pair's time for which a thread of the process waited for a core; empty if not known."""

    def undisturbed(self) -> Timing:
        """Return the pairs during which no thread of the process waited long for a core."""
        if not self.waited:
            return self
        kept = [index for index, share in enumerate(self.waited) if share <= BUSY]
        return Timing(
            tuple(self.first_ms[index] for index in kept),
            tuple(self.second_ms[index] for index in kept),
            tuple(self.waited[index] for index in kept),
        )


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Rule by which timing ends: `rounds` undisturbed pairs, then a third of that at a time until the ratio is certain.

    With `bounds` the ratio is certain if no bound lies in its interval, without bounds if the interval is at most the
    share `width` of the ratio. There are at most `most` pairs, and none after `seconds`; with bounds, which decide a
    verdict, default limits are higher. Timing ends early on a machine that stays busy.
    """

    rounds: int
    bounds: tuple[float, ...] = ()
    width: float = 0.04
    most: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, not {self.rounds}")

    def ends(self, timing: Timing, seconds: float) -> bool:
        """Return True if the pairs of `timing`, which took `seconds` in all, are enough."""
        most, longest = DECIDING if self.bounds else MEASURING
        longest = longest if self.seconds is None else self.seconds
        undisturbed = timing.undisturbed()
        done, count = len(timing.first_ms), len(undisturbed.first_ms)
        if seconds >= longest or (self.most is not None and done >= self.most):
            return True
        if count < HOPELESS * done and seconds >= HOPE * longest:
            return True
        if count < self.rounds:
            return False
        if self.most is None and count >= most * self.rounds and seconds >= min(BRISK_SECONDS, longest):
            return True
        found = ratio_interval(undisturbed)
        if self.bounds:
            return not any(found.low <= bound <= found.high for bound in self.bounds)
        return found.high - found.low <= self.width * found.ratio


ROUGHLY = StoppingRule(8, width=0.1, seconds=2.5)
"""Rule for a ratio that is only shown: as few pairs as give an interval."""


def interleave(
    first: Callable[[], object],
    second: Callable[[], object],
    patience: StoppingRule,
    warmup: int = 2,
    device: torch.device | str = "cpu",
) -> Timing:
    """Time `first` and `second` in pairs, one after the other, after `warmup` untimed calls of each. The garbage
    collector is off meanwhile; on CUDA, calls are timed by events, once the GPU's clock rate is steady."""
    clock = clock_of(torch.device(device))
    for _ in range(warmup):
        first()
        second()

    def pair(leader: int) -> tuple[float, float]:
        """Return the milliseconds of one run of each step, the `leader` (0 or 1) first."""
        if leader == 0:
            return clock(first), clock(second)
        after = clock(second)
        return clock(first), after

    with no_collection():
        if clock is not host_clock:
            settle(lambda: sum(pair(0)))
        return _time_pairs(pair, patience, waits if clock is host_clock else dict[str, int])


def in_turns(first: TurningStep, second: TurningStep, patience: StoppingRule, *, slice_ms: float = SLICE_MS) -> Timing:
    """Time pairs like `interleave`, but in turns of about `slice_ms` milliseconds, on the CPU only. A slowdown of the
    machine that is longer than a turn affects both steps alike: the *ratio* varies several times less. The times are
    those of steps that share caches with each other. One untimed pair runs first."""
    with no_collection(), TimeSlices(first, second, slice_ms) as pairs:
        pairs.pair(0)
        return _time_pairs(pairs.pair, patience, waits)


def _time_pairs(
    pair: Callable[[int], tuple[float, float]], patience: StoppingRule, waits: Callable[[], dict[str, int]]
) -> Timing:
    """Time pairs until the stopping rule ends, with alternating leaders."""
    pairs: list[tuple[float, float]] = []
    waited: list[float] = []
    begun = time.perf_counter_ns()
    before = waits()
    while True:
        wanted = len(pairs) + (max(1, patience.rounds // 3) if pairs else patience.rounds)
        while len(pairs) < wanted:
            pairs.append(pair(len(pairs) % 2))
            after = waits()
            # the thread that waited longest; none is known where the system does not count
            longest = max((ns - before.get(name, 0) for name, ns in after.items()), default=0)
            waited.append(min(1.0, longest / 1e6 / max(sum(pairs[-1]), 1e-6)))  # it may have waited between steps, too
            before = after
        timing = Timing(tuple(times[0] for times in pairs), tuple(times[1] for times in pairs), tuple(waited))
        if patience.ends(timing, (time.perf_counter_ns() - begun) / 1e9):
            return timing


def alone(step: Callable[[], object], rounds: int, device: torch.device | str = "cpu") -> tuple[float, ...]:
    """Return the milliseconds of each of `rounds` calls, after an untimed one; timed as by `interleave`."""
    clock = clock_of(torch.device(device))
    step()
    with no_collection():
        if clock is not host_clock:
            settle(lambda: clock(step))
        return tuple(clock(step) for _ in range(rounds))


def host_clock(step: Callable[[], object]) -> float:
    """Return the milliseconds of a call by the host's clock."""
    start = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - start) / 1e6


def event_clock(make_event: Callable[[], Any], synchronize: Callable[[], object]) -> Clock:
    """Return a clock that measures the milliseconds between two events on the device's current stream, around a call.
    The device is idle when the first event is recorded. Time of the host to enqueue work counts only if the device
    waits for it. Other streams count as far as the current stream waits for them."""

    def clock(step: Callable[[], object]) -> float:
        start, end = make_event(), make_event()
        synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return clock


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which steps on the device are timed."""
    if device.type != "cuda":
        return host_clock
    return event_clock(partial(torch.cuda.Event, enable_timing=True), partial(torch.cuda.synchronize, device))


def settle(once: Callable[[], float], seconds: float = SETTLING_SECONDS) -> int:
    """Call `once` (which returns milliseconds) until the medians of two successive groups of three differ by at most
    2%. An idle GPU raises its clock rate over its first steps. There are at most 15 groups, and none after `seconds`
    (of the calls' own time); returns their number."""
    before, spent = -1.0, 0.0
    for count in range(1, SETTLING_GROUPS + 1):
        times = [once() for _ in range(3)]
        spent += sum(times) / 1e3
        median = statistics.median(times)
        if (count > 1 and abs(median - before) <= STEADY * before) or spent >= seconds:
            return count
        before = median
    return SETTLING_GROUPS


def ratio_interval(timing: Timing, confidence: float = CONFIDENCE) -> RatioInterval:
    """Return the median of the pairs' ratios second / first, and an interval that contains it with `confidence`.

    The interval runs from the k-th smallest to the k-th largest ratio, k as large as the sign test allows; from 0 to
    infinity if there are too few pairs (fewer than 8 at 0.99). The result is deterministic. Raises ValueError without a
    pair or for a confidence outside (0, 1).
    """
    if not timing.first_ms or len(timing.first_ms) != len(timing.second_ms):
        raise ValueError(f"pairs wanted, not {len(timing.first_ms)} and {len(timing.second_ms)} samples")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    ratios = sorted(second / first for first, second in zip(timing.first_ms, timing.second_ms, strict=True))
    count = len(ratios)
    # The largest k for which the k-th smallest and k-th largest ratio enclose the median; 0: none. The interval misses
    # with twice the probability that a fair coin shows heads fewer than k times in `count`.
    allowed = (1 - Fraction(str(confidence))) * 2**count
    tail, rank = 0, 0
    while rank < (count + 1) // 2:
        tail += math.comb(count, rank)
        if 2 * tail > allowed:  # exact: floats end at 1024 pairs
            break
        rank += 1
    low, high = (ratios[rank - 1], ratios[count - rank]) if rank else (0.0, math.inf)
    return RatioInterval(statistics.median(ratios), low, high, count)


def agreed(first: Timing, second: Timing | None, bounds: tuple[float, ...] = ()) -> RatioInterval:
    """Return the ratio on which two looks agree: the mean of their medians, with an interval that contains both
    intervals.

    Effects that differ between processes are equal in all pairs of a look: more pairs would not reveal them. ``second``
    is None if a second look was not needed. A ratio is in ``doubt`` if the machine left too few pairs undisturbed, or
    if the two intervals differ too much, unless both lie above every bound.
    """
    looks = [look for look in (first, second) if look is not None]
    for look in looks:
        if is_too_busy(look):
            share = statistics.median(look.waited)
            why = f"the machine is too busy: threads waited for a core {share:.0%} of the time; let it do nothing else"
            return replace(ratio_interval(look), doubt=why)
    seen = [ratio_interval(look.undisturbed() if look.undisturbed().first_ms else look) for look in looks]
    ratio, pairs = statistics.mean(each.ratio for each in seen), sum(each.pairs for each in seen)
    low, high = min(each.low for each in seen), max(each.high for each in seen)
    wide = math.isfinite(high) and high - low > WIDEST * ratio and not (bounds and low > max(bounds))
    doubt = ""
    if second is not None and wide:
        told = ", ".join(f"{each.ratio:.3f} [{each.low:.3f}, {each.high:.3f}]" for each in seen)
        doubt = f"the machine is too busy: two looks at the ratio do not repeat each other closely enough ({told})"
    return RatioInterval(ratio, low, high, pairs, doubt)


def is_too_busy(timing: Timing) -> bool:
    """Return True if enough pairs were timed, but too few of them undisturbed to know a ratio."""
    return len(timing.first_ms) >= FEWEST > len(timing.undisturbed().first_ms)
