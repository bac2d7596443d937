"""Steps that do not fit: what is said of them, and the optimized one by itself where only the original does not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from magis.api.subject import ROUNDS_ALONE, Subject
from magis.backend.exhausted import is_out_of_memory
from magis.backend.measure import others_memory
from magis.backend.steps import Step, whole_step
from magis.backend.timing import alone
from magis.results import Memory
from magis.units import GIB, format_bytes

NOT_RUN = "not run"
NOT_COMPARED = "not run: the original does not fit"
NOT_BOTH = "not run: original and optimized step do not fit together"
NOTABLE_BYTES = GIB
"""Of a GPU in others' hands: CUDA itself takes about half of that in every process."""

T = TypeVar("T")


@dataclass(frozen=True)
class Alone:
    """What is known of an optimized step that ran without the original."""

    memory: Memory
    times_ms: tuple[float, ...]


def attempt(run: Callable[[], T]) -> T | None:
    """What ``run`` returns; None if it runs out of memory, all of which is given back."""
    try:
        return run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # the error is gone by now, and with it the frames that held the step's tensors
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None


def fits_alone(subject: Subject, peak_bytes: int) -> bool:
    """Whether a step with this peak is run where nothing else of the case is but a copy of the module."""
    if subject.simulated_only or subject.too_slow:
        return False
    return peak_bytes + subject.captured.graph.persistent_bytes() <= subject.free_bytes


def run_alone(subject: Subject, make: Callable[[], Step]) -> Alone | None:
    """Measure and time a step; None if it runs out of memory."""

    def run() -> Alone:
        step = make()
        once = whole_step(step)
        for _ in range(2):  # the first one makes the optimizer's state
            once()
        return Alone(subject.measure(step), alone(once, ROUNDS_ALONE, subject.torch_device))

    return attempt(run)


def too_large(subject: Subject) -> str:
    """That the original needs more than is free, with bytes."""
    return f"it needs about {format_bytes(subject.predicted_bytes)} of memory, {_free(subject)}"


def ran_out(subject: Subject) -> str:
    """That it ran out of memory although it should fit, with bytes."""
    return f"it ran out of memory: its simulated peak is {format_bytes(subject.original.peak_bytes)}, {_free(subject)}"


def _free(subject: Subject) -> str:
    others = others_memory(subject.source.device)
    held = f", {format_bytes(others)} are held by other processes" if others >= NOTABLE_BYTES else ""
    return f"{format_bytes(subject.free_bytes)} are free{held}"
