"""Scratch bytes of single operators on made-up arguments, measured where a crash harms nothing.

One call before the measured one lets kernels fill their caches, which are no scratch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from magis.cost.signature import parse, signature
from magis.graph.nodes import ITEM_SIZE, Op, Value
from magis.ops.call import call, resolve
from magis.ops.fake_results import IN_TRAINING, masked, with_bits
from magis.runtime.measure import Allocation, allocations, memory_profile, replay
from magis.runtime.scratch_in_context import Needs, needs

# Scratch of operators that a process of its own tries out, which may die of it.
# Run as ``python -m magis.runtime.isolated_scratch``: signatures come as lines on standard input, answers leave as
# lines on standard output, one each, `null` for a call that raises. Whoever asks sees from the end of the answers which
# call ended the process, leaves that one out and goes on with the next in a process of its own. Starting one takes
# seconds, so only operators that need it are tried this way.

PATIENCE_SECONDS = 120
"""For all calls of one process together: a kernel that made-up numbers send into an endless loop ends with it."""


def measured_aside(keys: Sequence[str]) -> dict[str, int]:
    """Workspace bytes by signature; left out are those that raised, ended their process, or never came back."""
    found: dict[str, int] = {}
    pending = list(keys)
    while pending:
        answers = list(_answers(pending))
        found.update({key: nbytes for key, nbytes in zip(pending, answers, strict=False) if nbytes is not None})
        pending = pending[len(answers) + 1 :]  # without the one that it died of
    return found


def _answers(keys: Sequence[str]) -> Iterator[int | None]:
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (an empty one stands for this folder)
    command = [sys.executable, "-P", "-m", "magis.runtime.isolated_scratch", str(torch.get_num_threads())]
    with tempfile.TemporaryFile("w+") as asked:
        asked.writelines(f"{key}\n" for key in keys)
        asked.seek(0)
        process = subprocess.Popen(
            command,
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the one who asks
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
    for line in said.splitlines():
        yield json.loads(line)


def main() -> None:
    """Answer line by line until the input ends."""
    torch.set_num_threads(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kernels and profilers that print
    for line in sys.stdin.read().splitlines():
        nbytes = measure_here([parse(line)]).get(line)
        answers.write(f"{json.dumps(nbytes)}\n")
        answers.flush()


def make_tensors(op: Op, values: Mapping[int, Value], device: torch.device | str = "cpu") -> dict[int, torch.Tensor]:
    """Made-up tensors for the inputs of `op` by value id: exact shapes, strides and types, storages apart.

    The numbers come from a fixed seed and are the same for every call.
    """
    generator = torch.Generator(device).manual_seed(0)
    return {number: _tensor(values[number], generator) for number in dict.fromkeys(op.inputs())}


def _tensor(value: Value, generator: torch.Generator) -> torch.Tensor:
    """A tensor as `value` describes it, at offset 0 of a storage that is just large enough."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    length = reach(value)
    flat: torch.Tensor
    if dtype == torch.bool:
        flat = torch.rand(length, generator=generator, device=generator.device) < 0.5
    elif dtype.is_floating_point or dtype.is_complex:
        flat = torch.rand(length, generator=generator, device=generator.device).add_(1).mul_(0.5).to(dtype)
    else:
        flat = torch.zeros(length, dtype=dtype, device=generator.device)
    # filled before it is strided: an expanded tensor (stride 0) cannot be written in place
    return with_bits(flat.as_strided(value.shape, value.stride), value.bits)


def reach(value: Value) -> int:
    """Elements from the first to the last that the strides touch."""
    if value.numel == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride, strict=True))


_MARK = "magis workspace "


@dataclass(frozen=True, slots=True)
class _Call:
    """One measured call: which mark of the log it is, and the bytes of the fresh storages that it
    returned."""

    key: str
    fresh_bytes: int


