"""What a case tells besides its figures: whose the bytes at the peak are, what the plan does, and its time lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from magis.api.subject import Subject
from magis.backend.parting import Parting, first_parting
from magis.capture import Captured
from magis.ir import Graph
from magis.results import Peak, Span
from magis.simulate.replay import MemoryProfile, replay
from magis.simulate.tables import peak_of
from magis.simulate.timeline import timeline

__all__ = ["Replayed"]


@dataclass(frozen=True, eq=False)
class Replayed:
    """A step as the simulator replays it: a captured one by eager's lifetimes, a graph of ours by its own."""

    subject: Subject
    graph: Graph
    captured: Captured | None = None

    @property
    def _deaths(self) -> Mapping[int, int] | None:
        return None if self.captured is None else self.captured.deaths

    def _profile(self) -> MemoryProfile:
        if self.captured is not None:
            return self.subject.simulate(self.captured)
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        return replay(self.graph, costs.workspace, rounding=costs.rounding)

    def parting(self, run: Callable[[], object]) -> Parting | None:
        """Where the measured bytes of the step, which `run` runs, part from the simulated ones."""
        return first_parting(run, self.graph, self._profile())

    def at_peak(self) -> Peak:
        """What makes the peak of tensors that is reported for the step."""
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        profile = self._profile()
        return peak_of(self.graph, costs.workspace, profile, deaths=self._deaths, rounding=costs.rounding)

    def spans(self) -> tuple[Span, ...]:
        """Its calls, at the prices of the latency that is reported for it."""
        costs = self.subject.costs(self.subject.workspaces(self.graph))
        return timeline(self.graph, self.subject.predicting, costs.workspace, self._profile(), rounding=costs.rounding)
