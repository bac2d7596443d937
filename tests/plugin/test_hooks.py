"""What other projects can add: models, strategies, columns, and a way to run cases."""

from __future__ import annotations

import pytest

MODELS = """
def pytest_magis_models(config):
    return {"our-net": "conftest:make", "our-other_net": "conftest:make_other"}
"""

STRATEGY = """
import dataclasses
from magis.results import Case

@dataclasses.dataclass(frozen=True)
class Twice:
    name: str = "twice"
    def cases(self, model, grid):
        for part in (1, 2):
            yield f"twice-{part}", Case(model, "twice", grid.device, grid.preset, dtype=grid.dtype)

def pytest_magis_strategies(config):
    return [Twice()]
"""

COLUMNS = """
def pytest_magis_columns(config):
    return {"saved bytes": lambda result: result.original_memory.peak_bytes - result.memory.peak_bytes}
"""


def test_models(gate, node_ids):
    gate.extend_conftest(MODELS)
    arguments = ("--magis-models=our-*,bert", "--magis-strategies=eager")
    assert node_ids(gate("--collect-only", "-q", *arguments)) == [
        "magis::our-net[eager]",
        "magis::our-other_net[eager]",
        "magis::bert[eager]",
    ]
    gate.accept(*arguments)
    assert {call[0] for call in gate.calls()} == {"conftest:make[eager]", "conftest:make_other[eager]", "bert[eager]"}
    gate(*arguments).assert_outcomes(passed=3)
    assert [row["name"] for row in gate.rows()] == ["our-net", "our-other_net", "bert"]
    assert gate.baseline("our-net")["model"] == "our-net"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("{'bert': 'conftest:make'}", "a plugin adds a model called 'bert', which magis already has"),
        ("{'all': 'conftest:make'}", "a plugin adds a model called 'all'"),
        ("{'../../x': 'conftest:make'}", "a plugin adds the model '../../x'; use letters"),
        ("{'net[0]': 'conftest:make'}", "a plugin adds the model 'net[0]'"),
        ("{'net': 'conftest'}", "a plugin adds the model 'net' as 'conftest'; write package.module:factory"),
    ],
)
def test_models_that_cannot_be_are_refused(gate, models, message):
    gate.extend_conftest(f"def pytest_magis_models(config): return {models}\n")
    assert message in gate.refuses("--magis-models=bert")


def test_strategies(gate, node_ids):
    gate.extend_conftest(STRATEGY)
    arguments = ("--magis-models=bert", "--magis-strategies=eager,twice")
    labels = ["eager", "twice-1", "twice-2"]
    assert node_ids(gate("--collect-only", "-q", *arguments)) == [f"magis::bert[{label}]" for label in labels]
    gate.accept(*arguments)
    gate(*arguments).assert_outcomes(passed=3)
    assert [row["strategy"] for row in gate.rows()] == ["eager", "twice", "twice"]


def test_columns(gate):
    gate.extend_conftest(COLUMNS)
    gate("--magis-models=bert")
    rows = gate.rows()
    assert list(rows[0])[-1] == "saved bytes"
    assert [int(row["saved bytes"]) for row in rows] == [
        int(row["ori peak bytes"]) - int(row["opt peak bytes"]) for row in rows
    ]


def test_a_core_may_leave_a_case_to_the_next(gate):
    (gate.root / "second.py").write_text("def pytest_magis_run_case(case): return None\n")
    gate("-p", "second", "--magis-models=bert").assert_outcomes(failed=3)
    assert len(gate.calls()) == 3
