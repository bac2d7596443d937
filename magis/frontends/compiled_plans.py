"""Plans whose stretches inductor compiles: layout of their batches, their bytes, and the search for one that keeps the
limit when compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from magis.capture.workload import Batch
from magis.errors import UsageError
from magis.frontends.limits import PlanReport
from magis.frontends.optimizer_behind import Behind
from magis.graph import Graph
from magis.planner.subject import Subject
from magis.runtime.codegen import CompiledPlan
from magis.units import format_bytes

T = TypeVar("T")
ROUNDS, MORE = 3, 6
"""Most searches for a plan whose compiled code keeps the limit; and if none has kept it so far."""
CLOSE = 0.02
"""Share of the limit by which a compiled plan may stay below it without another search."""
MARGIN = 0.004
"""Share of the limit by which the next search aims lower, where a compiled plan exceeds it."""

_CONVOLUTIONS = nn.Conv2d, nn.ConvTranspose2d


def has_pictures(module: nn.Module) -> bool:
    """Return True if a module has convolutions over pictures, whose kernels are fastest on channels last."""
    return any(isinstance(each, _CONVOLUTIONS) for each in module.modules())


def channels_last(batch: Batch) -> Batch:
    """Return a batch with its pictures as channels last; the layers of a network follow the layout of its input."""

    def laid_out(tensor: Tensor) -> Tensor:
        picture = tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if picture else tensor

    inputs, targets = (tuple(map(laid_out, each)) for each in (batch.inputs, batch.targets))
    both = zip((*batch.inputs, *batch.targets), (*inputs, *targets), strict=True)
    return replace(batch, inputs=inputs, targets=targets, copied=sum(old.nbytes for old, new in both if old is not new))


def compiled(
    compiler: Callable[[Graph], CompiledPlan], graph: Graph, subject: Subject, behind: Behind, kept: int,
    report: PlanReport,
) -> tuple[CompiledPlan, PlanReport]:  # fmt: skip
    """Compile a plan's stretches; return them, and the report with the bytes that the plan then needs. ``kept`` are
    bytes of copies beside the plan, those of the batch included."""
    found = compiler(graph)
    costs = subject.costs({**subject.workspaces(graph), **found.scratch})
    peak = behind.peak(subject.replayed(found.graph, costs).peak_bytes + kept)
    said = f"{found.operators} operators in {found.count} stretches, {len(found.functions)} distinct"
    return found, replace(report, planned_bytes=peak, compiled=said)


def fastest(find: Callable[[int], T], report_of: Callable[[T], PlanReport]) -> T:
    """Return the fastest plan found that keeps the limit when it is compiled. Compiled code may need more bytes than
    its operators, or fewer: the limit of the search, which `find` takes as bytes beyond the real one, moves by the
    difference until the compiled plan comes close to the limit. Raises UsageError if none keeps it."""
    best: T | None = None
    moved, told = 0, ""
    for number in range(MORE):
        if number >= ROUNDS and best is not None:
            break
        try:
            found = find(moved)
        except UsageError:
            if best is None:
                raise
            break
        report = report_of(found)
        if report.limit_bytes is None:
            return found
        spare = report.limit_bytes - report.planned_bytes
        if spare >= 0 and (best is None or report.latency_ratio < report_of(best).latency_ratio):
            best = found
        if 0 <= spare <= CLOSE * report.limit_bytes or (spare > 0 and not report.recomputed_ops):
            break
        told = f"at most {format_bytes(report.limit_bytes)}: the last needs {format_bytes(report.planned_bytes)}"
        moved += spare if spare > 0 else spare - int(MARGIN * report.limit_bytes)
    if best is None:
        raise UsageError(f"no compiled plan found that needs {told}", hint="raise the limit, or leave out compile=True")
    return best
