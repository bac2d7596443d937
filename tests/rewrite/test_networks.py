"""The gate's networks under random plans and adversarial schedules: bytes are as predicted, numbers are eager's."""

from __future__ import annotations

import pytest

from magis.extensions.models.network_names import GATE_NAMES
from tests.rewrite.cases import MODELS, Case, batches
from tests.strategies import adversarial_order


@pytest.fixture(scope="module", params=GATE_NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    """One network after the other: all of them at once would take gigabytes."""
    return Case(MODELS[request.param].build())


@pytest.mark.parametrize("seeds", batches(1, 25, 201))
def test_random_plans(case: Case, seeds: range) -> None:
    """Evaluator, exact simulator and the measured step agree to the byte, eager and the step to the bit."""
    for seed in seeds:
        case.check(*case.drawn_plan(seed))


@pytest.mark.parametrize("seeds", batches(2, 50, 302))
def test_adversarial_schedules(case: Case, seeds: range) -> None:
    """Any order that keeps the hazards is as good: of the captured graph and of the functional one by turns."""
    for seed in seeds:
        functional = seed % 2 == 0
        graph = case.graph if functional else case.step.graph
        case.check_schedule(adversarial_order(graph, seed), functional=functional)
