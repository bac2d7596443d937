"""Checks of a model before its cases run: building, capturing, one eager step; and growth of memory from step to step.

Fake tensors allow some steps that eager rejects: their kernels do not compare dtypes in matrix products, say. So a
captured step is searched for mixed products, and run once in eager mode if its cases run on a real device.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from magis.cases.case_rows import attempt
from magis.cases.contenders import strategy_of
from magis.cases.tensor_ledger import MadeStorage, TensorLedger, by_module
from magis.dtypes import autocast_type
from magis.errors import CaptureError, UsageError
from magis.ops.generators import generators_kept
from magis.planner.bench import Bench, Make
from magis.planner.subject import Subject
from magis.progress import Progress
from magis.results import Case, StepGrowth
from magis.runtime.measure import no_collection
from magis.runtime.steps import EagerStep, Step, whole_step
from magis.strategies.single_device import on_fake_tensors

EAGER_FIRST = "the step must run eagerly before it can be optimized"


def check_case(
    case: Case, *, cache: Bench | None = None, make: Make | None = None, progress: Progress | None = None
) -> None:
    """Build and capture the case's step; run the original step once if its cases run on a real device.

    With a ``cache`` that is later passed to `run_case`, the step is captured once. Raises UsageError for a model that
    cannot be found or built, and CaptureError, which names module and line, for one that is no single static step:
    numbers read off data, tensors on another device, mixed dtypes. ``progress`` is called with progress messages.
    """
    subject = (cache if cache is not None else Bench()).subject(case, make)
    subject.tell = progress or subject.tell
    strategy = strategy_of(case, subject)
    if strategy and strategy.is_captured:
        subject.captured_as(strategy)
    else:
        _ = subject.captured
    if subject.runs:

        def run() -> object:
            return whole_step(subject.eager())()

        try:
            attempt(run)  # out of memory is no error: the case is simulated then
        except UsageError:
            raise
        except Exception as error:
            grown = growth(subject) if subject.source.of_user else None  # a kept autograd graph cannot be copied, say
            text = f"{type(error).__name__}{_innermost_user_line(error)} in eager mode: {error}"
            raise CaptureError(f"{grown}; {text}" if grown else text, hint=EAGER_FIRST) from error
    _ = subject.conformance


def _innermost_user_line(error: BaseException) -> str:
    """Return " at FILE:LINE" of the innermost frame in the user's code; "" if there is none."""
    own = (Path(torch.__file__).parent, Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in own):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""


# Growth of memory from step to step: outputs, autograd graphs or gradients kept alive, late state, caches.

STEPS = 4
"""Number of steps to run. Later steps are compared with the second: the first makes gradients and optimizer state."""


def growth(subject: Subject) -> StepGrowth | None:
    """Return the growth of memory over eager's steps of a user's network; None without growth.

    Steps run on the real device if cases do, else on fake tensors. A step that fails in both ways gives None: the case
    itself reports the error.
    """
    if subject.traced.optimizer.kind == "none":
        return None
    for fake in (False, True) if subject.runs else (True,):
        try:
            with generators_kept():
                step, mode = _fake_step(subject) if fake else (subject.eager(), nullcontext())
                return grown(step, mode, "cpu" if fake else subject.kind)
        except Exception:  # noqa: BLE001, S112  (reported by the case itself)
            continue
    return None


def _fake_step(subject: Subject) -> tuple[Step, AbstractContextManager[object]]:
    with FakeTensorMode():
        mode, work = on_fake_tensors(subject.make())
    cast = autocast_type(subject.source.dtype)

    def around() -> AbstractContextManager[object]:
        return nullcontext() if cast is None else torch.autocast("cpu", getattr(torch, cast))

    explicit, seed = work.explicit_attention, subject.source.seed
    return EagerStep(*work.parts, explicit_attention=explicit, around=around, seed=seed), mode


def grown(step: Step, inside: AbstractContextManager[object], device: str) -> StepGrowth | None:
    """Run a step `STEPS` times without the garbage collector, which steps of few objects do not start; return the
    storages allocated since the second step, None without growth."""
    ledger = TensorLedger(device)
    held: list[Mapping[int, MadeStorage]] = []
    with no_collection(), inside, ledger.modules.watched(), ledger:
        for _ in range(STEPS):
            step.prepare()
            step.run()
            step.prepare()  # frees gradients and results
            held.append(ledger.alive())
        gc.collect()
        kept = ledger.alive()
    alive = [sum(each.nbytes for each in storages.values()) for storages in held]
    if min(alive[2:]) <= alive[1]:  # no growth, or freed again
        return None
    # storages of equal size and origin that existed before are no growth
    added = Counter(held[-1].values()) - Counter(held[1].values())
    in_cycles = sum(each.nbytes for serial, each in held[-1].items() if serial not in {*kept, *held[1]})
    return StepGrowth(alive[-1] - alive[1], STEPS, by_module(list(added.elements())), in_cycles)
