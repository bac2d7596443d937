"""Cache of the plans of a `magis.optimize` step, for different batches and states of the module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from magis.capture import OptimizerSpec
from magis.capture.number_places import changed_numbers
from magis.capture.optimizer_rule import Update
from magis.capture.workload import Batch
from magis.errors import CaptureError
from magis.frontends.audits import Audits
from magis.frontends.number_inputs import Given
from magis.frontends.planned import Planned
from magis.ops.call import follows_data

KEPT = 4
"""Maximum number of cached plans for one kind of batch."""
KINDS = 64
"""Maximum number of cached plans for all kinds of batches."""
KEPT_OPERATORS = 100_000
"""Maximum number of operators in all cached plans, at about 2.5 KiB each; `KEPT` plans of any size are cached."""
VAIN = 3
"""Failed attempts after which a number is no longer made a graph input, or a branch on data no longer planned again."""
MISSED = 2
"""Number of successive steps on another branch than planned after which the step is planned again."""
PROVEN = 16
"""Number of steps after which a plan counts as useful."""


@dataclass(frozen=True)
class Choice:
    """The place of the weight update, in words; and the update, if it is part of the step."""

    words: str
    update: Update | None

    @property
    def rule(self) -> OptimizerSpec | None:
        return None if self.update is None else self.update.frozen_in


@dataclass(eq=False)
class KeptStep:
    """A cached plan with its cache key and the record of its use."""

    key: Any
    choice: Choice
    plan: Planned
    audits: Audits
    bound: Any = None
    """The plan bound to the current tensors; None until its first step, and after tensors have changed."""
    given: Given | None = None
    """Values for the next step's number inputs; None if its graph has none."""
    steps: int = 0
    """Number of steps that used the plan."""
    missed: int = 0
    """Number of successive last steps that took another branch on data than planned."""
    vain: int = 0
    """Number of earlier plans that were dropped because steps took other branches."""
    variants: dict[str, KeptStep] = field(default_factory=dict)
    """Plans by graph outline, for forwards that draw random numbers on the host."""

    def ran(self, *, planned: bool) -> None:
        """Record that a step ran as `planned`, or took another branch."""
        self.missed = 0 if planned else self.missed + 1
        if planned and self.steps > PROVEN:
            self.vain = 0

    @property
    def numbers(self) -> Mapping[str, float]:
        """Values of the graph's named scalars in the next step."""
        return {} if self.given is None else self.given.numbers

    def holds(self, batch: Batch) -> bool:
        """Return True if the plan is valid for this batch and the current state of module, loss and settings."""
        inputs = self.plan.inputs
        if inputs is None:
            return self.plan.guards.hold(batch)
        given = self.given = inputs.now(partial(self.plan.guards.tensors, batch))
        changed = None if given is None else changed_numbers(self.plan.guards.changes(batch))
        return changed is not None and changed <= inputs.paths


class KeptSteps(list[KeptStep]):
    """Cached plans in the order of last use, and the record of numbers that change between steps."""

    def __init__(self) -> None:
        super().__init__()
        self._vain: dict[str, int] = {}
        """Failures by path of numbers that were made, or should have been made, graph inputs."""

    def keep(self, found: KeptStep) -> None:
        """Move a plan to the end, as the last one used, and evict the oldest ones beyond the cache's size."""
        if self and self[-1] is found:
            return
        rest = [entry for entry in self if entry is not found]
        alike = [entry for entry in rest if entry.key == found.key]
        gone = {id(entry) for entry in alike[: max(0, len(alike) + 1 - KEPT)]}
        kept, operators = [found], len(found.plan.graph.ops)
        for entry in reversed(rest):
            operators += len(entry.plan.graph.ops)
            if id(entry) not in gone and len(kept) < (KINDS if operators <= KEPT_OPERATORS else KEPT):
                kept.append(entry)
        self[:] = kept[::-1]

    def audit(self, entry: KeptStep, number: int, difference: Callable[[], str]) -> CaptureError | None:
        """Audit the next step. Raises CaptureError, and drops the plan, if the step no longer equals its plan. The
        error is returned if the graph checks branches on data, as the step itself then detects the difference."""
        doubt = entry.audits.check(number, difference)
        if doubt is not None and not follows_data(entry.plan.graph):
            self.remove(entry)
            raise doubt
        return doubt

    def give_up(self, key: Any) -> int:
        """Drop plans of one kind of batch whose recent steps took other branches (say, one that only first steps take);
        return how many were dropped so far, 0 if none."""
        gone = [entry for entry in self if entry.key == key and entry.missed >= MISSED and entry.vain < VAIN]
        self[:] = [entry for entry in self if entry not in gone]
        return max((entry.vain + 1 for entry in gone), default=0)

    def changing(self, key: Any, batch: Batch) -> Collection[str]:
        """Return the paths of Python numbers that change from step to step, if nothing else changes."""
        changed = (changed_numbers(entry.plan.guards.changes(batch)) for entry in reversed(self) if entry.key == key)
        found = next(filter(None, changed), frozenset())
        return [path for path in {*found, *self._vain} if self._vain.get(path, 0) <= VAIN]

    def note_inputs(self, asked: Collection[str], found: KeptStep) -> None:
        """Count failures of numbers that could not become graph inputs, or whose plans served a single step."""
        inputs = frozenset() if found.plan.inputs is None else frozenset(found.plan.inputs.paths)
        once = any(entry.steps == 1 for entry in self if entry.key == found.key and entry.plan.inputs is not None)
        for path in asked:
            self._vain[path] = self._vain.get(path, 0) + 1 if once or path not in inputs else 0
