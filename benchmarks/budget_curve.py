"""Torch's activation memory budget beside ours: requests against peaks, on the decoder of pytorch#197838.

    python benchmarks/budget_curve.py [--sizes 16x512 24x768 32x1024] [--requests 1.0 0.9 ... 0.05]
        [--planners dp ilp magis] [--output FILE.txt]
    python benchmarks/budget_curve.py --drawn-from FILE.txt ... [--output FILE.txt] [--picture FILE.svg]

A request is a share of the activations that torch saves from forward to backward at its budget of 1. "dp" and "ilp" are
`torch.compile(backend="aot_eager")` with that budget and that solver. "magis" is `torch.compile(backend="magis")` with
the peak that the request means: the one at budget 1, less the activations that the request gives up. Peaks are the
bytes of the CPU's allocator in one forward and backward, with parameters, buffers, batch and gradients. "reached" is
the request that a peak would have answered. "least" is the one at which parameters, batch and gradients alone fit:
below it no request can be kept. "ABOVE": more than asked for; "LEANEST": likewise, and the planner said so.

``--drawn-from`` measures nothing: it joins, sums up and draws the rows that earlier runs printed. A size takes
8 to 13 minutes of processor time, although the larger ones have fewer requests; ``--planners`` divides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import torch
from lib.decoder_budgets import SOLVERS, Decoder, Measured, by_magis, by_torch, decoder
from lib.request_curves import ABOVE, HEADING, KEPT, LEANEST, Row, Scale, curves_svg, joined, rows_of, summary

REQUESTS = {
    "16x512": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05),
    "24x768": (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05),
    "32x1024": (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05),
}
PLANNERS = (*SOLVERS, "magis")


def main() -> None:
    """Print the table, or draw one."""
    parser = arguments(__doc__, sizes=list(REQUESTS), planners=list(PLANNERS), output=Path, picture=Path)
    parser.add_argument("--requests", type=float, nargs="+")
    parser.add_argument("--drawn-from", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.drawn_from:
        texts = [path.read_text(encoding="utf-8") for path in asked.drawn_from]
        lines = joined(line for text in texts for line in text.splitlines())
    else:
        lines = table(asked.sizes, asked.requests, asked.planners)
    rows = rows_of(printed(lines, asked.output))
    if asked.picture is not None:
        asked.picture.write_text(curves_svg(rows), encoding="utf-8")


def table(sizes: Sequence[str], requests: Sequence[float] | None, planners: Sequence[str]) -> Iterator[str]:
    """Head, rows of every size, and what they come to."""
    yield from head(f"{torch.get_num_threads()} threads")
    yield HEADING
    found = []
    for size in sizes:
        layers, _, length = size.partition("x")
        own = requests or REQUESTS.get(size, REQUESTS["24x768"])
        for row in measured(decoder(int(layers), int(length)), own, planners):
            found.append(row)
            yield str(row)
    yield from summary(found)


def measured(net: Decoder, requests: Sequence[float], planners: Sequence[str]) -> Iterator[Row]:
    """Every planner's answers to every request, beginning with the largest."""
    full = by_torch(net, 1.0, SOLVERS[0])
    scale = Scale(full.peak_bytes, full.saved_bytes, net.held_bytes + net.gradient_bytes)
    for planner in planners:
        for request in sorted(requests, reverse=True):
            limit_bytes = scale.limit_bytes(request)
            if planner == "magis":
                found = by_magis(net, limit_bytes)
            else:  # at a budget of 1 both solvers stand by
                found = full if request == 1 else by_torch(net, request, planner)
            yield Row(
                net.name, planner, request, limit_bytes, found.peak_bytes, found.saved_bytes,
                scale.share(found.peak_bytes), scale.least, found.cpu_s, verdict(limit_bytes, found, full),
            )  # fmt: skip


def verdict(limit_bytes: int, found: Measured, full: Measured) -> str:
    """Whether the peak is within the limit, and what else is not as it should be."""
    report = found.report
    words = KEPT if found.peak_bytes <= limit_bytes else LEANEST if report and not report.feasible else ABOVE
    off = found.peak_bytes - report.planned_bytes if report else 0
    equal = all(map(torch.equal, found.gradients, full.gradients))
    return "".join((words, f", {off:+} bytes to the plan" if off else "", "" if equal else ", OTHER gradients"))


if __name__ == "__main__":
    main()
