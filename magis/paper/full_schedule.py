"""Full scheduling (paper, Algorithm 2): the whole step cut at narrow waists, every part in its best order.

A part of more than ``dynamic.WIDEST`` nodes is cut where it is narrowest, and once more around those cuts.
"""

from __future__ import annotations

import numpy as np

from magis.schedule.dynamic import WIDEST
from magis.schedule.stretches import MOST, Steps, cuts, forced, improved
from magis.schedule.waists import NARROW, in_parts
from magis.simulate.arrays import Step
from magis.simulate.evaluator import Evaluator
from magis.simulate.events import KEEP
from magis.simulate.problem import Int32s, Problem

__all__ = ["full_order"]


def full_order(problem: Problem, *, step: Step | None = None, most: int = MOST) -> Int32s:
    """A legal order with a low peak, nothing recomputed; no worse than program order, which it begins with."""
    steps = Steps(problem, step)
    program = np.arange(problem.n_nodes, dtype=np.int32)
    order = in_parts(steps.needs, steps.waists, program)
    stretches = cuts(steps.narrowness, order, 0, len(order))
    seams = list(forced(steps.narrowness, order, stretches, NARROW))
    order = improved(steps, order, stretches, most=most)
    around = [(max(0, seam - WIDEST // 2), min(len(order), seam + WIDEST // 2)) for seam in seams]
    order = improved(steps, order, around, most=most)
    judge = Evaluator(problem, program, steps.step)
    flags = np.full(problem.n_storages, KEEP, dtype=np.int8)
    before, _ = judge.quick(flags)
    after, _ = Evaluator(problem, order, judge.step).quick(flags)
    return order if after < before else program
