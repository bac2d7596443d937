"""The plans that a step of `magis.optimize` keeps, for other batches and other states of its module."""

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
"""Plans for one kind of batch, with modules in different states, that are kept."""
KINDS = 64
"""Plans that are kept for batches of all kinds."""
KEPT_OPERATORS = 100_000
"""Operators of all plans that are kept, at about 2.5 KiB each; `KEPT` plans are kept however many they have."""
VAIN = 3
"""Times that a number is tried as an input of the graph in vain, or a plan for another way at branches on data."""
MISSED = 2
"""Steps in a row that take another way than their plan, after which that is made anew."""
PROVEN = 16
"""Steps after which a plan counts as one that was not made in vain."""


@dataclass(frozen=True)
class Choice:
    """Where the weight update happens, in words; and the update, if that is in the step."""

    words: str
    update: Update | None

    @property
    def rule(self) -> OptimizerSpec | None:
        return None if self.update is None else self.update.frozen_in


@dataclass(eq=False)
class KeptStep:
    """A plan, and the kind of batch that it is for."""

    key: Any
    choice: Choice
    plan: Planned
    audits: Audits
    bound: Any = None
    """Plan bound to the present tensors, once that has been made."""
    given: Given | None = None
    """Numbers for the step to come, where numbers are inputs of its graph."""
    steps: int = 0
    """For how many it was used."""
    missed: int = 0
    """Number of last steps in a row that took another way than the plan."""
    vain: int = 0
    """Number of plans before this one that were given up for that."""
    variants: dict[str, KeptStep] = field(default_factory=dict)
    """By the outlines of their graphs, where forwards draw on the host."""

    def ran(self, *, planned: bool) -> None:
        """Note a step that ran as `planned`, or took another way."""
        self.missed = 0 if planned else self.missed + 1
        if planned and self.steps > PROVEN:
            self.vain = 0

    @property
    def numbers(self) -> Mapping[str, float]:
        """Those that the step to come is given."""
        return {} if self.given is None else self.given.numbers

    @property
    def given_up(self) -> bool:
        """True if steps take another way for good: a branch on a state that the first steps alone are in, say."""
        return self.missed >= MISSED and self.vain < VAIN

    def holds(self, batch: Batch) -> bool:
        """Return True if it is a plan for a step on this batch, with all that the step rests on as it is now."""
        inputs = self.plan.inputs
        if inputs is None:
            return self.plan.guards.hold(batch)
        given = self.given = inputs.now(partial(self.plan.guards.tensors, batch))
        changed = None if given is None else changed_numbers(self.plan.guards.changes(batch))
        return changed is not None and changed <= inputs.paths


class KeptSteps(list[KeptStep]):
    """The entries in the order of their last use, and what is known of the numbers that change between them."""

    def __init__(self) -> None:
        super().__init__()
        self._vain: dict[str, int] = {}
        """Paths of numbers that became inputs of a graph, or should have, and how often in vain."""

    def keep(self, found: KeptStep) -> None:
        """Put an entry last, behind those used longer ago; drop what is more than is kept."""
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
        """Audit the step to come. CaptureError where it is another one than was planned: the next one is planned anew.

        The error is returned where a batch may take another way at a branch on data, which the step itself will find.
        """
        doubt = entry.audits.check(number, difference)
        if doubt is not None and not follows_data(entry.plan.graph):
            self.remove(entry)
            raise doubt
        return doubt

    def give_up(self, key: Any) -> int:
        """Drop the plans for one kind of batch whose steps take another way; how many were given up so far."""
        gone = [entry for entry in self if entry.key == key and entry.given_up]
        self[:] = [entry for entry in self if entry not in gone]
        return max((entry.vain + 1 for entry in gone), default=0)

    def changing(self, key: Any, batch: Batch) -> Collection[str]:
        """Paths of the user's own numbers that change from step to step, if nothing else does."""
        changed = (changed_numbers(entry.plan.guards.changes(batch)) for entry in reversed(self) if entry.key == key)
        found = next(filter(None, changed), frozenset())
        return [path for path in {*found, *self._vain} if self._vain.get(path, 0) <= VAIN]

    def note_inputs(self, asked: Collection[str], found: KeptStep) -> None:
        """Leave numbers constants that cannot become inputs of the graph, or whose plans serve one step each."""
        inputs = frozenset() if found.plan.inputs is None else frozenset(found.plan.inputs.paths)
        once = any(entry.steps == 1 for entry in self if entry.key == found.key and entry.plan.inputs is not None)
        for path in asked:
            self._vain[path] = self._vain.get(path, 0) + 1 if once or path not in inputs else 0
