"""How AOTAutograd's joint graph is split: as planned, or as torch does it where it has no form in our graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._functorch.partitioners import default_partition

from magis.compile.halves import halves
from magis.compile.joint import capture_joint, why_not
from magis.compile.options import Options
from magis.compile.plan import plan_joint
from magis.compile.report import Report
from magis.errors import MagisError
from magis.units import format_bytes

__all__ = ["REFUSED", "as_torch_does", "partition", "tell"]

REFUSED = (MagisError, RuntimeError, TypeError, ValueError, LookupError, NotImplementedError)
"""What capture and planning raise for what they cannot do: torch's operators on fake tensors raise any of these."""


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    options: Options,
    **further: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph, planned under the limit of the options.

    A graph that cannot be planned is split as torch's default does, everything saved, with one warning that says why.
    So is told a limit that no plan keeps; the plan that exceeds it least is then the one that runs.
    """
    reason = why_not(joint)
    if not reason:
        try:
            with no_python_dispatcher():  # AOTAutograd's, which takes operators apart that run whole
                captured = capture_joint(joint, num_fwd_outputs)
                planned, report = plan_joint(captured, options)
                found = halves(joint, captured, planned)
        except REFUSED as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
        else:
            tell(report, options)
            return found
    as_torch_does(reason, options)
    forward, backward = default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **further)
    return forward, backward


def as_torch_does(reason: str, options: Options) -> None:
    """Say why a graph is not planned: a warning, and a report without numbers."""
    what = "inductor chooses what" if options.inductor else "all that"
    saved = "is saved" if options.inductor else "its backward needs is saved"
    warnings.warn(f"magis: a graph is not planned, {what} {saved}: {reason}", stacklevel=3)
    if options.report is not None:
        options.report(Report(0, 0, None, False, 0, 1.0, (), 0.0, fallback=reason))


def tell(report: Report, options: Options) -> None:
    """Hand a report to whom it is for; a warning where the limit is not kept."""
    if not report.feasible and report.limit_bytes is not None:
        warnings.warn(
            f"magis: no plan found for a graph within {format_bytes(report.limit_bytes)}: it will need"
            f" {format_bytes(report.planned_bytes)}, unplanned {format_bytes(report.original_bytes)}",
            stacklevel=3,
        )
    if options.report is not None:
        options.report(report)
