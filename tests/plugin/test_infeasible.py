"""What a limit that no plan can meet is told as: the limit, the bound, what makes it, and the best peak found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magis.cases.run_case import run_case
from magis.plain_records import from_plain, to_plain
from magis.results import Case, CaseResult, Memory, StepFigures
from pytest_magis.baselines import stored_case, updated
from pytest_magis.verdict import judge
from tests.golden.golden import check_golden


@pytest.mark.parametrize("model", ["mlp", "bert"])
def test_the_verdict_says_all_of_it_in_one_line(model: str) -> None:
    case = Case(model, "magis", "sim:rtx3090", "small", memory_ratio=0.05, budget=1, seconds=0.001)
    result = from_plain(CaseResult, to_plain(run_case(case)))
    assert not result.search.feasible
    assert result.lower_bound_bytes <= result.memory.peak_bytes
    # of a search that ended by itself, and of a plan that no change of the search changes
    found = StepFigures(Memory(40_000_000, 40_000_000), 2.0)
    search = replace(result.search, stopped_by_seconds=False, unsplit="")
    result = replace(result, search=search, optimized=found)
    stored = stored_case(updated(None, model, "label", case, result), "label", case)
    verdict = judge(result, stored)
    assert (verdict.passed, verdict.label, verdict.findings) == (True, "infeasible, proven", ())
    (line,) = verdict.notes
    assert "\n" not in line
    check_golden(f"verdict_infeasible_{model}.txt", f"{line}\n")
