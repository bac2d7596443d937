"""The largest batch (or sequence length) whose training step fits a memory limit, in eager mode and planned; or
compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis import registry
from magis.capture import Captured, Workload
from magis.cases.case_rows import run_alone
from magis.cost.cards import limit_bytes
from magis.errors import CaptureError, UsageError
from magis.frontends.limits import largest, limits_of
from magis.graph import Graph
from magis.models.model_specs import factory_default, get, is_factory
from magis.models.step_parts import ORDER, in_one_order, recipe_of
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench, Make, default_device
from magis.planner.planning import plan, within_reserved
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.results import Case, CaseResult
from magis.simulate.allocator_settings import allocator_text
from magis.units import check_whole, is_number

# A model at other batch sizes.


def extent(work: Workload, dim: int) -> int:
    """Return the first input's extent along `dim`. Raises UsageError if it has no such dimension, or an extent of 0."""
    shape = tuple(work.inputs[0].shape) if work.inputs else ()
    if dim >= len(shape) or shape[dim] < 1:
        raise UsageError(
            f"{work.name}: the first input, of shape {list(shape)}, has nothing along dimension {dim}",
            hint="choose another dimension, or name a keyword of the factory",
        )
    return shape[dim]


def resized(work: Workload, dim: int, size: int) -> Workload:
    """Return the workload with ``size`` instead of the first input's extent along ``dim``, in all inputs and targets
    that have the extent there. Rows are repeated, so that class numbers stay valid. Works on fake tensors, too."""
    before = extent(work, dim)
    inputs, targets = (tuple(repeated(t, dim, before, size) for t in each) for each in (work.inputs, work.targets))
    return replace(work, inputs=inputs, targets=targets)


def repeated(tensor: Tensor, dim: int, before: int, size: int) -> Tensor:
    """Return a tensor with ``size`` rows along ``dim``, repeated, if it has ``before`` rows there; else as it is."""
    if tensor.ndim <= dim or tensor.shape[dim] != before:
        return tensor
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % before)


MOST = 1 << 20
FIRST = 8
"""First size that is tried of a factory's keyword that has no default."""
BEYOND = (0.01, 0.03, 0.1, 0.25, 0.6)
"""Shares above the largest size found at which larger sizes are tried, as memory may not grow monotonically."""
PRECISION = 0.02

Progress = Callable[[str], None]


@dataclass(frozen=True)
class FitPoint:
    """One size that fits, in eager mode or planned."""

    size: int
    peak_bytes: int
    """Simulated peak bytes, persistent tensors included."""
    latency_ms: float
    """Predicted time of one step in milliseconds."""
    latency_ratio: float
    """Predicted latency divided by that of eager at this size."""
    measured_bytes: int | None = None
    """Peak bytes that the allocator measured; None if not requested, or if the step does not fit into free memory."""
    reserved_bytes: int | None = None
    """Bytes that a GPU's caching allocator is predicted to reserve; None unless its settings were given."""


@dataclass(frozen=True)
class Fit:
    """The largest sizes that fit a memory limit; None if not even size 1 fits."""

    model: str
    device: str
    dtype: str
    what: str
    """Name of the size that varies: "dimension 0", or a keyword such as "batch_size"."""
    limit_bytes: int
    eager: FitPoint | None
    """The unplanned step: in eager mode, or compiled if that was asked for."""
    magis: FitPoint | None
    """The planned step; None also if a compiled step was asked for."""
    bound: int | None
    """Largest size that the lower bound allows: at the next one, the persistent tensors and largest operator alone
    exceed the limit, or the model refuses it. Equal to `most` if nothing larger was tried."""
    most: int
    """Largest size that the search may try."""
    is_monotone: bool
    """True if eager's peak grew with every larger size that was tried."""
    refused: str = ""
    """One line that says why the model refuses the next size; empty if memory is the reason."""
    allocator: str | None = None
    """Settings of the allocator whose reserved bytes are limited; None if the peak is."""


