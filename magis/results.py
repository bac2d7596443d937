"""Records of a case and its result, for reports, baselines and the csv.

Bytes are whole numbers, times are milliseconds, every ratio is optimized / original.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from magis.module_bytes import ModuleBytes, Peak, StepGrowth, collapsed, is_below
from magis.step_records import Span, TensorLives, Timelines
from magis.units import median_and_spread

__all__ = [
    "Case",
    "CaseResult",
    "FrontPoint",
    "Memory",
    "ModuleBytes",
    "ParetoFront",
    "Peak",
    "Provenance",
    "RankMemory",
    "RatioInterval",
    "SearchStats",
    "Span",
    "StepFigures",
    "StepGrowth",
    "TensorLives",
    "Term",
    "Timelines",
    "collapsed",
    "is_below",
]


@dataclass(frozen=True)
class Case:
    """One case of the gate: a model and a strategy on a device, at one limit or none."""

    MOST_SLACK: ClassVar = 0.9
    model: str
    """Name of a registered model, or "package.module:factory"."""
    strategy: str
    """Strategy: "eager", "magis", another one (docs/strategies.md) such as "ddp", or "peak" for a block of code."""
    device: str
    """Device: "cpu", "cuda" or "sim:<name>"."""
    preset: str
    """Size of the model: "small" or "paper"."""
    dtype: str | None = None
    """Data type; None: the model's own (float32; for gpt_neo and btlm at "paper" bfloat16; a factory's as built).
    "tf32": products in tf32. "amp-bfloat16", "amp-float16": float32 weights, autocast, no GradScaler."""
    memory_ratio: float | None = None
    """Memory limit as a fraction of the original's peak; only for "magis"."""
    latency_ratio: float | None = None
    """Latency limit as a multiple (>= 1) of the original's latency; only for "magis"."""
    budget: int | None = None
    """Budget of the search in plans evaluated; None: the default."""
    seconds: float | None = None
    """Time limit of the search in seconds, None without one; a search that it stopped is reported and not gated."""
    seed: int = 0
    ranks: int = 1
    """Number of ranks of a distributed strategy, run or predicted."""
    timing_rounds: int | None = None
    """Number of pairs of interleaved steps to time; None: the default."""
    search: str = "magis"
    """Name of the search: "magis", or "paper" for the published method; only for the strategy "magis"."""
    memory_limit_of: str = "peak"
    """Base of the memory ratio: the original's "peak", or the bytes "reserved" by a GPU's caching allocator."""
    slack: float = 0.2
    """Share by which the host link may be slower than simulated, and kernels faster by half of it, without a stall."""
    memory_limit: int | None = None
    """Memory limit in bytes, instead of the memory ratio."""
    allocator: str = ""
    """Settings of a GPU allocator, as in PYTORCH_ALLOC_CONF; empty: torch's, whatever the environment says."""
    accumulate: int = 1
    """Micro-batches per update, each as large as the model's batch; only for strategies of one device."""
    host_limit: int = 0
    """Most bytes of optimizer state that a plan keeps in host memory between updates."""

    @property
    def limits_memory(self) -> bool:
        """Return True if the case has a memory limit, in bytes or as a ratio."""
        return self.memory_ratio is not None or self.memory_limit is not None

    @property
    def has_limit(self) -> bool:
        """Return True if the case has a limit on memory or latency, and so a search."""
        return self.limits_memory or self.latency_ratio is not None

    @property
    def has_one_step(self) -> bool:
        """Return True if the case has only an original step and no optimized one."""
        return self.strategy in ("eager", "peak")

    @property
    def shown(self) -> str:
        """Name of the strategy, followed by the search in parentheses if that is not "magis"."""
        return self.strategy if self.search == "magis" else f"{self.strategy} ({self.search})"


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step: tensors (parameters and other persistent ones included), and operators' workspaces."""

    tensor_bytes: int
    """Peak of tensor bytes alone, equal on every machine."""
    peak_bytes: int
    """Peak of tensors + workspaces; depends on the device identity."""
    reserved_bytes: int | None = None
    """Measured peak of bytes reserved by a GPU's caching allocator; None on other devices."""

    @property
    def workspace_bytes(self) -> int:
        return self.peak_bytes - self.tensor_bytes


