"""The update of a planned step: in short lists, or over all weights at once, as eager runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import magis
from magis.graph import Graph
from magis.models import from_function
from magis.planner import planning, update_lists
from magis.planner.bench import Bench
from magis.planner.fronts import realized_front
from magis.planner.plans import Plan, PlanScratch
from magis.planner.subject import Subject
from magis.results import Case, CaseResult

LAYERS = {
    "many small": lambda: [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)],
    "normalized": lambda: [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(6)],
    "few large": lambda: [nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)) for _ in range(2)],
}
RULES = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def step(
    rule: str = "adamw", layers: str = "many small", how: str = "foreach"
) -> tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor], Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*LAYERS[layers](), nn.Linear(64, 8))
    batch = torch.randn(256, 64), torch.randint(0, 8, (256,))
    return net, batch, F.cross_entropy, RULES[rule](net.parameters(), lr=1e-2, **{how: True})


def case(limit: dict[str, Any], device: str = "sim:h200", **given: str) -> CaseResult:
    make = from_function("step", lambda: step(**given))
    return magis.run_case(Case("step", "magis", device, "paper", budget=1000, **limit), make=make)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("rule", RULES)
def test_eager_own_step_is_a_candidate(rule: str, layers: str) -> None:
    """Where a limit is what eager itself needs, a plan needs no more of the other."""
    by_memory, by_time = (
        case(limit, rule=rule, layers=layers) for limit in ({"memory_ratio": 1.0}, {"latency_ratio": 1.0})
    )
    assert by_memory.search.feasible
    assert by_memory.latency_ratio <= 1.0
    assert by_time.search.feasible
    assert by_time.memory_ratio <= 1.0


def subject_of(rule: str = "adamw", layers: str = "many small", device: str = "sim:h200") -> Subject:
    return Bench().subject(Case("step", "magis", device, "paper"), from_function("step", lambda: step(rule, layers)))


def planned(subject: Subject, memory_ratio: float) -> Plan:
    limit = int(memory_ratio * subject.original.peak_bytes)
    return planning.plan(
        subject, memory_limit=limit, latency_limit_ns=None, budget=1000, seconds=None, seed=0, stored=None
    )


def updates(graph: Graph) -> int:
    return sum(op.target.startswith("aten._foreach_sqrt") for op in graph.ops)


def test_the_update_is_the_one_that_suits_the_limit() -> None:
    """A limit below the gradients and the temporaries of all weights needs short lists."""
    subject = subject_of(layers="few large")
    wide, tight = planned(subject, 1.0), planned(subject, 0.75)
    assert wide.feasible
    assert tight.feasible
    assert updates(wide.graph) == 1 < updates(tight.graph)


def test_the_step_with_eager_update_is_derived_from_its_own_graph() -> None:
    """Also from a subject whose graphs were derived before."""
    warm, cold = subject_of(), subject_of()
    names = ("normal", "untangled", "lean", "aggregated")
    for name in (*names, "floor", "base_workspaces"):
        getattr(warm, name)
    for subject in (warm, cold):
        other = update_lists.with_eager_update(subject)
        assert other is not None
        assert other.digest == subject.digest
        assert other.original_ns == subject.original_ns
        for name in names:
            assert updates(getattr(other, name)) == 1 < updates(getattr(subject, name))


def test_a_front_has_plans_with_either_update() -> None:
    subject = subject_of(layers="few large")
    front, _ = realized_front(subject, budget=300, points=16)
    counts = {updates(plan.graph) for plan in front}
    assert 1 in counts
    assert max(counts) > 1
    assert min(plan.latency_ns for plan in front) <= subject.original_ns


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_plans_with_eager_update_run(rule: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that update all weights at once compute eager's numbers in the bytes predicted, and are taken up again."""

    def with_eager_update(scratch: PlanScratch, *_: object) -> list[tuple[PlanScratch, None]]:
        subject = update_lists.with_eager_update(scratch.subject)
        return [(replace(scratch, subject=subject), None)]  # type: ignore[arg-type]

    monkeypatch.setattr(planning, "_forms_of_update", with_eager_update)  # no plan on a CPU needs it
    make = from_function("step", lambda: step(rule, how=how))
    result = magis.run_case(
        Case("step", "magis", "cpu", "small", memory_ratio=0.9, timing_rounds=1, budget=300), make=make
    )
    assert result.numbers == "bit-identical"
    assert result.optimized.measured is not None
    assert result.optimized.measured.peak_bytes == result.optimized.simulated.peak_bytes

    net, batch, loss, optimizer = step(rule, how=how)
    theirs = step(rule, how=how)
    planned = magis.optimize(net, batch, loss, optimizer, memory_ratio=0.9, budget=300)
    planned.save(tmp_path / "plan.txt")
    again = magis.optimize(*step(rule, how=how), plan=tmp_path / "plan.txt", memory_ratio=0.9)
    for _ in range(2):
        theirs[3].zero_grad()
        found = theirs[2](theirs[0](batch[0]), batch[1])
        found.backward()
        theirs[3].step()
        assert torch.equal(planned(*batch), found.detach())
        assert torch.equal(again(*batch), found.detach())
