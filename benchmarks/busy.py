"""What a busy machine does to the latency gate: unchanged tests that turn red, and ratios stored that do not hold.

    python benchmarks/busy.py [load] [runs] [real-time]         (default: 8 30)

Three tests as users write them are stored once while nothing else is started: the reference. Then, beside `load`
processes that compute without end (0: none), they run `runs` times, in a fresh process each, half of the runs against
the reference and half to store baselines of their own. Printed of each run: ratio, verdict, and what was stored. In the
end: red rows, latency ratios stored, those of them whose interval does not touch the reference's, and rows that were
not gated. `real-time` runs the reference, and the tests at load 0, before all other processes of the machine, where
that is permitted: of use on a machine that is not quiet by itself.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lib.program import arguments

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.magis(memory_ratios=[0.8])


def test_classifier():
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    return module, (torch.randn(512, 64), torch.randint(0, 10, (512,))), nn.functional.cross_entropy


def test_blocks():
    layers = (nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers), (torch.randn(16, 64, 128), torch.randn(16, 64, 128)), nn.functional.mse_loss


def test_convolutions():
    def part(width, wider):
        return nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()

    first, second = (*part(3, 32), *part(32, 32)), (*part(32, 64), *part(64, 64))
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    module = nn.Sequential(*first, nn.MaxPool2d(2), *second, *head)
    return module, (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))), nn.functional.cross_entropy
"""
SPIN = "while True: sum(range(10000))"
NOT_GATED = "latency is not gated"


@dataclass
class Counts:
    """What became of the rows so far."""

    red: int = 0
    gated: int = 0
    not_gated: int = 0
    stored: int = 0
    contradicted: list[str] = field(default_factory=list)


def first_of_all() -> None:
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def gate(folder: Path, baselines: Path, *options: str, real_time: bool = False) -> list[dict[str, str]]:
    """The rows of one run of the tests, in a process of its own; of the eager step none."""
    results = folder / "results.csv"
    results.unlink(missing_ok=True)
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "pytest_magis.plugin",
            f"--magis-baselines={baselines}",
            *options,
        ),
        f"--magis-csv={results}",
        "--magis-csv-full",
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=first_of_all if real_time else None,
    )
    if not results.exists():
        sys.exit(f"the gate did not run:\n{done.stdout}{done.stderr}")
    with results.open(newline="", encoding="utf-8") as stream:
        return [row for row in csv.DictReader(stream) if row["strategy"] != "eager"]


def intervals(baselines: Path) -> dict[str, tuple[float, float]]:
    """The latency ratio's interval by model, of those that were stored with one."""
    found = {}
    for path in sorted(baselines.glob("cpu/*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))["configurations"]["small"]["cases"]["magis-mem0.8"]
        (measured,) = case["measured"].values()
        if measured.get("latency_ratio") is not None:
            found[path.stem] = measured["latency_ratio_low"], measured["latency_ratio_high"]
    return found


@contextmanager
def busy(processes: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def told(row: dict[str, str]) -> str:
    if not row["latency ratio reached (opt/ori)"]:
        return f"{row['name']} {row['verdict']} {row['note']}"
    low, high = float(row["latency ratio low (opt/ori)"]), float(row["latency ratio high (opt/ori)"])
    ratio = float(row["latency ratio reached (opt/ori)"])
    doubt = " (not gated)" if NOT_GATED in row["note"] else ""
    return f"{row['name'].rpartition('_')[2]} {ratio:.3f} [{low:.3f}, {high:.3f}] {row['verdict']}{doubt}"


def store(folder: Path, reference: dict[str, tuple[float, float]], counts: Counts, *, real_time: bool) -> str:
    """A run that stores baselines of its own."""
    with tempfile.TemporaryDirectory() as own:
        rows = gate(folder, Path(own), "--magis-update=new", real_time=real_time)
        found = intervals(Path(own))
    counts.stored += len(found)
    counts.not_gated += len(rows) - len(found)
    for name, (low, high) in found.items():
        if name in reference and (low > reference[name][1] or high < reference[name][0]):
            counts.contradicted.append(f"{name} [{low:.3f}, {high:.3f}], quiet {reference[name]}")
    return f"stored {len(found)}: {'; '.join(map(told, rows))}"


def compare(folder: Path, baselines: Path, counts: Counts, *, real_time: bool) -> str:
    """A run against the reference."""
    rows = gate(folder, baselines, real_time=real_time)
    unsure = sum(NOT_GATED in row["note"] for row in rows)
    counts.not_gated += unsure
    counts.gated += len(rows) - unsure
    counts.red += sum(row["verdict"].startswith(("FAIL", "ERROR")) for row in rows)
    return f"gated {len(rows) - unsure}: {'; '.join(map(told, rows))}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("load", nargs="?", type=int, default=8)
    parser.add_argument("runs", nargs="?", type=int, default=30)
    parser.add_argument("real_time", nargs="?", type=bool, default=False)
    asked = parser.parse_args()
    load, runs, real_time = asked.load, asked.runs, asked.real_time
    counts = Counts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_user.py").write_text(TESTS, encoding="utf-8")
        baselines = folder / "baselines"
        rows = gate(folder, baselines, "--magis-update=new", real_time=real_time)
        reference = intervals(baselines)
        print(f"reference, stored {len(reference)} of {len(rows)}: {'; '.join(map(told, rows))}", flush=True)
        first = real_time and load == 0
        kinds = partial(compare, folder, baselines), partial(store, folder, reference)
        with busy(load):
            for run in range(runs):
                print(
                    f"run {run}, load {os.getloadavg()[0]:.1f}: {kinds[run % 2](counts, real_time=first)}", flush=True
                )
    print(
        f"load {load}, {runs} runs: {counts.red} rows red of {counts.gated} gated;"
        f" {counts.stored} latency ratios stored, {len(counts.contradicted)} that the reference contradicts;"
        f" {counts.not_gated} rows neither gated nor stored by their latency"
    )
    for line in counts.contradicted:
        print(f"    {line}")
    sys.exit(bool(counts.red or counts.contradicted))


if __name__ == "__main__":
    main()
