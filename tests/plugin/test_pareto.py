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
    assert fronts.run_fronts("--magis-models=bert", "--magis-pareto=").ret == 4
