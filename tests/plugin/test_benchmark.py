"""Cases as rows of pytest-benchmark's session: its table, its files, its comparison."""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace

import pytest

from pytest_magis.outputs.benchmark import BenchmarkRows
from pytest_magis.run_plan import Outcome
from pytest_magis.verdict import Verdict
from tests.plugin.verdicts import result as made

THEIRS = ("-p", "pytest_benchmark.plugin")
RUN = (*THEIRS, "--magis-models=bert")


@pytest.fixture
def accepted(gate, monkeypatch):
    """With stored baselines of bert's three cases."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # by which pytest-benchmark tells that it runs in one
    gate.accept("--magis-models=bert")
    return gate


def test_its_table_has_a_row_for_each_case(accepted, workers):
    result = accepted(*RUN, "--benchmark-json=all.json", "--benchmark-columns=median,rounds", workers=workers)
    result.stdout.fnmatch_lines(["*benchmark 'bert': 3 tests*", "*bert?eager?*", "*bert?magis-mem0.8?*"])
    assert {each["fullname"] for each in json.loads((accepted.root / "all.json").read_text())["benchmarks"]} == {
        "magis::bert[eager]",
        "magis::bert[magis-mem0.8]",
        "magis::bert[magis-mem0.6]",
    }


def test_only_benchmarks_are_the_cases_and_none_is_skipped_with_them(accepted):
    (accepted.root / "test_other.py").write_text("def test_other(): pass\n")
    accepted(*RUN, "test_other.py", "--benchmark-only").assert_outcomes(passed=3, skipped=1)
    accepted(*RUN, "test_other.py", "--benchmark-skip").assert_outcomes(passed=1, skipped=3)


def test_rounds_and_bytes_are_those_of_the_rows(accepted):
    accepted.fake(**{"bert[magis-mem0.6]": {"raise": "no"}})
    accepted(*RUN, "--benchmark-json=latencies.json")
    eager, optimized = json.loads((accepted.root / "latencies.json").read_text())["benchmarks"]
    row = accepted.rows()[1]
    assert (eager["name"], optimized["fullname"]) == ("bert[eager]", "magis::bert[magis-mem0.8]")
    stats = optimized["stats"]
    assert stats["median"] == pytest.approx(float(row["opt-latency"]) / 1000)
    assert stats["rounds"] == len(stats["data"]) == 3
    assert stats["mean"] == pytest.approx(statistics.mean(stats["data"]))
    assert optimized["extra_info"]["optimized_peak_bytes"] == int(row["opt peak bytes"])
    assert optimized["extra_info"]["simulated"] is False


@pytest.mark.parametrize(("milliseconds", "red"), [(10.5, False), (15.0, True)])
def test_its_comparison_finds_cases_that_got_slower(accepted, milliseconds, red):
    storage = "--benchmark-storage=file://saved"
    accepted.fake(any_case={"milliseconds": 10.0})
    assert accepted(*RUN, storage, "--benchmark-save=before").ret == 0
    (path,) = accepted.root.glob("saved/*/*_before.json")
    assert len(json.loads(path.read_text())["benchmarks"]) == 3
    accepted.fake(any_case={"milliseconds": milliseconds})
    result = accepted(*RUN, storage, "--benchmark-compare", "--benchmark-compare-fail=median:10%")
    assert bool(result.ret) is red
    assert ("Performance has regressed" in result.stdout.str() + result.stderr.str()) is red


@pytest.mark.parametrize("models", [("--magis-models=bert",), ()])
def test_the_second_name_of_the_file_is_answered_by_the_first(gate, models):
    for given in (["--magis-benchmark-json=x.json"], ["-o", "magis_benchmark_json=x.json"]):
        line = gate.refuses(*models, *given)
        assert line == "ERROR: --magis-benchmark-json is gone; give --benchmark-json"


def test_where_it_is_not_installed_its_options_name_the_extra(gate, monkeypatch):
    monkeypatch.setattr("pytest_magis.plugin.find_spec", lambda _name: None)
    line = gate.refuses("--magis-models=bert", "--benchmark-json=x.json")
    said = "--benchmark-json is an option of pytest-benchmark, which is not installed"
    assert line == f"ERROR: {said}; pip install 'pytest-magis[benchmark]'"
    gate.extend_conftest("def pytest_addoption(parser):\n    parser.addoption('--benchmark-size')\n")
    assert gate("--benchmark-size=3").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_marked_tests_count_as_benchmarks(gate, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    gate.pytester.makepyfile(
        """
        import pytest

        @pytest.mark.magis
        def test_net(): ...

        def test_other(): ...
        """
    )
    counts = {"--benchmark-only": "test_net", "--benchmark-skip": "test_other"}
    for option, name in counts.items():
        result = gate(*THEIRS, option, "--setup-plan", "-v", "-rs")
        skipped = [line for line in result.outlines if "SKIPPED" in line and "::" in line]
        assert skipped
        assert not [line for line in skipped if name in line.partition(" ")[0]]


def test_a_case_that_ran_again_is_one_row():
    result = made(strategy="eager")
    outcome = Outcome("bert", "eager", result.case, Verdict(passed=True, label="pass"), result)
    session = SimpleNamespace(json=None, benchmarks=[])
    rows = BenchmarkRows(SimpleNamespace(_benchmarksession=session))
    for _ in range(2):
        rows.put(outcome)
    assert [row.fullname for row in session.benchmarks] == ["magis::bert[eager]"]
