"""Memory that grows from step to step: outputs, graphs or gradients kept alive, state made late, caches."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from magis.capture import Workload
from magis.cases.tensor_ledger import MadeStorage, TensorLedger, by_module
from magis.dtypes import autocast_type
from magis.ops.generators import generators_kept
from magis.planner.subject import Subject
from magis.results import StepGrowth
from magis.runtime.measure import no_collection
from magis.runtime.steps import EagerStep, Step
from magis.strategies.single_device import on_fake_tensors

STEPS = 4
"""The second one is compared with the later ones: the first makes gradients and optimizer state."""


def growth(subject: Subject) -> StepGrowth | None:
    """What eager's step of a user's network leaves alive, step by step; None where nothing grows.

    Run for real where cases of the network are, else on fake tensors. A step that runs in neither way is not looked at:
    whoever runs it says what is wrong.
    """
    if subject.traced.optimizer.kind == "none":
        return None
    ways = ((_real, subject.kind), (_fake, "cpu")) if subject.runs else ((_fake, "cpu"),)
    for make, device in ways:
        try:
            with generators_kept():
                return grown(*make(subject), device)
        except Exception:  # noqa: BLE001, S112  (said where the step is run for its own sake)
            continue
    return None


def _real(subject: Subject) -> tuple[Step, AbstractContextManager[object]]:
    return subject.eager(), nullcontext()


def _fake(subject: Subject) -> tuple[Step, AbstractContextManager[object]]:
    mode = FakeTensorMode()
    with mode:
        mode_of_work, work = on_fake_tensors(subject.make())
    return _eager(subject, work), mode_of_work


def _eager(subject: Subject, work: Workload) -> EagerStep:
    cast = autocast_type(subject.source.dtype)

    def around() -> AbstractContextManager[object]:
        return nullcontext() if cast is None else torch.autocast("cpu", getattr(torch, cast))

    return EagerStep(*work.parts, explicit_attention=work.explicit_attention, around=around, seed=subject.source.seed)


def grown(step: Step, inside: AbstractContextManager[object], device: str) -> StepGrowth | None:
    """Run a step some times; what is alive after each later one and was not after the second."""
    ledger = TensorLedger(device)
    held: list[tuple[MadeStorage, ...]] = []
    with no_collection(), inside, ledger.modules.watched(), ledger:
        for _ in range(STEPS):
            step.prepare()
            step.run()
            step.prepare()  # neither gradients nor results are kept by the loop
            gc.collect()
            held.append(ledger.alive())
    alive = [sum(each.nbytes for each in storages) for storages in held]
    if min(alive[2:]) <= alive[1]:  # not at all, or not for good: what was freed again is no growth
        return None
    return StepGrowth(alive[-1] - alive[1], STEPS, by_module(_added(held[-1], held[1])))


def _added(held: tuple[MadeStorage, ...], before: tuple[MadeStorage, ...]) -> list[MadeStorage]:
    """Storages beyond those of the same size from the same place that were there before."""
    known = Counter(before)
    added = []
    for each in held:
        if known[each]:
            known[each] -= 1
        else:
            added.append(each)
    return added
