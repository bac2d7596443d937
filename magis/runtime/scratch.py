"""Workspaces: the scratch bytes that each operator allocates, by signature.

Each distinct signature is called on made-up tensors of equal shapes, strides and dtypes, under one profile of the CPU
allocator. Workspaces depend on the instruction set, the number of threads and the torch version (the device identity),
and mostly not on the numbers in the tensors. The made-up numbers must only be harmless: floats in [0.5, 1) (valid
variances and probabilities), integers 0 (valid indices), scalars 1. A first call, which is not measured, lets kernels
fill their caches.

That is exact for kernels that allocate by shapes alone, as dense arithmetic does. It is not where integers determine
the amount of work (bags, segments, scatter indices); and it can crash the process if a tensor must hold another
kernel's packed bytes. Such operators are measured in a whole step on its own tensors (`record_workspaces`). Without
one, kernels that pack bytes run ahead of the one that reads them, and the others run in a child process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from magis.cost.shapes import reach
from magis.cost.signature import parse, signature
from magis.fission.proof import last_part
from magis.graph import Graph, every_op
from magis.graph.nodes import ITEM_SIZE, Op, Value
from magis.ops.call import CallError, call, resolve, shaped_by_contents
from magis.ops.fake_results import IN_TRAINING, masked, with_bits
from magis.ops.generators import own_kept
from magis.ops.operators import op_info
from magis.runtime.codegen import compile_step
from magis.runtime.measure import Allocation, allocations, logged, memory_profile, replay
from magis.runtime.steps import GraphStep


class Needs(Enum):
    """Contents that a call's tensors must have for its workspace to equal that in the step."""

    ANYTHING = "anything harmless"
    NUMBERS = "the step's own numbers"
    """Made-up numbers give an estimate, and are tried in a child process, which they may crash."""
    BYTES = "the bytes that another operator wrote"
    """Packed bytes of another operator, which are never made up: that one runs first, or a whole step."""


_PRIVATE = (
    "mkldnn", "cudnn", "miopen", "onednn", "fbgemm", "quantize", "qlinear", "qconv", "_thnn_fused", "_sparse", "_cslt",
    "_weight_int", "_dyn_quant", "_nested", "_jagged", "_pack_padded", "_prepack", "_packed",
)  # fmt: skip
"""Parts of the names of operators that exchange packed bytes."""

_BY_SHAPES = ("copy", "fill", "none", "gather", "pool", "softmax", "random")
"""Kinds of operators whose workspace depends on shapes alone, unless their row says otherwise; pointwise ones do,
too."""


def needs(op: Op, values: Mapping[int, Value]) -> Needs:
    """Return the contents that the tensors of `op` must have when its workspace is measured."""
    space, name = (*op.target.split("."), "")[:2]
    if space != "aten" or any(part in name for part in _PRIVATE):
        # packed bytes cannot be made up; only operators that pack floats can be called
        floats = all(not _is_whole(values[number].dtype) and values[number].dtype != "bool" for number in op.inputs())
        packs = space == "aten" and "backward" not in name and "quant" not in name and floats
        return Needs.ANYTHING if packs else Needs.BYTES
    info = op_info(op.target)
    if info.scratch == "values" or shaped_by_contents(op, values):
        return Needs.NUMBERS
    whole = {values[number].dtype for number in op.inputs() if _is_whole(values[number].dtype)}
    by_shapes = info.scratch == "shapes" or (not info.scratch and info.kind in _BY_SHAPES)
    return Needs.ANYTHING if not whole or by_shapes or info.view or _is_pointwise(op.target) else Needs.NUMBERS


def _is_whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def _is_pointwise(target: str) -> bool:
    try:
        return torch.Tag.pointwise in resolve(target).tags
    except CallError:
        return False


def packed_by(graph: Graph) -> dict[str, tuple[Op, ...]]:
    """Return, for each operator that reads packed bytes of others, those others, by signature."""
    made = {(id(values), number): op for op, values in every_op(graph) for number in op.made()}
    found: dict[str, tuple[Op, ...]] = {}
    for op, values in every_op(graph):
        if not op.target.startswith("magis.") and needs(op, values) is Needs.BYTES:
            makers = [made[id(values), number] for number in op.inputs() if (id(values), number) in made]
            packing = [each for each in makers if any(part in each.target for part in _PRIVATE)]
            if packing and all(needs(each, values) is Needs.ANYTHING for each in packing):
                found[signature(op, values)] = tuple(dict.fromkeys(packing))
    return found


