"""Peak bytes of a step in ONNX Runtime: measured by its own allocator, and predicted from the graph that it runs.

ONNX Runtime allocates outside of torch's allocator. Its profile says after every operator how many bytes its arena has
handed out, as asked for (``mem_bytes_requested_in_use``), at most so far with scratch and rounding
(``mem_in_use_peak``), and how many it holds (``mem_arena_held``). Weights, state, batch and outputs are torch's
tensors; constants that ONNX Runtime has computed beforehand lie outside of the arena, too. Both are added. (Some small
constants lie in it and are counted twice: hundreds of bytes.)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch

from magis.errors import MagisError
from magis.results import Memory, Term
from magis.strategies.ort.export import Exported
from magis.strategies.ort.planned import constant_bytes, in_order, planned_peak
from magis.strategies.ort.session import bind, open_session

__all__ = ["MEASURED", "PREDICTED", "measured_memory", "persistent_bytes", "predicted_memory", "terms"]

MEASURED = "ONNX Runtime's own count of its arena, from its profile; weights, state, batch, outputs and constants added"
"""How a measured row says that its bytes were found."""
PREDICTED = "ONNX Runtime's allocation planner replayed over the graph that it runs; no scratch inside operators"
"""The same of a predicted row."""

_STEPS = 2
_UNCAST = "InsertedPrecisionFreeCast_"
_FIGURES = ("mem_bytes_requested_in_use", "mem_in_use_peak", "mem_arena_held")


def persistent_bytes(exported: Exported) -> int:
    """Bytes of what exists before and after a step: weights, statistics, state, batch, and the tensors that the next
    weights and state (of an inference: the outputs) go to."""
    return sum(port.nbytes for port in (*exported.inputs, *exported.outputs)) + 4 * len(exported.scalars)


def measured_memory(exported: Exported, *, optimized: bool, name: str) -> Memory:
    """Run two steps on zeros and read off ONNX Runtime's profile what it had allocated.

    ``tensor_bytes``: as asked for, at the end of an operator. ``peak_bytes``: with scratch inside operators, and as the
    arena rounds. ``reserved_bytes``: what the arena held. Raises MagisError where its profile does not say.
    """
    with tempfile.TemporaryDirectory(prefix="magis-ort-") as folder:
        path = Path(folder) / "run.onnx"
        session = open_session(
            exported.model, optimized=optimized, name=name, optimized_path=path, profile=Path(folder) / "step"
        )
        always = persistent_bytes(exported) + constant_bytes(onnx.load(path))
        ports = {port.name: torch.zeros(port.shape, dtype=port.dtype) for port in exported.inputs}
        ports.update((scalar, torch.ones(())) for scalar in exported.scalars)
        outputs = {port.name: torch.zeros(port.shape, dtype=port.dtype) for port in exported.outputs}
        binding = bind(session, ports, outputs)
        for _ in range(_STEPS):
            session.run_with_iobinding(binding)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    found = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
    if not found or not all(figure in found[0] for figure in _FIGURES):
        raise MagisError(
            f"{name}: ONNX Runtime's profile says nothing of memory", hint="install onnxruntime 1.32 or newer"
        )
    tensors, peak, held = (max(int(args[figure]) for args in found) for figure in _FIGURES)
    return Memory(tensor_bytes=always + tensors, peak_bytes=always + peak, reserved_bytes=always + held)


def predicted_memory(exported: Exported, *, optimized: bool, name: str) -> Memory:
    """Peak bytes of tensors without running anything: ONNX Runtime loads and optimizes the graph, and its allocation
    planner is replayed over that. The tensors may have been fake."""
    peak = persistent_bytes(exported) + planned_peak(_as_run(exported.model, optimized, name))
    return Memory(tensor_bytes=peak, peak_bytes=peak)


def terms(exported: Exported, predicted: Memory) -> tuple[Term, ...]:
    """What a predicted peak consists of; they sum up to it."""
    groups: dict[str, int] = {}
    for port in exported.inputs:
        kind = port.name.partition(":")[0]
        groups[kind] = groups.get(kind, 0) + port.nbytes
    made = sum(port.nbytes for port in exported.outputs) + 4 * len(exported.scalars)
    rest = predicted.peak_bytes - sum(groups.values()) - made
    return (
        *(Term(kind, nbytes) for kind, nbytes in groups.items()),
        Term("outputs", made, "new weights and state are written beside the old ones"),
        Term("tensors of the step", rest, PREDICTED),
    )


def _as_run(model: onnx.ModelProto, optimized: bool, name: str) -> onnx.ModelProto:
    """The graph as ONNX Runtime runs it, in its order, the shapes of all values in it."""
    shaped: Any = onnx.shape_inference.infer_shapes(model)
    if not optimized:
        return in_order(shaped)
    with tempfile.TemporaryDirectory(prefix="magis-ort-") as folder:
        path = Path(folder) / "optimized.onnx"
        open_session(model, optimized=True, name=name, optimized_path=path)
        run: onnx.ModelProto = onnx.load(path)
    made = {value for node in run.graph.node for value in node.output}
    run.graph.value_info.extend(value for value in shaped.graph.value_info if value.name in made)
    inferred: onnx.ModelProto = onnx.shape_inference.infer_shapes(run)
    inferred.graph.value_info.extend(_uncast(inferred.graph, shaped.graph))
    return inferred


def _uncast(graph: onnx.GraphProto, before: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """What ONNX Runtime's own operators, whose shapes ONNX does not know, make in float32 where there is no kernel in
    half: it is called after the value in half, which has the same shape."""
    known = {value.name for value in (*graph.input, *graph.output, *graph.value_info)}
    half = {_UNCAST + value.name: value for value in (*before.output, *before.value_info)}
    for name in (name for node in graph.node for name in node.output if name in half and name not in known):
        sizes = [dim.dim_value for dim in half[name].type.tensor_type.shape.dim]
        yield onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
