"""Judges thousands of seeds in child processes, in which a crash or a hang costs one seed."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["judged_in_children", "table"]

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 240.0
"""Without a line from a child; more where it also shrinks."""
TOGETHER = 250
"""Seeds that one child judges."""


def judged_in_children(kind: str, seeds: range, *, shrink_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """What became of each seed, as the child tells it; "died" or "hung" for those that took the child with them."""
    at = seeds.start
    while at < seeds.stop:
        last = min(at + TOGETHER, seeds.stop)
        for row in _child(kind, at, last, shrink_s):
            yield row
            at = row["seed"] + 1


def _child(kind: str, first: int, last: int, shrink_s: float) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fuzz.child", kind, str(first), str(last), str(shrink_s)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        lines: queue.Queue[str | None] = queue.Queue()
        complaints: list[str] = []
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        threading.Thread(target=lambda: complaints.extend(child.stderr or ()), daemon=True).start()
        begun = first
        hung = False
        while begun < last:
            try:
                line = lines.get(timeout=PATIENCE_S + 3 * shrink_s)
            except queue.Empty:
                hung = True
                break
            if line is None:
                break
            row = json.loads(line)
            if "begin" in row:
                begun = row["begin"]
            else:
                yield row
                begun = row["seed"] + 1
        if begun < last:
            child.kill()
            code = child.wait()
            said = complaints[-1].strip() if complaints else ""
            name = "hung" if hung else "died"
            detail = "no answer" if hung else f"exit {code}: {said}"
            yield {"seed": begun, "kind": name, "detail": detail, "cause": f"{name}: {detail}", "way": "", "source": ""}
        child.wait()


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        if line.startswith("{"):
            lines.put(line)
    lines.put(None)


def table(rows: list[dict[str, Any]]) -> str:
    """Outcomes, what plans did, and refusals and failures by cause, most frequent first."""
    if not rows:
        return "nothing was run"
    kinds = ("equal", "refused", "wrong", "traceback", "died", "hung")
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in kinds}
    planned = [row for row in rows if "recomputed" in row and row["kind"] != "refused"]
    did = {
        "smaller than eager": sum(bool(row["smaller"]) for row in planned),
        "recompute": sum(row["recomputed"] > 0 for row in planned),
        "swap": sum(row["swapped"] > 0 for row in planned),
        "in parts": sum(bool(row["parts"]) for row in planned),
        "update within": sum(bool(row["early"]) for row in planned),
    }
    lines = [
        f"{len(rows)} seeds: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        f"refused {100 * counts['refused'] / len(rows):.1f}%",
        f"plans of {len(planned)}: " + ", ".join(f"{count} {name}" for name, count in did.items()),
    ]
    causes: dict[str, list[int]] = {}
    for row in rows:
        if row["kind"] != "equal":
            causes.setdefault(row["cause"], []).append(row["seed"])
    for cause, seeds in sorted(causes.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"{len(seeds):5}  {cause}  (seeds {', '.join(map(str, seeds[:5]))})")
    return "\n".join(lines)
