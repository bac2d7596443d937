"""A case and its result as plain frozen records, for reports, baselines and the csv.

Bytes are whole numbers, times are milliseconds, every ratio is optimized / original.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from magis.module_bytes import ModuleBytes, Peak, StepGrowth, collapsed, is_below
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
    "Term",
    "Timelines",
    "collapsed",
    "is_below",
]


@dataclass(frozen=True)
class Case:
    """One cell of the harness: a model under a strategy, on a device, at one limit (or none)."""

    MOST_SLACK: ClassVar = 0.9
    model: str
    """A registered model's name or "package.module:factory"."""
    strategy: str
    """ "eager", "magis", or one to compare with (docs/strategies.md) such as "ddp"; "peak" for a block of code."""
    device: str
    """ "cpu", "cuda" or "sim:<name>"."""
    preset: str
    """ "small" or "paper"."""
    dtype: str | None = None
    """None: the model's own (float32; bfloat16 for gpt_neo and btlm at "paper"; a factory's as built). "tf32": products
    in tf32; "amp-bfloat16", "amp-float16": float32 weights, forward and loss under autocast, gradients not scaled."""
    memory_ratio: float | None = None
    """Memory limit as a share of the original's peak; only for "magis"."""
    latency_ratio: float | None = None
    """Latency limit as a multiple (>= 1) of the original's latency; only for "magis"."""
    budget: int | None = None
    """Work budget of the search in states evaluated; None: the default."""
    seconds: float | None = None
    """Optional cap on search seconds; a row that it stopped says so and is not gated."""
    seed: int = 0
    ranks: int = 1
    """Number of ranks that a distributed strategy runs on, or is predicted for."""
    timing_rounds: int | None = None
    """Pairs of interleaved steps to time; None: the default."""
    search: str = "magis"
    """Search that plans: "magis", or "paper" for the method as it was published; only for the strategy "magis"."""
    memory_limit_of: str = "peak"
    """Bytes that the memory ratio is a share of: the original's "peak", or those "reserved" by a GPU's allocator."""
    slack: float = 0.2
    """Share by which the host link may be slower than simulated, and kernels quicker by half of it, without a swap that
    the step waits for; no effect on a CPU, where nothing is swapped."""
    memory_limit: int | None = None
    """Memory limit in bytes, in place of the memory ratio."""

    @property
    def limits_memory(self) -> bool:
        """Return True if the case has a memory limit, in bytes or as a share."""
        return self.memory_ratio is not None or self.memory_limit is not None

    @property
    def has_limit(self) -> bool:
        """Return True if the case has a limit on memory or latency, and so a search."""
        return self.limits_memory or self.latency_ratio is not None

    @property
    def has_one_step(self) -> bool:
        """Return True if the case has only an original, with nothing optimized beside it."""
        return self.strategy in ("eager", "peak")

    @property
    def shown(self) -> str:
        """Name the strategy, with its search in parentheses if that is not "magis"."""
        return self.strategy if self.search == "magis" else f"{self.strategy} ({self.search})"


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step: tensors (persistent ones included) and the rest, scratch inside operators."""

    tensor_bytes: int
    """Peak of tensor bytes alone: identical on every machine."""
    peak_bytes: int
    """Peak of tensors + workspace; it depends on the device identity."""
    reserved_bytes: int | None = None
    """Most bytes that a GPU's caching allocator held for the step, as measured; None elsewhere."""

    @property
    def workspace_bytes(self) -> int:
        return self.peak_bytes - self.tensor_bytes


@dataclass(frozen=True)
class Span:
    """One call on the simulated time line of a step."""

    KINDS: ClassVar = (
        "parameters", "optimizer state", "batch and buffers", "activations", "gradients", "updates", "scratch",
    )  # fmt: skip
    op: str
    module: str
    phase: str
    line: str
    start_ms: float
    ms: float
    nbytes: int
    """Bytes in memory at the worst moment of the call, tensors and scratch."""
    stream: str = "compute"
    """ "to host" and "from host": copies beside the operators; "messages": between ranks, beside the operators."""
    again: bool = False
    """True for a recomputation."""
    kinds: tuple[int, ...] = ()
    """The same bytes by `KINDS`: activations are made by the forward pass, gradients by the backward pass, updates by
    the weight update. Empty where another plugin simulated."""


