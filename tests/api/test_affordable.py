"""Steps that would take too long are found out under a deadline, and simulated."""

from __future__ import annotations

import math

import pytest
import torch

from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.planner.workload_source import COLD, STEPS, step_seconds, too_slow
from magis.results import Case

CASE = Case("tests.api.nets:few_blocks", "magis", "cpu", "small", memory_ratio=0.8, budget=300, timing_rounds=1)


class Ticks:
    """A clock that goes on by a second whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Bench().subject(CASE)


def weights(step: object) -> list[torch.Tensor]:
    return [each.detach().clone() for each in step.module.parameters()]  # type: ignore[attr-defined]


def ticks_of(subject: Subject) -> float:
    clock = Ticks()
    assert step_seconds(subject.eager(), 1e9, clock) < math.inf
    return clock.now


@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
def test_a_step_ends_soon_after_its_deadline(subject: Subject, share: float) -> None:
    whole = ticks_of(subject)
    step, clock = subject.eager(), Ticks()
    before = weights(step)
    assert step_seconds(step, share * whole / COLD, clock) == math.inf
    assert clock.now <= share * whole + 8
    assert all(torch.equal(one, other) for one, other in zip(weights(step), before, strict=True))  # no update was made


def test_a_slow_first_step_gets_a_second_chance(subject: Subject) -> None:
    calls: list[float] = []

    def clock() -> float:
        """Twice as slow until the first step is done."""
        step = 2.0 if len(calls) < ticks_of_one else 1.0
        calls.append((calls[-1] if calls else 0.0) + step)
        return calls[-1]

    ticks_of_one = int(ticks_of(subject))
    assert step_seconds(subject.eager(), 1.5 * ticks_of_one, clock) < 1.5 * ticks_of_one
    assert len(calls) > 1.8 * ticks_of_one


def test_what_is_too_slow_is_said_and_the_generator_goes_on_as_if_nothing_had_run(subject: Subject) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert too_slow(subject.eager, 1e9, Ticks()) == ""
    said = f"a step takes more than 1.2 s here, running a case {STEPS} of them, and may take 60 s"
    assert too_slow(subject.eager, 60.0, Ticks()) == said
    assert torch.equal(torch.get_rng_state(), state)
