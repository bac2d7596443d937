"""What a case asks for and what it found: plain, frozen records that travel to reports, baselines and the csv.

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
    """ "eager", "magis", or what it is compared with (docs/strategies.md): "ddp", "ort"; "peak" for a block of code."""
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
    """That a distributed strategy runs on, or is predicted for."""
    timing_rounds: int | None = None
    """Pairs of interleaved steps to time; None: the default."""
    search: str = "magis"
    """Whose search plans: "magis", or "paper" for the method as it was published; only for "magis"."""
    memory_limit_of: str = "peak"
    """What the memory ratio is a share of: the original's "peak", or what a GPU's caching allocator has "reserved"."""
    slack: float = 0.2
    """Plans stand a host link that is slower by this share, and kernels that are quicker by half of it; nothing on a
    CPU, where nothing is swapped."""

    @property
    def has_one_step(self) -> bool:
        """Whether it shows a step, or code, as it is, with nothing optimized beside it."""
        return self.strategy in ("eager", "peak")

    @property
    def shown(self) -> str:
        """The strategy, and whose search plans where that is not ours."""
        return self.strategy if self.search == "magis" else f"{self.strategy} ({self.search})"


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step: tensors (persistent ones included) and the rest, scratch inside operators."""

    tensor_bytes: int
    """Peak of tensor bytes alone: identical on every machine."""
    peak_bytes: int
    """Peak of tensors + workspace: belongs to a device identity."""
    reserved_bytes: int | None = None
    """The most that a GPU's caching allocator held for the step, as measured; None elsewhere."""

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
    """In memory at the worst moment of the call, tensors and scratch."""
    stream: str = "compute"
    """ "to host" and "from host": copies beside the operators; "messages": between ranks, beside the operators."""
    again: bool = False
    """Whether it is a recomputation."""
    kinds: tuple[int, ...] = ()
    """Those bytes by kind: parameters, optimizer state, batch and buffers, activations (made by the forward pass),
    gradients (by the backward pass), updates (by that of the weights), scratch; empty where another
    plugin simulated."""


@dataclass(frozen=True)
class Timelines:
    """Simulated calls of both steps, in the order in which they start on their stream."""

    original: tuple[Span, ...]
    optimized: tuple[Span, ...]


@dataclass(frozen=True)
class StepFigures:
    """One step, original or optimized: what the simulator says and what the device said (None: it did not run)."""

    simulated: Memory
    simulated_ms: float
    measured: Memory | None = None
    times_ms: tuple[float, ...] = ()
    """Of each timed step, in the order in which they ran; empty where none was timed."""
    reserved_bytes: int | None = None
    """What a GPU's caching allocator is predicted to hold, fragmentation included; None for a CPU."""
    at_peak: Peak | None = None
    """What the simulator holds at its peak; None where another plugin simulated."""

    @property
    def measured_ms(self) -> float | None:
        """Median of the timed steps; None without one."""
        return median_and_spread(self.times_ms)[0]

    @property
    def spread_ms(self) -> float | None:
        """Half the interquartile range of the timed steps; None without one."""
        return median_and_spread(self.times_ms)[1]

    @property
    def measured_reserved_bytes(self) -> int | None:
        """What it was seen to hold; None where the step did not run, and on a CPU."""
        return None if self.measured is None else self.measured.reserved_bytes

    @property
    def is_measured(self) -> bool:
        return self.measured is not None

    def needed_bytes(self, what: str) -> int:
        """Bytes that a limit of ``what`` ("peak" or "reserved") counts: measured where it ran, else predicted."""
        peak = (self.measured or self.simulated).peak_bytes
        return peak if what == "peak" else self.measured_reserved_bytes or self.reserved_bytes or peak


@dataclass(frozen=True)
class Provenance:
    """What a simulated latency rests on: shares (0..1) of it by where the operators' times are from."""

    measured: float = 0.0
    interpolated: float = 0.0
    estimated: float = 1.0
    error: float = 0.0
    """By which share the interpolated part is typically off."""
    source: str = ""
    """The operator profile, in words; empty without one."""
    digest: str = ""
    """Of the profile."""
    note: str = ""
    """What a reader should know about the profile, or why one was left aside; one line."""


@dataclass(frozen=True)
class Term:
    """A named part of a predicted peak, bytes."""

    name: str
    nbytes: int
    note: str = ""
    """What it rests on, in words: an assumption, say."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory in a step: what is predicted for it, and what it measured (None: it did not run)."""

    rank: int
    predicted: Memory | None = None
    measured: Memory | None = None
    terms: tuple[Term, ...] = ()
    """Sum up to the predicted peak."""