@dataclass(frozen=True)
class Timelines:
    """Simulated calls of both steps, in the order in which they start on their stream."""

    original: tuple[Span, ...]
    optimized: tuple[Span, ...]


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step, original or optimized: simulated, and measured (None: it did not run)."""

    simulated: Memory
    simulated_ms: float
    measured: Memory | None = None
    times_ms: tuple[float, ...] = ()
    """Time of each timed step, in the order in which they ran."""
    reserved_bytes: int | None = None
    """Bytes that a GPU's caching allocator is predicted to hold, fragmentation included; None for a CPU."""
    at_peak: Peak | None = None
    """Tensors held at the simulated peak; None where another plugin simulated."""

    @property
    def measured_ms(self) -> float | None:
        """Return the median of the timed steps; None without one."""
        return median_and_spread(self.times_ms)[0]

    @property
    def spread_ms(self) -> float | None:
        """Return half the interquartile range of the timed steps; None without one."""
        return median_and_spread(self.times_ms)[1]

    @property
    def measured_reserved_bytes(self) -> int | None:
        """Return the bytes that a GPU's caching allocator held; None where the step did not run, and on a CPU."""
        return None if self.measured is None else self.measured.reserved_bytes

    @property
    def is_measured(self) -> bool:
        return self.measured is not None

    def needed_bytes(self, what: str) -> int:
        """Return the bytes that a limit of ``what`` ("peak" or "reserved") counts: measured, else predicted."""
        peak = (self.measured or self.simulated).peak_bytes
        return peak if what == "peak" else self.measured_reserved_bytes or self.reserved_bytes or peak


@dataclass(frozen=True)
class Provenance:
    """Sources of a simulated latency: its shares (0..1) by the source of the operators' times."""

    measured: float = 0.0
    interpolated: float = 0.0
    estimated: float = 1.0
    error: float = 0.0
    """Typical relative error of the interpolated part."""
    source: str = ""
    """The operator profile, in words; empty without one."""
    digest: str = ""
    """Digest of the profile."""
    note: str = ""
    """One line on the profile for readers, or the reason for which one was left aside."""


@dataclass(frozen=True)
class Term:
    """A named part of a predicted peak, bytes."""

    name: str
    nbytes: int
    note: str = ""
    """Its assumption or source, in words."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory in a step, predicted and measured (None: it did not run)."""

    rank: int
    predicted: Memory | None = None
    measured: Memory | None = None
    terms: tuple[Term, ...] = ()
    """Parts that sum up to the predicted peak."""


