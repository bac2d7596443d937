"""Torch's activation memory budget beside ours: what is counted, the picture, and a small network under both."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from benchmarks.lib.decoder_budgets import by_magis, by_torch, decoder
from benchmarks.lib.request_curves import Row, Scale, curves, curves_svg, rises, rows_of, summary
from magis.report.axes import overlap, text_box

SVG = "{http://www.w3.org/2000/svg}"
SCALE = Scale(full_bytes=1000, saved_bytes=800, least_bytes=360)


def row(planner: str, request: float, peak_bytes: int, size: str = "4x64") -> Row:
    limit_bytes, reached = SCALE.limit_bytes(request), SCALE.share(peak_bytes)
    return Row(size, planner, request, limit_bytes, peak_bytes, 99, reached, SCALE.least, 1.0, "kept, and more")


ROWS = [
    *(row("dp", request, peak) for request, peak in ((1.0, 1000), (0.1, 500), (0.5, 700), (0.3, 400))),
    *(row("magis", request, peak) for request, peak in ((1.0, 1000), (0.5, 600), (0.3, 440), (0.1, 400))),
]


def test_rises_and_broken_requests_are_counted_where_a_request_can_be_kept() -> None:
    found = curves(ROWS)
    assert [each.request for each in found["4x64", "dp"]] == [1.0, 0.5, 0.3, 0.1]
    assert (rises(found["4x64", "dp"]), rises(found["4x64", "magis"])) == (1, 0)
    # at 0.1 the limit is below what weights and gradients need
    assert list(summary(ROWS)) == [
        "# 4x64 dp: rises at 1 of 3 steps; above 1 of 3 requests, by 0.125 at most; leanest 0.250",
        "# 4x64 magis: rises at 0 of 3 steps; above 0 of 3 requests; leanest 0.250",
        "# all dp: rises at 1 of 3 steps; above 1 of 3 requests",
        "# all magis: rises at 0 of 3 steps; above 0 of 3 requests",
    ]


def test_the_picture_has_a_panel_for_each_size_and_kept_requests_lie_on_the_diagonal() -> None:
    tree = ET.fromstring(curves_svg([*ROWS, row("dp", 0.5, 600, size="8x64")]))
    titles = [circle.findtext(f"{SVG}title") for circle in tree.iter(f"{SVG}circle")]
    assert titles.count("magis: asked 0.3, reached 0.300") == 1
    assert len(titles) == len(ROWS) + 1
    words = [text.text for text in tree.iter(f"{SVG}text")]
    assert {"4 layers, 64 tokens", "8 layers, 64 tokens", "torch, dp", "magis", "the request"} <= set(words)
    assert "torch, ilp" not in words
    places = [(float(each.attrib["cx"]), float(each.attrib["cy"])) for each in tree.iter(f"{SVG}circle")]
    asked = dict(zip(titles, places, strict=True))
    (x1, y1), (x2, y2) = (asked[f"magis: asked {at}, reached {float(at):.3f}"] for at in ("0.5", "0.3"))
    assert x1 - x2 == pytest.approx(y2 - y1, abs=0.2)
    boxes = [
        text_box(each.text or "", (float(each.attrib["x"]), float(each.attrib["y"]), each.attrib["text-anchor"]))
        for each in tree.iter(f"{SVG}text")
    ]
    assert not any(overlap(one, other) for at, one in enumerate(boxes) for other in boxes[:at])
    assert max(right for _, _, right, _ in boxes) < float(tree.attrib["width"])
    with pytest.raises(ValueError, match="at least one row"):
        curves_svg([])


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
