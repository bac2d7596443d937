"""The largest batch (or sequence) whose training step fits a memory limit: in eager mode, and optimized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture import Workload
from magis.cases.case_rows import run_alone
from magis.errors import CaptureError, UsageError
from magis.models.model_specs import factory_default, get, is_factory
from magis.models.step_parts import ORDER, in_one_order, recipe_of
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench, Make, default_device
from magis.planner.planning import plan
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.results import Case
from magis.units import parse_bytes

# A model at other sizes of its batch, and the largest size of which something holds.


def extent(work: Workload, dim: int) -> int:
    """The extent of the first input along a dimension. Raises UsageError where it has no such dimension, or nothing."""
    shape = tuple(work.inputs[0].shape) if work.inputs else ()
    if dim >= len(shape) or shape[dim] < 1:
        raise UsageError(
            f"{work.name}: the first input, of shape {list(shape)}, has nothing along dimension {dim}",
            hint="choose another dimension, or name a keyword of the factory",
        )
    return shape[dim]


def resized(work: Workload, dim: int, size: int) -> Workload:
    """The workload with ``size`` in place of the first input's extent along ``dim``, in every input and target that has
    the same extent there; rows repeat, so that class numbers stay valid. Works on fake tensors."""
    before = extent(work, dim)

    def change(tensor: Tensor) -> Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] != before:
            return tensor
        return tensor.index_select(dim, torch.arange(size, device=tensor.device) % before)

    return replace(
        work,
        inputs=tuple(change(tensor) for tensor in work.inputs),
        targets=tuple(change(tensor) for tensor in work.targets),
    )


def largest(fits: Callable[[int], bool], start: int, most: int, *, precision: float = 0.0) -> int | None:
    """The largest size from 1 to ``most`` that fits, where every smaller one fits too; None where 1 does not.

    By doubling or halving from ``start``, then bisection, which ends within ``precision`` (a share of the size) of the
    next size that does not fit.
    """
    low, high = 0, most + 1  # low fits, high does not
    size = min(start, most)
    while low + 1 < high:
        if fits(size):
            low = size
        else:
            high = size
        if low and high <= most:
            if high - low <= max(1.0, precision * low):
                break
            size = (low + high) // 2
        else:
            size = min(2 * size, most) if low else size // 2
        if size in (0, low, high):
            break
    return low or None


MOST = 1 << 20
FIRST = 8
"""Size that a keyword without a default is tried at first."""
BEYOND = (0.01, 0.03, 0.1, 0.25, 0.6)
"""Shares above an answer at which a larger size is tried, in case it fits after all."""
PRECISION = 0.02

Progress = Callable[[str], None]


@dataclass(frozen=True)
class FitPoint:
    """One size that fits, under eager mode or optimized."""

    size: int
    peak_bytes: int
    """Simulated, with everything that stays."""
    latency_ms: float
    """Predicted, of one step."""
    latency_ratio: float
    """Predicted: this step / eager's at the same size."""
    measured_bytes: int | None = None
    """As the allocator counted it, where that was asked for and the step fitted into what is free."""


@dataclass(frozen=True)
class Fit:
    """The largest sizes that fit a limit; None where not even size 1 does."""

    model: str
    device: str
    dtype: str
    what: str
    """Words for the size that is varied: "dimension 0", "batch_size"."""
    limit_bytes: int
    eager: FitPoint | None
    magis: FitPoint | None
    bound: int | None
    """No plan fits at the next size: its persistent tensors and largest operator alone exceed the limit, or the model
    does not take it. Equal to `most` where nothing larger was looked at."""
    most: int
    """The largest size that was asked for."""
    is_monotone: bool
    """True if every larger size that was tried needed more memory, in eager mode."""
    refused: str = ""
    """Why the model does not take the size behind the largest one, in one line; empty where memory is the reason."""