@dataclass(frozen=True)
class RatioInterval:
    """Latency ratio (optimized / original) of interleaved pairs: median and its confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int
    doubt: str = ""
    """Reason not to store it or compare it with another ratio; empty: none."""


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """Result of a search: its work, whether it met the limit, and the changes of its plan in figures."""

    seconds: float = 0.0
    states: int = 0
    """Number of plans evaluated; deterministic."""
    stopped_by_seconds: bool = False
    feasible: bool = True
    """True if the plan meets the limit, as simulated."""
    recomputed_ops: int = 0
    """Number in all parts of loops; so are the swapped bytes."""
    swapped_bytes: int = 0
    fission: str = ""
    """Loops of the plan, in words; empty: none."""
    unsplit: str = ""
    """Reason for which nothing runs in parts although the search tried, in words."""
    latency_bound_ns: int | None = None
    """Lower bound of the simulated latency of all plans that are cut into parts like this one, keep the memory limit
    (without one: this plan's peak) and tolerate the slack; only on simulated devices, where the limit is met."""


@dataclass(frozen=True)
class SearchStats(SearchOutcome):
    """Result of a search, with the changes of its plan by module."""

    changes: tuple[ModuleBytes, ...] = ()
    """Calls recomputed and swapped (in every part of a loop), and calls that run in parts (those of one part), by
    module, with the bytes that they make or move."""
    worst_latency_ratio: float | None = None
    """Latency ratio on the worst machine within the case's slack; None where nothing is ever swapped."""


@dataclass(frozen=True)
class CaseResult:
    """Result of one case. ``original`` is eager; for strategy "eager" both steps are the same."""

    case: Case
    dtype: str
    identity: dict[str, str]
    """Device identity: instruction set, threads and torch version of a CPU; name, torch and CUDA version of a GPU."""
    original: StepFigures
    optimized: StepFigures
    ratio: RatioInterval | None
    """None where nothing was timed (simulated rows)."""
    weight_bytes: int
    persistent_bytes: int
    memory_limit_bytes: int | None
    latency_limit_ms: float | None
    device_memory_bytes: int
    """Memory of the device (its limit), bytes."""
    lower_bound_bytes: int
    """Bytes that no plan gets below: persistent ones + the most that one operator needs whole, however it is cut."""
    bound: str = ""
    """Parts of that bound, in words: the persistent tensors, the operator, the tensors that it needs whole."""
    numbers: str = "not run"
    """ "bit-identical", "within tolerance", "differs: <what>", "not run" or "not run: <why>"."""
    graph_digest: str = ""
    step_digest: str = ""
    """Digest of the step's operators alone, by signature and in order: it survives another text form of the graph."""
    planner: str = ""
    """Digest of the planner's code; empty where nothing was planned."""
    note: str = ""
    """One line for readers: the reason for which a row was simulated, for instance."""
    search: SearchStats = field(default_factory=SearchStats)
    provenance: Provenance = field(default_factory=Provenance)
    """Sources of the optimized step's simulated latency."""
    planning_workspaces: dict[str, int] = field(default_factory=dict)
    """Operator signature -> workspace bytes (non-zero ones) that the planner used; the baseline keeps them."""
    timelines: Timelines | None = None
    """Calls of both steps; None unless asked for."""
    ranks: tuple[RankMemory, ...] = ()
    """Memory of each rank of a distributed strategy; ``optimized`` is the rank with the highest peak."""
    conformance: str = "not checked"
    """Part of the captured step that was compared with eager: "whole step", "batch of 2", "not checked: <why>"."""
    samples: int = 0
    """Samples in the global batch of one step; 0: unknown."""
    off_by: float = 0.0
    """Relative error that measured tensor bytes of the optimized step may have to simulated ones; infinite: any."""
    original_off_by: float = 0.0
    """The same for the original, where that is the step of ranks without a plan."""
    noise: float = 0.0
    """Relative difference of the optimized step's measured peak between runs; 0: none."""
    priced: bool = True
    """False if eager's simulated latency stands in for the optimized step's: then there is no throughput."""
    portable: bool = True
    """True if the optimized step's tensor bytes are the same on every machine."""
    growth: StepGrowth | None = None
    """Growth of eager's memory from step to step; None if it does not grow, or nobody looked."""

    @property
    def is_predicted(self) -> bool:
        """Return True if the optimized step was not run here, so that its figures are simulated."""
        return not self.optimized.is_measured

    @property
    def samples_per_s(self) -> float | None:
        """Return the throughput of the optimized step: of its median time, else as simulated; None if unknown."""
        ms = self.optimized.measured_ms or (self.optimized.simulated_ms if self.priced else 0.0)
        return self.samples * 1e3 / ms if self.samples and ms > 0 else None

    @property
    def samples_per_s_spread(self) -> float | None:
        """Return half the interquartile range of the throughput, to first order; None if the step was not timed."""
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
        """Return optimized / original bytes, of peaks or of reserved bytes, as the case's limit counts."""
        what = self.case.memory_limit_of
        return self.optimized.needed_bytes(what) / self.original.needed_bytes(what)

    @property
    def latency_ratio_bound(self) -> float | None:
        """Return the lower bound of the latency ratio (see `SearchOutcome.latency_bound_ns`)."""
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
    """One plan of a front, realized, with the figures of the exact simulator."""

    peak_bytes: int
    latency_ms: float
    recomputed_ops: int
    swapped_bytes: int
    fission: str
    """Loops of the plan, in words; empty: none."""


@dataclass(frozen=True)
class ParetoFront:
    """Peak memory against latency of one model: plans that no other one found beats in both."""

    model: str
    device: str
    preset: str
    dtype: str
    seed: int
    original: FrontPoint
    """Eager, simulated."""
    lower_bound_bytes: int
    """Bytes that no plan gets below (see `CaseResult`)."""
    points: tuple[FrontPoint, ...]
    """Plans by rising peak and falling latency, thinned evenly; the original is among them where no
    plan beats it in both. A search for one limit may find better."""
    states: int
    """Number of plans judged; deterministic."""
    seconds: float
    """Seconds of the search, without capture."""
    provenance: Provenance = field(default_factory=Provenance)
    """Sources of eager's simulated latency."""

    def best(self, *, memory_ratio: float | None = None, latency_ratio: float | None = None) -> FrontPoint | None:
        """Return the fastest point within a share of the original's peak, or the leanest within one of its latency.

        None if no point keeps the given limits.
        """
        within = [
            point
            for point in self.points
            if (memory_ratio is None or point.peak_bytes <= memory_ratio * self.original.peak_bytes)
            and (latency_ratio is None or point.latency_ms <= latency_ratio * self.original.latency_ms)
        ]
        wanted = attrgetter("peak_bytes" if memory_ratio is None else "latency_ms")
        return min(within, key=wanted, default=None)
