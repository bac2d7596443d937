"""What a run survives: being killed, a full disk, a read-only folder, a second run beside it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_magis.baseline_files import parse

MODELS = ("bert", "vit", "unet", "resnet50", "gpt_neo", "btlm", "unetpp", "mlp")
WORSE = {"*": {"ori_tensor": 1.005, "ori_peak": 1.005}}
"""What a run measures that has something to accept."""


def command(*arguments: str) -> list[str]:
    plugins = ("-p", "pytest_magis.plugin", "-p", "xdist.plugin")
    return [sys.executable, "-m", "pytest", "-q", *plugins, f"--magis-models={','.join(MODELS)}", *arguments]


def stored(gate):
    return {path.name: path.read_text() for path in sorted((gate.root / "baselines" / "cpu").glob("*.json"))}


@pytest.fixture
def grown(gate):
    """Baselines that a run would replace, each by `new`; returns both contents, by file."""
    gate.accept(f"--magis-models={','.join(MODELS)}")
    old = stored(gate)
    (gate.root / "fake.json").write_text(json.dumps(WORSE))
    gate.accept(f"--magis-models={','.join(MODELS)}", update="worse")
    new = stored(gate)
    assert all(old[name] != new[name] for name in new)
    return old, new


def put_back(gate, old):
    for name, text in old.items():
        (gate.root / "baselines" / "cpu" / name).write_text(text)


@pytest.mark.parametrize("moments", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_at_any_moment_every_baseline_is_old_or_new(gate, grown, moments):
    old, new = grown
    put_back(gate, old)
    start = time.monotonic()
    subprocess.run(command("--magis-update=worse"), cwd=gate.root, check=True, capture_output=True)
    whole = time.monotonic() - start
    chance = random.Random(0)
    seen = set()
    for moment in range(moments):
        put_back(gate, old)
        process = subprocess.Popen(
            command("--magis-update=worse"), cwd=gate.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # the first one before anything is written, every other one near the end, when files are
        earliest = 0.0 if moment % 2 else 0.7 * whole
        time.sleep(chance.uniform(earliest, 1.05 * whole) if moment else 0.1 * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for name, text in stored(gate).items():
            parse(text, Path(name))
            assert text in (old[name], new[name]), name
            seen.add("old" if text == old[name] else "new")
    subprocess.run(command("--magis-update=worse"), cwd=gate.root, check=True, capture_output=True)
    assert stored(gate) == new  # whatever killed runs left behind is in nobody's way
    assert "old" in seen


def test_two_runs_at_once_lose_nothing(gate, grown):
    """Each accepts other cases of the same files."""
    _, new = grown
    for name in new:
        (gate.root / "baselines" / "cpu" / name).unlink()
    runs = [
        subprocess.Popen(
            command("--magis-update=new", f"--magis-memory-ratios={ratio}", f"--magis-csv={ratio}.csv"),
            cwd=gate.root,
            stdout=subprocess.PIPE,
            text=True,
        )
        for ratio in (0.8, 0.7, 0.6)
    ]
    for run in runs:
        said, _ = run.communicate(timeout=120)
        assert run.returncode == 0, said
    for name, text in stored(gate).items():
        cases = parse(text, Path(name)).configurations["small"].cases
        assert set(cases) == {"eager", "magis-mem0.8", "magis-mem0.7", "magis-mem0.6"}, name
