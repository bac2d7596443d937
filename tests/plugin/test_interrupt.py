"""Ctrl-C at any moment leaves every file whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from magis.report import read_results


def test_finished_rows_are_written_and_nothing_is_accepted(gate):
    gate.accept("--magis-models=bert,vit")
    gate.fake(any_case={"opt_tensor": 1.005}, **{"vit[magis-mem0.8]": {"interrupt": True}})
    baselines = {name: text for name, text in gate.files().items() if name.startswith("baselines")}
    result = gate.in_subprocess("--magis-models=bert,vit", "--magis-update=worse")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert [row["name"] for row in gate.rows()] == ["bert", "bert", "bert", "vit"]
    assert {name: text for name, text in gate.files().items() if name.startswith("baselines")} == baselines
    assert not [name for name in gate.files() if name.endswith(".tmp")]


HANGS = """
import time
_before = figures
def figures(root, name):
    if name == "vit[magis-mem0.6]":
        (root / "last").touch()
        time.sleep(120)
    return _before(root, name)
"""


def test_rows_are_there_as_cases_end_and_a_killed_run_keeps_them(gate, workers):
    """Whatever moment they are read at, they are those of the cases that had ended, each of them whole."""
    gate.extend_conftest(HANGS)
    plugins = ("-p", "pytest_magis.plugin", "-p", "xdist.plugin", *(("-n2",) if workers else ()))
    command = [sys.executable, "-m", "pytest", *plugins, "--magis-models=bert,vit"]
    with subprocess.Popen(command, cwd=gate.root, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        seen = [0]
        while seen[-1] < 5 and process.poll() is None:
            if (gate.root / "results.csv").exists():
                seen.append(len(read_results(gate.root / "results.csv")))
        os.killpg(process.pid, signal.SIGKILL)
    assert seen == sorted(seen)
    assert (gate.root / "last").exists()
    assert [row["name"] for row in gate.rows()] == ["bert"] * 3 + ["vit"] * 2
    assert not [name for name in gate.files() if name.endswith(".tmp")]