@dataclass(frozen=True)
class _Sizes:
    """A model's captured steps by size; a size that the model refuses has none."""

    bench: Bench
    case: Case
    dim: int
    keyword: str | None
    make: Make | None = None
    """Builds the workload from a seed; None if the model's name says how."""
    reserves: bool = False
    """True if the limit is on bytes reserved with the case's settings of the allocator."""
    compiled: bool | str = False
    """Parts of the unplanned step that are compiled, as in `fit`."""
    refused: dict[int, str] = field(default_factory=dict)
    """Reasons, by size, why the model refused sizes that were tried."""
    _peaks: dict[int, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> int:
        """Size in the model's own batch, or the default of the factory's keyword."""
        if self.keyword is None:
            return extent(self.bench.subject(self.case, self.make).traced, self.dim)
        return factory_default(self.case.model, self.keyword) or FIRST

    def subject(self, size: int) -> Subject:
        """Return the model at a size. Raises the errors of building and capturing it."""
        case, keyword = self.case, self.keyword
        if keyword is None:
            build = self.make or partial(get(case.model).build, case.preset)
            make: Make = partial(_at_size, build, self.dim, size)
        else:
            make = partial(get(case.model, {keyword: size}).build, case.preset)
        base = self.bench.subject(case, self.make)
        source = replace(base.source, make=make, dtype="" if base.keeps_dtypes else base.source.dtype)
        key = case.model, self.make or case.preset, self.dim, keyword, size
        return self.bench.keep(key, source, host_limit=case.host_limit)

    def taken(self, size: int) -> Subject | None:
        """Return the captured model at a size; None if the model refuses the size."""
        if size in self.refused:
            return None
        try:
            subject = self.subject(size)
            _ = subject.captured
        except (CaptureError, UsageError) as error:
            self.refused[size] = str(error)
            return None
        return subject

    def needed(self, size: int) -> float:
        """Return the bytes of the unplanned step at a size that are limited; infinity if the model refuses the size."""
        if size not in self._peaks:
            subject = self.taken(size)
            if subject is None:
                return math.inf
            eager = subject.captured.original
            point = self.compiled_point(size) if self.compiled else None
            peak = subject.original.peak_bytes if point is None else point.peak_bytes
            reserved = self.reserved(subject, eager) if point is None else point.reserved_bytes
            self._peaks[size] = peak if reserved is None else reserved
        return self._peaks[size]

    def compiled_point(self, size: int) -> FitPoint:
        """Return the figures of the compiled step at a size; its time is that of eager."""
        found = compiled_result(self.case, self.subject(size), self.compiled)
        reserved = found.optimized.reserved_bytes if self.reserves else None
        return FitPoint(size, found.memory.peak_bytes, found.optimized.simulated_ms, 1.0, reserved_bytes=reserved)

    def reserved(self, subject: Subject, step: Graph | Captured) -> int | None:
        """Return the bytes reserved for a step; None if the limit is on the peak."""
        return subject.reserved_bytes(step, self.case.allocator) if self.reserves else None

    @property
    def is_monotone(self) -> bool:
        peaks = [peak for _, peak in sorted(self._peaks.items())]
        return peaks == sorted(peaks)


def _at_size(build: Make, dim: int, size: int, seed: int) -> Workload:
    return resized(build(seed), dim, size)


def compiled_result(case: Case, subject: Subject, compiled: bool | str) -> CaseResult:
    """Predict a case whose network (True, "model"), network and loss ("loss"), or update, too ("step"), are compiled.
    Raises MissingNeighbourError without the neighbour for torch.compile."""
    predict: Callable[[Case, Subject, str], CaseResult] = registry.load("compiled", "result")
    return predict(case, subject, "model" if compiled is True else str(compiled))


@in_one_order("magis.fit", ORDER, {"model": "module"})
def fit(
    module: nn.Module | Workload | tuple[Any, ...] | Callable[[], object] | str,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer | OptimizerSpec | str | None = None,
    *,
    memory_limit: str | int,
    device: str | None = None,
    preset: str | None = None,
    dtype: str | None = None,
    dim: int = 0,
    keyword: str | None = None,
    latency_ratio: float | None = None,
    budget: int | None = None,
    seed: int = 0,
    most: int = MOST,
    precision: float = PRECISION,
    allocator: str | None = None,
    run: bool = False,
    cache: Bench | None = None,
    progress: Progress | None = None,
    compiled: bool | str = False,
    accumulate: int = 1,
    host_limit: str | int = 0,
) -> Fit:
    """Find the largest size of a model whose training step needs at most ``memory_limit`` (bytes, "8 GiB", or a card:
    "rtx4090").

    Module, batch, loss and optimizer are the arguments of `magis.estimate`. The size is the extent of dimension ``dim``
    of the first input, and of every input and target that has that extent there; or the value of a ``keyword`` of the
    factory. Eager's size is exact if memory grows with the size, which ``Fit.is_monotone`` reports. The planned size is
    the largest at which a plan was found that fits and takes at most ``latency_ratio`` times eager's predicted time,
    within ``precision`` (a share of the size). ``run`` measures the steps of both sizes that fit into free memory.
    ``most`` bounds the sizes that are tried. With ``allocator``, settings of a GPU's caching allocator as in
    PYTORCH_ALLOC_CONF ("": torch's defaults), the limit is on the bytes that it reserves, else on the peak. With
    ``compiled``, as of `magis.estimate`, ``Fit.eager`` is the compiled step and nothing is planned; with
    ``accumulate``, the size is that of one of so many micro-batches. Plans keep up to ``host_limit`` of the optimizer's
    state in host memory.

    Raises MagisError for models that cannot be captured and for invalid arguments.
    """
    limit = limit_bytes(memory_limit)
    _check_amounts(dim, latency_ratio, most, precision, budget)
    device = default_device() if device is None else device
    preset = ("small" if device == "cpu" else "paper") if preset is None else preset
    name, make = recipe_of("magis.fit", module, batch, loss, optimizer)
    settings = allocator_text(allocator or "", device)
    case = Case(name, "magis", device, preset, dtype, budget=budget, seed=seed, allocator=settings)
    case = replace(case, accumulate=accumulate, host_limit=limits_of({"host_limit": host_limit}).host_limit)
    if keyword is not None and not is_factory(name):
        raise UsageError(f"{name} takes no keyword {keyword!r}", hint="leave it out: the batch is resized along --dim")
    reserves = allocator is not None and device != "cpu"
    sizes = _Sizes(Bench() if cache is None else cache, case, dim, keyword, make, reserves, compiled)
    say = progress or (lambda _text: None)
    _ = sizes.subject(min(sizes.start, most)).captured  # raise errors of the model itself first
    eager = _eager(sizes, limit, most, say)
    dtype_of_case, what = sizes.bench.subject(case, make).source.dtype, keyword or f"dimension {dim}"
    if compiled:
        point = None if eager is None else sizes.compiled_point(eager)
        why, by = sizes.refused.get((eager or 0) + 1, ""), settings if reserves else None
        return Fit(name, device, dtype_of_case, what, limit, point, None, None, most, sizes.is_monotone, why, by)

    def is_possible(size: int) -> bool:
        """Return True if the lower bound of memory at a size is within the limit."""
        say(f"lower bound at {size}")
        subject = sizes.taken(size)
        return subject is not None and subject.lower_bound <= limit

    ceiling = largest(is_possible, max(eager or 0, 1), most)
    plans: dict[int, Plan] = {}
    best = _optimized(sizes, limit, latency_ratio, eager, ceiling, precision, plans, say)
    last = max((size for size in (eager, ceiling) if size is not None), default=0)
    as_it_is = None if eager is None else _eager_point(sizes, eager, run=run)
    planned = None if best is None else plans.get(best)
    return Fit(
        model=name,
        device=device,
        dtype=dtype_of_case,
        what=what,
        limit_bytes=limit,
        eager=as_it_is,
        magis=as_it_is if best is None or planned is None else _planned_point(sizes, best, planned, limit, run=run),
        bound=ceiling,
        most=most,
        is_monotone=sizes.is_monotone,
        refused=sizes.refused.get(last + 1, ""),
        allocator=settings if reserves else None,
    )


def _check_amounts(dim: int, latency_ratio: float | None, most: int, precision: float, budget: int | None) -> None:
    for name, amount, least in (("dim", dim, 0), ("most", most, 1), ("budget", 1 if budget is None else budget, 1)):
        check_whole(name, amount, least)
    if latency_ratio is not None and not (is_number(latency_ratio) and latency_ratio >= 1):
        raise UsageError(f"latency_ratio={latency_ratio!r}", hint="give a number that is at least 1")
    if not (is_number(precision) and 0 <= precision < 1):
        raise UsageError(f"precision={precision!r}", hint="give a share from 0 up to 1")


def _eager(sizes: _Sizes, limit: int, most: int, say: Progress) -> int | None:
    """Return the largest size that fits in eager mode; some larger ones are tried, as memory may not grow with the
    size."""

    def fits(size: int) -> bool:
        say(f"eager at {size}")
        return sizes.needed(size) <= limit

    found = largest(fits, sizes.start, most)
    while found is not None:
        beyond = {min(most, found + max(2, round(share * found))) for share in BEYOND}
        further = max((size for size in beyond if size > found and fits(size)), default=None)
        if further is None:
            break
        found = largest(fits, further, most)
    return found


def _optimized(
    sizes: _Sizes,
    limit: int,
    latency_ratio: float | None,
    eager: int | None,
    ceiling: int | None,
    precision: float,
    plans: dict[int, Plan],
    say: Progress,
) -> int | None:
    """Return the largest size for which a plan fits, or eager's if that is larger, without a plan; fill ``plans`` by
    size."""
    if ceiling is None:
        return None

    def fits(size: int) -> bool:
        subject = sizes.taken(size)
        if subject is None:
            return False
        say(f"searching at {size}")
        case = sizes.case

        def search(nbytes: int, _: float | None = None) -> Plan:
            return plan(
                subject,
                memory_limit=nbytes,
                latency_limit_ns=None,
                budget=case.budget,
                seconds=None,
                seed=case.seed,
                stored=None,
            )

        found = within_reserved(subject, limit, None, search, case.allocator) if sizes.reserves else search(limit)
        plans[size] = found
        return found.feasible and (
            latency_ratio is None or latency_ratio_of(subject, found.latency_ns) <= latency_ratio
        )

    start = max(1, min(ceiling, round(1.25 * eager) if eager else ceiling))
    found = largest(fits, start, ceiling, precision=precision)
    if eager is None or (found is not None and found >= eager):
        return found
    if not fits(eager):
        plans.pop(eager, None)
    return eager


def latency_ratio_of(subject: Subject, latency_ns: int) -> float:
    """Return a predicted latency divided by that of eager's step."""
    return latency_ns / max(1, subject.latency_ns(subject.captured.original.graph))


def _eager_point(sizes: _Sizes, size: int, *, run: bool) -> FitPoint:
    subject = sizes.subject(size)
    measured = subject.original_measured.peak_bytes if run and subject.runs else None
    eager = subject.captured.original
    latency_ms = subject.latency_ns(eager.graph) / 1e6
    return FitPoint(size, subject.original.peak_bytes, latency_ms, 1.0, measured, sizes.reserved(subject, eager))


def _planned_point(sizes: _Sizes, size: int, found: Plan, limit: int, *, run: bool) -> FitPoint:
    """Simulate a plan with this machine's workspaces. Raises UsageError if its peak then exceeds the limit."""
    subject = sizes.subject(size)
    peak = subject.simulate_graph(found.graph).peak_bytes
    if peak > limit:
        raise UsageError(f"fit: the plan at {size} needs {peak:,} bytes here, more than the limit of {limit:,}")
    alone = run_alone(subject, lambda: subject.generated(found.graph)) if run and subject.may_run else None
    measured = None if alone is None else alone.memory.peak_bytes
    ratio = latency_ratio_of(subject, found.latency_ns)
    return FitPoint(size, peak, found.latency_ns / 1e6, ratio, measured, sizes.reserved(subject, found.graph))
