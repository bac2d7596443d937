"""Where a workload comes from, whether running its step takes too long, and values that are made once; the latency of a
rank's step as it was captured, whose messages run beside its operators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from magis.capture import Workload
from magis.graph import BESIDE, Graph
from magis.ops.generators import seed_all
from magis.runtime.steps import Step
from magis.runtime.time_slices import Watched
from magis.simulate.compiled_problem import Costs, compile_problem
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import KEEP

STEPS = 50
"""Number of steps that a case runs, of eager and of its own together: to compare numbers, to measure memory, to
time."""
RUNNING_SECONDS, LEAST_SECONDS = 600.0, 60.0
"""Seconds that running a case may take: without a cap, and at least."""
COLD = 3
"""Factor by which a first step may take longer: it builds kernels and maps memory."""

Clock = Callable[[], float]


class _OverrunError(Exception):
    """Raised once the deadline has gone by."""


class _Deadline:
    """Callable between operators that raises once the time is up."""

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
    """Return the seconds that running a case may take whose search has this cap, or none."""
    return RUNNING_SECONDS if seconds is None else max(LEAST_SECONDS, seconds)


def too_slow(make: Callable[[], Step], seconds: float, clock: Clock = time.thread_time) -> str:
    """Say why the cases of a step are not run in so many seconds; empty if they are. A step that fails is not too
    slow: whoever runs it says what is wrong. The generator is left as it was."""
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


def expected_too_slow(expected: float, seconds: float) -> str:
    """Say the same of a step that would take so many seconds, which nobody has run; empty if it is worth a try."""
    if expected <= COLD * seconds / STEPS:
        return ""
    about = float(f"{expected:.2g}")
    return f"a step would take about {about:g} s here, running a case {STEPS} of them, and may take {seconds:.3g} s"


def step_seconds(step: Step, most: float, clock: Clock = time.thread_time) -> float:
    """Return the seconds of one step, if these are at most ``most``, else infinity. A slow first step gets a second
    chance."""
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


@dataclass(frozen=True)
class Source:
    """Source of a workload: a recipe (seed -> workload), and the case's settings that shape it."""

    name: str
    make: Callable[[int], Workload]
    dtype: str
    """Data type that every floating-point tensor is converted to; empty: each stays as it was built."""
    device: str
    seed: int
    of_user: bool = False
    """True if a user wrote the recipe, which may then do on real tensors what fake ones cannot."""
    reuse: bool = True
    """True if an operator may take over the memory of an input that dies with it."""
    running_seconds: float = RUNNING_SECONDS
    """Seconds that running a case may take; what takes longer is simulated."""
    seeded: bool = True
    """True if the step is captured with generators seeded so; else with these as they are."""
    keeps_results: bool = False
    """True if tensors that the forward leaves in attributes are results of the step."""

    def start(self) -> None:
        """Set the generators as they are when the step begins."""
        if self.seeded:
            seed_all(self.seed)


def own_dtype(workload: Workload) -> str:
    """Return the data type of the first floating-point parameter, else of such an input, else float32."""
    for tensor in (*workload.module.parameters(), *workload.inputs):
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def conversion_changes(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return True if converting a module to a data type would change tensors that have memory behind them."""
    tensors = (*module.parameters(), *module.buffers())
    return any(each.is_floating_point() and each.dtype != dtype and type(each.data) is torch.Tensor for each in tensors)


# Small things that several kinds of cases need: statistics of timings, and what is made once.

_Made = TypeVar("_Made")


class Memo:
    """Values that one case has made and the next ones use as well."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Any] = {}

    def get(self, key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """Return what ``make`` has made under this key; it is called the first time only."""
        if key not in self._made:
            self._made[key] = make()
        found: _Made = self._made[key]
        return found


def sends(graph: Graph) -> bool:
    """Return True if there are messages that can run beside the operators."""
    return any(op.target in BESIDE for op in graph.ops)


def in_order_ns(graph: Graph, costs: Costs) -> int:
    """Return the nanoseconds of a step in program order that recomputes nothing. Each message is sent ahead of its
    first reader, where that is possible, and not before that of the one before it, as `fully_shard` does."""
    problem = compile_problem(graph, costs).problem
    order, flags = np.arange(problem.n_nodes, dtype=np.int32), np.full(problem.n_storages, KEEP, dtype=np.int8)
    return evaluate(problem, order, flags).latency_ns
