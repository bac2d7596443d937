"""Measurement of one rank in a job: peak memory, times, losses.

Peaks include everything that the job keeps. On a CPU, the profiler logs all allocations from before the workload is
built until the measured step ends, so that no tensor of the measured step is older than the log; memory left by earlier
jobs in the process does not count.
"""

from __future__ import annotations

import gc
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from magis.capture import Workload
from magis.extensions.ranks.prediction.live_storage import COLLECTIVES
from magis.extensions.ranks.prediction.rank_memory import number, rank_peak, warm_steps_of
from magis.extensions.ranks.processes.records import RankJob, RankReport
from magis.extensions.ranks.strategies.distributed import local
from magis.models import model_specs
from magis.results import Memory
from magis.runtime.measure import allocations, device_identity, no_collection
from magis.strategies.distributed_names import check_world, distributed_strategy
from magis.strategies.rank_step import RankStep, RankStrategy, World, Wrapping, batch_size, has_dropout, without_dropout

_COMPARED = 3
"""Number of steps whose losses are reported."""
_REST_SECONDS = 5.0
_TASKS = Path("/proc/self/task")
_MARK = "magis: the measured step"


def run_job(job: RankJob, world: World, enter: Callable[[str], None]) -> RankReport:
    """Run a job on this rank, together with all others, and return its report; ``enter`` receives each phase's name."""
    where = _Where(world, enter)
    chosen = distributed_strategy(job.strategy)
    check_world(chosen, world.size)
    if job.memory_limits:
        within: Any = chosen  # a strategy that plans
        chosen = within.within(tuple(job.memory_limits), job.budget, world.device)
    told = _AnnouncedStrategy(chosen, where)
    gc.collect()
    gc.freeze()  # collections in the job need not look through all of torch
    torch.manual_seed(job.seed)
    rest = None if world.device == "cuda" else _let_threads_rest
    tensors = rank_peak(told, partial(_workload, job, where), world, let_threads_rest=rest)
    told.release()
    peak, reserved, times, losses = _peak_and_times(job, told, where)
    told.release()
    weights = ""
    if job.losses and (told.drops or job.weights or len(losses) < _COMPARED):
        losses, weights = _losses_and_weights(job, told, where)
        told.release()
    enter("the end of the job")
    where.meet()
    return RankReport(
        rank=world.rank,
        memory=Memory(tensors.peak_bytes, max(peak, tensors.peak_bytes), reserved),
        times_ms=times,
        losses=losses if job.losses else (),
        weights=weights if job.weights else "",
        samples=told.samples,
        terms=tensors.terms,
        identity=device_identity(world.device),
    )


@dataclass(frozen=True)
class _Where:
    """Group of all ranks, and the callback that reports this rank's phase."""

    world: World
    enter: Callable[[str], None]

    def meet(self) -> None:
        """Wait at a barrier of all ranks, and for the GPU."""
        if self.world.device == "cuda":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier()

    def finish(self) -> None:
        """Wait for this rank's GPU."""
        if self.world.device == "cuda":
            torch.cuda.synchronize()


@dataclass
class _AnnouncedStrategy(Wrapping):
    """Strategy whose steps report their phase; records facts about the workload."""

    strategy: RankStrategy
    where: _Where
    modules: list[nn.Module] = field(default_factory=list)
    """Modules of steps that may still be alive."""
    samples: int = 0
    """Number of samples in the global batch."""
    drops: bool = False
    """True if the network has dropout."""

    def prepare(self, work: Workload, world: World) -> _AnnouncedStep:
        """Return the strategy's step, wrapped to report its phase."""
        self.samples = batch_size(work)
        self.drops = self.drops or has_dropout(work.module)
        self.where.enter("the preparation of the step")
        step = self.strategy.prepare(work, world)
        self.modules.append(step.module)
        return _AnnouncedStep(step, self.where)

    def release(self) -> None:
        """Free the steps: a hook that refers to its own parameter would keep the parameter alive."""
        for module in self.modules:
            for parameter in module.parameters():
                hooks = parameter._post_accumulate_grad_hooks
                if hooks is not None:
                    hooks.clear()
        self.modules.clear()
        gc.collect()


@dataclass
class _AnnouncedStep:
    step: RankStep
    where: _Where
    count: int = 0

    def __post_init__(self) -> None:
        self.module = self.step.module

    def prepare(self) -> None:
        self.count += 1
        self.where.enter(f"step {self.count}")
        self.step.prepare()

    def run(self) -> Tensor | None:
        return self.step.run()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) for the tensors that the step keeps alive between steps."""
        own: Callable[[], Iterator[tuple[str, Tensor]]] | None = getattr(self.step, "held", None)
        return iter(()) if own is None else own()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the parameters by name, without padding."""
        own: Callable[[], Iterator[tuple[str, Tensor]]] | None = getattr(self.step, "weights", None)
        named = self.step.module.named_parameters()
        return ((name, local(p)) for name, p in named) if own is None else own()


