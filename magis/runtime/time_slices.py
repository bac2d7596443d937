"""Two steps that run in turns of some milliseconds each, so that a machine's changing speed affects both alike.

A shared machine's speed drifts by a tenth and more within tenths of a second. Steps that run one after the other run at
different speeds, and their ratio varies as much; steps that take turns every few milliseconds run at equal speed.
Measured on such a machine with a step of 0.3 s (`docs/notes/timing.md`): the standard deviation of one pair's ratio
falls from 10% to 2%, which is worth twenty times as many pairs.

The first step runs in the calling thread and the second in another thread; both call ``turn`` between operators, and
hand over when their slice is used up. Only one of them runs at any time, and only its clock. Generated code calls
``turn`` after every operator; eager mode after every torch function and before every node of the backward
(``Watched``), which does not change what runs: under a *dispatch* mode, for instance, the backward would copy gradients
that it otherwise passes on. Caches filled by the other step slow down both alike, so only the *ratio* is meaningful:
the times are somewhat longer than those of undisturbed steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor
from torch.overrides import TorchFunctionMode

from magis.ops.eager_only import layers_as_eager

_FRAME_SLOTS = 1 << 15
"""Stack slots of a frame that gets a memory chunk of its own; half of the chunk, 256 KiB, is left to calls inside."""


class TimeSlice:
    """The turns of one step: a call between operators waits for the step's next turn once the slice is used up."""

    def __init__(self, baton: _Baton, which: int, slice_ns: float) -> None:
        self.total_ns = 0
        self._baton = baton
        self._which = which
        self._slice_ns = slice_ns
        self._since = 0

    def __call__(self, _gradients: object = None) -> None:
        if time.perf_counter_ns() - self._since >= self._slice_ns:
            self._stop()
            self._baton.hand_over(self._which)
            self._since = time.perf_counter_ns()

    @property
    def spent_ns(self) -> int:
        """Nanoseconds that the step has run, without the other step's turns; valid during a turn only."""
        return self.total_ns + time.perf_counter_ns() - self._since

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Stop the step's clock in the block."""
        self._stop()
        yield
        self._since = time.perf_counter_ns()

    def run(self, step: Step) -> None:
        """Run the whole step, starting with its first turn."""
        try:
            self._baton.wait(self._which)
            self._since = time.perf_counter_ns()
            _with_room(step, self)
            self._stop()
        finally:
            self._baton.finish(self._which)

    def _stop(self) -> None:
        self.total_ns = self.spent_ns


Step = Callable[[TimeSlice], object]
"""Runs a step that calls the turn between its operators."""


class TimeSlices:
    """Context manager that runs pairs of two steps in turns; it owns a thread."""

    def __init__(self, first: Step, second: Step, slice_ms: float) -> None:
        self._steps = (first, second)
        self._slice_ns = slice_ms * 1e6
        self._total_ns = [0, 0]
        self._baton = _Baton(0)
        self._worker = _Worker()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._baton.finish(0)  # an interrupt may have kept the pair from doing so
        self._worker.close()

    def pair(self, leader: int) -> tuple[float, float]:
        """Run each step once, the `leader` (0 or 1) first; return the milliseconds of both. Raises what a step
        raises."""
        # turns in proportion to the steps' times so far, so that both end at about the same time
        first, second = self._total_ns
        share = second / (first + second) if first and second else 0.5
        slices = 2 * (1 - share) * self._slice_ns, 2 * share * self._slice_ns
        baton = self._baton = _Baton(leader)
        turns = tuple(TimeSlice(baton, which, slice_ns) for which, slice_ns in enumerate(slices))
        self._worker.start(partial(turns[1].run, self._steps[1]))
        try:
            turns[0].run(self._steps[0])
        finally:  # also after an interrupt, the other thread runs to its end
            baton.finish(0)
            error = self._worker.end()
        if error is not None:
            raise error
        for which, turn in enumerate(turns):
            self._total_ns[which] += turn.total_ns
        return turns[0].total_ns / 1e6, turns[1].total_ns / 1e6


class Between(Protocol):
    """A callable that runs between operators, such as a turn."""

    def __call__(self, _gradients: object = None) -> None: ...

    def rest(self) -> AbstractContextManager[None]:
        """Exclude the block from the step's time."""


class Watched(TorchFunctionMode):
    """Function mode that calls ``turn`` after every torch function and before every node of a backward."""

    def __init__(self, turn: Between) -> None:
        super().__init__()
        self._turn = turn
        self._layers = ExitStack()

    def __enter__(self) -> Self:
        self._layers.enter_context(layers_as_eager())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._layers.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            with self._turn.rest():
                for node in _inner_nodes(args[0]):
                    node.register_prehook(self._turn)
        result = func(*args, **(kwargs or {}))
        self._turn()
        return result


class _Worker:
    """A thread that lives as long as the pairs, with the thread-local state of OpenMP and operators. An interrupt may
    hit the main thread anywhere, also inside of Python's own locks, futures and executors, which then stay locked for
    good. Hence a daemon thread, and queues whose operations are single calls."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="magis-turns", daemon=True).start()

    def start(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def end(self) -> BaseException | None:
        """Wait for the job to end; return the exception that it raised, or None."""
        return self._ends.get()

    def close(self) -> None:
        self._jobs.put(None)
        self._ends.get()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  (raised again where the pair is waited for)
                self._ends.put(error)
            else:
                self._ends.put(None)
        self._ends.put(None)


class _Baton:
    """The right to run: one of two threads has it, until it hands over or ends."""

    def __init__(self, leader: int) -> None:
        self._turns: tuple[SimpleQueue[None], SimpleQueue[None]] = (SimpleQueue(), SimpleQueue())
        self._done = [False, False]
        self._turns[leader].put(None)

    def wait(self, which: int) -> None:
        self._turns[which].get()

    def hand_over(self, which: int) -> None:
        if not self._done[1 - which]:
            self._turns[1 - which].put(None)
            self._turns[which].get()

    def finish(self, which: int) -> None:
        """Let the other thread run to its end; may be called again."""
        self._done[which] = True
        self._turns[1 - which].put(None)


def _inner_nodes(result: Tensor) -> Iterator[Any]:
    """Yield the nodes of the backward except its leaves, which outlive the step."""
    seen = set()
    stack = [result.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            yield node
            stack.extend(following for following, _ in node.next_functions)


def _with_room(step: Step, turn: TimeSlice) -> object:
    """Call `step` with stack memory for Python's own frames. Python maps frame memory in chunks of 16 KiB when a call
    does not fit any more, and unmaps them when the call returns: a step at the end of a chunk maps and unmaps memory
    for every operator, tens of milliseconds in all."""
    return step(turn)


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=_FRAME_SLOTS)
