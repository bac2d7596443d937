"""--magis-models: which models, and what happens without the option."""

from __future__ import annotations

import pytest

from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES


def models(result: pytest.RunResult) -> list[str]:
    ids = [line for line in result.outlines if line.startswith("magis::")]
    return list(dict.fromkeys(line.removeprefix("magis::").partition("[")[0] for line in ids))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--magis-models=all"], list(GATE_NAMES)),
        (["--magis-models=seed"], list(SEED_NAMES)),
        (["--magis-models=vit,bert"], ["vit", "bert"]),
        (["--magis-models=vit", "--magis-models= bert ,vit"], ["vit", "bert"]),
        (["--magis-models=unet*"], ["unet", "unetpp"]),
        (["-o", "magis_models=bert,mlp"], ["bert", "mlp"]),
        (["-o", "magis_models=bert\nvit"], ["bert", "vit"]),
        (["-o", "magis_models=bert", "--magis-models=vit"], ["vit"]),
        (["--magis-models=conftest:anything"], ["conftest:anything"]),
    ],
)
def test_names_are_resolved_in_the_order_written(gate, given, expected):
    result = gate("--collect-only", "-q", *given)
    assert models(result) == expected
    assert result.ret == 0


def test_without_models_nothing_changes(gate):
    gate.pytester.makepyfile("def test_own(): pass")
    before = gate.files()
    result = gate("-p", "no:cacheprovider", "--magis-memory-ratios=0.5")
    result.assert_outcomes(passed=1)
    assert "magis" not in result.stdout.str()
    assert gate.files() == before
    assert gate.calls() == []


def test_without_models_an_empty_directory_has_no_tests(gate):
    assert gate().ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_all_models_pass_once_accepted(gate, workers):
    gate.accept("--magis-models=all")
    result = gate("--magis-models=all", workers=workers)
    result.assert_outcomes(passed=21)
    rows = gate.rows()
    assert [row["name"] for row in rows] == [name for name in GATE_NAMES for _ in range(3)]
    assert {row["verdict"] for row in rows} == {"pass"}


def test_a_factory_names_its_row_and_its_baseline(gate):
    gate.accept("--magis-models=conftest:net")
    assert gate.rows()[0]["name"] == "conftest:net"
    assert (gate.root / "baselines" / "cpu" / "conftest%3Anet.json").is_file()
