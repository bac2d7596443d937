"""Memory snapshots, and what readers find in them: `python benchmarks/snapshots.py`.

Llama 3 8B, trained by AdamW in bfloat16 on one sequence of 2048 tokens on a simulated H100: bytes of the file, and its
peak, by a plain sum of the trace, by torch's own parser, and by ptmem and pt-snap-cli, if they can be imported (pip
install --target DIR, and DIR on PYTHONPATH). Needs transformers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle  # noqa: TID251 (of files that it has written itself)
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from estimate_llama import DEVICE, GROWING, make
from torch.cuda import _memory_viz

import magis


def summed(entries: list[dict[str, Any]]) -> tuple[int, int]:
    """The most bytes allocated at one time, and the most in segments."""
    signs = {"alloc": 1, "free_completed": -1}
    of_segments = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    found = []
    for actions in (signs, of_segments):
        now, most = 0, 0
        for entry in entries:
            now += actions.get(entry["action"], 0) * entry["size"]
            most = max(most, now)
        found.append(most)
    return found[0], found[1]


def by_ptmem(path: Path) -> str:
    from ptmem.cli import MemoryProfileData

    return f"peak {MemoryProfileData(str(path)).max_memory:,}"


def by_pt_snap(path: Path) -> str:
    def ask(*words: str) -> str:
        command = [sys.executable, "-c", "from pt_snap_cli.cli import _safe_call; _safe_call()", *words]
        environment = {**os.environ, "HOME": str(path.parent)}
        done = subprocess.run(command, cwd=path.parent, env=environment, check=True, capture_output=True, text=True)
        return done.stdout

    ask("import", str(path))
    ask("focus", f"{path}.db", "--device", "0")
    (row,) = json.loads(ask("query", "--template-use", "memory_peak", "--json"))["rows"]
    return f"peak {row['peak_allocated']:,}, reserved {row['peak_reserved']:,}"


READERS = {"ptmem": by_ptmem, "pt_snap_cli": by_pt_snap}


def told() -> Iterator[str]:
    """Yield the lines of the table."""
    yield from head()
    for settings in ("", GROWING):
        step = magis.estimate(make, device=DEVICE, allocator=settings)
        with tempfile.TemporaryDirectory() as folder:
            path, started = Path(folder) / "step.pickle", time.perf_counter()
            step.save_snapshot(path)
            seconds, content = time.perf_counter() - started, path.read_bytes()
            found = pickle.loads(content)
            entries = found["device_traces"][0]
            about = f"{len(content):,} bytes, {len(entries):,} entries, {len(found['segments']):,} segments"
            yield f"{settings or 'default allocator'}: {about}; written in {seconds:.1f} s"
            yield f"  magis.estimate: peak {step.peak_bytes:,}, reserved {step.reserved_bytes:,}"
            peak, reserved = summed(entries)
            yield f"  sum of the trace: peak {peak:,}, reserved {reserved:,}"
            for line in _memory_viz.segsum(found).splitlines():
                if line.startswith("total_reserved"):
                    yield f"  torch.cuda._memory_viz: {line}"
            for name, reader in READERS.items():
                there = importlib.util.find_spec(name) is not None
                yield f"  {name}: {reader(path) if there else 'not installed'}"


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    printed(told())
