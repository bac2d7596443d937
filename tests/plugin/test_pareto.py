"""`--magis-pareto`: one pair of files per model."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest


@pytest.fixture
def fronts(gate):
    """The gate with baselines of its cases."""
    gate.accept("--magis-models=bert,vit", "--magis-strategies=eager")
    gate.run_fronts = lambda *args: gate("--magis-strategies=eager", *args)
    return gate


def test_a_front_of_every_model_is_written(fronts):
    result = fronts.run_fronts("--magis-models=bert", "--magis-pareto=out/fronts", "--magis-budget=5", "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*magis::bert[[]pareto[]] PASSED*"])
    result.stdout.fnmatch_lines(["front: *bert.svg (2 plans, 5 judged)"])
    text = json.loads((fronts.root / "out/fronts/bert.json").read_text())
    assert (text["model"], text["device"], text["preset"], text["states"]) == ("bert", "cpu", "small", 5)
    assert len(text["points"]) == 2
    assert ET.fromstring((fronts.root / "out/fronts/bert.svg").read_text()).tag.endswith("svg")


def test_without_the_option_there_is_no_front(fronts):
    result = fronts.run_fronts("--magis-models=bert", "--collect-only", "-q")
    assert "pareto" not in result.stdout.str()


def test_a_front_is_chosen_by_its_name(fronts):
    result = fronts.run_fronts("--magis-models=bert,vit", "--magis-pareto=out", "magis::bert[pareto]")
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    assert [path.name for path in sorted((fronts.root / "out").iterdir())] == ["bert.json", "bert.svg"]


def test_a_front_that_cannot_be_searched_is_red_in_one_line(fronts):
    (fronts.root / "fake.json").write_text(json.dumps({"vit[pareto]": {"raise": "the model branches on its data"}}))
    result = fronts.run_fronts("--magis-models=vit", "--magis-pareto=out", "magis::vit[pareto]")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["the model branches on its data"])
    assert "Traceback" not in result.stdout.str()
    assert not (fronts.root / "out").exists()


def test_a_place_that_cannot_be_written_ends_the_run_first(fronts):
    (fronts.root / "file").write_text("mine")
    for where in ("file", "file/fronts"):
        result = fronts.run_fronts("--magis-models=bert", f"--magis-pareto={where}")
        assert result.ret == 4
        result.stderr.fnmatch_lines(["ERROR: *not a directory*"])
    assert (fronts.root / "file").read_text() == "mine"
    for where in ("", "a" * 300, "/proc/nowhere"):
        result = fronts.run_fronts("--magis-models=bert", f"--magis-pareto={where}")
        assert result.ret == 4
        assert "Traceback" not in result.stderr.str()
    (fronts.root / "there/bert.svg").mkdir(parents=True)
    result = fronts.run_fronts("--magis-models=bert", "--magis-pareto=there")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --magis-pareto: cannot write to *bert.svg*directory*"])


def test_a_strategy_cannot_take_the_name_of_a_front(fronts):
    fronts.extend_conftest(
        """
from pytest_magis.strategies import Named

class Mine:
    name = "mine"
    def cases(self, model, grid):
        return [("pareto", case) for _, case in Named("eager").cases(model, grid)]

def pytest_magis_strategies():
    return (Mine(),)
"""
    )
    result = fronts("--magis-models=bert", "--magis-strategies=mine")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: strategy 'mine' makes a case bert[[]pareto[]]*"])


def test_the_front_of_a_model_that_branches_is_refused_before_anything_runs(gate):
    gate.use_real_core()
    result = gate("--magis-models=own_nets:branches", "--magis-device=cpu", "--magis-pareto=out", "-k", "pareto")
    assert result.ret == 4
    assert not (gate.root / "out").exists()


def test_a_real_front_is_written_and_said(gate):
    gate.use_real_core()
    result = gate("--magis-models=own_nets:sound", "--magis-device=cpu", "--magis-pareto=out", "-k", "pareto")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["front: *.svg (* plans, * judged)"])
    (path,) = (gate.root / "out").glob("*.json")
    read = json.loads(path.read_text())
    assert read["lower_bound_bytes"] <= read["points"][0]["peak_bytes"] < read["original"]["peak_bytes"]
