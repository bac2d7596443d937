"""The two-level program of torchtitan's graph trainer: memory policy ``auto_perf_maxing``, to compare with.

Source: github.com/pytorch/torchtitan, pull requests 3881, 3942, 3975 and 4636 (2026). Every activation that the
backward pass reads is kept, recomputed or offloaded to the host.

Outer linear program: shares k + r + o = 1 of each layer's activation bytes a, least ``sum r * (time of the layer's
forward pass)``, such that

    fixed + sum k * a of other layers + all of this layer + what the layer before offloads <= budget, in each layer's
        forward and in its backward pass
    k >= the share that must be kept; o = 0 in the last layer
    o * a <= bandwidth * time of the layer's forward pass, and of its backward pass

Inner integer program, layer by layer, equal layers once: one of keep, recompute, offload for each activation, least
time of the operators that make what is recomputed, such that no more than k * a bytes are kept and o * a bytes are
offloaded (or up to 5% more, for the time of the transfer). Random operators are never recomputed, tensors below 1 MiB
never offloaded, and what goes on to a later layer is kept.

Where we depart: "fixed" is exact, the evaluator's bytes at the worst moment of the pass with nothing recomputed, where
theirs are sums of estimates; each layer has its own times, not the average of all; what lies between the blocks is made
of layers of its own, which theirs never touches; shares are also bounded by what may be recomputed and offloaded at
all; where no choice keeps as few bytes as asked for, which ends theirs, the one that keeps least is taken. For each
budget there are six variants: what goes on to a later layer may be offloaded, or not; and of equally cheap shares those
that offload most, least, or whatever the solver finds, as theirs. There are no parameters to unshard on one device, and
no bound on the host's memory. The inner program is their ``solver_type="ilp"``; their default is a greedy stand-in.

Their outer program prices recomputation by shares of a layer's time, as if all bytes cost the same (known there: some
layers then recompute everything, others nothing). So that this does not decide the comparison, there is a stronger
program, too: the inner one solved for many targets makes options of each layer, which the outer one chooses from at
what they really cost (``options``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from magis.search.budgeted_evaluator import JudgedPlan, Objective
from magis.simulate.problem import Int8s

from .options import ByOptions
from .setting import Calibrated, Setting
from .shares import TIE, TwoLevel

__all__ = ["two_level", "two_level_plan"]


def two_level(setting: Setting) -> Calibrated:
    """Its plans, at budgets from all kept down to what it can keep, in all variants."""
    choices = itertools.product((False, True), (TIE, 0.0, -TIE))
    by_shares = [TwoLevel(setting, send_on=send_on, tie=tie) for send_on, tie in choices]
    every: list[TwoLevel | ByOptions] = [
        *by_shares,
        *(ByOptions(TwoLevel(setting, send_on=send_on)) for send_on in (False, True)),
    ]
    variants = [(each, each.least()) for each in every]

    def plans_at(tight: float) -> Iterator[Int8s]:
        for variant, least in variants:
            flags = variant.flags(setting.budget(least, tight))
            if flags is not None:
                yield flags

    return Calibrated(setting, plans_at)


def two_level_plan(setting: Setting, goal: Objective) -> JudgedPlan | None:
    """Its best plan that meets a goal."""
    return two_level(setting).best(goal)
