"""Finds, before any case of a model runs, what only building, capturing and running that model can find; and memory
that grows from step to step.

Fake tensors take some steps that eager refuses: their kernels do not compare the data types of a matrix product, say.
So a captured step is looked through for mixed products, and run once in eager mode where cases run for real.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
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
    """Build and capture what the case would run; run the original step once if its cases run for real.

    With a ``cache`` that the case is given afterwards, the capture is made once. Raises UsageError for a model that
    cannot be found or built, and CaptureError, naming module and line, for one that is no single static step: numbers
    read off data, tensors on another device, data types that eager refuses to mix. ``progress`` is told what is going
    on.
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
            attempt(run)  # too little memory is nothing to refuse: the case is simulated then
        except UsageError:
            raise
        except Exception as error:
            grown = growth(subject) if subject.source.of_user else None  # graphs that are kept cannot be copied, say
            text = f"{type(error).__name__}{_innermost_user_line(error)} in eager mode: {error}"
            raise CaptureError(f"{grown}; {text}" if grown else text, hint=EAGER_FIRST) from error
    _ = subject.conformance


def _innermost_user_line(error: BaseException) -> str:
    """Return file name and line of the innermost frame that is neither torch's nor ours; empty if there is none."""
    own = (Path(torch.__file__).parent, Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in own):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""


# Memory that grows from step to step: outputs, graphs or gradients kept alive, state made late, caches.

STEPS = 4
"""Steps that are run. The second is compared with the later ones: the first makes gradients and optimizer state."""


def growth(subject: Subject) -> StepGrowth | None:
    """Find what eager's step of a user's network leaves alive, step by step; None if nothing grows.

    It runs for real where cases of the network do, else on fake tensors. A step that runs in neither way is passed
    over: whoever runs it says what is wrong.
    """
    if subject.traced.optimizer.kind == "none":
        return None
    for fake in (False, True) if subject.runs else (True,):
        try:
            with generators_kept():
                step, mode = _fake_step(subject) if fake else (subject.eager(), nullcontext())
                return grown(step, mode, "cpu" if fake else subject.kind)
        except Exception:  # noqa: BLE001, S112  (said where the step is run for its own sake)
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
    """Run a step a few times; return what is alive after each later one and was not after the second."""
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
    # beyond those of the same size from the same place that were there before
    added = Counter(held[-1]) - Counter(held[1])
    return StepGrowth(alive[-1] - alive[1], STEPS, by_module(list(added.elements())))
