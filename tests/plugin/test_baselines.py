"""--magis-baselines: where baselines are kept, and what happens to one that cannot be believed."""

from __future__ import annotations

import json
import os

import pytest


def write(gate, text: str) -> None:
    path = gate.root / "baselines" / "cpu" / "bert.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def stored(gate) -> dict:
    if not (gate.root / "baselines").exists():
        gate.accept("--magis-models=bert")
    return gate.baseline()


@pytest.mark.parametrize("given", [["--magis-baselines=kept/here"], ["-o", "magis_baselines=kept/here"]])
def test_another_directory_can_be_given(gate, given):
    gate.accept("--magis-models=bert", *given)
    gate("--magis-models=bert", *given).assert_outcomes(passed=3)
    assert (gate.root / "kept" / "here" / "cpu" / "bert.json").is_file()
    assert not (gate.root / "baselines").exists()


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


def test_a_directory_that_is_a_file_is_refused(gate):
    message = gate.refuses("--magis-models=bert", "--magis-baselines=conftest.py")
    assert message.endswith("conftest.py is not a directory")


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


def test_it_is_refused_under_xdist_too(gate):
    write(gate, '{"schema": 2}')
    assert "upgrade pytest-magis" in gate.refuses("--magis-models=bert", workers=2)


CASE = ("configurations", "small", "cases", "magis-mem0.8")
TABLE = "aef825467dbf"
MEASURED = (*CASE, "measured", "instruction set=avx512, threads=2, torch=2.13.0")

WRONG = {
    "other model": (("model",), "../../vit", "it is of '../../vit' on 'cpu', not of 'bert' on 'cpu'"),
    "other device": (("device",), "cuda", "it is of 'bert' on 'cuda'"),
    "model no text": (("model",), 3, "model: expected text, found 3"),
    "list of cases": (("configurations", "small", "cases"), [], "expected an object, found a list"),
    "unknown entry": ((*CASE, "tensor_bytes"), 3, "unknown entry 'tensor_bytes'"),
    "negative": ((*CASE, "optimized_tensor_bytes"), -4, "expected a whole number from 0 to"),
    "huge": ((*CASE, "optimized_tensor_bytes"), 10**400, "found a number of 1329 bits"),
    "fraction": ((*CASE, "optimized_tensor_bytes"), 4.0, "found 4.0"),
    "flag as count": ((*CASE, "states_evaluated"), True, "found True"),
    "count as flag": ((*CASE, "feasible"), 1, "feasible: expected true or false, found 1"),
    "null": ((*CASE, "original_tensor_bytes"), None, "found None"),
    "long text": ((*CASE, "original_tensor_bytes"), "x" * 10**6, "..."),
    "ratio 0": ((*MEASURED, "latency_ratio"), 0, "latency_ratio: expected a positive number, found 0"),
    "ratio infinite": ((*MEASURED, "latency_ratio"), 1e999, "Infinity is not a number"),
    "ratio huge": ((*MEASURED, "latency_ratio"), 10**400, "expected a positive number"),
    "workspace": (("configurations", "small", "workspaces", TABLE, "aten::mm(4x4)"), "512", "found '512'"),
    "no such table": ((*CASE, "workspaces"), "elsewhere", "no workspaces called 'elsewhere'"),
    "table": (("configurations", "small", "workspaces", TABLE), 7, "expected an object, found 7"),
}


@pytest.mark.parametrize(("place", "value", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_named_and_the_file_kept(gate, place, value, message):
    data = stored(gate)
    *path, last = place
    inner = data
    for key in path:
        inner = inner[key]
    inner[last] = value
    write(gate, json.dumps(data))
    line = gate.refuses("--magis-models=bert", "--magis-update=new,better,worse")
    assert message in line
    assert len(line) < 500


def test_every_missing_entry_is_noticed(gate):
    data = stored(gate)
    for key in ("feasible", "graph", "optimized_tensor_bytes", "original_tensor_bytes", "states_evaluated", "measured"):
        broken = json.loads(json.dumps(data))
        del broken["configurations"]["small"]["cases"]["eager"][key]
        write(gate, json.dumps(broken))
        assert f"{key!r} is missing" in gate.refuses("--magis-models=bert")


def test_places_that_are_no_files_are_refused(gate):
    path = gate.root / "baselines" / "cpu" / "bert.json"
    path.mkdir(parents=True)
    assert "it is not a regular file" in gate.refuses("--magis-models=bert")
    path.rmdir()
    os.mkfifo(path)  # reading it would wait forever
    before = sorted(gate.root.rglob("*"))
    result = gate("--magis-models=bert")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "it is not a regular file" in result.stderr.str()
    assert sorted(gate.root.rglob("*")) == before
    path.unlink()
    path.write_bytes(b'{"schema": "\xff"}')
    assert "not UTF-8 text" in gate.refuses("--magis-models=bert")
    path.write_bytes(b" " * (17 * 2**20))
    assert "it has more than" in gate.refuses("--magis-models=bert")


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


def test_eager_first_does_not_plan_without_workspaces(gate):
    """The commands that a red run prints, one after the other."""
    gate.accept("--magis-models=bert", "--magis-strategies=eager")
    gate.accept("--magis-models=bert", "--magis-strategies=magis")
    assert {tuple(call[2:]) for call in gate.calls()} == {(None, None)}


def test_no_workspaces_on_cpu_are_a_table_too(gate):
    gate.fake(any_case={"workspaces": {}})
    gate.accept("--magis-models=bert", "--magis-memory-ratios=0.5")
    gate("--magis-models=bert", "--magis-memory-ratios=0.5")
    assert gate.calls()[-1][2:] == [{}, "g1"]
    gate.accept("--magis-models=bert", "--magis-memory-ratios=0.5", "--magis-device=sim:rtx3090")
    gate("--magis-models=bert", "--magis-memory-ratios=0.5", "--magis-device=sim:rtx3090")
    assert gate.calls()[-1][2:] == [None, None]


def test_workspaces_that_no_case_was_planned_with_are_dropped(gate):
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"graph": "g2", "ori_tensor": 1.1, "workspaces": {"aten::mm(8x8)": 1024}})
    gate.accept("--magis-models=bert", update="worse")
    assert list(gate.baseline()["configurations"]["small"]["workspaces"].values()) == [{"aten::mm(8x8)": 1024}]


def test_the_file_has_one_value_a_line_and_sorted_keys(gate):
    gate.accept("--magis-models=bert")
    lines = (gate.root / "baselines" / "cpu" / "bert.json").read_text().splitlines()
    assert max(line.replace("::", "").count(":") for line in lines) == 1
    assert json.dumps(gate.baseline(), indent=2, sort_keys=True).splitlines() == lines
