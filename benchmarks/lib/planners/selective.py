"""PyTorch's automatic selective activation checkpointing, to compare with.

Source: ``torch.distributed._tools.sac_ilp`` (torch 2.13; Purandare, Liu, Gu). An integer program over the tree of
modules: y says whether a module is checkpointed, r which share of its tensors' bytes is then discarded,

    d = bytes * r - (bytes - saved) * y          discarded of what is saved without checkpointing; d >= 0, r <= y
    peak of the module's backward pass - sum of d of the modules that end before it <= budget
    y of a module + y of a module in it <= 1; a leaf is never checkpointed
    time >= (the module's time) * (slope * r + intercept) for each line of its curve, if y; least sum of time

A second one, module by module, chooses the operators that are stored: most time stored within (1 - r) of the bytes.
Offloading there is none. The plan: in a checkpointed module its inputs and what is stored are kept, the rest is made
again when the backward pass wants it.

Where we depart: the peaks of backward passes are the evaluator's, exact, where theirs are sums of what a memory tracker
saw (parameters + gradients + activations + temporaries); integer programs are solved to the end, theirs to 5%; their
lower bound of time, big-M, is written as slope * r + intercept * y, which is the same for whole y. No shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from magis.search.budgeted_evaluator import JudgedPlan, Objective
from magis.simulate.problem import DROP, KEEP, RECOMPUTE, Int8s

from .modules import Group, Module, modules
from .setting import Calibrated, Setting
from .solver import Program

__all__ = ["checkpointed", "discards", "selective", "selective_plan", "stored"]

MIB = float(1 << 20)


def discards(every: Sequence[Module], budget: float | None) -> tuple[dict[int, float], float] | None:
    """The discarded share of each checkpointed module, by its number, and the recomputation time (ns).

    Without a budget (bytes): the least budget instead of the time. None: the budget cannot be kept.
    """
    program = Program()
    limit = program.variable(1.0) if budget is None else program.variable(upper=max(0.0, budget) / MIB)
    chosen: list[tuple[int, int]] = []
    for module in every:
        able = float(not module.leaf and module.nbytes > 0)
        y = program.variable(upper=able, whole=True)
        r = program.variable(upper=able)
        chosen.append((y, r))
        if able:
            time = program.variable(float(budget is not None))
            program.row([(y, 1.0), (r, -1.0)], low=0.0)
            program.row([(r, module.nbytes / MIB), (y, -_unsaved(module) / MIB)], low=0.0)
            for slope, intercept in zip(module.curve.slopes, module.curve.intercepts, strict=True):
                us = module.ns / 1000.0
                program.row([(time, 1.0), (r, -us * slope), (y, -us * intercept)], low=0.0)
    for number, module in enumerate(every):
        for other in module.inside:
            program.row([(chosen[number][0], 1.0), (chosen[other][0], 1.0)], high=1.0)
    freed: list[tuple[int, float]] = []
    for module, (y, r) in zip(every, chosen, strict=True):
        program.row([(limit, -1.0), *((variable, -factor) for variable, factor in freed)], high=-module.peak / MIB)
        if not module.leaf:
            freed += [(r, module.nbytes / MIB), (y, -_unsaved(module) / MIB)]
    found = program.solve()
    if found is None:
        return None
    total = float(found[limit]) * MIB if budget is None else float(np.dot(program.costs, found)) * 1000.0
    return {number: round(float(found[r]), 4) for number, (y, r) in enumerate(chosen) if found[y] > 0.5}, total


def _unsaved(module: Module) -> int:
    """Bytes of tensors that are not saved without checkpointing."""
    return max(0, module.nbytes - module.saved_bytes)


def stored(groups: Sequence[Group], share: float) -> list[bool] | None:
    """Which groups are stored: most time within a share of all bytes; None: what must be stored is more than that."""
    program = Program()
    chosen = [
        program.variable(-group.ns / 1000.0, lower=float(group.stored), upper=1.0, whole=True) for group in groups
    ]
    most = np.ceil(share * sum(group.nbytes for group in groups) - 1e-6)
    terms = [(x, group.nbytes / MIB) for x, group in zip(chosen, groups, strict=True)]
    program.row(terms, high=float(most) / MIB + 1e-9)
    found = program.solve()
    return None if found is None else [bool(found[x] > 0.5) for x in chosen]


def checkpointed(setting: Setting, every: Sequence[Module], found: dict[int, float]) -> Int8s | None:
    """The plan with these modules checkpointed; None: a module must store more than it may."""
    problem, saved = setting.problem, setting.saved
    flags = setting.untouched.copy()
    flags[saved] = KEEP
    entering: set[int] = set()
    for number, share in found.items():
        module = every[number]
        kept = stored(module.groups, 1.0 - share)
        if kept is None:
            return None
        nodes = set(module.nodes)
        for node in module.nodes:
            entering.update(s for s in problem.inputs(node).tolist() if int(problem.producer[s]) not in nodes)
        for group, keep in zip(module.groups, kept, strict=True):
            made = [s for node in group.nodes for s in problem.outputs(node).tolist()]
            for storage in made:
                flags[storage] = KEEP if keep else RECOMPUTE if saved[storage] else DROP
        ends = problem.outputs(module.nodes[-1])
        flags[ends[saved[ends]]] = KEEP  # the output is there, whether the program counts it or not
    flags[sorted(entering)] = KEEP
    return flags


def selective(setting: Setting) -> Calibrated:
    """Its plans, at budgets from nothing checkpointed down to what it can keep."""
    every = modules(setting)
    tightest = discards(every, None)
    least = float(setting.peak) if tightest is None else tightest[1]

    def plans_at(tight: float) -> Iterator[Int8s]:
        found = discards(every, setting.budget(least, tight))
        flags = None if found is None else checkpointed(setting, every, found[0])
        if flags is not None:
            yield flags

    return Calibrated(setting, plans_at)


def selective_plan(setting: Setting, goal: Objective) -> JudgedPlan | None:
    """Its best plan that meets a goal."""
    return selective(setting).best(goal)
