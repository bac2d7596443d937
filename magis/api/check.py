"""Finds, before any case of a model runs, what only building, capturing and running that model can find.

Fake tensors take some steps that eager refuses: their kernels do not compare the data types of a matrix product, say.
So a captured step is looked through for mixed products, and run once in eager mode where cases run for real.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from magis.api.alone import attempt
from magis.api.bench import Bench, Make
from magis.api.subject import Subject
from magis.api.variants import technique_of
from magis.capture import Workload
from magis.errors import CaptureError, UsageError
from magis.ir import Graph
from magis.results import Case

PRODUCTS = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward")
)
"""Operators whose kernels, on every device, refuse operands of different data types."""

EAGER_FIRST = "the step must run eagerly before it can be optimized"


def check_case(case: Case, *, cache: Bench | None = None, make: Make | None = None) -> None:
    """Build and capture what the case would run, and run the original step once if its cases run for real.

    With a ``cache`` that the case is given afterwards, the capture is made once. Raises UsageError for a model that
    cannot be found or built, and CaptureError, naming module and line, for one that is no single static step: a
    branch on data, tensors on another device, data types that eager refuses to mix.
    """
    subject = (cache if cache is not None else Bench()).subject(case, make)
    if subject.keeps_dtypes:
        _check_dtypes(subject.fake)
    technique = technique_of(case, subject)
    captured = subject.captured_as(technique)[0] if technique and technique.is_captured else subject.captured
    _check_products(captured.graph)
    if subject.runs:
        _check_eager(subject)


def _check_dtypes(work: Workload) -> None:
    """Parameters and inputs must have one data type: a step that mixes them there cannot be captured."""
    named = [*work.module.named_parameters(), *((f"input {index}", t) for index, t in enumerate(work.inputs))]
    first: tuple[str, torch.dtype] | None = None
    for name, tensor in named:
        if not tensor.is_floating_point():
            continue
        first = first or (name, tensor.dtype)
        if tensor.dtype != first[1]:
            raise CaptureError(
                f"mixed data types: {first[0]} is {_short(first[1])}, {name} is {_short(tensor.dtype)}",
                hint=f"convert the module and its inputs to one, with .to(torch.{_short(first[1])}) say, or have that "
                "done to every tensor (dtype of the case, --magis-dtype)",
            )


def _check_products(graph: Graph) -> None:
    for op in graph.ops:
        if op.target not in PRODUCTS:
            continue
        dtypes = sorted({graph.values[value].dtype for value in op.inputs()})
        if len(dtypes) > 1:
            raise CaptureError(
                f"mixed data types: {op.target} in module {op.module or '(root)'!r} is given {' and '.join(dtypes)}",
                hint=EAGER_FIRST,
            )


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
        text = f"{type(error).__name__}{_place(error)} in eager mode: {error}"
        raise CaptureError(text, hint=EAGER_FIRST) from error


def _place(error: BaseException) -> str:
    """File name and line of the innermost frame that is neither torch's nor ours; empty where there is none."""
    own = (Path(torch.__file__).parent, Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in own):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
