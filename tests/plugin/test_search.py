"""--magis-search: whose search plans. The paper's is another case, beside ours."""

from __future__ import annotations

import pytest


def test_both_stand_side_by_side(gate, workers):
    gate.accept("--magis-models=bert", "--magis-search=magis,paper")
    result = gate("--magis-models=bert", "--magis-search=magis,paper", workers=workers)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["bert * magis (paper) *mem 0.8*"])
    cases = gate.baseline()["configurations"]["small"]["cases"]
    ours, paper = ([f"{name}-mem{ratio}" for ratio in (0.6, 0.8)] for name in ("magis", "magis-paper"))
    assert sorted(cases) == ["eager", *ours, *paper]
    rows = [(row["strategy"], row["search"], row["memory limit ratio"]) for row in gate.rows()]
    assert rows == [
        ("eager", "magis", ""),
        *(("magis", search, ratio) for search in ("magis", "paper") for ratio in ("0.8", "0.6")),
    ]


def test_the_command_that_accepts_a_case_names_its_search(gate):
    result = gate("--magis-models=bert", "--magis-search=paper", "--magis-memory-ratios=0.8")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["create it with: pytest --magis-models=bert --magis-strategies=magis --magis-search=paper *=new"]
    )


@pytest.mark.parametrize("given", ["theirs", "", "paper,theirs", "Paper"])
def test_unknown_searches_are_refused(gate, given):
    assert gate.refuses("--magis-models=bert", f"--magis-search={given}").startswith("ERROR: --magis-search")
