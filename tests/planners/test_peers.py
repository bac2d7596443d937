"""What others would plan: their plans when judged, and the layers and modules that they see."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("scipy", reason="other planners are linear and integer programs, which scipy solves")

from benchmarks.lib.planners.layers import layers
from benchmarks.lib.planners.modules import modules
from benchmarks.lib.planners.selective import selective, selective_plan
from benchmarks.lib.planners.setting import Calibrated, Setting, origins
from benchmarks.lib.planners.two_level import two_level, two_level_plan
from magis.search.budgeted_evaluator import JudgedPlan, Objective
from magis.simulate.evaluator import evaluate, lower_bound
from tests.planners.modular import NETWORKS, setting, with_modules
from tests.search.subjects import step


@functools.cache
def peers(name: str) -> tuple[Calibrated, Calibrated]:
    """Each keeps what it has found for one goal for the next."""
    return two_level(setting(name)), selective(setting(name))


@pytest.fixture(autouse=True)
def few_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lib.planners.setting.BUDGETS", 5)
    monkeypatch.setattr("benchmarks.lib.planners.options.KEPT", 2)
    monkeypatch.setattr("benchmarks.lib.planners.setting.REFINEMENTS", 1)


def goals(found: Setting) -> list[Objective]:
    _, latency = found.evaluator.quick(found.untouched)
    memory = [Objective(memory_limit=found.peak * share // 10) for share in (10, 8, 6, 3)]
    return [*memory, *(Objective(latency_limit_ns=latency * share // 100) for share in (103, 110, 150, 90))]


@pytest.mark.parametrize("name", NETWORKS)
def test_plans_cost_what_they_say_and_meet_the_goal_they_are_given_for(name: str) -> None:
    found = setting(name)
    reached = 0
    for goal in goals(found):
        for peer in peers(name):
            plan = peer.best(goal)
            if plan is None:
                continue
            reached += 1
            judged = evaluate(found.problem, plan.order, plan.flags)
            assert (judged.peak, judged.latency_ns) == (plan.peak, plan.latency_ns)
            assert plan.met(goal)
            assert judged.peak >= lower_bound(found.problem)
            known = found.judged(found.untouched)
            assert plan.key(goal) <= known.key(goal) or not known.met(goal)
    assert reached >= 6
    assert all(peer.best(goals(found)[-1]) is None for peer in peers(name))  # nothing is faster than the step as it is


@pytest.mark.parametrize("name", NETWORKS)
def test_every_peer_gives_memory_for_time(name: str) -> None:
    found = setting(name)
    base = found.judged(found.untouched)
    for peer in peers(name):
        lean = peer.best(Objective(latency_limit_ns=2 * base.latency_ns))
        assert lean is not None
        assert lean.peak < base.peak


def test_a_plan_does_not_depend_on_what_was_asked_before() -> None:
    found = setting("resnet")
    goal = Objective(memory_limit=found.peak * 7 // 10)
    for peer, alone in zip(peers("resnet"), (two_level_plan, selective_plan), strict=True):
        peer.best(Objective(memory_limit=found.peak * 8 // 10))
        assert costs_of(peer.best(goal)) == costs_of(alone(found, goal))


def costs_of(plan: JudgedPlan | None) -> tuple[int, int] | None:
    return None if plan is None else (plan.peak, plan.latency_ns)


def test_layers_are_blocks_or_stretches_between_waists() -> None:
    named = setting("transformer")
    assert layers(named).count == 3  # two blocks and the head
    unnamed = layers(with_modules(*NETWORKS["transformer"](), blocks=False))
    assert unnamed.count >= 3
    for found, of_node in ((named, layers(named).of_node), (named, unnamed.of_node)):
        forward = of_node[found.origins.forward]
        assert (np.diff(forward) >= 0).all()
        assert set(of_node.tolist()) == set(forward.tolist())


def test_a_captured_step_knows_its_modules() -> None:
    compiled = step("blocks").compiled
    found = origins(compiled, ["0", "1"], ["0", "1"])
    assert found.forward.any()
    assert not found.forward.all()
    every = modules(Setting(compiled.problem, found))
    assert every[-1].path == ""
    assert every[-1].inside == frozenset(range(len(every) - 1))
