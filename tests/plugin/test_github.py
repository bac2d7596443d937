"""What a run leaves for GitHub: a summary in Markdown, annotations in the log; nothing where nobody asks."""

from __future__ import annotations

import re


def test_the_summary_holds_the_table_and_what_red_cases_say(gate, workers):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.8]": {"opt_peak": 1.001}})
    result = gate("--magis-models=bert", "--magis-markdown=summary.md", workers=workers)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines([f"summary: {gate.root / 'summary.md'}"])
    text = (gate.root / "summary.md").read_text()
    assert text.startswith("## magis: 1 of 3 cases red\n\n| model | strategy | limit |")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 5
    assert len({row.count(" | ") for row in rows}) == 1
    assert rows[1] == "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- |"
    assert rows[3].startswith("| bert | magis | mem 0.8 |")
    assert rows[3].endswith("| FAIL worse |")
    assert "**bert\\[magis-mem0.8\\]**" in text
    assert "* worse: optimized peak bytes: " in text
    assert re.search(r"^\* accept with: `pytest --magis-models=bert .*--magis-update=worse`$", text, re.MULTILINE)
    gate.fake()
    gate("--magis-models=bert", "--magis-markdown=summary.md", workers=workers).assert_outcomes(passed=3)
    assert (gate.root / "summary.md").read_text().startswith("## magis: all 3 cases green\n")  # replaced


def test_red_cases_are_annotations_on_github_alone(gate, monkeypatch):
    gate.fake(**{"bert[magis-mem0.6]": {"raise": "50% too\nlarge, twice: a"}})
    assert not [line for line in gate("--magis-models=bert").outlines if line.startswith("::")]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = gate("--magis-models=bert")
    lines = [line for line in result.outlines if line.startswith("::")]
    assert len(lines) == 3  # two without a baseline, and the error
    assert lines[0] == "::error title=magis%3A%3Abert[eager]::new: no baseline"
    assert lines[2] == "::error title=magis%3A%3Abert[magis-mem0.6]::error: 50%25 too large, twice: a"


def test_text_of_others_is_no_markup(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"numbers": "differs: <script>|`x`*_[a](b)"})
    gate("--magis-models=bert", "--magis-markdown=summary.md")
    text = (gate.root / "summary.md").read_text()
    assert "<script>" not in text
    assert "&lt;script>\\|\\`x\\`\\*\\_\\[a\\](b)" in text
    assert len({line.count(" | ") for line in text.splitlines() if line.startswith("|")}) == 1
