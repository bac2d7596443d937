"""What planning large steps for simulated devices takes: `python benchmarks/simulated_memory.py [NAME ...]`.

Each step (`lib/large_steps.py`: 40 with large batches, lengths and pictures) is estimated and planned in a process of
its own, which is ended above `--stop-gib` resident. Prints the simulated peak, how far the step was compared with
eager, the plan, seconds, and the largest resident set; exit code 1 where that is over `--most-gib`, or where a process
ended in any other way than with a result.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lib.large_steps import STEPS, make
from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import magis
from magis.results import Case
from magis.units import GIB

DEVICES = ("sim:h200", "sim:rtx3090")
LIMITS = ({"memory_ratio": 0.7}, {"latency_ratio": 1.1})


def one(name: str, budget: int) -> dict[str, object]:
    """The figures of a step: estimated, then planned under one of the limits, on one of the devices."""
    number = list(STEPS).index(name)
    device, limit = DEVICES[number % 2], LIMITS[number // 2 % 2]
    started = time.perf_counter()
    step = magis.estimate(lambda: make(name), device=device)
    case = Case(name, "magis", device, "paper", budget=budget, **limit)  # type: ignore[arg-type]
    result = magis.run_case(case, make=magis.models.from_function(name, lambda: make(name)))
    return {
        "device": device,
        "peak": step.peak_bytes / GIB,
        "conformance": result.conformance,
        "plan": f"{result.memory.peak_bytes / step.peak_bytes:.2f} of the memory",
        "seconds": time.perf_counter() - started,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def apart(name: str, budget: int, stop_gib: float) -> dict[str, object]:
    """The same from a process of its own, or what became of it."""
    command = [sys.executable, __file__, name, "--budget", str(budget), "--here"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    highest = 0.0
    while process.poll() is None:
        pages = Path(f"/proc/{process.pid}/statm").read_text(encoding="utf-8").split()
        highest = max(highest, int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / GIB if len(pages) > 1 else 0.0)
        if highest > stop_gib:
            process.kill()
        time.sleep(0.05)
    said = process.communicate()[0].strip().splitlines() or [""]
    if process.returncode == 0:
        found: dict[str, object] = json.loads(said[-1])
        return found
    return {"failed": f"ended with {process.returncode}: {said[-1]}", "resident": highest}


def rows(names: list[str], budget: int, most_gib: float, stop_gib: float, failed: list[str]) -> Iterator[str]:
    yield "| step | device | simulated peak, GiB | compared with eager | plan | seconds | resident, GiB |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    highest = 0.0
    for name in names:
        found = apart(name, budget, stop_gib)
        resident = float(str(found["resident"]))
        highest = max(highest, resident)
        if "failed" in found or resident > most_gib:
            failed.append(name)
        if "failed" in found:
            yield f"| {name} | | | {found['failed']} | | | {resident:.2f} |"
            continue
        figures = f"{found['peak']:.1f} | {found['conformance']} | {found['plan']} | {found['seconds']:.0f}"
        yield f"| {name} | {found['device']} | {figures} | {resident:.2f} |"
    yield f"{len(names) - len(failed)} of {len(names)} within {most_gib:g} GiB; {highest:.2f} GiB resident at most"


def main() -> int:
    """Print one row per step; 1 where one of them fails."""
    parser = arguments(__doc__, names=[""], budget=300, most_gib=2.0, stop_gib=4.0, here=False)
    given = parser.parse_args()
    names = [name for name in given.names if name] or list(STEPS)
    if given.here:
        print(json.dumps(one(names[0], given.budget)))
        return 0
    failed: list[str] = []
    printed(head())
    printed(rows(names, given.budget, given.most_gib, given.stop_gib, failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
