"""What a run shows: the table, notes, the progress line."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest


def lines_after(result: pytest.RunResult, start: str) -> list[str]:
    lines = result.outlines
    first = next(index for index, line in enumerate(lines) if line.startswith(start))
    return lines[first:]


def test_the_table(gate, workers):
    gate.accept("--magis-models=bert,vit")
    gate.fake(
        **{"vit[magis-mem0.6]": {"numbers": "within tolerance"}, "bert[magis-mem0.8]": {"note": "looked  at\nit"}}
    )
    table = lines_after(gate("--magis-models=bert,vit", workers=workers), "model ")
    assert table[:8] == [
        "model  strategy  limit    original   optimized  ratio      latency ratio  numbers           verdict",
        "bert   eager     -        1.18 MiB    1.18 MiB  1.000                  -  bit-identical     pass",
        "bert   magis     mem 0.8  1.18 MiB  956.04 KiB  0.790  1.02 [1.01, 1.03]  bit-identical     pass",
        "bert   magis     mem 0.6  1.18 MiB  717.16 KiB  0.592  1.02 [1.01, 1.03]  bit-identical     pass",
        "vit    eager     -        1.18 MiB    1.18 MiB  1.000                  -  bit-identical     pass",
        "vit    magis     mem 0.8  1.18 MiB  954.30 KiB  0.790  1.02 [1.01, 1.03]  bit-identical     pass",
        "vit    magis     mem 0.6  1.18 MiB  715.85 KiB  0.592  1.02 [1.01, 1.03]  within tolerance  pass",
        "bert[magis-mem0.8]: looked at it",
    ]


def test_the_table_fits_a_terminal(gate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    name = "conftest:" + "a_long_name" * 9
    gate.fake(any_case={"numbers": "differs: " + "x" * 500})
    result = gate("--magis-models", f"{name},wide_resnet101_2", "--magis-latency-ratios=1.123456789,1.1")
    table = [line for line in lines_after(result, "model ") if "FAIL" in line and not line.startswith("FAILED")]
    assert len(table) == 6
    assert max(map(len, table)) <= 120
    assert table[0].startswith("confte...")


def test_simulated_figures_are_marked(gate):
    result = gate("--magis-models=bert", "--magis-device=sim:rtx3090")
    result.stdout.fnmatch_lines(["bert *mem 0.8 * ~956.04 KiB *0.790 * ~1.020 *not run *FAIL new"])


def test_errors_are_in_the_table(gate):
    gate.fake(any_case={"raise": "cannot be captured"})
    result = gate("--magis-models=bert")
    result.stdout.fnmatch_lines(["bert *eager * ERROR", "*FAILED magis::bert[[]eager[]] - cannot be captured"])


def test_what_a_case_prints_does_not_disturb(gate):
    gate.fake(any_case={"shout": "USDT: something\n"})
    assert "USDT" not in gate("--magis-models=bert", "--magis-update=new").stdout.str()


def on_terminal(gate, *args: str) -> str:
    """The bytes that a terminal gets."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "pytest", "-p", "pytest_magis.plugin", "-p", "no:cacheprovider", *args]
    with subprocess.Popen(command, cwd=gate.root, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # how Linux reports the end of a terminal
                break
            if not part:
                break
            shown += part
        process.wait(timeout=60)
    os.close(controller)
    return shown.decode()


def test_a_terminal_shows_progress_and_nothing_stays(gate):
    gate.fake(any_case={"says": ["searching\nstates", "never shown: too soon"]})
    shown = on_terminal(gate, "--magis-models=bert")
    assert "\r\x1b[2Kbert[eager]: searching states" in shown
    assert "never shown" not in shown
    # each line that was shown is erased before anything else is written
    assert shown.count("searching states\r\x1b[2K") == 3
    assert "FAIL new" in shown


def test_a_quiet_run_shows_no_progress(gate):
    gate.fake(any_case={"says": []})
    assert "\x1b[2K" not in on_terminal(gate, "--magis-models=bert", "-q")


def test_a_pipe_gets_no_progress(gate):
    """The made-up core would fail if it were asked to show any: `progress` is None."""
    gate.fake(any_case={"says": []})
    gate.extend_conftest(
        "old = pytest_magis_run_case\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_magis_run_case(case, config, planning_workspaces, expected_graph, progress, timelines):\n"
        "    if progress is not None: raise UsageError('progress')\n"
        "    return old(case, config, planning_workspaces, expected_graph, progress, timelines)\n"
    )
    result = gate.in_subprocess("--magis-models=bert", "--magis-update=new")
    result.assert_outcomes(passed=3)
