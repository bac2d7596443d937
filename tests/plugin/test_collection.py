"""How the gate's cases sit in pytest: paths, node ids, selections, last-failed, reruns, JUnit."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

IDS = ["magis::bert[eager]", "magis::bert[magis-mem0.8]", "magis::bert[magis-mem0.6]"]


@pytest.fixture
def own_tests(gate):
    """Tests of the project, where its ini file says that they are."""
    gate.pytester.makeini("[pytest]\ntestpaths = checks")
    gate.pytester.mkdir("checks").joinpath("test_own.py").write_text("def test_own(): pass\ndef test_two(): pass\n")


@pytest.mark.parametrize(
    ("given", "own"),
    [
        (["--magis-models=bert"], 0),
        (["--magis-models=bert", "checks"], 2),
        (["--magis-models=bert", "checks/test_own.py::test_two"], 1),
        (["-o", "magis_models=bert"], 2),
        (["-o", "magis_models=bert", "checks/test_own.py::test_two"], 1),
    ],
)
def test_paths_decide_what_else_is_collected(gate, own_tests, node_ids, given, own):
    result = gate("--collect-only", "-q", *given)
    assert node_ids(result) == IDS
    assert len([line for line in result.outlines if line.startswith("checks/")]) == own


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["-k", "mem0.8"], [IDS[1]]),
        (["-k", "bert and not magis-mem"], [IDS[0]]),
        (["-m", "magis"], IDS),
        (["-m", "not magis"], []),
        (["--deselect", "magis::bert[eager]"], IDS[1:]),
        (["magis::bert[magis-mem0.6]"], [IDS[2]]),
        (["magis::bert"], IDS),
        (["magis::bert[magis-mem0.6]", "magis::bert[eager]"], [IDS[0], IDS[2]]),
        (["magis::bert", "-k", "eager"], [IDS[0]]),
    ],
)
def test_cases_are_selected_like_tests(gate, node_ids, given, expected):
    assert node_ids(gate("--magis-models=bert", "--collect-only", "-q", *given)) == expected


def test_collect_only_writes_nothing(gate):
    before = gate.files()
    gate("--magis-models=all", "--collect-only", "--magis-update=new")
    assert gate.files() == before
    assert gate.calls() == []


def test_junit_has_the_failure_and_the_result(gate, workers):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.8]": {"opt_tensor": 1.005}})
    gate("--magis-models=bert", "--junitxml=junit.xml", workers=workers)
    suite = ET.parse(gate.root / "junit.xml").getroot()[0]
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["errors"]) == ("3", "1", "0")
    cases = {case.attrib["name"]: case for case in suite.iter("testcase")}
    assert sorted(cases) == ["bert[eager]", "bert[magis-mem0.6]", "bert[magis-mem0.8]"]
    failure = cases["bert[magis-mem0.8]"].find("failure")
    assert "worse: optimized tensor bytes" in (failure.text or "")
    assert "Traceback" not in (failure.text or "")
    found = {each.attrib["name"]: each.attrib["value"] for each in cases["bert[eager]"].iter("property")}
    result = json.loads(found["magis"])["result"]
    assert result["persistent_bytes"] > 0
    assert int(found["magis.original_peak_bytes"]) == result["original"]["measured"]["peak_bytes"]
    assert (found["magis.verdict"], found["magis.passed"]) == ("pass", "true")
    assert "magis.latency_ratio" not in found or float(found["magis.latency_ratio"]) == 1.0
    red = {each.attrib["name"]: each.attrib["value"] for each in cases["bert[magis-mem0.8]"].iter("property")}
    assert (red["magis.verdict"], red["magis.passed"], red["magis.memory_ratio_limit"]) == (
        "FAIL worse",
        "false",
        "0.8",
    )
    assert float(red["magis.latency_ratio"]) == 1.02


def test_all_cases_of_a_model_run_in_one_process(gate):
    gate("--magis-models=bert,vit,mlp", workers=2)
    processes: dict[str, set[int]] = {}
    for name, process, *_ in gate.calls():
        processes.setdefault(name.partition("[")[0], set()).add(process)
    assert {name: len(found) for name, found in processes.items()} == {"bert": 1, "vit": 1, "mlp": 1}
    assert len(set.union(*processes.values())) == 2
