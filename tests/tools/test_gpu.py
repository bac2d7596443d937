"""The command for a GPU machine: what succeeded is left out the next time, what is late cut off, all of it told."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(repository: Path, name: str) -> ModuleType:
    path = repository / "tools" / "gpu" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, with pieces of a line each."""
    module = _load(repository, "run")
    pieces = {
        "good": "open('ran', 'a').write('good '); print('said')",
        "bad": "open('ran', 'a').write('bad '); raise SystemExit(7)",
        "slow": "import time; open('ran', 'a').write('slow '); time.sleep(60)",
        "after": "open('ran', 'a').write('after ')",
        "report": "open('ran', 'a').write('report ')",
    }
    made = [module.Piece(name, (sys.executable, "-c", text)) for name, text in pieces.items()]
    monkeypatch.setattr(module, "_pieces", lambda *_: iter(made))
    monkeypatch.setattr(module, "_profiles", lambda *_: Path())
    monkeypatch.setattr(module, "LEAST", 4.0)  # in which Python starts, on any machine
    return module


def _call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, seconds: float) -> int:
    monkeypatch.setattr(module, "ROOT", out)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--seconds", str(seconds)])
    code: int = module.main()
    return code


def test_what_succeeded_is_left_out_and_what_is_late_is_cut_off(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(run, monkeypatch, tmp_path, 8) == 3
    assert (tmp_path / "ran").read_text() == "good bad slow report "
    assert "after: no time left; run the command again to go on" in capsys.readouterr().out
    state = json.loads((tmp_path / "state.json").read_text())
    assert state == {"good": 0, "bad": 7, "slow": 124, "report": 0}
    assert (tmp_path / "good.log").read_text() == "said\n"

    assert _call(run, monkeypatch, tmp_path, 8) == 3  # what was never tried comes first
    assert (tmp_path / "ran").read_text() == "good bad slow report after bad slow report "
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == [
        "after: exit code 0", "bad: exit code 7", "slow: exit code 124", "report: exit code 0",
    ]  # fmt: skip

    assert _call(run, monkeypatch, tmp_path, 0.1) == 3  # the report is made anew, whatever the time
    assert (tmp_path / "ran").read_text().endswith("slow report report ")
    assert "bad: no time left; run the command again to go on" in capsys.readouterr().out


def test_the_page_sets_measured_figures_beside_the_papers(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from magis.report import COLUMNS, write_csv

    row = dict.fromkeys(COLUMNS)
    row |= {
        "name": "bert", "strategy": "magis", "dtype": "float32", "memory limit ratio": 0.4,
        "memory ratio reached (opt/ori)": 0.39, "latency ratio reached (opt/ori)": 1.03, "opt-is-prof-result": True,
        "opt memory error % (of measured)": 0.5, "opt latency error % (of measured)": -4.0, "verdict": "pass",
    }  # fmt: skip
    other = {**row, "memory limit ratio": None, "latency limit ratio": 1.1, "opt-is-prof-result": False}
    write_csv(tmp_path / "memory-bert.csv", [row, other], full=True)
    _load(repository, "report").main(str(tmp_path), "cpu")
    page = (tmp_path / "results-cpu.md").read_text()
    assert "| bert | float32 | memory 0.4 | 0.390 | 1.030 | 1.15 latency | 0.500 | -4.000 | pass |" in page
    assert "| bert | float32 | latency 1.1 | 0.390 | 1.030 (simulated) | 0.47 memory |" in page
    assert "Median latency error of 2 steps: 4.00%, largest 4.00%." in page
    assert capsys.readouterr().out.strip().endswith("results-cpu.md")
