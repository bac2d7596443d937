"""What one rank measures of a job: peak memory, times, losses.

Peaks include everything that the job keeps. On a CPU all allocations from before the workload is built until the
measured step has ended are logged, so that nothing in the measured step is older than the log; what earlier jobs left
in the process does not count.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import profile, record_function

from magis.backend.measure import allocations, device_identity, tensor_peak
from magis.capture import Workload
from magis.errors import UsageError
from magis.models import registry
from magis.ranks.records import RankJob, RankReport
from magis.results import Memory
from magis.strategies.base import RankStep, Technique, World, batch_size

__all__ = ["measured", "peak_within", "without_dropout"]

_WARM_UPS = 2
"""Steps before the measured one: the first makes the optimizer's state, some techniques settle in the second."""
_COMPARED = 3
_MARK = "magis: the measured step"


def measured(job: RankJob, world: World, enter: Callable[[str], None]) -> RankReport:
    """Run a job on this rank and report; ``enter`` is told what is done next. All ranks do so at the same time."""
    technique = _technique(job.technique)
    where = _Where(world, enter)
    samples, memory, times = _peak_and_times(job, technique, where)
    gc.collect()
    losses = _losses(job, technique, where) if job.losses else ()
    gc.collect()
    enter("end of the job")
    where.meet()
    return RankReport(world.rank, memory, times, losses, samples, device_identity(world.device))


@dataclass(frozen=True)
class _Where:
    """A world, and who is told how far a rank is."""

    world: World
    enter: Callable[[str], None]

    def meet(self) -> None:
        """Wait for all ranks, and for the GPU."""
        if self.world.device == "cuda":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier()

    def finish(self) -> None:
        """Wait for this rank's GPU."""
        if self.world.device == "cuda":
            torch.cuda.synchronize()


def _peak_and_times(job: RankJob, technique: Technique, where: _Where) -> tuple[int, Memory, tuple[float, ...]]:
    with _collections_asked_for(), profile(enabled=where.world.device == "cpu", profile_memory=True) as log:
        samples, step = _prepared(job, technique, where, dropout=True)
        for _ in range(_WARM_UPS):
            where.enter("the warm-up")
            step.prepare()
            step.run()
            gc.collect()
        where.enter("the measured step")
        step.prepare()
        where.meet()
        if where.world.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with record_function(_MARK):
            step.run()
            where.finish()
    if where.world.device == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peak, reserved = peak_within(log, _MARK), None
    where.enter("the measured step, tensors alone")
    step.prepare()
    where.meet()
    tensors = _alive(where.world.device) + tensor_peak(step.run)
    where.meet()
    return samples, Memory(tensors, peak, reserved), _times(job, step, where)


def _times(job: RankJob, step: RankStep, where: _Where) -> tuple[float, ...]:
    """Milliseconds of each timed step, from a barrier before it."""
    times = []
    with _collections_asked_for():
        for number in range(job.rounds):
            where.enter(f"timed step {number + 1}")
            step.prepare()
            where.meet()
            start = time.perf_counter_ns()
            step.run()
            where.finish()
            times.append((time.perf_counter_ns() - start) / 1e6)
    return tuple(times)


def _losses(job: RankJob, technique: Technique, where: _Where) -> tuple[float | None, ...]:
    """Of the first steps from fresh weights, without dropout."""
    _, step = _prepared(job, technique, where, dropout=False)
    found: list[float | None] = []
    for number in range(_COMPARED):
        where.enter(f"step {number + 1} of those whose losses are compared")
        step.prepare()
        loss = step.run()
        found.append(None if loss is None else float(loss))
    where.meet()
    return tuple(found)


def _prepared(job: RankJob, technique: Technique, where: _Where, *, dropout: bool) -> tuple[int, RankStep]:
    """Samples in the batch, and this rank's step of it."""
    where.enter("building the model")
    work = _workload(job)
    samples = batch_size(work)
    if not dropout:
        without_dropout(work.module)
    torch.manual_seed(job.seed)
    where.enter("preparing the step")
    return samples, technique.prepare(work, where.world)


def _workload(job: RankJob) -> Workload:
    spec = registry.get(job.model)
    dtype = job.dtype or (spec.paper_dtype if job.preset == "paper" else spec.dtype)
    work = spec.build(job.preset, job.seed)
    return work.to(dtype) if dtype else work


def _technique(name: str) -> Technique:
    """The technique of that name, or what the callable at "package.module:factory" returns."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        made: Technique = getattr(import_module(module), attribute)()
        return made
    raise UsageError(f"unknown technique {name!r}")


def without_dropout(module: nn.Module) -> None:
    """Make every dropout of a network let everything through: of modules named so, and attributes of attention."""
    for part in module.modules():
        for name in ("p",) if "Dropout" in type(part).__name__ else ("dropout", "attention_dropout", "dropout_p"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def peak_within(log: profile, mark: str) -> int:
    """The most bytes alive during the event called ``mark``, of those allocated since the log began."""
    window = _window(log, mark)
    live: dict[int, int] = {}
    now = peak = 0
    for event in allocations(log):
        if event.time_ns > window[1]:
            break
        if event.time_ns >= window[0]:
            peak = max(peak, now)  # what the window begins with
        if event.nbytes < 0:
            now -= live.pop(event.address, 0)
        else:
            # an address that comes twice was freed in between by a thread that is not logged
            now += event.nbytes - live.get(event.address, 0)
            live[event.address] = event.nbytes
        if event.time_ns >= window[0]:
            peak = max(peak, now)
    return max(peak, now)


def _window(log: profile, mark: str) -> tuple[int, int]:
    results: Any = log.kineto_results
    pending = list(results.experimental_event_tree())
    while pending:
        node = pending.pop()
        if node.name == mark:
            return node.start_time_ns, node.end_time_ns
        pending.extend(node.children)
    raise LookupError(mark)


def _alive(device: str) -> int:
    """Bytes of all storages on a device that Python knows of."""
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == device and each.layout == torch.strided:
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()  # noqa: SLF001
    return sum(storages.values())


@contextmanager
def _collections_asked_for() -> Iterator[None]:
    """Cycles die where `gc.collect` is called and nowhere else."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