def measure_workspaces(
    items: Iterable[tuple[Op, Mapping[int, Value]]],
    limit_bytes: int | None = None,
    packing: Mapping[str, tuple[Op, ...]] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the peak bytes that each operator allocates on the CPU beyond its new outputs, by signature. Left out are
    operators that refuse made-up arguments or must not get any (without those of `packing`, see `packed_by`),
    operators that crash their process, and, with `limit_bytes`, operators whose arguments and outputs are larger than
    the limit. The result is reproducible."""
    here: list[tuple[Op, Mapping[int, Value]]] = []
    aside: dict[str, None] = {}
    for op, values in items:
        wanted = needs(op, values)
        touched = [values[number] for number in dict.fromkeys((*op.inputs(), *op.made()))]
        size = sum(reach(value.shape, value.stride) * ITEM_SIZE[value.dtype] for value in touched)
        behind = wanted is Needs.BYTES and signature(op, values) in packing
        if (wanted is Needs.BYTES and not behind) or (limit_bytes is not None and size > limit_bytes):
            continue
        if behind or wanted is Needs.ANYTHING:
            here.append((op, values))
        else:
            aside[signature(op, values)] = None
    return {**measure_here(here, packing), **measure_aside(tuple(aside))}


# Made-up tensors, and calls on them in this process.


def make_tensors(op: Op, values: Mapping[int, Value], device: torch.device | str = "cpu") -> dict[int, torch.Tensor]:
    """Make tensors for the inputs of `op`, by value id: exact shapes, strides and dtypes, each with its own storage.
    The numbers come from a fixed seed and are equal for every call."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, torch.Tensor] = {}
    for number in dict.fromkeys(op.inputs()):
        value = values[number]
        dtype: torch.dtype = getattr(torch, value.dtype)
        length = reach(value.shape, value.stride)
        flat: torch.Tensor
        if dtype == torch.bool:
            flat = torch.rand(length, generator=generator, device=generator.device) < 0.5
        elif dtype.is_floating_point or dtype.is_complex:
            flat = torch.rand(length, generator=generator, device=generator.device).add_(1).mul_(0.5).to(dtype)
        else:
            flat = torch.zeros(length, dtype=dtype, device=generator.device)
        # filled before it is strided: an expanded tensor (stride 0) cannot be written in place
        made[number] = with_bits(flat.as_strided(value.shape, value.stride), value.bits)
    return made


def measure_here(
    items: Iterable[tuple[Op, Mapping[int, Value]]], packing: Mapping[str, tuple[Op, ...]] = MappingProxyType({})
) -> dict[str, int]:
    """Return the bytes that each operator allocates in this process, on made-up arguments, by signature; operators of
    `packing` run ahead of the one that reads their bytes. Runs every distinct signature of `items` (operator, values of
    the graph) twice with the current number of threads; only one signature's arguments are alive at a time. The global
    random-number generator is restored."""
    distinct: dict[str, tuple[Op, Mapping[int, Value]]] = {}
    for op, values in items:
        distinct.setdefault(signature(op, values), (op, values))
    fresh_bytes: dict[str, int] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), memory_profile() as log:
        for key, (op, values) in distinct.items():
            fresh = _call_marked(op, values, packing.get(key, ()))
            if fresh is not None:
                fresh_bytes[key] = fresh
    windows = [*_between_marks(log)][1::2]
    return {
        key: max(0, replay(w).peak_bytes - fresh) for w, (key, fresh) in zip(windows, fresh_bytes.items(), strict=True)
    }


def _call_marked(op: Op, values: Mapping[int, Value], ahead: Sequence[Op]) -> int | None:
    """Call `op` between two profiler marks, on results of the operators in `ahead`; return the bytes of new storages in
    its results, or None if it raises."""
    tensors = make_tensors(op, values)
    for each in ahead:
        tensors |= _results(each, values)
    scalars = dict.fromkeys(op.scalars(), 1.0)
    made = [values[number] for number in op.made()]
    packs = op.target in IN_TRAINING and (not made or made[-1].numel > 0)
    older = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    with torch.set_grad_enabled(packs):
        try:
            call(op, tensors, scalars)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        _mark()
        results = call(op, tensors, scalars)
        _mark()
    # without results that kernels make although they are masked out
    wanted: tuple[torch.Tensor | None, ...] = masked(resolve(op.target), op.args, results)
    fresh: dict[int, int] = {
        storage.data_ptr(): storage.nbytes()
        for storage in (each.untyped_storage() for each in wanted if each is not None and not each._is_zerotensor())
        if storage.data_ptr() not in older
    }
    return sum(fresh.values())


