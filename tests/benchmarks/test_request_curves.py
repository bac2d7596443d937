"""Torch's activation memory budget beside ours: what is counted, the picture, and a small network under both."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from benchmarks.lib.decoder_budgets import by_magis, by_torch, decoder
from benchmarks.lib.request_curves import Scale, curves_svg, rows_of, summary


def test_the_picture_in_the_docs_is_of_the_rows_that_are_kept(repository: Path) -> None:
    kept = (repository / "benchmarks" / "results" / "budget_curve.txt").read_text(encoding="utf-8")
    rows = rows_of(kept.splitlines())
    assert (repository / "docs" / "budget_curve.svg").read_text(encoding="utf-8") == curves_svg(rows)
    said = [line for line in summary(rows) if line.startswith("# all")]
    assert [line for line in kept.splitlines() if line.startswith("# all")] == said
    page = (repository / "docs" / "compile.md").read_text(encoding="utf-8")
    for line in said:
        planner, *figures = re.findall(r"dp|ilp|magis|\d+ of \d+", line)
        assert re.search(rf"^\| {planner}\b.*{figures[0]}.*{figures[1]}", page, re.MULTILINE), line
    reached = {(each.size, each.planner, each.request): f"{each.reached:.3f}" for each in rows}
    sizes = sorted({each.size for each in rows})
    told = re.findall(r"^\| (0\.\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(told) == 6
    for request, cells in told:
        wanted = (", ".join(reached[size, name, float(request)] for name in ("dp", "ilp", "magis")) for size in sizes)
        assert cells == " | ".join(wanted)


def test_both_are_measured_alike() -> None:
    net = decoder(2, 256)
    full = by_torch(net, 1.0, "dp")
    scale = Scale(full.peak_bytes, full.saved_bytes, net.held_bytes + net.gradient_bytes)
    assert scale.least < 0.6
    less = by_torch(net, 0.5, "ilp")
    assert less.saved_bytes < full.saved_bytes
    limit_bytes = scale.limit_bytes(0.6)
    ours = by_magis(net, limit_bytes, budget=500)
    assert ours.report is not None
    assert ours.report.feasible
    assert ours.peak_bytes == ours.report.planned_bytes <= limit_bytes
    assert all(map(torch.equal, ours.gradients, full.gradients))
    assert all(map(torch.equal, less.gradients, full.gradients))
