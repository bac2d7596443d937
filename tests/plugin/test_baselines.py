"""--magis-baselines: where baselines are kept, and what happens to one that cannot be believed."""

from __future__ import annotations

import pytest


def write(gate, text: str) -> None:
    path = gate.root / "baselines" / "cpu" / "bert.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_missing_baseline_fails_with_the_command_that_creates_it(gate, workers):
    result = gate("--magis-models=bert", "--magis-baselines=kept", workers=workers)
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "new: no baseline in kept/cpu/bert.json",
            "create it with: pytest --magis-models=bert --magis-strategies=eager --magis-baselines=kept *=new",
            "create it with: pytest --magis-models=bert --magis-strategies=magis --magis-memory-ratios=0.8 *",
            "accept everything that can be: pytest --magis-models=bert --magis-baselines=kept --magis-update=new",
        ]
    )
    assert not (gate.root / "kept").exists()


def test_the_printed_command_does_what_it_says(gate):
    result = gate("--magis-models=bert")
    command = next(line for line in result.outlines if "--magis-memory-ratios=0.8" in line).split()
    gate(*command[command.index("pytest") + 1 :]).assert_outcomes(passed=1)
    gate("--magis-models=bert").assert_outcomes(passed=1, failed=2)


HOSTILE = {
    "empty": ("", "not valid JSON"),
    "truncated": ('{"schema": 1, "model": "bert", "dev', "not valid JSON"),
    "not an object": ("[1, 2]", "expected an object, found a list"),
    "deep": ("[" * 200_000, "nested too deeply"),
    "deep objects": ('{"a":' * 200_000, "nested too deeply"),
    "no schema": ("{}", "schema: expected 1, found None"),
    "schema of text": ('{"schema": "1"}', "schema: expected 1, found '1'"),
    "schema true": ('{"schema": true}', "schema: expected 1, found True"),
    "schema 0": ('{"schema": 0}', "schema: expected 1, found 0"),
    "huge schema": ('{"schema": %s}' % ("9" * 4000), "made by a newer version of pytest-magis (schema a number of"),
    "number too long": ('{"schema": %s}' % ("9" * 5000), "not valid JSON"),
    "newer": ('{"schema": 2, "whatever": 1}', "(schema 2, this version reads 1); upgrade pytest-magis"),
    "missing": ('{"schema": 1}', "'configurations' is missing"),
    "not a number": ('{"schema": NaN}', "NaN is not a number"),
    "twice": ('{"schema": 1, "schema": 1}', "the key 'schema' occurs twice"),
    "merge": ('<<<<<<< HEAD\n{"schema": 1}', "not valid JSON"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_no_baseline_is_refused_and_kept(gate, text, message):
    write(gate, text)
    line = gate.refuses("--magis-models=bert", "--magis-update=new,better,worse")
    assert "baselines/cpu/bert.json" in line
    assert message in line
    assert len(line) < 400


def test_what_the_planner_used_is_handed_back(gate, workers):
    gate("--magis-models=bert")
    assert {tuple(call[2:]) for call in gate.calls()} == {(None, None)}
    gate.accept("--magis-models=bert")
    (gate.root / "calls.txt").unlink()
    gate("--magis-models=bert", "--magis-memory-ratios=0.8,0.5", workers=workers)
    # eager plans nothing, and 0.5 has no baseline: another plan's workspaces might lack its operators
    assert {call[0]: call[2:] for call in gate.calls()} == {
        "bert[eager]": [None, None],
        "bert[magis-mem0.8]": [{"aten::mm(4x4)": 512}, "g1"],
        "bert[magis-mem0.5]": [None, None],
    }


def test_cases_keep_the_workspaces_that_they_were_planned_with(gate):
    other = {"aten::mm(4x4)": 640, "aten::mul_(4)": 64}
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.5]": {"workspaces": other}})
    gate.accept("--magis-models=bert", "--magis-memory-ratios=0.5")
    (gate.root / "calls.txt").unlink()
    gate.fake()
    gate("--magis-models=bert", "--magis-memory-ratios=0.6,0.5")
    assert [call[2] for call in gate.calls()] == [None, {"aten::mm(4x4)": 512}, other]
    assert len(gate.baseline()["configurations"]["small"]["workspaces"]) == 2
