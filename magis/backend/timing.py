"""Latency of two steps as a ratio: interleaved timing, and an interval for the ratio that noise cannot move much.

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

See docs/notes/timing.md for how many pairs a verdict needs, and why OpenMP should wait passively.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from magis.backend import turns
from magis.results import RatioInterval

__all__ = ["CONFIDENCE", "Timing", "in_turns", "interleave", "ratio_interval"]

CONFIDENCE = 0.99
SLICE_MS = 3.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of each step by round; equal positions ran next to each other."""

    first_ms: tuple[float, ...]
    second_ms: tuple[float, ...]


def interleave(
    first: Callable[[], object],
    second: Callable[[], object],
    rounds: int,
    warmup: int = 2,
    device: torch.device | str = "cpu",
    *,
    width: float = math.inf,
    most: int | None = None,
    seconds: float = math.inf,
) -> Timing:
    """Time `first` and `second` in `rounds` pairs, one after the other, after `warmup` untimed calls of each.

    As long as the ratio's interval is wider than the share `width` of the ratio (0.04: 4%), more pairs follow, a
    third of `rounds` at a time, up to `most` in all (default: 3 x `rounds`) and until `seconds` have gone by: a quiet
    machine stops early, a busy one takes longer, a slow one ends with a wider interval. The garbage collector rests
    meanwhile; on CUDA each call ends with a synchronization.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    most = max(rounds, 3 * rounds if most is None else most)
    synchronize = _synchronizer(torch.device(device))
    for _ in range(warmup):
        first()
        second()
    with _collector_at_rest():
        pair = partial(_one_after_the_other, first, second, synchronize)
        return _collected(pair, rounds, width=width, most=most, seconds=seconds)


def in_turns(
    first: turns.Step,
    second: turns.Step,
    rounds: int,
    *,
    slice_ms: float = SLICE_MS,
    width: float = math.inf,
    most: int | None = None,
    seconds: float = math.inf,
) -> Timing:
    """Like `interleave`, but the steps of a pair go on in turn, about `slice_ms` milliseconds each: CPU only.

    What slows the machine down for longer than that slows both alike: the *ratio* varies several times less. The times
    themselves are those of steps that share caches with each other. One pair is run before the timed ones.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    most = max(rounds, 3 * rounds if most is None else most)
    with _collector_at_rest(), turns.Turns(first, second, slice_ms) as pairs:
        pairs.pair(0)
        return _collected(pairs.pair, rounds, width=width, most=most, seconds=seconds)


def _collected(
    pair: Callable[[int], tuple[float, float]], rounds: int, *, width: float, most: int, seconds: float
) -> Timing:
    """`rounds` pairs, the leader alternating, and more as long as the ratio is uncertain."""
    pairs: list[tuple[float, float]] = []
    begun = time.perf_counter_ns()
    wanted = rounds
    while True:
        while len(pairs) < wanted:
            pairs.append(pair(len(pairs) % 2))
        timing = Timing(tuple(times[0] for times in pairs), tuple(times[1] for times in pairs))
        if wanted >= most or _width(timing) <= width or time.perf_counter_ns() - begun >= seconds * 1e9:
            return timing
        wanted = min(most, wanted + max(1, rounds // 3))


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _one_after_the_other(
    first: Callable[[], object], second: Callable[[], object], synchronize: Callable[[], object], leader: int
) -> tuple[float, float]:
    """Milliseconds of one run of each, the `leader` (0 or 1) first."""
    if leader == 0:
        before = _once(first, synchronize)
        return before, _once(second, synchronize)
    after = _once(second, synchronize)
    return _once(first, synchronize), after


def _width(timing: Timing) -> float:
    """Width of the ratio's interval as a share of the ratio."""
    found = ratio_interval(timing)
    return (found.high - found.low) / found.ratio


def _once(step: Callable[[], object], synchronize: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter_ns()
    step()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e6


def _synchronizer(device: torch.device) -> Callable[[], object]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def ratio_interval(timing: Timing, confidence: float = CONFIDENCE) -> RatioInterval:
    """Median of the pairs' ratios second / first, and an interval that holds the true median with `confidence`.

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


def _rank(count: int, confidence: float) -> int:
    """The largest k for which the k-th smallest and k-th largest of `count` samples enclose the median; 0: none.

    The interval misses with twice the probability that a fair coin shows heads fewer than k times in `count`.
    """
    outcomes = 2**count
    tail, rank = 0, 0
    while rank < (count + 1) // 2:
        tail += math.comb(count, rank)
        # whole numbers throughout, but for the confidence itself
        if 2 * tail > (1 - confidence) * outcomes:
            break
        rank += 1
    return rank