@dataclass(frozen=True)
class StepFigures:
    """Memory and latency of one step, original or optimized: simulated, and measured (None: the step did not run)."""

    simulated: Memory
    simulated_ms: float
    measured: Memory | None = None
    times_ms: tuple[float, ...] = ()
    """Milliseconds of each timed step, in the order of the runs."""
    reserved_bytes: int | None = None
    """Predicted bytes reserved by a GPU's caching allocator, fragmentation included; None for a CPU."""
    at_peak: Peak | None = None
    """Tensors alive at the simulated peak; None if a neighbour simulated the step."""

    @property
    def measured_ms(self) -> float | None:
        """Return the median time of the timed steps in milliseconds; None if none was timed."""
        return median_and_spread(self.times_ms)[0]

    @property
    def spread_ms(self) -> float | None:
        """Return half the interquartile range of the timed steps in milliseconds; None if none was timed."""
        return median_and_spread(self.times_ms)[1]

    @property
    def measured_reserved_bytes(self) -> int | None:
        """Return the measured bytes reserved by a GPU's caching allocator; None on a CPU, or without a run."""
        return None if self.measured is None else self.measured.reserved_bytes

    @property
    def is_measured(self) -> bool:
        return self.measured is not None

    def needed_bytes(self, what: str) -> int:
        """Return the bytes that a limit on ``what`` ("peak", "reserved") bounds: measured if known, else simulated."""
        peak = (self.measured or self.simulated).peak_bytes
        return peak if what == "peak" else self.measured_reserved_bytes or self.reserved_bytes or peak


@dataclass(frozen=True)
class Provenance:
    """Sources of a simulated latency: fractions (0..1) of the latency by origin of the operators' times."""

    measured: float = 0.0
    interpolated: float = 0.0
    estimated: float = 1.0
    error: float = 0.0
    """Typical relative error of the interpolated times."""
    source: str = ""
    """Description of the operator profile; empty without one."""
    digest: str = ""
    """Digest of the operator profile."""
    note: str = ""
    """One line for readers about the profile, or the reason why a profile is ignored."""


@dataclass(frozen=True)
class Term:
    """A named term of a predicted peak, in bytes."""

    name: str
    nbytes: int
    note: str = ""
    """Assumption behind the term, or its source, in words."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in a step, predicted and measured (None: unknown)."""

    rank: int
    predicted: Memory | None = None
    measured: Memory | None = None
    terms: tuple[Term, ...] = ()
    """Terms that sum to the predicted peak."""


@dataclass(frozen=True)
class RatioInterval:
    """Median latency ratio (optimized / original) of interleaved pairs of steps, with its confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int
    doubt: str = ""
    """Reason why the ratio must not be stored or compared; empty: none."""


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """Result of a search: plans evaluated, feasibility, and figures of the plan found."""

    seconds: float = 0.0
    states: int = 0
    """Number of plans evaluated; deterministic."""
    stopped_by_seconds: bool = False
    feasible: bool = True
    """True if the plan meets the limit in the simulation."""
    recomputed_ops: int = 0
    """Number of recomputed operators, counted in every part of a loop."""
    swapped_bytes: int = 0
    fission: str = ""
    """Description of the plan's loops (fission); empty: none."""
    unsplit: str = ""
    """Reason why nothing runs in parts although the search tried, in words."""
    latency_bound_ns: int | None = None
    """Lower bound on the simulated latency (ns) of plans with this plan's loops, update lists, limit (else its peak)
    and slack; None if the limit is missed, and except on simulated devices."""


@dataclass(frozen=True)
class SearchStats(SearchOutcome):
    """Result of a search, with the plan's changes by module."""

    changes: tuple[ModuleBytes, ...] = ()
    """Recomputed and swapped calls (counted in every part of a loop) and calls in loops (counted once), by module."""
    worst_latency_ratio: float | None = None
    """Latency ratio on the slowest machine within the slack; None on a device without swaps."""
    halved_latency_ratio: float | None = None
    """Latency ratio with a host link half as fast; None on a device without swaps."""