@dataclass(frozen=True)
class RatioInterval:
    """Latency ratio (optimized / original) of interleaved pairs: median and its confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int
    doubt: str = ""
    """Why it is shown, but neither stored nor compared with another; empty: it may be."""


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """What a search did, and whether it met the limit."""

    seconds: float = 0.0
    states: int = 0
    """Plans evaluated; deterministic."""
    stopped_by_seconds: bool = False
    feasible: bool = True
    """Whether the limit was met (by the simulator)."""
    recomputed_ops: int = 0
    """In all parts of loops, as the bytes that are swapped."""
    swapped_bytes: int = 0
    fission: str = ""
    """What runs in parts, in words; empty: nothing does."""
    unsplit: str = ""
    """Why nothing runs in parts although the search tried, in words."""
    latency_bound_ns: int | None = None
    """No plan of the step, cut into parts like this one, has a lower simulated latency within the memory limit (within
    this plan's peak, where there is only a latency limit) and stands the slack; on simulated devices, where the limit
    is met."""


@dataclass(frozen=True)
class SearchStats(SearchOutcome):
    """What the search did, whether it met the limit, and what the plan changes."""

    changes: tuple[ModuleBytes, ...] = ()
    """What the plan recomputes and swaps, in every part of a loop, and what runs in parts (calls of one part), by
    module: calls, and the bytes that they make or move."""
    worst_latency_ratio: float | None = None
    """Latency to the original's on the worst machine of the case's slack; None where nothing is ever swapped."""


@dataclass(frozen=True)
class CaseResult:
    """Everything about one case. ``original`` is eager; for strategy "eager" both are the same."""

    case: Case
    dtype: str
    identity: dict[str, str]
    """Device identity: for cpu instruction set, threads, torch version; for cuda GPU name, torch, CUDA version."""
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
    """Persistent bytes + the most that one operator needs whole, however it is cut: no plan gets below it."""
    bound: str = ""
    """What makes that bound, in words: the persistent tensors, the operator, what it needs whole."""
    numbers: str = "not run"
    """ "bit-identical", "within tolerance", "differs: <what>", "not run" or "not run: <why>"."""
    graph_digest: str = ""
    step_digest: str = ""
    """Of the step's operators alone, by signature and in order: the same under another form of the captured graph."""
    planner: str = ""
    """Digest of the code that planned; empty where nothing was planned."""
    note: str = ""
    """Why a row was simulated, for instance."""
    search: SearchStats = field(default_factory=SearchStats)
    provenance: Provenance = field(default_factory=Provenance)
    """Of the optimized step's simulated latency."""
    planning_workspaces: dict[str, int] = field(default_factory=dict)
    """Operator signature -> workspace bytes (non-zero ones) that the planner used, for the baseline to keep."""
    timelines: Timelines | None = None
    """Only where they were asked for."""
    ranks: tuple[RankMemory, ...] = ()
    """Of a strategy that runs on several ranks; ``optimized`` then is the one with the highest peak."""
    conformance: str = "not checked"
    """How far the captured step was compared with what eager runs: "whole step", "batch of 2", "not checked: <why>"."""
    samples: int = 0
    """In the global batch of one step; 0: not known."""
    off_by: float = 0.0
    """By which share the optimized step's measured tensor bytes may be off the simulated ones; infinite: not judged."""
    original_off_by: float = 0.0
    """The same of the original, where that is a strategy's step: that of ranks without a plan."""
    noise: float = 0.0
    """By which share the optimized step's measured peak differs from run to run; 0: it does not."""
    priced: bool = True
    """Whether the optimized step's simulated latency is its own; else eager's stands in, and no throughput is told."""
    portable: bool = True
    """Whether the optimized step's tensor bytes are the same on every machine."""
    growth: StepGrowth | None = None
    """Of eager's step, where its memory grows from step to step."""

    @property
    def is_predicted(self) -> bool:
        """Whether the optimized step was not run here: its figures are simulated."""
        return not self.optimized.is_measured

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the optimized step: of the median time where it ran, else as simulated; None: not known."""
        ms = self.optimized.measured_ms or (self.optimized.simulated_ms if self.priced else 0.0)
        return self.samples * 1e3 / ms if self.samples and ms > 0 else None

    @property
    def samples_per_s_spread(self) -> float | None:
        """Half the interquartile range of that, as far as times spread evenly; None where the step was not timed."""
        rate, ms, spread = self.samples_per_s, self.optimized.measured_ms, self.optimized.spread_ms
        return rate * spread / ms if rate is not None and ms and spread is not None else None

    @property
    def memory(self) -> Memory:
        """The optimized step's memory: measured where it ran, else simulated."""
        return self.optimized.measured or self.optimized.simulated

    @property
    def original_memory(self) -> Memory:
        return self.original.measured or self.original.simulated

    @property
    def memory_ratio(self) -> float:
        """The optimized step's share of the original's bytes, of the peak or of reserved ones as limits count."""
        what = self.case.memory_limit_of
        return self.optimized.needed_bytes(what) / self.original.needed_bytes(what)

    @property
    def latency_ratio_bound(self) -> float | None:
        """The latency ratio that no plan like this one gets below (see SearchStats)."""
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
    """One plan of a front, realized and judged by the exact simulator."""

    peak_bytes: int
    latency_ms: float
    recomputed_ops: int
    swapped_bytes: int
    fission: str
    """What runs in parts, in words; empty: nothing does."""


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
    """No plan gets below it (see CaseResult)."""
    points: tuple[FrontPoint, ...]
    """By rising peak and falling latency, the original among them where no plan beats it in both; thinned, evenly over
    the peaks. A search for one limit may find better."""
    states: int
    """Plans judged; deterministic."""
    seconds: float
    """What the search took, capture left out."""
    provenance: Provenance = field(default_factory=Provenance)
    """What eager's simulated latency rests on."""

    def best(self, *, memory_ratio: float | None = None, latency_ratio: float | None = None) -> FrontPoint | None:
        """The fastest point within a share of the original's peak, or the leanest within a multiple of its latency;
        None where no point keeps the limits that are given."""
        within = [
            point
            for point in self.points
            if (memory_ratio is None or point.peak_bytes <= memory_ratio * self.original.peak_bytes)
            and (latency_ratio is None or point.latency_ms <= latency_ratio * self.original.latency_ms)
        ]
        wanted = attrgetter("peak_bytes" if memory_ratio is None else "latency_ms")
        return min(within, key=wanted, default=None)
