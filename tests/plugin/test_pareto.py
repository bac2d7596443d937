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


MARKED = """
import pytest

@pytest.mark.magis(memory_ratios=[0.8], strategies=["magis"])
@pytest.mark.parametrize("width", [64, "a/b:c"])
def test_net(width): ...

def test_blocks(magis):
    magis.check(lambda: None, strategies=["eager"], name="block")
    magis.check(lambda: None, strategies=["eager"], name="other", budget=9)
"""


def test_fronts_of_users_tests(gate, workers):
    """A case more of a marked test; with the others, where the fixture gates."""
    (gate.root / "test_memory.py").write_text(MARKED)
    gate("--magis-update=new").assert_outcomes(passed=3)
    assert not (gate.root / "out").exists()
    result = gate("--magis-pareto=out", "--magis-report=report.html", workers=workers)
    result.assert_outcomes(passed=5)
    names = ("block", "other", "test_memory.test_net-64", "test_memory.test_net-a%2Fb%3Ac")
    assert sorted(path.name for path in (gate.root / "out").iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in ("json", "svg")
    )
    said = [line for line in result.outlines if line.startswith("front: ")]
    assert [line.partition(".svg")[2] for line in said] == [f" (2 plans, {n} judged)" for n in (7, 9, 7, 7)]
    page = (gate.root / "report.html").read_text()
    assert page.count("data:image/svg+xml") == 4
    gate("-k", "pareto", "--magis-pareto=alone", workers=workers).assert_outcomes(passed=2)
    assert len(list((gate.root / "alone").glob("*.svg"))) == 2


def test_a_mark_takes_the_budgets_of_the_option(gate):
    """By name, too; the default is one of them, whatever the option says."""
    budgets = {"quick": 3_000, "default": 7, "thorough": 300_000, "70": 70, "None": 300_000}  # 7: of the made-up core
    (gate.root / "test_memory.py").write_text(
        "import pytest\n"
        + "".join(f"@pytest.mark.magis(budget={name!r})\ndef test_{name}(): ...\n" for name in budgets).replace(
            "budget='None'", "budget=None"
        )
    )
    gate("--magis-budget=thorough", "--magis-pareto=out", "-k", "pareto").assert_outcomes(passed=5, deselected=15)
    for name, number in budgets.items():
        assert json.loads((gate.root / f"out/test_memory.test_{name}.json").read_text())["states"] == number


def test_a_real_front_of_a_marked_test(gate):
    gate.use_real_core()
    (gate.root / "test_memory.py").write_text(
        "import own_nets, pytest\n@pytest.mark.magis(device='sim:h200')\ndef test_net(): return own_nets.sound()\n"
    )
    gate("--magis-pareto=out", "-k", "pareto").assert_outcomes(passed=1, deselected=3)
    read = json.loads((gate.root / "out" / "test_memory.test_net.json").read_text())
    assert (read["model"], read["device"]) == ("test_memory.test_net", "sim:h200")
    assert read["points"][0]["peak_bytes"] < read["original"]["peak_bytes"]
