"""What an unchanged model costs: cases from scratch, with kept plans, and with kept results.

    python benchmarks/cached.py [--models bert,resnet50] [--devices sim:h200,cpu] [--output FILE]

Each row is a process of its own, which loads magis and torch first; that is not counted. Cases are those of the gate
(eager, memory ratios 0.8 and 0.6), presets its defaults. The first row of a model fills the caches that the next use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

RATIOS = (None, 0.8, 0.6)
MODES = ("nothing kept", "plans", "results")


def seconds_of(model: str, device: str, folder: Path, *, results: bool) -> list[float]:
    """Seconds of capturing, then of each case."""
    before_torch()
    from magis.cases.run_case import run_case
    from magis.planner.bench import Bench
    from magis.results import Case

    bench = Bench(kept=folder, keep_results=results)
    preset = "small" if device == "cpu" else "paper"
    cases = [Case(model, "eager" if ratio is None else "magis", device, preset, memory_ratio=ratio) for ratio in RATIOS]
    started = time.perf_counter()
    _ = bench.subject(cases[0]).captured
    found = [time.perf_counter() - started]
    for case in cases:
        started = time.perf_counter()
        run_case(case, cache=bench)
        found.append(time.perf_counter() - started)
    return found


def in_process(model: str, device: str, folder: Path, mode: str) -> list[float]:
    """The same in a fresh process."""
    arguments = [sys.executable, __file__, "--one", model, device, str(folder), mode]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(models: list[str], devices: list[str]) -> Iterator[str]:
    """The lines of the table."""
    heads = ("capture", "eager", "mem 0.8", "mem 0.6", "all")
    yield f"{'device':9} {'model':9} {'kept':13} {' '.join(f'{each:>8}' for each in heads)}  seconds"
    for device in devices:
        for model in models:
            with tempfile.TemporaryDirectory() as folder:
                for mode in MODES:
                    if mode == "results":  # whole results beside the plans, from a run that is not shown
                        in_process(model, device, Path(folder), mode)
                    found = in_process(model, device, Path(folder), mode)
                    cells = " ".join(f"{each:8.2f}" for each in (*found, sum(found)))
                    yield f"{device:9} {model:9} {mode:13} {cells}"


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, models="bert,resnet50", devices="sim:h200,cpu", output=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        model, device, folder, mode = asked.one
        print(json.dumps(seconds_of(model, device, Path(folder), results=mode == "results")))
        return
    load = f"load before: {os.getloadavg()[0]:.1f}"
    printed(chain(head(load), rows(asked.models.split(","), asked.devices.split(","))), asked.output)


if __name__ == "__main__":
    main()
