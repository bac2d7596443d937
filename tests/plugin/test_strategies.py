"""--magis-strategies: what each model is run under."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ([], ["eager", "magis-mem0.8", "magis-mem0.6"]),
        (["--magis-strategies=magis"], ["magis-mem0.8", "magis-mem0.6"]),
        (["--magis-strategies=checkpoint,eager"], ["checkpoint", "eager"]),
        (["--magis-strategies=eager", "--magis-strategies=checkpoint"], ["eager", "checkpoint"]),
        (["-o", "magis_strategies=checkpoint"], ["checkpoint"]),
    ],
)
def test_strategies_contribute_cases(gate, node_ids, given, labels):
    result = gate("--collect-only", "-q", "--magis-models=bert", *given)
    assert node_ids(result) == [f"magis::bert[{label}]" for label in labels]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("zero4", "--magis-strategies: unknown strategy 'zero4'; choose from eager, magis, checkpoint"),
        ("", "--magis-strategies: empty item"),
        ("eager,,magis", "--magis-strategies: empty item"),
    ],
)
def test_unknown_strategies_are_refused(gate, given, message, workers):
    assert message in gate.refuses("--magis-models=bert", f"--magis-strategies={given}", workers=workers)


def test_checkpointing_is_gated_like_the_others(gate, workers):
    arguments = ("--magis-models=bert", "--magis-strategies=checkpoint")
    gate.accept(*arguments)
    gate.fake(any_case={"opt_tensor": 1.01})
    result = gate(*arguments, workers=workers)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["worse: optimized tensor bytes: *, +1.0%"])
    assert gate.rows()[0]["strategy"] == "checkpoint"
