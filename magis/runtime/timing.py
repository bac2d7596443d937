"""Latency ratio of two steps, with an interval that noise cannot move much, on a machine that may be busy.

Both steps run alternately in one process, whole (`interleave`) or a few milliseconds each (`in_turns`), so that what
slows the machine down slows both; which one goes first alternates too. The ratio is the *median of the pairs' ratios*
with a distribution-free interval from order statistics (a sign-test interval): it assumes nothing but independent
pairs, and a few pairs that were interrupted do not move it. Compared on 31 runs of a 75 ms step (25 pairs of whole
steps each, two busy cores): standard deviation of the estimate over the 23 calmer runs, and over all:

    median of the pairs' ratios   0.014   0.037
    ratio of medians              0.017   0.194
    ratio of minima               0.023   0.043
    ratio of lower quartiles      0.022   0.092
    Hodges-Lehmann of the pairs   0.016   0.075

Pairs during which a thread of ours waited for a core are no pairs of equals (`magis.runtime.timing`): only the others
count. And one look is not believed: what makes a process's ratio differ from another's (where buffers lie, on which
cores threads stay) holds for all its pairs alike. `agreed` makes one ratio of two looks at steps made anew, or says why
there is none.

See docs/notes/timing.md for how many pairs a verdict needs, and why OpenMP should wait passively.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
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

# How long threads of this process waited for a core: what tells a busy machine from a quiet one.
# Linux counts for every thread the nanoseconds in which it could have run and did not. On a quiet machine the
# thread that waits most does so for 0.1% of a step's time, beside one other busy process for 40%, at load 8 for 60%
# and more. From there on wall times tell little of a step: an operator of two threads ends when the later one got
# its core, so a step takes as long as it has parallel operators to wait for; and the threads of two steps in turn
# are placed each by itself, those of one on two cores, say, and those of the other on one, for seconds on end:
# ratios of 0.1 and 10 were seen.

_THREADS = Path("/proc/self/task")


def waits(threads: Path = _THREADS) -> dict[str, int]:
    """Return the nanoseconds that each thread has been ready without a core so far. Empty where the system does not
    count them."""
    found = {}
    if not threads.is_dir():
        return {}
    for thread in threads.iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_bytes().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            continue
    return found


def longest_wait(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the nanoseconds of the thread that waited most; 0 where nothing is known."""
    return max((waited - before.get(name, 0) for name, waited in after.items()), default=0)


Clock: TypeAlias = Callable[[Callable[[], object]], float]
"""Call something once; return its milliseconds."""

CONFIDENCE = 0.99
SLICE_MS = 3.0
STEADY, SETTLING_GROUPS, SETTLING_SECONDS = 0.02, 15, 10.0
"""Largest difference of medians under a steady clock, and the limits of waiting for it."""
MEASURING, DECIDING = (6, 8.0), (12, 20.0)
"""Limits, as a multiple of the rounds and as seconds. The first pair is to know a ratio, the second to decide by it."""
BRISK_SECONDS = 1.5
"""Time for which short steps may be timed, however many pairs that makes."""
BUSY = 0.1
"""Share of a pair's time for which a thread of ours may wait for a core (quiet: 0.001; one busy neighbour: 0.4)."""
HOPELESS, HOPE = 0.1, 1 / 3
"""A machine is given up that leaves fewer pairs undisturbed than the first share, in the second of the seconds."""
WIDEST = 0.1
"""Width, as a share of the ratio, of the widest interval that two looks may agree on; wider ones tell nothing."""
FEWEST = 8
"""Number of pairs that give an interval at 0.99."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each step by round; equal positions ran next to each other."""

    first_ms: tuple[float, ...]
    second_ms: tuple[float, ...]
    waited: tuple[float, ...] = field(default=(), compare=False)
    """Share of each pair's time for which one of our threads waited for a core; empty: not known."""

    def undisturbed(self) -> Timing:
        """Return the pairs during which no thread of ours waited long for a core."""
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

    With `bounds` the ratio is certain enough when none of them lies in its interval, without when the interval is at
    most the share `width` of the ratio. There are at most `most` pairs, and no more after `seconds`; with bounds, where
    something is decided, the limits are higher. A machine that stays busy is given up before.
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
        """Return True if these pairs, which took so many seconds, are enough."""
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
    collector rests meanwhile; on CUDA each call is timed by events of the device, once its clock is steady."""
    clock = clock_of(torch.device(device))
    for _ in range(warmup):
        first()
        second()
    pair = partial(_time_pair, first, second, clock)
    with no_collection():
        if clock is not host_clock:
            settle(lambda: sum(pair(0)))
        return _time_pairs(pair, patience, waits if clock is host_clock else dict[str, int])


def in_turns(first: TurningStep, second: TurningStep, patience: StoppingRule, *, slice_ms: float = SLICE_MS) -> Timing:
    """Time pairs like `interleave`, but the steps go on in turn, about `slice_ms` milliseconds each: CPU only.

    What slows the machine down for longer than that slows both alike: the *ratio* varies several times less. The times
    themselves are those of steps that share caches with each other. One pair is run before the timed ones.
    """
    with no_collection(), TimeSlices(first, second, slice_ms) as pairs:
        pairs.pair(0)
        return _time_pairs(pairs.pair, patience, waits)


def _time_pairs(
    pair: Callable[[int], tuple[float, float]], patience: StoppingRule, waits: Callable[[], dict[str, int]]
) -> Timing:
    """Time pairs until patience ends, the leader alternating."""
    pairs: list[tuple[float, float]] = []
    waited: list[float] = []
    begun = time.perf_counter_ns()
    before = waits()
    while True:
        wanted = len(pairs) + (max(1, patience.rounds // 3) if pairs else patience.rounds)
        while len(pairs) < wanted:
            pairs.append(pair(len(pairs) % 2))
            after = waits()
            waited.append(longest_wait(before, after) / 1e6 / max(sum(pairs[-1]), 1e-6))
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


def _time_pair(
    first: Callable[[], object], second: Callable[[], object], clock: Clock, leader: int
) -> tuple[float, float]:
    """Return the milliseconds of one run of each, the `leader` (0 or 1) first."""
    if leader == 0:
        return clock(first), clock(second)
    after = clock(second)
    return clock(first), after


def host_clock(step: Callable[[], object]) -> float:
    """Return the milliseconds of a call by the host's clock."""
    start = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - start) / 1e6


