"""Finds, before any case of a model runs, what only building, capturing and running that model can find.

Fake tensors take some steps that eager refuses: their kernels do not compare the data types of a matrix product, say.
So a captured step is looked through for mixed products, and run once in eager mode where cases run for real.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from magis.cases.case_rows import attempt
from magis.cases.contenders import technique_of
from magis.cases.growth import growth
from magis.errors import CaptureError, UsageError
from magis.planner.bench import Bench, Make
from magis.planner.subject import Subject
from magis.results import Case

EAGER_FIRST = "the step must run eagerly before it can be optimized"


def check_case(case: Case, *, cache: Bench | None = None, make: Make | None = None) -> None:
    """Build and capture what the case would run, and run the original step once if its cases run for real.

    With a ``cache`` that the case is given afterwards, the capture is made once. Raises UsageError for a model that
    cannot be found or built, and CaptureError, naming module and line, for one that is no single static step:
    numbers read off data, tensors on another device, data types that eager refuses to mix.
    """
    subject = (cache if cache is not None else Bench()).subject(case, make)
    technique = technique_of(case, subject)
    if technique and technique.is_captured:
        subject.captured_as(technique)
    else:
        _ = subject.captured
    if subject.runs:
        _check_eager(subject)
    _ = subject.conformance


def _check_eager(subject: Subject) -> None:
    def run() -> None:
        step = subject.eager()
        step.prepare()
        step.run()

    try:
        attempt(run)  # too little memory is nothing to refuse: the case is simulated then
    except UsageError:
        raise
    except Exception as error:
        grown = growth(subject) if subject.source.of_user else None  # graphs that are kept cannot be copied, say
        text = f"{f'{grown}; ' if grown else ''}{type(error).__name__}{_place(error)} in eager mode: {error}"
        raise CaptureError(text, hint=EAGER_FIRST) from error


def _place(error: BaseException) -> str:
    """File name and line of the innermost frame that is neither torch's nor ours; empty where there is none."""
    own = (Path(torch.__file__).parent, Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in own):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""
