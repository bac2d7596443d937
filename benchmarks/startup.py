"""What the plugin adds to pytest's start-up time, and the processor's seconds to the first plan.

    .venv/bin/python benchmarks/startup.py [--runs N]

Starts `pytest --version --version` (which registers every installed plugin) and an empty test session, each
with and without the plugin (`-p no:magis`), in an empty directory. Runs alternate, so that a busy moment of
the machine hits both sides. Prints the medians and the median of the paired differences, in ms. Then a small network
is trained by one step in processes of their own: in eager mode, by `magis.optimize` with an empty cache of numba, as in
a new installation, and once more with that cache. Seconds of the processor are those of the whole process, `import
torch` included. Exit code 1 when a difference or the first plan is over its bar.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from lib.program import arguments

BAR_MS = 50.0
BAR_CPU_S = 6.0
STEP = """
import sys, time
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.GELU())))
x = torch.randn(256, 64)
update = torch.optim.AdamW(net.parameters())
if sys.argv[1] == "eager":
    nn.functional.mse_loss(net(x), x).backward()
    update.step()
else:
    import magis

    step = magis.optimize(net, (x, x), nn.functional.mse_loss, update, memory_ratio=0.8)
    step(x, x)
print(time.process_time())
"""
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
CASES = {
    "pytest --version": ("--version", "--version"),
    "empty session": ("--collect-only", "-q"),
}


def run_ms(options: Sequence[str], folder: str) -> float:
    """Wall-clock milliseconds of one pytest process; SystemExit when pytest itself fails."""
    start = time.perf_counter_ns()
    done = subprocess.run([*PYTEST, *options], cwd=folder, capture_output=True, text=True, check=False)
    elapsed = (time.perf_counter_ns() - start) / 1e6
    if done.returncode not in (0, 5):  # 5: no tests collected, which is what the empty session is about
        raise SystemExit(f"pytest {' '.join(options)} ended with {done.returncode}: {done.stderr.strip()}")
    return elapsed


def plugin_is_installed(folder: str) -> bool:
    """Whether pytest finds the plugin: without it both sides would measure the same thing."""
    done = subprocess.run([*PYTEST, "--help"], cwd=folder, capture_output=True, text=True, check=False)
    return "--magis-models" in done.stdout


def main() -> int:
    """Print one row per case; 1 when one of them is over the bar."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=15, help="pairs of runs per case (default 15)")
    runs = parser.parse_args().runs
    if runs < 1:
        parser.error(f"--runs must be at least 1, not {runs}")
    slow = False
    with tempfile.TemporaryDirectory() as folder:
        if not plugin_is_installed(folder):
            raise SystemExit("pytest does not find the plugin: run `make venv` first")
        print(f"{'case':<18} {'without':>10} {'with':>10} {'difference':>11}   median of {runs} pairs, ms")
        for name, options in CASES.items():
            pairs = []
            for index in range(runs + 1):
                without = run_ms((*options, "-p", "no:magis"), folder)
                together = run_ms(options, folder)
                if index:  # the first pair fills the file cache
                    pairs.append((without, together))
            difference = statistics.median(together - without for without, together in pairs)
            without, together = (statistics.median(side) for side in zip(*pairs, strict=True))
            slow |= difference > BAR_MS
            print(f"{name:<18} {without:>10.1f} {together:>10.1f} {difference:>11.1f}")
    print(f"bar: {BAR_MS:.0f} ms: {'MISSED' if slow else 'met'}")
    return int(slow | first_plans(min(3, runs)))


def first_plans(runs: int) -> bool:
    """Print the processor's seconds of a first step, the best of some runs; True where the first plan is late."""
    found: dict[str, list[float]] = {"eager": [], "first plan": [], "next plan": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            variables = {**os.environ, "NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
            for name, seconds in found.items():
                command = (sys.executable, "-c", STEP, name)
                done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
                seconds.append(float(done.stdout))
    for name, seconds in found.items():
        print(f"{name:<18} {min(seconds):>10.1f} CPU s, best of {runs}")
    slow = min(found["first plan"]) > BAR_CPU_S
    print(f"bar: {BAR_CPU_S:.0f} CPU s: {'MISSED' if slow else 'met'}")
    return slow


if __name__ == "__main__":
    sys.exit(main())
