"""Progress messages of a search: the best plan so far, and the compilation of the planner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from numba.core import event

from magis.planner.subject import Subject
from magis.progress import Progress, on_stderr, shown_if_slow
from magis.search.budgeted_evaluator import Objective

COMPILING = "compiling the planner, once in an installation"


class BestSoFar:
    """Callback for evaluated plans (peak in bytes, latency in ns) that reports the best one relative to eager."""

    def __init__(self, tell: Progress, subject: Subject, goal: Objective) -> None:
        self._tell, self._goal = tell, goal
        self._eager_bytes = max(1, subject.original.peak_bytes)
        self._eager_ns = max(1, subject.original_ns)
        self._key: tuple[int, int] | None = None
        self._stage, self._best = "", ""

    def stage(self, text: str) -> None:
        """Report the start of a stage."""
        self._stage = text
        self._say()

    def __call__(self, peak: int, latency_ns: int) -> None:
        key = self._goal.key(peak, latency_ns)
        if self._key is None or key < self._key:
            self._key = key
            memory, time = peak / self._eager_bytes, latency_ns / self._eager_ns
            self._best = f", best so far {memory:.3f} of eager's memory in {time:.3f} of its time"
            self._say()

    def _say(self) -> None:
        self._tell(f"{self._stage}{self._best}")


@contextmanager
def compiling_told(tell: Progress) -> Iterator[Progress]:
    """Yield a callback that forwards progress messages; while numba compiles, report that instead."""
    last = ["capturing"]

    def passed_on(text: str) -> None:
        last[0] = text
        tell(text)

    class Compiling(event.Listener):
        def on_start(self, _event: Any) -> None:
            tell(COMPILING)

        def on_end(self, _event: Any) -> None:
            tell(last[0])

    with event.install_listener("numba:compile", Compiling()):
        yield passed_on


@contextmanager
def planning_shown(name: str) -> Iterator[Progress]:
    """Show on stderr what planning under a user's call is doing, if it takes more than two seconds. Under torchrun the
    first rank alone does."""
    place = on_stderr()
    if os.environ.get("RANK", "0") != "0":
        place = replace(place, write=lambda _text: None)
    with shown_if_slow(place, name) as tell, compiling_told(tell) as told:
        told("capturing")
        yield told
