"""Operators whose scratch depends on their tensors' contents: measured within a step on its own tensors.

Scratch is mostly measured on made-up tensors of the right shapes. That is exact where a kernel allocates by shapes
alone, as dense arithmetic does. It is not where whole numbers say how much there is to do (bags, segments, places to
scatter to); and it can end the process where a tensor holds another kernel's bytes, which only that one can write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch.autograd.profiler import record_function

from magis.cost.signature import signature
from magis.graph import Graph
from magis.graph.nodes import Op, Value
from magis.ops.call import CallError, resolve, shaped_by_contents
from magis.ops.generators import own_kept
from magis.ops.operators import op_info
from magis.runtime.codegen import compile_step
from magis.runtime.measure import Allocation, allocations, memory_profile, replay
from magis.runtime.steps import GraphStep


class Needs(Enum):
    """What a call's tensors must hold for its scratch to be that of the step."""

    ANYTHING = "anything harmless"
    NUMBERS = "the step's own numbers"
    """Made-up ones are an estimate, and tried where a crash takes nobody else along."""
    BYTES = "the bytes that another operator wrote"
    """Never made up."""


_PRIVATE = (
    "mkldnn", "cudnn", "miopen", "onednn", "fbgemm", "quantize", "qlinear", "qconv", "_thnn_fused", "_sparse", "_cslt",
    "_weight_int", "_dyn_quant", "_nested", "_jagged", "_pack_padded", "_prepack", "_packed",
)  # fmt: skip
"""In names of operators that hand packed bytes to each other."""

_BY_SHAPES = ("copy", "fill", "none", "gather", "pool", "softmax", "random")
"""Kinds of operators whose scratch hangs on shapes alone, unless their row says otherwise; those that torch calls
pointwise are such, too."""


def needs(op: Op, values: Mapping[int, Value]) -> Needs:
    """What is to be in the tensors of `op` when its scratch is measured."""
    space, name = (*op.target.split("."), "")[:2]
    if space != "aten" or any(part in name for part in _PRIVATE):
        return Needs.ANYTHING if _is_first(name, op, values) else Needs.BYTES
    info = op_info(op.target)
    if info.scratch == "values" or shaped_by_contents(op, values):
        return Needs.NUMBERS
    whole = {values[number].dtype for number in op.inputs() if _is_whole(values[number].dtype)}
    by_shapes = info.scratch == "shapes" or (not info.scratch and info.kind in _BY_SHAPES)
    return Needs.ANYTHING if not whole or by_shapes or info.view or _is_pointwise(op.target) else Needs.NUMBERS


def _is_first(name: str, op: Op, values: Mapping[int, Value]) -> bool:
    """Whether an operator of such a family is the one that makes the bytes, of floats alone."""
    floats = all(not _is_whole(values[number].dtype) and values[number].dtype != "bool" for number in op.inputs())
    return op.target.startswith("aten.") and "backward" not in name and "quant" not in name and floats


def _is_whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _is_pointwise(target: str) -> bool:
    try:
        return torch.Tag.pointwise in resolve(target).tags
    except CallError:
        return False


# Scratch of operators within a step that runs on its own tensors.

_MARK = "magis step "


def record_workspaces(graph: Graph, ready: Callable[[], GraphStep]) -> dict[str, int]:
    """Bytes that each operator of a whole step allocates on the step's own numbers, by signature; on the CPU.

    The step runs twice, as generated code does, each time on the tensors of a new one that `ready` makes, and with the
    generators as they are now: what it branches on shall not have moved. Where calls of one signature differ, the most
    that any takes. All generators are left as they were.
    """
    count = 0

    def mark() -> None:
        nonlocal count
        with record_function(f"{_MARK}{count}"):
            count += 1

    def run(log: AbstractContextManager[Any]) -> Any:
        nonlocal count
        made = ready()
        with torch.random.fork_rng(devices=[]), own_kept(made.generators):
            made.prepare()
            step, numbers = compile_step(graph, between=mark, generators=made.generators), made.numbers()
            count = 0
            with log as window, record_function(_MARK):
                kept = step(made.tensors, numbers)
        del kept
        return window

    run(nullcontext())
    log = run(memory_profile())
    found: dict[str, int] = {}
    calls, windows = [*_called(graph)], [*_between_marks(log)]
    if len(calls) != len(windows):
        return {}  # it is not known which window is whose
    for (op, inside), events in zip(calls, windows, strict=True):
        window = replay(events)
        key = signature(op, inside.values)
        # some kernels make what nobody asked for, which is scratch
        stays = min(window.kept_bytes, _made_bytes(op, inside)) if None in op.outputs else window.kept_bytes
        found[key] = max(found.get(key, 0), window.peak_bytes - stays)
    return found


def _called(graph: Graph) -> Iterator[tuple[Op, Graph]]:
    """Calls of torch's operators with their graph, in the order in which generated code makes them."""
    for op in graph.ops:
        if op.body is not None:
            for _ in range(op.body.parts):
                yield from _called(op.body.graph)
        elif not op.target.startswith("magis."):
            yield op, graph


def _made_bytes(op: Op, graph: Graph) -> int:
    given = {graph.values[value].storage for value in op.inputs()}
    fresh = {graph.values[value].storage for value in op.made()} - given
    return sum(graph.storages[storage].nbytes for storage in fresh)


def _between_marks(log: Any) -> Iterator[list[Allocation]]:
    """The allocator's events up to each mark, from the one before it on."""
    pending = list(log.kineto_results.experimental_event_tree())
    marks = []
    while pending:
        node = pending.pop()
        pending.extend(node.children)
        if node.name.startswith(_MARK) and node.name != _MARK:
            marks.append(node.start_time_ns)
    events = allocations(log)
    at = 0
    for moment in sorted(marks):
        first = at
        while at < len(events) and events[at].time_ns <= moment:
            at += 1
        yield events[first:at]
