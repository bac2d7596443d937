"""The seam to `magis.api`: one small network on a simulated device, planned in earnest."""

from __future__ import annotations

ARGUMENTS = ("--magis-models=mlp", "--magis-device=sim:rtx3090", "--magis-preset=small", "--magis-budget=20")


def test_a_run_is_accepted_and_comes_again(gate):
    gate.use_real_core()
    gate.in_subprocess(*ARGUMENTS, "--magis-update=new").assert_outcomes(passed=3)
    first = gate.rows()
    result = gate.in_subprocess(*ARGUMENTS, "-n2")
    result.assert_outcomes(passed=3)
    same = [column for column in first[0] if column not in ("search seconds", "verdict", "note")]
    assert [[row[column] for column in same] for row in gate.rows()] == [
        [row[column] for column in same] for row in first
    ]
    eager, at_80, at_60 = first
    for row, ratio in ((at_80, 0.8), (at_60, 0.6)):
        if row["feasible"] == "True":
            assert int(row["opt peak bytes"]) <= ratio * int(eager["ori peak bytes"])
    assert int(at_80["states evaluated"]) > 0


def test_devices_are_asked_for(gate):
    gate.use_real_core()
    result = gate.in_subprocess("--magis-models=mlp", "--magis-device=sim:abacus", "--collect-only")
    assert result.ret == 4
    (line,) = [line for line in result.stderr.str().splitlines() if line]
    assert line.startswith("ERROR: --magis-device: unknown device 'sim:abacus'; choose from cpu")
