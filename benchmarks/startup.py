"""What the plugin adds to pytest's start-up time.

    .venv/bin/python benchmarks/startup.py [--runs N]

Starts `pytest --version --version` (which registers every installed plugin) and an empty test session, each
with and without the plugin (`-p no:magis`), in an empty directory. Runs alternate, so that a busy moment of
the machine hits both sides. Prints the medians and the median of the paired differences, in ms; exit
code 1 when a difference is over the bar.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from lib.program import arguments

BAR_MS = 50.0
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
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
