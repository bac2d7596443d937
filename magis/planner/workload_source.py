"""Sources of workloads, time limits for running a step, cached values, and the latency of a rank's step in program
order, whose collectives overlap its operators."""

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
"""Steps that a case runs, eager's and planned ones together, for comparison, memory and timing."""
RUNNING_SECONDS, LEAST_SECONDS = 600.0, 60.0
"""Default seconds that running a case may take, and the least that a time limit leaves for it."""
COLD = 3
"""Factor by which a first step may take longer, since it compiles kernels and maps memory."""

Clock = Callable[[], float]


class _OverrunError(Exception):
    """Raised between operators once the deadline has passed."""


class _Deadline:
    """Callback between operators that raises _OverrunError once the time is up."""

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
    """Return the seconds that running a case may take, given the time limit of its search (None: no limit)."""
    return RUNNING_SECONDS if seconds is None else max(LEAST_SECONDS, seconds)


def too_slow(make: Callable[[], Step], seconds: float, clock: Clock = time.thread_time) -> str:
    """Return the reason why a case's steps take longer than ``seconds``; empty if they do not, or if the step fails
    (running the case then reports the error). The CPU generator's state is restored."""
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
    """Return the reason not to try a step of ``expected`` seconds per step; empty if a trial is worthwhile."""
    if expected <= COLD * seconds / STEPS:
        return ""
    about = float(f"{expected:.2g}")
    return f"a step would take about {about:g} s here, running a case {STEPS} of them, and may take {seconds:.3g} s"


def step_seconds(step: Step, most: float, clock: Clock = time.thread_time) -> float:
    """Return the seconds of one step, or infinity if they exceed ``most``. A slow first step is repeated once."""
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
    """Source of a workload: a factory (seed -> workload), and the settings of the case that shape the workload."""

    name: str
    make: Callable[[int], Workload]
    dtype: str
    """Data type to which all floating-point tensors are converted; empty: each keeps its own."""
    device: str
    seed: int
    of_user: bool = False
    """True if the factory is the user's, and may need real tensors."""
    reuse: bool = True
    """True if an operator may run in place on an input that dies there."""
    running_seconds: float = RUNNING_SECONDS
    """Seconds that running a case may take; slower steps are simulated."""
    seeded: bool = True
    """True if generators are seeded before capture; else they keep their state."""
    keeps_results: bool = False
    """True if tensors that the forward stores in attributes are outputs of the step."""
    accumulate: int = 1
    """Micro-batches per update."""

    def start(self) -> None:
        """Seed the generators for the start of a step, if the source is ``seeded``."""
        if self.seeded:
            seed_all(self.seed)


def own_dtype(workload: Workload) -> str:
    """Return the dtype of the first floating-point parameter, else of the first such input, else "float32"."""
    for tensor in (*workload.module.parameters(), *workload.inputs):
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def conversion_changes(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Return True if converting a module to a dtype changes any real (not hollow) parameter or buffer."""
    tensors = (*module.parameters(), *module.buffers())
    return any(each.is_floating_point() and each.dtype != dtype and type(each.data) is torch.Tensor for each in tensors)


# Helpers for several kinds of cases.

_Made = TypeVar("_Made")


class Memo:
    """Cache of values that the cases of one model share."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Any] = {}

    def get(self, key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
        """Return the cached value of a key; ``make`` is called for a new key only."""
        if key not in self._made:
            self._made[key] = make()
        found: _Made = self._made[key]
        return found


def sends(graph: Graph) -> bool:
    """Return True if the graph has collectives that can overlap its operators."""
    return any(op.target in BESIDE for op in graph.ops)


def in_order_ns(graph: Graph, costs: Costs) -> int:
    """Return the latency in ns of a step in program order without recomputation. Collectives are enqueued in order,
    each as far ahead of its first reader as possible, as in `fully_shard`."""
    problem = compile_problem(graph, costs).problem
    order, flags = np.arange(problem.n_nodes, dtype=np.int32), np.full(problem.n_storages, KEEP, dtype=np.int8)
    return evaluate(problem, order, flags).latency_ns
