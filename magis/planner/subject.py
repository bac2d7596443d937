"""The model under test: capture, costs, fronts and measurements shared by all of its cases, computed on first use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch

from magis.capture import Captured
from magis.capture.with_optimizer import before_update, own_tail, without_state
from magis.cost.cost_model import RooflineCosts, shares
from magis.cost.devices import DeviceModel, find_device
from magis.cost.operator_latency import Prices
from magis.errors import UsageError
from magis.fission.lower_bound import LowerBound, lower_bound, with_behind
from magis.graph import Graph, digest, verify
from magis.planner.conformance import conformance
from magis.planner.device_profiles import UNPRICED, Pricing
from magis.planner.shared_searches import Sharing
from magis.planner.smaller_steps import MOST_BYTES, held_bytes, tensors_of
from magis.planner.traced_model import Scratches, TracedModel, redo_graph, signatures
from magis.planner.workload_source import STEPS, Memo, Source, expected_too_slow, in_order_ns, sends, too_slow
from magis.report.text_store import Kept
from magis.results import Case, Memory, Provenance
from magis.rewrite.flat_rows import with_flat_rows
from magis.rewrite.functionalize import functionalize, untangle
from magis.rewrite.losses import with_lean_cross_entropy
from magis.rewrite.moved_state import first_states, with_moved_state
from magis.rewrite.rules.rule_table import quickest
from magis.rewrite.short_rows import with_short_rows
from magis.runtime.behind_step import BehindStep
from magis.runtime.measure import device_memory, free_device_memory, tensor_peak, trim, window_peak
from magis.runtime.steps import EagerStep, GraphStep, Step, whole_step
from magis.runtime.timing import alone
from magis.search.budgeted_evaluator import Objective, Over, PlanRequest, never
from magis.search.fission_pareto import DivisibleStep, FissionFront, whole_front, work_of
from magis.search.loop_places import TriedPlaces, first_look, places_front, with_little_effort
from magis.search.pareto_sweep import FULL, Effort
from magis.simulate.reserved_bytes import Reserved, reserved, simulated_allocator
from magis.simulate.simulator import MemoryProfile, replay
from magis.strategies.rank_step import loss_of_shares

ROUNDS_ALONE = 5
_OF_LAYOUTS = frozenset({"normal", "digest", "original", "original_measured", "original_ns"})
"""Cached members that depend on the strides and offsets in the captured graph, and from which others are derived."""
ALONE = Sharing()


class Subject(TracedModel):
    """One model at one size, dtype and device. Expensive members are computed once and cached."""

    def __init__(
        self,
        source: Source,
        sharing: Sharing = ALONE,
        pricing: Pricing = UNPRICED,
        kept: Kept | None = None,
        slack: float = Case.slack,
        host_limit: int = 0,
    ) -> None:
        super().__init__(source)
        self.pricing = pricing
        self.kept = kept
        self.slack = slack
        self.hurry = 1.0
        self.host_limit = host_limit
        self._share = sharing if sharing.needed else None
        self.scratches = Scratches()
        self.tried = TriedPlaces()
        self.tried_briefly = TriedPlaces(least_ns=self.tried.least_ns)
        self.fronts: dict[tuple[Effort, tuple[tuple[str, int], ...]], FissionFront] = {}
        self.memo = Memo()

    @cached_property
    def conformance(self) -> str:
        """Extent to which the captured step was compared with eager's. Raises CaptureError where the two differ."""
        if self.too_slow or not (self.runs or self.captured.sends or self._asked.of_user):
            return f"not checked: {self.too_slow or 'built in, and simulated'}"
        on_cpu = self.captured if self.kind == "cpu" else None
        held = held_bytes(self.traced.module.parameters() if self.runs else tensors_of(self.traced))
        try:
            small = 4 * held <= MOST_BYTES and (self.runs or self._step_bytes <= MOST_BYTES)
            work = self._settled if small else self.traced
        except UsageError as error:
            if self.runs:
                raise
            return f"not checked: {error}"
        mends = on_cpu is None or _OF_LAYOUTS.isdisjoint(vars(self))
        said, found = conformance(
            work, on_cpu, self._step_bytes,
            autocast=self._cast, start=self._asked.start, heard=self._heard, mends=mends,
        )  # fmt: skip
        if self.simulated_only:
            trim()
        if on_cpu is not None and found is not None and found is not on_cpu:
            found = self.followed(found, work)
            verify(found.graph)
            verify(found.original.graph)
            self.captured = found
        return said

    def whole_front(self, workspaces: Mapping[str, int], over: Over = never, effort: Effort = FULL) -> FissionFront:
        """Return the Pareto front of the step without loops, cached by effort and workspaces (signature -> bytes)."""
        key = effort, tuple(sorted(workspaces.items()))
        known = self.fronts.get(key)
        if known is not None:
            return known
        found = whole_front(self.normal, self.costs(workspaces), reuse=self.source.reuse, effort=effort, over=over)
        if not found.stopped_by_seconds:
            self.fronts[key] = found
        return found

    @cached_property
    def _work(self) -> DivisibleStep:
        return work_of(self.aggregated, self.roofline, reuse=self.source.reuse)

    def sketched(self, wanted: PlanRequest, known: tuple[int, int] | None = None, over: Over = never) -> FissionFront:
        """Search quickly for plans with loops: return the front of the first loop place, as far as it is searched
        before ``over``. The front is empty if no plan there beats the ``known`` one (peak in bytes, latency in ns)."""
        return first_look(self._work, wanted, (self.tried_briefly, self.tried), known, over)

    def divided_front(
        self, wanted: PlanRequest, known: tuple[int, int] | None = None, *, brief: bool = False
    ) -> FissionFront:
        """Return the Pareto front of the step with loops, over all loop places.

        Skips places where no plan beats the ``known`` one (peak in bytes, latency in ns). ``brief`` searches with the
        low effort of `sketched`. Cases share the results.
        """
        work, tried = (with_little_effort(self._work), self.tried_briefly) if brief else (self._work, self.tried)
        return places_front(work, wanted, self._share, tried, known)

    @cached_property
    def normal(self) -> Graph:
        """Functionalized graph of the captured step, on which the search works."""
        verify(graph := functionalize(self.captured.graph))
        return graph

    @cached_property
    def untangled(self) -> Graph:
        """Functionalized graph without needless ordering edges."""
        verify(graph := untangle(self.normal))
        return graph

    @cached_property
    def lean(self) -> Graph:
        """The untangled graph in forms of scores and losses that are easy to cut (`magis.rewrite`)."""
        return with_lean_cross_entropy(with_flat_rows(with_short_rows(self.untangled)))

    @cached_property
    def aggregated(self) -> Graph:
        """The graph that fission splits: the lean one, with small calls merged if that pays."""
        verify(graph := quickest(self.lean, self.latency_ns))
        return graph

    @cached_property
    def digest(self) -> str:
        """Digest of the captured step, including an unplanned optimizer (its own `step()` runs after the plan)."""
        captured = self.captured if self.captured.behind is None else self.captured.original
        return digest(captured.graph)

    @cached_property
    def roofline(self) -> RooflineCosts:
        """Costs without measured workspaces: all of them are estimated."""
        return self.costs({})

    def costs(self, workspaces: Mapping[str, int]) -> RooflineCosts:
        """Return costs with known workspaces (signature -> bytes, else estimated), with slack and hurry."""
        prices = self._prices
        slack = self.slack if prices.device.link_bytes_per_s else 0.0
        return RooflineCosts(prices.device, prices.profile, workspaces, prices, slack, self.hurry)

    @cached_property
    def _prices(self) -> Prices:
        """Operator prices for searches, without a CPU's profile: plans must be equal on all machines."""
        gpu = torch.cuda.get_device_name() if self.source.device == "cuda" else ""
        device = find_device(self.source.device, gpu)
        return (UNPRICED if self.kind == "cpu" else self.pricing).prices(device)

    @property
    def device_model(self) -> DeviceModel:
        """Constants of the device."""
        return self._prices.device

    @cached_property
    def predicting(self) -> RooflineCosts:
        """Costs for predicted latencies: by the operator profile of this machine, if there is one."""
        prices = self.pricing.prices(self._prices.device)
        return RooflineCosts(prices.device, prices.profile, {}, prices)

    def workspaces(self, graph: Graph, *, runs: bool = True) -> Mapping[str, int]:
        """Return the workspace bytes measured on this machine for every operator of a graph, which is a whole step if
        `runs`. Empty (then workspaces are estimated) on other devices than the CPU, and where not even the smallest
        plan fits."""
        if self.kind != "cpu" or not self.may_run:
            return {}
        tail, limit = own_tail(self.captured, graph), None if self.runs else self.free_bytes
        if tail is not None:
            self.scratches.add(tail, limit, None)
            graph = without_state(before_update(graph))
        step = partial(self.stopped, graph) if self.runs and runs else None
        self.scratches.add(graph, limit, step)
        return self.scratches.known

    @cached_property
    def base_workspaces(self) -> Mapping[str, int]:
        """Workspaces of the original step, of its functionalized graph, and of the operators' recompute forms."""
        for graph in (self.captured.original.graph, self.normal):
            self.workspaces(graph)
        return dict(self.workspaces(redo_graph(self.normal), runs=False))

    # -- the original -------------------------------------------------------------------------------------------

    def simulate(self, captured: Captured) -> MemoryProfile:
        """Simulate eager's memory over the step, with the storage lifetimes seen during capture."""
        return self._profile(captured, self.workspaces(captured.graph))

    def _profile(self, captured: Captured, workspaces: Mapping[str, int]) -> MemoryProfile:
        costs, numbers = self.costs(workspaces), captured.numbers if self.kind == "cpu" else ()
        return replay(captured.graph, costs.workspace, deaths=captured.deaths, rounding=costs.rounding, numbers=numbers)

    @cached_property
    def original(self) -> Memory:
        """Simulated memory of the original step."""
        profile = self.simulate(self.captured.original)
        return Memory(profile.tensor_bytes, profile.peak_bytes)

    @cached_property
    def original_measured(self) -> Memory:
        """Measured memory of the original step."""
        step = self.eager()
        for _ in range(2):  # the first step makes the optimizer's state
            step.prepare()
            step.run()
        return self.measure(step)

    @cached_property
    def original_times_ms(self) -> tuple[float, ...]:
        """Times of the original step, timed alone."""
        return alone(whole_step(self.eager()), ROUNDS_ALONE, self.torch_device)

    def original_with(self, workspaces: Mapping[str, int]) -> Memory:
        """Simulate the original step's memory with the given workspaces (signature -> bytes); missing ones are 0."""
        known = {**dict.fromkeys(signatures(self.captured.original.graph), 0), **workspaces}
        profile = self._profile(self.captured.original, known)
        return Memory(profile.tensor_bytes, profile.peak_bytes)

    def simulate_graph(self, graph: Graph) -> Memory:
        """Predict the memory that this machine measures for a planned graph."""
        profile = self.replayed(graph, self.costs(self.workspaces(graph)))
        return Memory(profile.tensor_bytes, profile.peak_bytes)

    def replayed(self, graph: Graph, costs: RooflineCosts) -> MemoryProfile:
        """Simulate the memory of a planned graph at the given costs, including an unplanned optimizer."""
        whole = self.whole(graph)
        if whole is None:
            return replay(graph, costs.workspace, rounding=costs.rounding)
        return replay(whole.graph, costs.workspace, deaths=whole.deaths, rounding=costs.rounding)

    def is_hopeless(self, goal: Objective) -> bool:
        """Return True if an unplanned optimizer alone needs more than the memory limit, whatever the plan."""
        return self.captured.behind is not None and (goal.memory_limit or self.lower_bound) < self.lower_bound

    @cached_property
    def behind_ns(self) -> int:
        """Simulated latency of an unplanned optimizer, which runs after every step, eager or planned; 0 without one."""
        behind = self.captured.behind
        return 0 if behind is None else self.latency_ns(behind.graph)

    @cached_property
    def original_ns(self) -> int:
        """Simulated latency of the original step, without an unplanned optimizer."""
        if sends(self.captured.graph):
            return self.memo.get(("in order", self.digest), lambda: in_order_ns(self.normal, self.roofline))
        return self.latency_ns(self.captured.original.graph) - self.behind_ns

    def reserved(self, step: Graph | Captured, allocator: str = "", capacity: int | None = None) -> Reserved | None:
        """Simulate a CUDA caching allocator for eager's step, or a plan with an unplanned optimizer; None on a CPU."""
        if self.kind == "cpu":
            return None
        whole = self.whole(step) or step if isinstance(step, Graph) else step
        graph, deaths = (whole, None) if isinstance(whole, Graph) else (whole.graph, whole.deaths)
        made = simulated_allocator(allocator, device_memory(self.source.device), capacity)
        return reserved(graph, self.roofline.workspace, deaths, allocator=made)

    def reserved_bytes(self, step: Graph | Captured, allocator: str = "") -> int | None:
        """Predict the bytes that a CUDA caching allocator reserves; None on a CPU."""
        found = self.reserved(step, allocator)
        return None if found is None else found.reserved_bytes

    def latency_ns(self, graph: Graph) -> int:
        """Return the simulated latency of a graph without swaps: the sum over its operators."""
        return sum(self.roofline.nanoseconds(op, graph.values) for op in graph.ops)

    def predicted_ns(self, graph: Graph, planned_ns: int) -> int:
        """Return the latency to report for a graph: by this machine's profile of a CPU, if any; else ``planned_ns``."""
        if self.kind != "cpu" or self.pricing.profile is None:
            return planned_ns
        return sum(self.predicting.nanoseconds(op, graph.values) for op in graph.ops)

    def provenance(self, graph: Graph) -> Provenance:
        """Return the sources of the latency that is reported for a graph."""
        found, by = shares(self.predicting, graph), self.pricing
        return Provenance(
            found.measured, found.interpolated, found.estimated, found.error, by.source, by.digest, by.note
        )

    @cached_property
    def weight_bytes(self) -> int:
        storages = self.captured.graph.storages.values()
        return sum(storage.nbytes for storage in storages if storage.kind == "parameter")

    @property
    def lower_bound(self) -> int:
        """Lower bound of every plan's peak in bytes: persistent storages plus the largest need of one operator."""
        return self.floor.nbytes

    @cached_property
    def floor(self) -> LowerBound:
        """Lower bound of every plan's peak in bytes, with its breakdown."""
        known = self.base_workspaces if self.kind == "cpu" and self.may_run else {}
        return self.floor_at(self.costs(known))

    def floor_at(self, costs: RooflineCosts) -> LowerBound:
        """Return the lower bound of every plan's peak, with workspaces at the given costs."""
        graph = with_moved_state(self.untangled, first_states(self.untangled, self.host_limit))
        found, own = lower_bound(graph, costs.workspace, costs.rounding), self.traced.optimizer.own
        whole = self.whole(self.captured.graph)
        if own is None or whole is None:
            return found
        start = len(self.captured.graph.ops)
        return with_behind(found, f"{own.name}.step", whole.graph, costs.workspace, whole.deaths, costs.rounding, start)

    @property
    def predicted_bytes(self) -> int:
        """Free memory that a case needs: two modules with optimizer state beside one step's peak."""
        return self._step_bytes + 2 * self.captured.original.graph.persistent_bytes()

    @cached_property
    def _step_bytes(self) -> int:
        """Peak bytes of the original step, with estimated workspaces."""
        step, costs = self.captured.original, self.roofline
        return replay(step.graph, costs.workspace, deaths=step.deaths, rounding=costs.rounding).peak_bytes

    @cached_property
    def runs(self) -> bool:
        """True if cases run for real: the device is here, the step fits into its free memory, and is fast enough."""
        here = not (self.simulated_only or self.captured.sends)
        return here and self.predicted_bytes <= self.free_bytes and not self.too_slow

    @cached_property
    def too_slow(self) -> str:
        """Reason why a step that fits takes too long to run here; empty if it does not."""
        most = self._asked.running_seconds
        if most == math.inf or self.kind != "cpu" or self.predicted_bytes > self.free_bytes:
            return ""
        expected = self.expected_seconds(self.captured.original.graph, most / STEPS)
        return expected_too_slow(expected, most) or too_slow(self.eager, most)

    @cached_property
    def may_run(self) -> bool:
        """True if some step can run for real: the original one, or a planned one alone, going by the lower bound."""
        if self.runs or self.simulated_only or self.captured.sends or self.too_slow:
            return self.runs
        return self.floor_at(self.roofline).nbytes + self.captured.graph.persistent_bytes() <= self.free_bytes

    @cached_property
    def runs_together(self) -> bool:
        """True if the original and planned steps can alternate: on a CPU with memory for both, and unless random draws
        decide which operators run (both steps draw from one generator)."""
        if self.captured.expects and self._step_seed is not None:
            return False
        return self.kind == "cpu" and self.runs and self.predicted_bytes + self.original.peak_bytes <= self.free_bytes

    @cached_property
    def free_bytes(self) -> int:
        return free_device_memory(self.source.device)

    # -- running ------------------------------------------------------------------------------------------------

    def eager(self, *, shares: int = 1, stops: bool = False) -> EagerStep:
        """Build eager's step over ``shares`` equal shares of the batch. ``stops`` leaves out an unplanned optimizer."""
        work = self.fresh()
        rule = replace(work.optimizer, kind="gradients") if stops and work.optimizer.own is not None else work.optimizer
        by_shares = None if shares == 1 else loss_of_shares(work, shares)
        return EagerStep(
            work.module, work.inputs, work.targets, work.loss_fn, rule,
            explicit_attention=work.explicit_attention, around=self._around,
            transform=None if by_shares is None else lambda _: by_shares,
            seed=self._step_seed,
        )  # fmt: skip

    def generated(self, graph: Graph) -> GraphStep | BehindStep:
        """Build a step that runs a graph, followed by an unplanned optimizer, if there is one."""
        step, own = self.stopped(graph), self._settled.optimizer.own
        return step if own is None else BehindStep(step, own, self.captured.graded)

    def stopped(self, graph: Graph) -> GraphStep:
        """Build a step that runs a graph, without an unplanned optimizer."""
        work = self.fresh()
        return GraphStep(
            graph if work.optimizer.own is None else without_state(graph),
            work.module, work.inputs, work.targets, work.optimizer, device=self.torch_device,
            loss_fn=work.loss_fn, seed=self._step_seed, cached=self.captured.cached,
        )  # fmt: skip

    def measure(self, step: Step, *, compiled: bool = False) -> Memory:
        """Measure the memory of a step that has run before. For ``compiled`` code, tensor bytes include scratch."""
        persistent = (step.graph if isinstance(step, GraphStep) else self.captured.graph).persistent_bytes()
        if isinstance(step, (EagerStep, BehindStep)):
            step.settle()
        step.prepare()
        peak = window_peak(step.run, self.torch_device)
        step.prepare()
        tensors = peak.peak_bytes if compiled else tensor_peak(step.run)
        reserved_bytes = None if peak.reserved_bytes is None else persistent + peak.reserved_bytes
        return Memory(persistent + tensors, persistent + peak.peak_bytes, reserved_bytes)
