"""--magis-preset: the sizes of the models."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "preset"),
    [
        ([], "small"),
        (["--magis-device=sim:rtx3090"], "paper"),
        (["--magis-device=sim:rtx3090", "--magis-preset=small"], "small"),
        (["--magis-preset=paper"], "paper"),
        (["-o", "magis_preset=paper"], "paper"),
    ],
)
def test_the_default_depends_on_the_device(gate, given, preset):
    gate("--magis-models=bert", *given)
    assert {row["preset"] for row in gate.rows()} == {preset}


@pytest.mark.parametrize("given", ["tiny", "Small", ""])
def test_unknown_presets_are_refused(gate, given, workers):
    message = gate.refuses("--magis-models=bert", f"--magis-preset={given}", workers=workers)
    assert message.startswith("ERROR: --magis-preset")


def test_presets_do_not_share_baselines(gate, workers):
    gate.accept("--magis-models=bert")
    gate("--magis-models=bert", "--magis-preset=paper").assert_outcomes(failed=3)
    gate.accept("--magis-models=bert", "--magis-preset=paper")
    gate("--magis-models=bert", workers=workers).assert_outcomes(passed=3)
    assert sorted(gate.baseline()["configurations"]) == ["paper", "small"]