def _results(op: Op, values: Mapping[int, Value]) -> dict[int, torch.Tensor]:
    """Call `op` on made-up tensors; return its results by value id."""
    with torch.set_grad_enabled(op.target in IN_TRAINING):
        made = call(op, make_tensors(op, values), dict.fromkeys(op.scalars(), 1.0))
    return {
        number: each.detach()
        for number, each in zip(op.outputs, made, strict=True)
        if number is not None and each is not None
    }


_MARK = "magis mark"


def _mark() -> None:
    with record_function(_MARK):
        pass


def _between_marks(log: Any) -> Iterator[list[Allocation]]:
    """Yield the allocator's events between successive profiler marks."""
    events = allocations(log)
    at = 0
    for moment in sorted(node.start_time_ns for node in logged(log) if node.name == _MARK):
        first = at
        while at < len(events) and events[at].time_ns <= moment:
            at += 1
        yield events[first:at]


# Workspaces of operators in a step that runs on its own tensors.


def record_workspaces(graph: Graph, ready: Callable[[], GraphStep]) -> dict[str, int]:
    """Return the CPU workspace of each operator of a step on the step's own numbers, by signature, in bytes.

    The step runs twice as generated code, each time on the tensors of a new step made by `ready`, and with the current
    state of the generators, so that branches on data go alike. If calls of one signature differ, the largest workspace
    counts. All generators are restored.
    """

    def run(log: AbstractContextManager[Any]) -> Any:
        made = ready()
        with torch.random.fork_rng(devices=[]), own_kept(made.generators):
            made.prepare()
            step, numbers = compile_step(graph, between=_mark, generators=made.generators), made.numbers()
            with log as window, record_function("magis step"):
                kept = step(made.arguments, numbers)
        del kept
        return window

    run(nullcontext())
    log = run(memory_profile())
    found: dict[str, int] = {}
    calls, windows = [*_calls_in_order(graph)], [*_between_marks(log)]
    if len(calls) != len(windows):
        return {}  # windows cannot be matched with calls
    for (op, inside), events in zip(calls, windows, strict=True):
        window = replay(events)
        key = signature(op, inside.values)
        stays = window.kept_bytes
        if None in op.outputs:  # unrequested results of a kernel count as workspace
            given = {inside.values[value].storage for value in op.inputs()}
            fresh = {inside.values[value].storage for value in op.made()} - given
            stays = min(stays, sum(inside.storages[storage].nbytes for storage in fresh))
        found[key] = max(found.get(key, 0), window.peak_bytes - stays)
    return found


def _calls_in_order(graph: Graph) -> Iterator[tuple[Op, Graph]]:
    """Yield the calls of torch's operators with their graph, in the order of generated code."""
    for op in graph.ops:
        if op.body is not None:
            for _ in range(op.body.parts - 1):
                yield from _calls_in_order(op.body.graph)
            yield from _calls_in_order(last_part(op, graph.values) or op.body.graph)
        elif not op.target.startswith("magis."):
            yield op, graph


# Operators that are measured in a child process, as they may crash it.
# Run as ``python -m magis.runtime.scratch``: it reads signatures as lines from standard input and writes one line for
# each to standard output, `null` for a call that raises. The number of answers tells which call crashed the child; the
# next child continues behind that call. Starting a child takes seconds, so only operators that need one get it.

PATIENCE_SECONDS = 120
"""Time limit for all calls of a child process together: it ends kernels that made-up numbers send into endless
loops."""


def measure_aside(keys: Sequence[str]) -> dict[str, int]:
    """Measure workspaces in child processes; return bytes by signature, without calls that raise, crash or time out."""
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (an empty one stands for this folder)
    command = [sys.executable, "-P", "-m", "magis.runtime.scratch", str(torch.get_num_threads())]
    found: dict[str, int] = {}
    pending = list(keys)
    while pending:
        try:
            said = subprocess.run(
                command,
                input="".join(f"{key}\n" for key in pending).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the parent only
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                timeout=PATIENCE_SECONDS,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b""
        answers = [json.loads(line) for line in said.splitlines()]
        found.update({key: nbytes for key, nbytes in zip(pending, answers, strict=False) if nbytes is not None})
        pending = pending[len(answers) + 1 :]  # skip the call that crashed the child
    return found


def main() -> None:
    """Read signatures line by line from stdin, and write each workspace as a line to stdout."""
    torch.set_num_threads(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of kernels and profilers
    for line in sys.stdin.read().splitlines():
        nbytes = measure_here([parse(line)]).get(line)
        answers.write(f"{json.dumps(nbytes)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
