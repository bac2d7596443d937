"""docs/results-<gpu>.md: what was measured on a GPU, beside the paper's figures.

    python tools/gpu/report.py FOLDER DEVICE

Reads the csv files that `tools/gpu/run.py` left in the folder; a rehearsal on a CPU writes its page there, too.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.lib.paper_figures import PAPER_LATENCY, PAPER_MEMORY  # noqa: E402

Row = Mapping[str, str]


def main(folder: str, device: str) -> int:
    """Write the page."""
    rows = [row for path in sorted(Path(folder).glob("*.csv")) for row in _rows(path)]
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU (rehearsal)"
    from magis.cost.devices import gpu_name

    name = f"results-{gpu_name(gpu) or 'gpu'}.md"
    path = Path(folder) / "results-cpu.md" if device != "cuda" else ROOT / "docs" / name
    path.write_text("\n".join(_page(rows, gpu)) + "\n", encoding="utf-8")
    if device == "cuda":
        (Path(folder) / name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    print(path)
    return 0


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _page(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    yield f"# Measured on {gpu}"
    yield ""
    yield f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, CUDA {torch.version.cuda}. Command: `make gpu`."
    yield "Ratios are optimized / original; the paper's figures are for an RTX 3090 and read off its charts."
    yield ""
    yield "| model | dtype | limit | memory ratio | latency ratio | paper | memory off % | latency off % | verdict |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if row["strategy"] == "magis":
            yield _line(row)
    yield ""
    yield from _medians(rows)


def _line(row: Row) -> str:
    memory, latency = row["memory limit ratio"], row["latency limit ratio"]
    limit = f"memory {memory}" if memory else f"latency {latency}"
    paper = PAPER_MEMORY.get(memory, {}) if memory else PAPER_LATENCY.get(latency, {})
    known = paper.get(row["name"])
    theirs = "" if known is None else f"{1 + known:.3g} latency" if memory else f"{known:.2f} memory"
    ran = row["opt-is-prof-result"] == "True"
    cells = [
        row["name"], row["dtype"], limit, _short(row["memory ratio reached (opt/ori)"]),
        _short(row["latency ratio reached (opt/ori)"]) + ("" if ran else " (simulated)"), theirs,
        _short(row["opt memory error % (of measured)"]), _short(row["opt latency error % (of measured)"]),
        row["verdict"],
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _medians(rows: Sequence[Row]) -> Iterator[str]:
    """Median errors over every step that ran, originals included once."""
    for what in ("memory", "latency"):
        seen = [
            abs(float(row[f"{step} {what} error % (of measured)"]))
            for row in rows
            for step in (("opt",) if row["strategy"] == "magis" else ("ori",))
            if row[f"{step} {what} error % (of measured)"]
        ]
        if seen:
            yield f"Median {what} error of {len(seen)} steps: {statistics.median(seen):.2f}%, largest {max(seen):.2f}%."


def _short(text: str) -> str:
    return f"{float(text):.3f}" if text else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