def event_clock(make_event: Callable[[], Any], synchronize: Callable[[], object]) -> Clock:
    """Return a clock of the milliseconds between two events on the device's current stream, around a call.

    Nothing else is on the device when the first event is recorded. What the host takes to hand out work counts only
    where the device has to wait for it. Other streams count as far as the current one waits for them.
    """

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
    """Return the clock that steps on the device are timed by."""
    if device.type != "cuda":
        return host_clock
    return event_clock(partial(torch.cuda.Event, enable_timing=True), partial(torch.cuda.synchronize, device))


def settle(once: Callable[[], float], seconds: float = SETTLING_SECONDS) -> int:
    """Call `once` (which returns milliseconds) until the medians of two successive threes differ by 2% at most.

    A GPU that was idle raises its clock over its first steps. There are at most 15 threes, and no more after `seconds`
    (of the calls' own time); returns how many there were.
    """
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
    """Return the median of the pairs' ratios second / first, and an interval that holds it with `confidence`.

    The interval runs from the k-th smallest to the k-th largest ratio, k as large as the sign test allows. Where
    even the extremes do not reach the confidence (fewer than 8 pairs at 0.99), nothing is known: 0 to infinity.
    The same samples give the same answer. Raises ValueError without a pair or for a confidence outside (0, 1).
    """
    if not timing.first_ms or len(timing.first_ms) != len(timing.second_ms):
        raise ValueError(f"pairs wanted, not {len(timing.first_ms)} and {len(timing.second_ms)} samples")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    ratios = sorted(second / first for first, second in zip(timing.first_ms, timing.second_ms, strict=True))
    count = len(ratios)
    rank = _rank(count, confidence)
    low, high = (ratios[rank - 1], ratios[count - rank]) if rank else (0.0, math.inf)
    return RatioInterval(statistics.median(ratios), low, high, count)


def agreed(first: Timing, second: Timing | None, bounds: tuple[float, ...] = ()) -> RatioInterval:
    """Return the ratio that two looks agree on: between their medians, with an interval that holds both of theirs.

    What makes a process's ratio differ from another's makes all pairs of a look alike: more pairs would not tell.

    ``second`` is None where there was no use for one. A ratio is in ``doubt`` if the machine left too few pairs
    undisturbed, or if the looks do not repeat each other closely enough, unless both lie above every bound.
    """
    looks = [look for look in (first, second) if look is not None]
    for look in looks:
        if is_too_busy(look):
            share = statistics.median(look.waited)
            why = f"the machine is too busy: threads waited for a core {share:.0%} of the time"
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
    """Return True if enough pairs were timed, but too few were undisturbed to know a ratio."""
    return len(timing.first_ms) >= FEWEST > len(timing.undisturbed().first_ms)


def _rank(count: int, confidence: float) -> int:
    """Return the largest k for which the k-th smallest and k-th largest of `count` samples enclose the median; 0: none.

    The interval misses with twice the probability that a fair coin shows heads fewer than k times in `count`.
    """
    allowed = (1 - Fraction(str(confidence))) * 2**count
    tail, rank = 0, 0
    while rank < (count + 1) // 2:
        tail += math.comb(count, rank)
        if 2 * tail > allowed:  # exact: floats end at 1024 pairs
            break
        rank += 1
    return rank
