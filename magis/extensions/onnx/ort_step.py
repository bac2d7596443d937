"""Export of a workload's step to ONNX Runtime; onnx and onnxruntime are imported only when a step is requested."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch._subclasses import FakeTensor

from magis.capture import Workload
from magis.capture.captured import capture
from magis.errors import UsageError

if TYPE_CHECKING:
    from magis.extensions.onnx.export import Exported
    from magis.extensions.onnx.ort_session import OrtStep

PRECISIONS = {"float32": None, "amp-float16": "float16", "amp-bfloat16": "bfloat16"}
"""Precision of a step -> data type of autocast for forward and loss. Gradients are not scaled."""


def check_installed() -> None:
    """Raise UsageError, which says what to install, unless onnxruntime and onnx are installed."""
    missing = [name for name in ("onnxruntime", "onnx") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the strategy ort needs {' and '.join(missing)}, not installed here",
            hint="pip install 'pytest-magis[ort]'",
        )


def export_step(work: Workload, *, precision: str = "float32", inference: bool = False) -> Exported:
    """Return a workload's training step (``inference``: its forward pass, in evaluation mode) as an ONNX model.

    The tensors may be fake. Attention is unfused. Raises UsageError if onnx is not installed, for an unknown precision,
    and for an operator without an ONNX form; also the errors of `capture`.
    """
    check_installed()
    if precision not in PRECISIONS:
        raise UsageError(f"unknown precision {precision!r} for ort", hint=f"choose one of {', '.join(PRECISIONS)}")
    from magis.extensions.onnx.export import export
    from magis.extensions.onnx.functional_trace import trace

    loss_fn = None if inference else work.loss_fn
    rule = replace(work.optimizer, kind="none") if inference else work.optimizer.looped()
    training = [part for part in work.module.modules() if part.training] if inference else []
    try:
        if inference:
            work.module.eval()
        captured = capture(
            work.module, work.inputs, work.targets, loss_fn, rule,
            explicit_attention=True, autocast=PRECISIONS[precision],
        )  # fmt: skip
    finally:
        for part in training:
            part.training = True
    return export(trace(captured), work.name, inference=inference)


def make_ort_step(work: Workload, exported: Exported, *, optimized: bool = True) -> OrtStep:
    """Return a workload's step in ONNX Runtime, with all of its graph optimizations or none.

    ``exported`` is `export_step`'s result for this workload or an equal one. The module's parameters are updated by
    every step. Raises UsageError for fake tensors, and if ONNX Runtime has no kernel for an operator in the data type.
    """
    if any(isinstance(tensor, FakeTensor) for tensor in (*work.module.parameters(), *work.inputs)):
        raise UsageError(f"{work.name}: ONNX Runtime cannot run a step on fake tensors")
    from magis.extensions.onnx.ort_session import OrtStep

    batch = {f"input:{index}": tensor for index, tensor in enumerate(work.inputs)}
    batch.update((f"target:{index}", tensor) for index, tensor in enumerate(work.targets))
    rule = replace(work.optimizer, kind="none") if exported.inference else work.optimizer
    return OrtStep(exported, work.module, batch, rule, optimized=optimized, name=work.name)