@dataclass(frozen=True)
class CaseResult:
    """Result of one case: eager is the original step; with strategy "eager" it is also the optimized one."""

    case: Case
    dtype: str
    identity: dict[str, str]
    """Device identity: instruction set, threads and torch version of a CPU; name, torch and CUDA version of a GPU."""
    original: StepFigures
    optimized: StepFigures
    ratio: RatioInterval | None
    """Measured latency ratio; None for simulated steps."""
    weight_bytes: int
    persistent_bytes: int
    memory_limit_bytes: int | None
    latency_limit_ms: float | None
    device_memory_bytes: int
    """Memory of the device, or its memory limit, in bytes."""
    lower_bound_bytes: int
    """Lower bound on every plan's peak: persistent bytes + most bytes that one operator needs, however it is split."""
    bound: str = ""
    """Terms of the lower bound in words: the persistent tensors, the operator, the tensors that it needs whole."""
    numbers: str = "not run"
    """Comparison with eager: "bit-identical", "within tolerance", "differs: <what>", "not run" or "not run: <why>"."""
    graph_digest: str = ""
    step_digest: str = ""
    """Digest of the signatures of the step's operators in order; independent of the graph's text form."""
    planner: str = ""
    """Digest of the planner's source code; empty if nothing was planned."""
    note: str = ""
    """One line for readers, such as the reason why the step was simulated."""
    search: SearchStats = field(default_factory=SearchStats)
    provenance: Provenance = field(default_factory=Provenance)
    """Sources of the optimized step's simulated latency."""
    planning_workspaces: dict[str, int] = field(default_factory=dict)
    """Operator signature -> workspace bytes (non-zero ones) used by the planner and stored in the baseline."""
    timelines: Timelines | None = None
    """Time lines of both steps; None unless requested."""
    ranks: tuple[RankMemory, ...] = ()
    """Memory of each rank of a distributed strategy; ``optimized`` describes the rank with the highest peak."""
    conformance: str = "not checked"
    """Part of the captured step that was compared with eager: "whole step", "batch of 2", "not checked: <why>"."""
    samples: int = 0
    """Number of samples in the global batch of one step; 0: unknown."""
    off_by: float = 0.0
    """Relative tolerance of the optimized step's measured tensor bytes against simulated ones; infinite: any."""
    original_off_by: float = 0.0
    """Relative tolerance of the original's tensor bytes (measured against simulated), for ranks without a plan."""
    noise: float = 0.0
    """Relative spread of the optimized step's measured peak between runs; 0: none."""
    priced: bool = True
    """False if the optimized step's latency is unknown and eager's is reported; then there is no throughput."""
    portable: bool = True
    """True if the optimized step's tensor bytes are equal on every machine."""
    growth: StepGrowth | None = None
    """Growth of eager's memory from step to step; None if memory does not grow, or growth was not measured."""

    @property
    def is_predicted(self) -> bool:
        """Return True if the optimized step did not run, so that its figures are simulated."""
        return not self.optimized.is_measured

    @property
    def samples_per_s(self) -> float | None:
        """Return the optimized step's samples per second, from the measured median, else simulated; None if unknown."""
        ms = self.optimized.measured_ms or (self.optimized.simulated_ms if self.priced else 0.0)
        return self.samples * 1e3 / ms if self.samples and ms > 0 else None

    @property
    def samples_per_s_spread(self) -> float | None:
        """Return half the interquartile range of the throughput, to first order; None if not timed."""
        rate, ms, spread = self.samples_per_s, self.optimized.measured_ms, self.optimized.spread_ms
        return rate * spread / ms if rate is not None and ms and spread is not None else None

    @property
    def memory(self) -> Memory:
        """Return the optimized step's memory: measured if it ran, else simulated."""
        return self.optimized.measured or self.optimized.simulated

    @property
    def original_memory(self) -> Memory:
        return self.original.measured or self.original.simulated

    @property
    def memory_ratio(self) -> float:
        """Return optimized / original bytes: of peaks, or of reserved bytes where the case's limit is on these."""
        what = self.case.memory_limit_of
        return self.optimized.needed_bytes(what) / self.original.needed_bytes(what)

    @property
    def latency_ratio_bound(self) -> float | None:
        """Return the lower bound on the latency ratio (see `SearchOutcome.latency_bound_ns`); None if unknown."""
        bound = self.search.latency_bound_ns
        return (
            bound / 1e6 / self.original.simulated_ms if bound is not None and self.original.simulated_ms > 0 else None
        )

    @property
    def latency_ratio(self) -> float:
        if self.ratio is not None:
            return self.ratio.ratio
        return self.optimized.simulated_ms / self.original.simulated_ms


@dataclass(frozen=True)
class FrontPoint:
    """One plan of a Pareto front, with peak and latency of its realized graph in the exact simulator."""

    peak_bytes: int
    latency_ms: float
    recomputed_ops: int
    swapped_bytes: int
    fission: str
    """Description of the plan's loops (fission); empty: none."""


@dataclass(frozen=True)
class ParetoFront:
    """Pareto front of one model: plans that no other plan found beats in both peak memory and latency."""

    model: str
    device: str
    preset: str
    dtype: str
    seed: int
    original: FrontPoint
    """Simulated figures of eager."""
    lower_bound_bytes: int
    """Lower bound on the peak of every plan (see `CaseResult`)."""
    points: tuple[FrontPoint, ...]
    """Plans by rising peak and falling latency, thinned evenly, eager among them unless a plan beats it in both."""
    states: int
    seconds: float
    """Seconds of the search, capture excluded."""
    provenance: Provenance = field(default_factory=Provenance)
    """Sources of eager's simulated latency."""

    def best(self, *, memory_ratio: float | None = None, latency_ratio: float | None = None) -> FrontPoint | None:
        """Return the fastest point within a memory ratio, or the smallest within a latency ratio; None without one.
        Ratios are to the original's peak and latency."""
        within = [
            point
            for point in self.points
            if (memory_ratio is None or point.peak_bytes <= memory_ratio * self.original.peak_bytes)
            and (latency_ratio is None or point.latency_ms <= latency_ratio * self.original.latency_ms)
        ]
        wanted = attrgetter("peak_bytes" if memory_ratio is None else "latency_ms")
        return min(within, key=wanted, default=None)
