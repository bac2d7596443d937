"""What a run survives: being killed, a full disk, a read-only folder, a second run beside it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
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
        time.sleep(chance.uniform(earliest, 1.05 * whole) if moment else min(0.1 * whole, 0.2))
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
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
    for name, text in stored(gate).items():
        cases = parse(text, Path(name)).configurations["small"].cases
        assert set(cases) == {"eager", "magis-mem0.8", "magis-mem0.7", "magis-mem0.6"}, name


@pytest.fixture
def mounted(tmp_path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=False)


def test_a_full_disk_loses_nothing(gate, mounted):
    options = (f"--magis-models={','.join(MODELS)}", f"--magis-baselines={mounted / 'baselines'}")
    gate.accept(*options)
    folder = mounted / "baselines" / "cpu"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    filler = mounted / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while stream.write(b"x" * 4096):
            pass
    (gate.root / "fake.json").write_text(json.dumps(WORSE))
    for csv in ("results.csv", str(mounted / "results.csv")):
        result = gate(*options, "--magis-update=worse", f"--magis-csv={csv}")
        text = result.stdout.str() + result.stderr.str()
        assert result.ret == pytest.ExitCode.USAGE_ERROR, text
        assert "No space left on device" in text
        assert "Traceback" not in text
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    filler.unlink()
    gate.accept(*options, update="worse")
    assert all(path.read_bytes() != before[path.name] for path in folder.iterdir())


def test_a_read_only_folder_is_told_in_one_line(gate, mounted):
    options = ("--magis-models=bert", f"--magis-baselines={mounted / 'baselines'}")
    gate.accept(*options)
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    gate(*options).assert_outcomes(passed=3)  # nothing to store
    assert "Read-only file system" in gate.refuses(*options, f"--magis-csv={mounted / 'results.csv'}")
    (gate.root / "fake.json").write_text(json.dumps(WORSE))
    assert "Read-only file system" in gate.refuses(*options, "--magis-update=worse")
