"""Compares a captured step with what eager really runs, at the real size where that fits, else on a small batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from magis.aten.host_random import generators_kept
from magis.capture import Captured, Workload, capture
from magis.capture.checks import BranchError
from magis.capture.conform import ConformanceError, check_conforms, first_difference
from magis.capture.listening import Heard
from magis.capture.step import record_eager
from magis.errors import CaptureError

__all__ = ["MOST_BYTES", "conformance"]

WHOLE = "whole step"
UNCHECKED = "not checked"
SMALL_BATCH = 2
MOST_BYTES = 1 << 30
"""Of the peak of a step that is run for no other purpose than this; a CPU takes seconds for it."""


def conformance(
    work: Workload,
    captured: Captured | None,
    peak_bytes: int,
    weight_bytes: int,
    *,
    autocast: str | None,
    start: Callable[[], None],
    mends: bool,
) -> tuple[str, Captured | None]:
    """How far a step was compared with eager's own operators: "whole step", "batch of 2", or "not checked: <why>".

    `work` is on real CPU tensors, `captured` its capture for the CPU where there is one already, for which `start` sets
    the generators, and `peak_bytes` what the whole step would need. Raises CaptureError, naming the first operator and
    module that differ, for a step that eager does not run so; where only layouts differ and it `mends`, the capture
    that follows eager's is returned, too.
    """
    if peak_bytes <= MOST_BYTES:
        return _checked(work, captured, autocast, start, WHOLE, follows=mends)
    if 4 * weight_bytes > MOST_BYTES:
        return f"{UNCHECKED}: the parameters alone are too large to run a step here", captured
    small = _smaller(work)
    if small is None:
        why = "the step is too large to run here, and its tensors have no batch dimension in common"
        return f"{UNCHECKED}: {why}", captured
    said, _ = _checked(small, None, autocast, start, f"batch of {SMALL_BATCH}", follows=False)
    return said, captured


def _checked(
    work: Workload,
    captured: Captured | None,
    autocast: str | None,
    start: Callable[[], None],
    said: str,
    *,
    follows: bool,
) -> tuple[str, Captured | None]:
    try:
        return said, _check(work, captured, autocast, start, follows=follows)
    except ConformanceError:
        raise
    except CaptureError as error:  # who runs the step for its own sake says so
        return f"{UNCHECKED}: run on the CPU for this, {said} fails: {error}", captured


def _check(
    work: Workload, captured: Captured | None, autocast: str | None, start: Callable[[], None], *, follows: bool
) -> Captured:
    explicit = work.explicit_attention
    expects = captured is not None and captured.expects

    def eager() -> Captured:
        start()
        return record_eager(*work.parts, explicit_attention=explicit, autocast=autocast, expects=expects)

    def anew(heard: Heard | None) -> Captured:
        start()
        return capture(*work.parts, explicit_attention=explicit, autocast=autocast, heard=heard)

    with generators_kept():
        try:
            found = captured or anew(None)
        except BranchError:
            expects = True
            found = anew(eager().heard)
        theirs = eager()
        if follows and first_difference(found.graph, theirs.graph):
            other = anew(theirs.heard)
            found = found if first_difference(other.graph, theirs.graph) else other
    check_conforms(found.graph, theirs.graph)
    return found


def _smaller(work: Workload) -> Workload | None:
    """The same on the first samples of the batch; None where its tensors do not share a first dimension."""
    sizes = {tensor.shape[0] for tensor in (*work.inputs, *work.targets) if tensor.dim()}
    if len(sizes) != 1:
        return None

    def few(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensor[:SMALL_BATCH].clone() if tensor.dim() else tensor for tensor in tensors)

    with torch.no_grad():
        return replace(work, inputs=few(work.inputs), targets=few(work.targets))
