"""Whether running a step's cases takes too long, found out by one step under a deadline.

Half-precision kernels of a CPU crawl: a step that takes half a second in float32 takes minutes in float16, and a case
runs some fifty of them. So one eager step is timed before anything else runs, operator by operator, and given up as
soon as it is known to be too slow. What counts is the computing of this thread, not the time that goes by: what runs
for real must not depend on what else the machine does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from magis.backend.steps import Step
from magis.backend.turns import Watched

__all__ = ["RUNNING_SECONDS", "STEPS", "running_seconds", "step_seconds", "too_slow"]

STEPS = 50
"""Steps that a case runs, of eager and of its own together: to compare numbers, to measure memory, to time."""
RUNNING_SECONDS, LEAST_SECONDS = 600.0, 60.0
"""What running a case may take: without a cap in seconds, and at least."""
COLD = 3
"""Times as long a first step may take: it builds kernels and maps memory."""

Clock = Callable[[], float]


class _OverrunError(Exception):
    """The deadline has gone by."""


class _Deadline:
    """What is called between operators: raises once the time is up."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def __call__(self, _gradients: object = None) -> None:
        if self._clock() > self._end:
            raise _OverrunError

    @contextmanager
    def rest(self) -> Iterator[None]:
        yield


def running_seconds(seconds: float | None) -> float:
    """How long running a case may take whose search has this cap, or none."""
    return RUNNING_SECONDS if seconds is None else max(LEAST_SECONDS, seconds)


def too_slow(make: Callable[[], Step], seconds: float, clock: Clock = time.thread_time) -> str:
    """Why the cases of a step are not run in so many seconds, in words; empty if they are.

    A step that fails is not too slow: whoever runs it says what is wrong. The generator is left as it was.
    """
    each = seconds / STEPS
    state = torch.get_rng_state()
    try:
        found = step_seconds(make(), each, clock)
    except Exception:  # noqa: BLE001  (said where the step is run for its own sake)
        return ""
    finally:
        torch.set_rng_state(state)
    if found <= each:
        return ""
    return f"a step takes more than {each:.3g} s here, running a case {STEPS} of them, and may take {seconds:.3g} s"


def step_seconds(step: Step, most: float, clock: Clock = time.thread_time) -> float:
    """Seconds of one step, if these are at most ``most``, else infinite. A slow first step gets a second chance."""
    for deadline in (COLD * most, most):
        step.prepare()
        begun = clock()
        try:
            with Watched(_Deadline(deadline, clock)):
                step.run()
        except _OverrunError:
            return math.inf
        if clock() - begun <= most:
            return clock() - begun
    return math.inf
