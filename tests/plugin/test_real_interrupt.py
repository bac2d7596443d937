"""Ctrl-C in the middle of a real run: whole files, exit code 2, and nothing of the run is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

MODEL = "own_nets:sound"
RUN = (
    f"--magis-models={MODEL}",
    "--magis-memory-ratios=0.8",
    "--magis-device=cpu",
    "--magis-budget=500",
    "--magis-csv-full",
)
BASELINE = "baselines/cpu/own_nets%3Asound.json"
PATIENCE = 300

# "timing" goes on until the interrupt: a million pairs of steps
CONFTEST = """
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_magis import harness


@pytest.hookimpl(tryfirst=True)
def pytest_magis_run_case(case, config, latency_bounds, rough, make, timelines, snapshots):
    def told(text):
        with Path("told.txt").open("a") as stream:
            stream.write(f"{case.strategy}: {text}\\n")

    case = replace(case, timing_rounds=1_000_000)
    further = rough, told, make, timelines, snapshots
    return harness.pytest_magis_run_case(case, config, None, None, latency_bounds, *further)


def pytest_unconfigure():
    Path("threads.txt").write_text(json.dumps([thread.name for thread in threading.enumerate()]))
"""


def wait_for(condition, process):
    start = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < start + PATIENCE
        time.sleep(0.02)


def interrupted(gate, moment, *args):
    """Start pytest as a shell would, send Ctrl-C when `moment` (of what it shows and was told) has come; its output."""
    command = [sys.executable, "-u", "-m", "pytest", "-v", "-p", "pytest_magis.plugin", *args]
    shown, told = gate.root / "shown.txt", gate.root / "told.txt"
    with (
        shown.open("w") as stream,
        subprocess.Popen(command, cwd=gate.root, stdout=stream, stderr=stream, start_new_session=True) as process,
    ):
        try:
            wait_for(lambda: moment(shown.read_text(), told.read_text() if told.exists() else ""), process)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=PATIENCE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, shown.read_text()
    with pytest.raises(ProcessLookupError):  # nobody of its group is left
        os.killpg(process.pid, 0)
    return shown.read_text()


def after_first_line(shown, told):
    return f"magis::{MODEL}[eager] PASSED" in shown


def while_timing(shown, told):
    if told.endswith("magis: timing\n"):
        time.sleep(0.3)  # some tens of pairs
        return True
    return False


def while_searching(shown, told):
    if told.endswith("magis: searching\n"):
        time.sleep(0.5)
        return True
    return False


ENDLESS = (*RUN[:-2], f"--magis-budget={10**12}", "--magis-csv-full")
"""Searches for much longer than until the interrupt."""


@pytest.mark.parametrize(
    ("moment", "is_first_run", "run"),
    [(after_first_line, True, RUN), (while_timing, False, RUN), (while_searching, False, ENDLESS)],
)
def test_ctrl_c_leaves_whole_files_and_nothing_else(gate, moment, is_first_run, run):
    gate.use_real_core()
    (gate.root / "conftest.py").write_text(CONFTEST)
    if not is_first_run:
        empty = {"schema": 1, "model": MODEL, "device": "cpu", "configurations": {}}
        (gate.root / BASELINE).parent.mkdir(parents=True)
        (gate.root / BASELINE).write_text(json.dumps(empty))
        (gate.root / "out.csv").write_text("rows of an earlier run\n")
    before = gate.files()
    shown = interrupted(gate, moment, *run, "--magis-update=new", "--magis-csv=out.csv")
    assert "KeyboardInterrupt" in shown
    assert "baselines are not updated: the run was interrupted" in shown
    assert "Traceback" not in shown
    after = gate.files()
    extra = {"shown.txt", "told.txt", "threads.txt", "out.csv"}
    assert {name: text for name, text in after.items() if name not in extra} == {
        name: text for name, text in before.items() if name != "out.csv"
    }
    assert extra <= after.keys()
    (row,) = gate.rows("out.csv")
    assert (row["strategy"], row["verdict"], row["numbers"]) == ("eager", "accepted new", "reference")
    assert None not in row
    assert None not in row.values()
    assert json.loads((gate.root / "threads.txt").read_text()) == ["MainThread"]