@dataclass(frozen=True)
class _Sizes:
    """The subjects of a model by size. Sizes that it does not take have none."""

    bench: Bench
    case: Case
    dim: int
    keyword: str | None
    make: Make | None = None
    """Builds the workload from a seed, where the model's name does not say it."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why sizes are not taken, of those that were asked for."""
    _peaks: dict[int, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> int:
        """The model's own size."""
        if self.keyword is None:
            return extent(self.bench.subject(self.case, self.make).traced, self.dim)
        return factory_default(self.case.model, self.keyword) or FIRST

    def subject(self, size: int) -> Subject:
        """The model at a size; raises what building and capturing it does."""
        case, keyword = self.case, self.keyword
        if keyword is None:
            build = self.make or partial(get(case.model).build, case.preset)
            make: Make = partial(_at_size, build, self.dim, size)
        else:
            make = partial(get(case.model, {keyword: size}).build, case.preset)
        base = self.bench.subject(case, self.make)
        asked = base.source.dtype if not base.keeps_dtypes else ""
        source = Source(case.model, make, asked, case.device, case.seed, base.source.of_user)
        return self.bench.keep((case.model, self.make or case.preset, self.dim, keyword, size), source)

    def taken(self, size: int) -> Subject | None:
        """The same; None where the model does not take the size."""
        if size in self.refused:
            return None
        try:
            subject = self.subject(size)
            _ = subject.captured
        except (CaptureError, UsageError) as error:
            self.refused[size] = str(error)
            return None
        return subject

    def peak(self, size: int) -> float:
        """Bytes of eager's step; infinite where the model does not take the size."""
        subject = self.taken(size)
        if subject is None:
            return math.inf
        return self._peaks.setdefault(size, subject.original.peak_bytes)

    @property
    def is_monotone(self) -> bool:
        peaks = [peak for _, peak in sorted(self._peaks.items())]
        return peaks == sorted(peaks)


def _at_size(build: Make, dim: int, size: int, seed: int) -> Workload:
    return resized(build(seed), dim, size)


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
    run: bool = False,
    cache: Bench | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Find the largest size of a model whose training step needs at most ``memory_limit`` (bytes, or a text: "8 GiB").

    Module, batch, loss and optimizer are those of `magis.estimate`.
    The size is that of dimension ``dim`` of the first input, and of every input and target that has the same extent
    there; or a ``keyword`` that the factory takes. Eager's answer is exact as far as memory grows with the size, which
    is looked at (``Fit.is_monotone``). The optimized one is the largest size at which a plan was found that fits and
    takes at most ``latency_ratio`` times eager's predicted time; the search for it ends within ``precision`` (a share
    of the size) of one at which none was found. ``run`` measures both answers, where they fit into what is free.
    Raises MagisError for what cannot be captured or asked for.
    """
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    _check_amounts(limit, dim, latency_ratio, most, precision, seed, budget)
    device = default_device() if device is None else device
    preset = ("small" if device == "cpu" else "paper") if preset is None else preset
    name, make = recipe_of("magis.fit", module, batch, loss, optimizer)
    case = Case(name, "magis", device, preset, dtype, budget=budget, seed=seed)
    if keyword is not None and not is_factory(name):
        raise UsageError(f"{name} takes no keyword {keyword!r}", hint="leave it out: the batch is resized along --dim")
    sizes = _Sizes(Bench() if cache is None else cache, case, dim, keyword, make)
    say = progress or (lambda _text: None)
    _ = sizes.subject(min(sizes.start, most)).captured  # what is wrong with the model itself is told at once
    eager = _eager(sizes, limit, most, say)

    def is_possible(size: int) -> bool:
        """Return True if the lower bound of a size leaves room for a plan."""
        say(f"lower bound at {size}")
        subject = sizes.taken(size)
        return subject is not None and subject.lower_bound <= limit

    ceiling = largest(is_possible, max(eager or 0, 1), most)
    plans: dict[int, Plan] = {}
    best = _optimized(sizes, limit, latency_ratio, eager, ceiling, precision, plans, say)
    last = max((size for size in (eager, ceiling) if size is not None), default=0)
    as_it_is = None if eager is None else _eager_point(sizes.subject(eager), eager, run=run)
    planned = None if best is None else plans.get(best)
    return Fit(
        model=name,
        device=device,
        dtype=sizes.bench.subject(case, make).source.dtype,
        what=keyword or f"dimension {dim}",
        limit_bytes=limit,
        eager=as_it_is,
        magis=as_it_is
        if best is None or planned is None
        else _planned_point(sizes.subject(best), best, planned, limit, run=run),
        bound=ceiling,
        most=most,
        is_monotone=sizes.is_monotone,
        refused=sizes.refused.get(last + 1, ""),
    )


def _check_amounts(
    limit: int, dim: int, latency_ratio: float | None, most: int, precision: float, seed: int, budget: int | None
) -> None:
    for name, amount, least in (
        ("memory limit", limit, 1), ("dimension", dim, 0), ("largest size", most, 1), ("seed", seed, 0),
        ("budget", 1 if budget is None else budget, 1), ("latency ratio", latency_ratio or 1.0, 1.0),
    ):  # fmt: skip
        if not least <= amount < math.inf:
            raise UsageError(f"fit: the {name} is {amount}, which is less than {least} or no number")
    if not 0 <= precision < 1:
        raise UsageError(f"fit: the precision is {precision}, not a share from 0 up to 1")


def _eager(sizes: _Sizes, limit: int, most: int, say: Progress) -> int | None:
    """The largest size that fits in eager mode. Larger ones are tried at some distances, since nothing says that memory
    grows with the size."""

    def fits(size: int) -> bool:
        say(f"eager at {size}")
        return sizes.peak(size) <= limit

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
    """The largest size at which a plan is found; all that were tried are left in ``plans``. Eager's, without a plan,
    where no plan is as large: the step as it is."""
    if ceiling is None:
        return None

    def fits(size: int) -> bool:
        subject = sizes.taken(size)
        if subject is None:
            return False
        say(f"searching at {size}")
        case = sizes.case
        found = plans[size] = plan(
            subject,
            memory_limit=limit,
            latency_limit_ns=None,
            budget=case.budget,
            seconds=None,
            seed=case.seed,
            stored=None,
        )
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
    """Predicted: a step of this latency / eager's."""
    return latency_ns / max(1, subject.latency_ns(subject.captured.original.graph))


def _eager_point(subject: Subject, size: int, *, run: bool) -> FitPoint:
    measured = subject.original_measured.peak_bytes if run and subject.runs else None
    return FitPoint(
        size, subject.original.peak_bytes, subject.latency_ns(subject.captured.original.graph) / 1e6, 1.0, measured
    )


def _planned_point(subject: Subject, size: int, found: Plan, limit: int, *, run: bool) -> FitPoint:
    """The plan, simulated once more by what this machine's operators need."""
    peak = subject.simulate_graph(found.graph).peak_bytes
    if peak > limit:
        raise UsageError(f"fit: the plan at {size} needs {peak:,} bytes here, more than the limit of {limit:,}")
    alone = run_alone(subject, lambda: subject.generated(found.graph)) if run and subject.may_run else None
    measured = None if alone is None else alone.memory.peak_bytes
    return FitPoint(size, peak, found.latency_ns / 1e6, latency_ratio_of(subject, found.latency_ns), measured)
