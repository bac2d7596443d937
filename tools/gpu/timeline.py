"""Writes the timeline of an optimized step with swaps, for https://ui.perfetto.dev.

python tools/gpu/timeline.py MODEL DEVICE PRESET FOLDER
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

from benchmarks.lib.chrome_trace import write_trace
from magis.planner.bench import Bench
from magis.planner.planning import plan
from magis.results import Case

RATIOS = (0.6, 0.5, 0.4)
"""Tried in turn until a plan swaps."""


def main(model: str, device: str, preset: str, folder: str) -> int:
    """Plan, run and write; the plan with the most swapped bytes if none of the ratios needs any."""
    subject = Bench().subject(Case(model, "magis", device, preset))
    for ratio in RATIOS:
        limit = int(ratio * subject.original.peak_bytes)
        found = plan(subject, memory_limit=limit, latency_limit_ns=None, budget=None, seconds=60.0, seed=0, stored=None)
        print(f"memory ratio {ratio}: {found.swapped_bytes:,} bytes swapped")
        if found.swapped_bytes:
            break
    path = Path(folder) / "trace.json"
    write_trace(path, subject.generated(found.graph), subject.torch_device)
    (Path(folder) / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    print(f"{folder}/trace.json.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
