"""Re-ordering by wide stretches around the peak: where branches are longer than the windows of ``window``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from magis.schedule.dynamic import WIDEST
from magis.schedule.stretches import Steps, improved, lives_of
from magis.simulate.evaluator import Evaluator
from magis.simulate.problem import Int32s

__all__ = ["wide_orders"]

MOST = 256
"""Sets of nodes that a layer keeps: seen to do as well as 2048, at a tenth of the time."""
PEAKS = 8
"""Stretches ordered at once."""


def wide_orders(evaluator: Evaluator) -> Iterator[Int32s]:
    """Other legal orders that may lower the peak of the plan judged last: stretches around every place that reaches it.

    Cells that are alike have peaks that are alike, so that all of them must be ordered anew to gain anything.
    """
    order, lives, levels = evaluator.order, lives_of(evaluator), evaluator.levels
    steps = Steps(evaluator.problem, evaluator.step)
    position = np.cumsum((evaluator.runs & 1) == 0) - 1  # of the node that runs last up to each run
    peaks = np.unique(position[levels == levels.max(initial=0)]).tolist()
    for ahead in (WIDEST // 2, WIDEST // 4, 3 * WIDEST // 4):
        found = improved(steps, order, _around(peaks, ahead, len(order)), lives, MOST)
        if not np.array_equal(found, order):
            yield found


def _around(peaks: list[int], ahead: int, nodes: int) -> list[tuple[int, int]]:
    """Stretches that begin so many nodes ahead of a peak; none where another already holds it."""
    found: list[tuple[int, int]] = []
    end = 0
    for peak in peaks:
        if peak >= end and len(found) < PEAKS:
            start = max(end, min(peak - ahead, nodes - WIDEST))
            end = min(start + WIDEST, nodes)
            found.append((start, end))
    return found