def measure_here(items: Iterable[tuple[Op, Mapping[int, Value]]]) -> dict[str, int]:
    """Bytes that each operator allocates in this process, on made-up arguments, by signature.

    Runs every distinct signature of `items` (operator, values of the graph) twice with the thread count in force; never
    more than one signature's arguments are alive. The global random-number generator is left as it was.
    """
    distinct: dict[str, tuple[Op, Mapping[int, Value]]] = {}
    for op, values in items:
        distinct.setdefault(signature(op, values), (op, values))
    calls: list[_Call] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), memory_profile() as log:
        for key, (op, values) in distinct.items():
            fresh = _call_marked(op, values, f"{_MARK}{len(calls)}")
            if fresh is not None:
                calls.append(_Call(key, fresh))
    windows = _marked_windows(log)
    found = {}
    for number, measured in enumerate(calls):
        peak = replay(windows[f"{_MARK}{number}"]).peak_bytes
        found[measured.key] = max(0, peak - measured.fresh_bytes)
    return found


def _call_marked(op: Op, values: Mapping[int, Value], mark: str) -> int | None:
    """Call `op` under `mark`; bytes of the storages that it made and returned, or None if it refuses."""
    tensors = make_tensors(op, values)
    scalars = dict.fromkeys(op.scalars(), 1.0)
    made = [values[number] for number in op.made()]
    packs = op.target in IN_TRAINING and (not made or made[-1].numel > 0)
    older = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    with torch.set_grad_enabled(packs):
        try:
            call(op, tensors, scalars)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        with record_function(mark):
            results = call(op, tensors, scalars)
    # without what some kernels make although nobody asked for it
    wanted: tuple[torch.Tensor | None, ...] = masked(resolve(op.target), op.args, results)
    fresh: dict[int, int] = {
        storage.data_ptr(): storage.nbytes()
        for storage in (result.untyped_storage() for result in wanted if result is not None)
        if storage.data_ptr() not in older
    }
    return sum(fresh.values())


def _marked_windows(log: Any) -> dict[str, list[Allocation]]:
    """The allocator's events between start and end of every mark, by mark."""
    marks = [
        (node.start_time_ns, node.end_time_ns, node.name)
        for node in log.kineto_results.experimental_event_tree()
        if node.name.startswith(_MARK)
    ]
    windows: dict[str, list[Allocation]] = {name: [] for _, _, name in marks}
    events = iter(allocations(log))
    event = next(events, None)
    for start, end, name in sorted(marks):
        while event is not None and event.time_ns <= end:
            if event.time_ns >= start:
                windows[name].append(event)
            event = next(events, None)
    return windows


# Workspaces: the scratch bytes that each operator allocates, by signature.
# Each distinct signature is called on made-up arguments of the same shapes, strides and types, under one profile of
# the CPU allocator for all of them. Workspaces depend on the instruction set, on the number of threads and on the
# torch version (the device identity), and mostly not on the numbers in the tensors.
# The made-up numbers only have to be harmless: floats in [0.5, 1) (valid variances and probabilities), whole
# numbers 0 (valid indices), scalars 1. One call before the measured one lets kernels fill their caches, which are
# no scratch. Where that is not enough (`magis.runtime.scratch_in_context`), a whole step is run on its own tensors
# (`record_workspaces`), else a process of its own tries made-up ones (`magis.runtime.isolated_scratch`).


def measure_workspaces(
    items: Iterable[tuple[Op, Mapping[int, Value]]], limit_bytes: int | None = None
) -> dict[str, int]:
    """Bytes that each operator allocates at its worst moment beyond its fresh outputs, by signature; on the
    CPU.

    Left out of the answer: operators that refuse made-up arguments (they raise) or that must not be given any, those
    whose process ended over them, and, with `limit_bytes`, those whose arguments and outputs alone are larger than
    that. The result repeats exactly.
    """
    here: list[tuple[Op, Mapping[int, Value]]] = []
    aside: dict[str, None] = {}
    for op, values in items:
        wanted = needs(op, values)
        if wanted is Needs.BYTES or (limit_bytes is not None and _bytes(op, values) > limit_bytes):
            continue
        if wanted is Needs.ANYTHING:
            here.append((op, values))
        else:
            aside[signature(op, values)] = None
    return {**measure_here(here), **measured_aside(tuple(aside))}


def _bytes(op: Op, values: Mapping[int, Value]) -> int:
    touched = dict.fromkeys((*op.inputs(), *op.made()))
    return sum(reach(values[number]) * ITEM_SIZE[values[number].dtype] for number in touched)


if __name__ == "__main__":
    main()