def _peak_and_times(
    job: RankJob, strategy: _AnnouncedStrategy, where: _Where
) -> tuple[int, int | None, tuple[float, ...], tuple[float | None, ...]]:
    """Return peak bytes, a GPU allocator's reserved bytes (else None), times of later steps, first losses."""
    losses: list[float | None] = []
    on_gpu = where.world.device == "cuda"
    resting = nullcontext() if on_gpu else _RestAfterCollectives()
    with no_collection(), profile(enabled=not on_gpu, profile_memory=True) as log, resting:
        step = _prepare_fresh(job, strategy, where, dropout=True)
        for _ in range(warm_steps_of(strategy, where.world)):
            step.prepare()
            losses.append(number(step.run(), where.world))
            gc.collect()
        step.prepare()
        where.meet()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with record_function(_MARK):
            loss = step.run()
            where.finish()
        losses.append(number(loss, where.world))
        where.meet()
        _let_threads_rest()
    if on_gpu:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        peak, reserved = peak_within(log, _MARK), None
        del log
    times = _time_steps(job, step, where, losses)
    return peak, reserved, times, tuple(losses[:_COMPARED])


def _time_steps(job: RankJob, step: RankStep, where: _Where, losses: list[float | None]) -> tuple[float, ...]:
    """Return the milliseconds of each timed step, measured from a barrier; appends its loss to ``losses``."""
    times = []
    with no_collection():
        for _ in range(job.rounds):
            step.prepare()
            where.meet()
            start = time.perf_counter_ns()
            loss = step.run()
            where.finish()
            times.append((time.perf_counter_ns() - start) / 1e6)
            losses.append(number(loss, where.world))
    return tuple(times)


def _losses_and_weights(
    job: RankJob, strategy: _AnnouncedStrategy, where: _Where
) -> tuple[tuple[float | None, ...], str]:
    """Return the losses of the first steps from fresh weights, and a digest of this rank's weights after them.

    Dropout is on only with ``job.weights``, whose digest is compared with that of a job that draws the same numbers.
    """
    step = _prepare_fresh(job, strategy, where, dropout=job.weights)
    found: list[float | None] = []
    for _ in range(_COMPARED):
        step.prepare()
        found.append(number(step.run(), where.world))
    where.meet()
    digest = hashlib.sha256()
    for _, tensor in sorted(step.weights(), key=lambda pair: pair[0]):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return tuple(found), digest.hexdigest()


def _prepare_fresh(job: RankJob, strategy: _AnnouncedStrategy, where: _Where, *, dropout: bool) -> _AnnouncedStep:
    """Return this rank's step with freshly initialized weights."""
    work = _workload(job, where)
    if not dropout:
        without_dropout(work.module)
    torch.manual_seed(job.seed)
    return strategy.prepare(work, where.world)


def _workload(job: RankJob, where: _Where) -> Workload:
    where.enter("the build of the model")
    spec = model_specs.get(job.model)
    dtype = job.dtype or (spec.paper_dtype if job.preset == "paper" else spec.dtype)
    work = spec.build(job.preset, job.seed)
    work = work.to(dtype) if dtype else work
    if where.world.device == "cpu":
        return work
    device = torch.device(where.world.device, torch.cuda.current_device())
    work.module.to(device)
    inputs, targets = (tuple(each.to(device) for each in given) for given in (work.inputs, work.targets))
    return replace(work, inputs=inputs, targets=targets)


def peak_within(log: profile, mark: str) -> int:
    """Return the peak bytes during the event ``mark``, counting allocations since the log began."""
    results: Any = log.kineto_results
    nodes = list(results.experimental_event_tree())
    while (marked := nodes.pop()).name != mark:
        nodes.extend(marked.children)
    live: dict[int, int] = {}
    now = peak = 0
    for event in allocations(log):
        if event.time_ns > marked.end_time_ns:
            break
        if event.time_ns >= marked.start_time_ns:
            peak = max(peak, now)  # bytes alive when the event begins
        if event.nbytes < 0:
            now -= live.pop(event.address, 0)
        else:
            # an address that comes twice was freed in between by a thread that is not logged
            now += event.nbytes - live.get(event.address, 0)
            live[event.address] = event.nbytes
        if event.time_ns >= marked.start_time_ns:
            peak = max(peak, now)
    return max(peak, now)


class _RestAfterCollectives(TorchDispatchMode):
    """Dispatch mode that keeps tensors of a collective alive until all threads rest, before the next operator.

    The thread that drops a tensor last frees it, and frees of other threads are not logged: the tensor would count as
    scratch from then on, in some runs and not in others (up to 6% of the peak of ``zero3``). A thread that waits for a
    slower rank rests, too: scratch of unfinished collectives may still differ. If threads never rest, since other code
    computes in this process, the mode stops waiting after one attempt.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lent: list[object] = []
        self._is_calm = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return False, so that code under the mode runs eagerly instead of compiled."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its parts' operators come by
        if func.namespace in COLLECTIVES:
            self._lent.append((args, kwargs))
        elif self._lent:
            self._is_calm = self._is_calm and _let_threads_rest()
            self._lent.clear()
        return func(*args, **(kwargs or {}))


def _let_threads_rest() -> bool:
    """Wait until no other thread of the process runs; return False on timeout.

    Gloo's threads free their tensors shortly after a collective ends. A tensor seems alive until then, and torch's
    profiler, which logs frees, may crash if they occur while it stops (one of twenty jobs with torch 2.13).
    """
    own, calm = str(threading.get_native_id()), 0
    until = time.monotonic() + _REST_SECONDS
    while calm < 3 and time.monotonic() < until:
        time.sleep(0.002)
        states = dict[str, str]()
        for task in _TASKS.iterdir():
            with suppress(OSError):  # gone meanwhile
                fields = (task / "stat").read_text(encoding="utf-8", errors="replace")
                states[task.name] = fields.rpartition(")")[2].split()[0]
        # any other state than sleep: the thread runs, or waits for a core
        calm = calm + 1 if all(state == "S" for name, state in states.items() if name != own) else 0
    return calm == 3
