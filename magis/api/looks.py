"""The latency ratio of a case: two looks at it, of steps that are made anew for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from magis.backend.steps import Step, whole_step
from magis.backend.timing import ROUGHLY, Patience, Timing, agreed, in_turns, interleave, is_too_busy, ratio_interval
from magis.backend.turns import Step as TurningStep
from magis.backend.turns import Turn
from magis.results import RatioInterval

__all__ = ["TIMING_ROUNDS", "Look", "Looks", "once_in_turns"]

TIMING_ROUNDS = 8
"""Pairs of a look, to start with."""
ROUNDS_WHOLE = 3
SHORTEST_MS = 30.0
"""Of a step that takes turns: ten slices. What turns cost shorter ones would show in their ratio."""
WARM_UP = 1
"""Untimed pairs before the others."""


@dataclass(frozen=True)
class Look:
    """Pairs of whole steps, which say the milliseconds, and those that say the ratio; they may be the same."""

    whole: Timing
    pairs: Timing


@dataclass(frozen=True)
class Looks:
    """How the two steps of a case are timed, and what of their ratio is believed.

    ``rounds`` pairs to start with; ``bounds`` are the ratios at which the verdict changes. A ``rough`` ratio is only
    shown, and is worth one short look. ``turning``: whether the steps can take turns.
    """

    device: torch.device
    rounds: int
    bounds: tuple[float, ...] = ()
    rough: bool = False
    turning: bool = False

    def look(self, eager: Step, step: Step) -> Look:
        """Time both steps: whole or, where they can and are long enough, in turns."""
        whole = partial(interleave, whole_step(eager), whole_step(step), warmup=WARM_UP, device=self.device)
        if self.rough:
            timing = whole(ROUGHLY)
            return Look(timing, timing)
        patience = Patience(self.rounds, self.bounds)
        if self.turning:
            some = whole(Patience(min(self.rounds, ROUNDS_WHOLE), most=0))
            if min(some.first_ms) >= SHORTEST_MS:
                return Look(some, in_turns(once_in_turns(eager), once_in_turns(step), patience))
        timing = whole(patience)
        return Look(timing, timing)

    def wants_another(self, look: Look) -> bool:
        """Whether a second look would tell something."""
        return not self.rough and not is_too_busy(look.pairs)

    def ratio(self, found: Sequence[Look]) -> RatioInterval:
        """What the looks, at most two, say together."""
        if self.rough:
            return ratio_interval(found[0].pairs)
        second = found[1].pairs if len(found) > 1 else None
        return agreed(found[0].pairs, second, self.bounds)


def once_in_turns(step: Step) -> TurningStep:
    """What is timed of a step that takes turns: what is timed of one that does not."""

    def once(turn: Turn) -> object:
        step.prepare()
        return step.run_in_turns(turn)

    return once
