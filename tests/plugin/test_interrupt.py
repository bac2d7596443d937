"""Ctrl-C at any moment leaves every file whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from magis.report import read_results, write_text_atomically


def test_finished_rows_are_written_and_nothing_is_accepted(gate):
    gate.accept("--magis-models=bert,vit")
    gate.fake(any_case={"opt_tensor": 1.005}, **{"vit[magis-mem0.8]": {"interrupt": True}})
    baselines = {name: text for name, text in gate.files().items() if name.startswith("baselines")}
    result = gate.in_subprocess("--magis-models=bert,vit", "--magis-update=worse")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert [row["name"] for row in gate.rows()] == ["bert", "bert", "bert", "vit"]
    assert {name: text for name, text in gate.files().items() if name.startswith("baselines")} == baselines
    assert not [name for name in gate.files() if name.endswith(".tmp")]


def test_an_interrupt_in_the_first_case_keeps_the_old_rows(gate):
    gate.accept("--magis-models=bert")
    before = (gate.root / "results.csv").read_bytes()
    gate.fake(any_case={"interrupt": True})
    assert gate.in_subprocess("--magis-models=bert").ret == pytest.ExitCode.INTERRUPTED
    assert (gate.root / "results.csv").read_bytes() == before


def test_an_interrupt_in_a_worker(gate):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.8]": {"interrupt": True}})
    before = {name: text for name, text in gate.files().items() if name.startswith("baselines")}
    assert gate.in_subprocess("-n2", "--magis-models=bert", "--magis-update=new").ret == pytest.ExitCode.INTERRUPTED
    assert {name: text for name, text in gate.files().items() if name.startswith("baselines")} == before
    assert [row["strategy"] for row in gate.rows()] == ["eager"]


WRITER = """
import sys
from pathlib import Path
from magis.report import read_results, write_text_atomically
path = Path(sys.argv[1])
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    for letter in "ab":
        write_text_atomically(path, letter * 2_000_000)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_ends_while_writing_leaves_a_whole_file(tmp_path, repository, kind):
    path = tmp_path / "file.txt"
    for delay in (0.0, 0.013, 0.05):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            cwd=repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(repository)},
        )
        with writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay)
            writer.send_signal(kind)
        if path.exists():
            text = path.read_text()
            assert text == text[0] * 2_000_000
        if kind is signal.SIGINT:  # a killed process cannot tidy up
            assert [found.name for found in tmp_path.iterdir() if found != path] == []


def test_a_write_that_fails_keeps_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_text_atomically(path, "old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match=r"cannot write .*file.txt: No space left on device"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["file.txt"]


HANGS = """
import time
_before = figures
def figures(root, name):
    if name == "vit[magis-mem0.6]":
        (root / "last").touch()
        time.sleep(600)
    return _before(root, name)
"""


def test_rows_are_there_as_cases_end_and_a_killed_run_keeps_them(gate, workers):
    """Whatever moment they are read at, they are those of the cases that had ended, each of them whole."""
    gate.extend_conftest(HANGS)
    plugins = ("-p", "pytest_magis.plugin", "-p", "xdist.plugin", *(("-n2",) if workers else ()))
    command = [sys.executable, "-m", "pytest", *plugins, "--magis-models=bert,vit"]
    with subprocess.Popen(command, cwd=gate.root, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        seen = [0]
        while (seen[-1] < 5 or not (gate.root / "last").exists()) and process.poll() is None:
            if (gate.root / "results.csv").exists():
                seen.append(len(read_results(gate.root / "results.csv")))
        os.killpg(process.pid, signal.SIGKILL)
    assert seen == sorted(seen)
    assert [row["name"] for row in gate.rows()] == ["bert"] * 3 + ["vit"] * 2
    assert not [name for name in gate.files() if name.endswith(".tmp")]
