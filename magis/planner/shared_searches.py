"""Searches shared among processes, and cached in a folder so that an interrupted search can continue.

The unit of work is one loop place of a step (``magis.search.loop_places``). The result does not depend on which process
computes a place, or when. If a worker dies, this process does its work; an incomplete file is computed again. No worker
outlives its search or its parent process.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Protocol

import numpy as np

from magis.errors import UsageError
from magis.graph import digest
from magis.printable import warn
from magis.report.text_store import Bounds, Kept
from magis.search.budgeted_evaluator import JudgedPlan, Over, never
from magis.search.fission_pareto import DivisibleStep, LoopPlace
from magis.search.loop_places import Findings, PointRecord, findings

BOUNDS = Bounds(total_bytes=1 << 50, entry_bytes=1 << 28, entries=1 << 30)
"""Cache bounds that evict nothing: to continue, a search needs all of its entries."""
POLL_S = 0.2


class Compute(Protocol):
    """Function that computes the findings of one place, as ``magis.search.loop_places.findings`` does."""

    def __call__(self, work: DivisibleStep, number: int, over: Over = never) -> Findings: ...


@dataclass(frozen=True)
class Sharing:
    """Number of processes for a search, and the folder for its partial results. More than one process needs an
    importable main module, as ``multiprocessing`` with spawn does."""

    processes: int = 1
    folder: Path | None = None
    compute: Compute = findings

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise UsageError(f"a search needs at least 1 process, not {self.processes}")

    @property
    def needed(self) -> bool:
        """True if the work is shared among processes or cached."""
        return self.processes > 1 or self.folder is not None

    def __call__(self, work: DivisibleStep, numbers: Sequence[int], over: Over) -> Generator[Findings, None, None]:
        """Yield the findings of the places in order, until ``over`` returns True."""
        store = None if self.folder is None else _Store(Kept(self.folder, BOUNDS, required=True), work)
        known = {} if store is None else {n: found for n in numbers if (found := store.load(n)) is not None}
        missing = [number for number in numbers if number not in known]
        with ExitStack() as stack:
            futures = self._submit(work, missing, stack)
            for number in numbers:
                found = known.get(number)
                if found is None:
                    found = self._wait_or_compute(work, number, futures.get(number), over)
                    if store is not None and found is not None and not over():  # `over` may cut findings short
                        store.save(number, found)
                if found is None:
                    return
                yield found

    def _submit(self, work: DivisibleStep, missing: Sequence[int], stack: ExitStack) -> dict[int, Future[Findings]]:
        workers = min(self.processes, len(missing))
        if workers < 2:
            return {}
        before = set(active_children())
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepared)

        def end() -> None:
            pool.shutdown(wait=False, cancel_futures=True)
            ours = [child for child in active_children() if child not in before]
            for child in ours:
                child.terminate()
            for child in ours:
                child.join()

        stack.callback(end)
        return {number: pool.submit(self.compute, work, number) for number in missing}

    def _wait_or_compute(
        self, work: DivisibleStep, number: int, future: Future[Findings] | None, over: Over
    ) -> Findings | None:
        """Return the findings of a place; None if ``over`` returns True before a worker finishes."""
        while future is not None:
            try:
                return future.result(timeout=POLL_S)
            except NotYet:
                if over():
                    return None
            except BrokenProcessPool:
                text = "a worker process died: its part of the search is done here"
                warn(text, RuntimeWarning, stacklevel=2)
                break
        return self.compute(work, number, over)


def _prepared() -> None:
    """Initialize a worker: it ignores Ctrl-C and exits when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Store:
    """Cache of findings in a folder, one text per place of a step."""

    def __init__(self, kept: Kept, work: DivisibleStep) -> None:
        self._kept = kept
        places = [(place.at, sorted(place.cuts.items()), place.graph and digest(place.graph)) for place in work.places]
        self._key = kept.key("place", digest(work.graph), work.costs, work.reuse, work.efforts, places)

    def load(self, number: int) -> Findings | None:
        """Return the cached findings of a place; None if there are none, or none that are valid."""
        return self._kept.load(f"{self._key}-{number}", lambda text: _parse_findings(text, number))

    def save(self, number: int, found: Findings) -> None:
        rows = [(astuple(each.cut), _plan_to_json(each.plan), _plan_to_json(each.body)) for each in found.points]
        self._kept.save(f"{self._key}-{number}", json.dumps([found.states, rows]))


def _plan_to_json(plan: JudgedPlan) -> tuple[list[int], list[int], int, int]:
    return plan.order.tolist(), plan.flags.tolist(), plan.peak, plan.latency_ns


def _parse_findings(text: str, number: int) -> Findings:
    """Parse findings from text; the figures of their plans are checked on use."""
    states, rows = json.loads(text)
    parsed = ((LoopPlace(*map(int, cut)), _plan_from_json(*plan), _plan_from_json(*body)) for cut, plan, body in rows)
    points = (PointRecord(replace(cut, number=number), plan, body) for cut, plan, body in parsed)
    return Findings(tuple(points), int(states))


def _plan_from_json(order: list[int], flags: list[int], peak: int, latency_ns: int) -> JudgedPlan:
    return JudgedPlan(np.array(order, dtype=np.int32), np.array(flags, dtype=np.int8), int(peak), int(latency_ns))
