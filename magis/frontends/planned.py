"""From module, example batch and limit to a plan: the implementation of `magis.optimize`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture import OptimizerSpec, Workload
from magis.capture.eager_run import Heard
from magis.capture.names_in_code import Reads
from magis.capture.number_places import OFF, NumberPlaces
from magis.capture.python_state import deep_copy
from magis.capture.refusals import BranchError, check_contents
from magis.capture.side_effects import BUFFER, DrawError, observe_step
from magis.capture.workload import Batch, own_loss, with_keywords
from magis.errors import CaptureError, UsageError, VerifyError
from magis.frontends.branching import check_outlines, outline
from magis.frontends.compiled_plans import compiled, fastest
from magis.frontends.fitting import latency_ratio_of
from magis.frontends.limits import AUTOCAST, Limits, PlanReport
from magis.frontends.number_inputs import NumberInputs, with_number_inputs, with_numbers
from magis.frontends.optimizer_behind import Behind, behind_step
from magis.frontends.optimizer_state import Guards
from magis.frontends.plan_files import SavedPlan
from magis.graph import Graph, digest, verify
from magis.ops.call import follows_data
from magis.ops.generators import generators_kept, seed_all
from magis.ops.python_objects import told
from magis.ops.raising import torn_by, undone, updates_last
from magis.planner.kept_plans import verify_plan
from magis.planner.planning import plan
from magis.planner.plans import Decisions
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.printable import warn
from magis.progress import Progress
from magis.rewrite.moved_state import host_bytes
from magis.runtime.codegen import CompiledPlan
from magis.units import format_bytes, share_of

T = TypeVar("T")
OTHER = 20261123  # seed for a second draw from the generators, which shows what depends on random numbers
STALE = "keeps results of the step that was planned, not of the last one: leave tensors in attributes of modules"


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan for batches of one kind."""

    graph: Graph
    graded: tuple[str, ...]
    """Names of parameters with a gradient, in the order of the graph's outputs if it returns gradients."""
    digest: str
    """Digest of the captured step for which the plan is valid; of its outline if the forward draws on the host."""
    rule: OptimizerSpec
    report: PlanReport
    guards: Guards
    cached: Mapping[str, Tensor]
    """Tensors that function caches hold, by their names in the graph."""
    counted: tuple[tuple[str, int], ...]
    """Numbers that the forward increments: path from its module (`model`) or loss (`loss`), and the increment."""
    results: tuple[str, ...]
    """Paths at which the forward stores tensors: outputs of the graph after the loss."""
    state: frozenset[str]
    """Paths of those attributes and buffers that the next step reads."""
    drawn: bool
    """True if the graph may differ from step to step, as the forward draws random numbers on the host."""
    captured: Graph
    """The captured step, with which audits compare; a saved plan has its number inputs as constants."""
    heard: Heard | None
    """Layouts and branches recorded from eager's run; None if the capture needed none."""
    capture_seconds: float
    decisions: Decisions | None = None
    """Order and flags of the search, for steps that differ in sizes or numbers only; None if the plan has a loop."""
    inputs: NumberInputs | None = None
    """Python numbers that are inputs of the graph; None if all are constants."""
    compiled: CompiledPlan | None = None
    """The plan with compiled stretches; None if it runs operator by operator."""

    def constant(self, numbers: Mapping[str, float]) -> tuple[Graph, str]:
        """Return the plan with these numbers as constants, and the digest of its step."""
        if self.inputs is None:
            return self.graph, self.digest
        return with_numbers(self.graph, numbers), digest(with_numbers(self.captured, numbers))


class Together(Protocol):
    """Ranks that capture and plan their steps together."""

    def all_or_none(self, what: str, make: Callable[[], T]) -> T:
        """Return the result of `make` on this rank; raise on all ranks if `make` raises on one."""

    def agreed(self, subject: Callable[[], ComparedStep], planned: Callable[[ComparedStep], Planned]) -> Graph:
        """Return the plan that one of the ranks with an equal step makes."""


def planned(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Batch,
    rule: OptimizerSpec,
    limits: Limits,
    *,
    device: str,
    autocast: torch.dtype | None,
    update: str,
    optimizer: Optimizer | None = None,
    saved: SavedPlan | None = None,
    known: Mapping[str, Planned] | None = None,
    decided: Collection[Decisions] = (),
    numbers: Collection[str] = (),
    ranks: Together | None = None,
    tell: Progress | None = None,
) -> Planned | None:
    """Capture the step and plan it, or use `saved`, a plan that was made earlier.

    `optimizer` is called after the planned step: peaks are those of both. `known` are plans by digest, to use again for
    an equal graph; `decided` are decisions for similar steps, to try first. The Python numbers at the paths `numbers`
    become graph inputs if possible. `ranks` agree on one plan; `tell` is told of progress. Returns None if the forward
    draws on the host and the update is part of the step, which would miss that torch skips layers that are left out.

    Raises CaptureError for a step that is no single static graph, UsageError if no plan is found within the limit.
    """
    look = partial(subject_now, module, loss_fn, batch, rule, device, autocast, limits, tell)
    cast = None if autocast is None else str(autocast).removeprefix("torch.")
    capture = partial(captured_step, look, cast, alone=ranks is None)
    compare = partial(compared_step, module, loss_fn, batch, limits=limits, update=update, optimizer=optimizer)
    if ranks is not None:
        return _planned_together(capture, compare, ranks, saved, decided)
    seen = compare(capture())
    if saved is None:
        seen = seen.with_inputs(look, numbers)
    if seen.drawn and rule.kind != "gradients":
        return None
    seen.check_repeats(look)
    same = (known or {}).get(seen.digest)
    if same is not None:
        return seen.planned(same.graph, replace(same.report, update=seen.update), same.decisions)
    return seen.plan(saved, decided)


def _planned_together(
    capture: Callable[[], tuple[Subject, Reads]],
    compare: Callable[[tuple[Subject, Reads]], ComparedStep],
    ranks: Together,
    saved: SavedPlan | None,
    decided: Collection[Decisions],
) -> Planned:
    """Return the plan that all ranks run: that of the first rank, or of the file that all ranks read."""
    # the eager step for the comparison has collectives: all ranks must run it, or none
    captured = ranks.all_or_none("step", capture)
    plans: list[Planned] = []

    def plan_of(step: ComparedStep) -> Planned:
        plans.append(step.plan(saved, decided))
        return plans[0]

    seen = ranks.all_or_none("step", partial(compare, captured))
    chosen = ranks.agreed(lambda: seen, plan_of)
    return plans[0] if plans else seen.taken(chosen, "as the first rank found")


@dataclass(frozen=True, eq=False)
class ComparedStep:
    """A captured step that agrees with eager, and all that planning needs of it."""

    subject: Subject
    reads: Reads
    guards: Guards
    behind: Behind
    rule: OptimizerSpec
    limits: Limits
    update: str
    digest: str
    """Digest of the step; of its outline if the forward draws on the host."""
    batch: Batch
    inputs: NumberInputs | None = None

    def with_inputs(self, look: Callable[[], Subject], paths: Collection[str]) -> ComparedStep:
        """Return the step with the numbers at these paths as graph inputs; unchanged if that is not possible."""
        paths = [*paths, *(f"{OFF}{name}" for name in self.subject.captured.moved)]
        # Increments of counters may depend on these numbers: watch the counters, too.
        counted = frozenset(path for path, _ in self.reads.counted if paths)
        reads = self.reads.more({path.rpartition(".")[2] for path in counted}) if counted else self.reads
        guards = self.guards.of_reads(reads) if counted else self.guards
        places, moved = NumberPlaces(guards.watched), reads.moved | counted
        wanted = paths or moved or self.drawn
        tensors = partial(self.guards.tensors, self.batch)
        found = with_number_inputs(look, self.subject, places, paths, moved, tensors) if wanted else None
        if found is None:
            return self
        subject, inputs = found
        guards = guards.of_contents(subject.captured.contents)
        reads = replace(reads, counted=(), moved=moved) if counted else reads
        return replace(self, subject=subject, digest=subject.digest, inputs=inputs, guards=guards, reads=reads)

    def check_repeats(self, look: Callable[[], Subject]) -> None:
        """Raise CaptureError if numbers change at every step and cannot become graph inputs."""
        check_contents(self.subject.captured.moved)
        if self.inputs is None and self.reads.moved:
            raise CaptureError(
                f"every forward changes {told(min(self.reads.moved))}, which a captured step would not", hint=BUFFER
            )
        if self.drawn:
            with generators_kept():
                seed_all(OTHER)
                check_outlines(self.subject.captured.graph, look().captured.graph)

    @property
    def drawn(self) -> bool:
        """True if the forward draws random numbers on the host."""
        return self.subject.captured.drawn

    @property
    def original_bytes(self) -> int:
        """Peak bytes of eager's step, and of the optimizer after it."""
        return self.behind.peak(self.subject.original.peak_bytes)

    def planned(self, graph: Graph, report: PlanReport, decisions: Decisions | None = None) -> Planned:
        """Return the plan with the guards and records of this step."""
        captured, subject = self.subject.captured, self.subject
        code: CompiledPlan | None = None
        if self.limits.compiler is not None:
            kept = _kept_bytes(graph) + self.batch.copied
            code, report = compiled(self.limits.compiler, graph, subject, self.behind, kept, report)
        return Planned(
            graph, captured.graded, self.digest, self.rule, report, self.guards, captured.cached, self.reads.counted,
            captured.results, self.reads.state, captured.drawn, captured.graph, captured.heard,
            subject.capture_seconds, decisions, self.inputs, code,
        )  # fmt: skip

    def plan(self, saved: SavedPlan | None, decided: Collection[Decisions] = ()) -> Planned:
        """Return the best plan within the limits: that of `decided` without a search if it meets them, or `saved`.
        Raises UsageError if no plan is found, or `saved` is of another step or exceeds the limit here."""
        if saved is None:
            return self._search_plan(decided)
        again = "leave out plan= to search anew"
        if self.digest != saved.digest:
            raise UsageError(
                "the saved plan is of another step: its model, loss, optimizer or batch differ", hint=again
            )
        saved.check_limit(self.limits.asked)
        try:
            verify_plan(saved.graph, self.subject)
        except VerifyError as error:
            raise UsageError(f"the saved plan does not compute this step: {error}", hint=again) from None
        found = self.taken(saved.graph, "as saved")
        limit, peak = found.report.limit_bytes, found.report.planned_bytes
        if limit is not None and peak > limit:
            needs = f"{format_bytes(peak)} here, the limit is {format_bytes(limit)}"
            raise UsageError(f"the saved plan needs {needs}", hint=again)
        return found

    def taken(self, graph: Graph, fission: str) -> Planned:
        """Return a plan that another rank or an earlier run made, with its figures on this step."""
        subject = self.subject
        peak = self.behind.peak(subject.simulate_graph(graph).peak_bytes + _kept_bytes(graph))
        ratio = latency_ratio_of(subject, subject.latency_ns(graph))
        limit = self.limits.bytes_of(self.original_bytes)
        report = PlanReport(
            self.original_bytes, peak, limit, ratio, 0, 0, fission, self.update, torn_by(graph), 0.0, host_bytes(graph)
        )
        return self.planned(graph, report)

    def _search_plan(self, decided: Collection[Decisions]) -> Planned:
        find = partial(self._found, decided)
        return find(0) if self.limits.compiler is None else fastest(find, lambda found: found.report)

    def _found(self, decided: Collection[Decisions], moved: int) -> Planned:
        """Return the best plan within the limit, moved by so many bytes."""
        subject, behind, limits = self.subject, self.behind, self.limits
        original = self.original_bytes
        asked = limits.bytes_of(original)
        limit = None if asked is None else asked + moved
        apart = behind.state_bytes + _kept_bytes(subject.captured.graph)
        search = partial(
            plan,
            subject,
            latency_limit_ns=share_of(limits.latency_ratio, subject.latency_ns(subject.captured.original.graph)),
            budget=limits.budget,
            seconds=limits.seconds,
            seed=0,
            stored=None,
            known=decided,
            tell=subject.tell,
        )
        found = search(memory_limit=None if limit is None else max(1, limit - apart))
        peak = behind.peak(found.peak + _kept_bytes(found.graph))
        kept = limit is None or (found.feasible and peak <= limit)
        granted = limits.granted + moved
        if not kept and peak <= granted:  # a smaller batch may use what a larger one was allowed
            found, limit = search(memory_limit=max(1, granted - apart)), granted
            peak = behind.peak(found.peak + _kept_bytes(found.graph))
            kept = found.feasible and peak <= limit
        graph, peak = self._at_the_end(found.graph, peak, peak if limit is None else limit)
        ratio = latency_ratio_of(subject, found.latency_ns)
        wanted = None if limit is None else limit - moved
        report = PlanReport(
            original, peak, wanted, ratio, found.recomputed_ops, found.swapped_bytes, found.fission, self.update,
            torn_by(graph), found.seconds, host_bytes(graph),
        )  # fmt: skip
        made = self.planned(graph, report, found.decisions)
        needed = made.report.planned_bytes
        if wanted is not None and not kept and (made.compiled is None or needed > wanted):
            raise UsageError(
                f"no plan found that needs at most {format_bytes(wanted)}: the best needs {format_bytes(needed)}, none"
                f" less than {format_bytes(behind.peak(subject.lower_bound))}, eager {format_bytes(original)}",
                hint="raise the limit",
            )
        return made

    def _at_the_end(self, graph: Graph, peak: int, limit: int) -> tuple[Graph, int]:
        """Move all updates behind everything else, if the plan then still meets the limit: a step that runs out of
        memory then has updated nothing. Returns the plan and its peak bytes."""
        copies_overlap = host_bytes(graph) and self.subject.roofline.link_bytes_per_s
        if not torn_by(graph) or peak > limit or copies_overlap:
            return graph, peak
        late = updates_last(graph)
        try:
            verify(late)
        except VerifyError:  # a result may reuse the memory of a gradient
            return graph, peak
        highest = self.behind.peak(self.subject.simulate_graph(late).peak_bytes + _kept_bytes(late))
        return (late, highest) if highest <= limit else (graph, peak)


def captured_step(look: Callable[[], Subject], cast: str | None, *, alone: bool) -> tuple[Subject, Reads]:
    """Capture the step and observe what its forward reads. Raises CaptureError for a step that is no single static
    graph."""
    subject = look()
    heard: Heard | None = None
    reads: Reads | None = None
    draws = False
    while reads is None:
        try:
            reads = observe_step(subject.workload, cast, heard, draws=draws)
        except BranchError:  # on data: as eager's run went
            if heard is not None:
                raise
            heard = subject.captured.heard
        except DrawError:  # every step is then captured again
            if draws:
                raise
            draws = True
    step = subject.captured
    of_batch = any(name.startswith(("input:", "target:")) for name in step.contents)
    if not alone and (step.results or reads.moved):
        raise UsageError(
            f"the forward leaves {told([*step.results, *reads.moved][0])} changed, and what is planned is a copy",
            hint="return it instead",
        )
    if not alone and (step.drawn or of_batch or follows_data(step.graph)):
        raise UsageError(
            "the forward reads numbers off data or draws on the host, and ranks that share a module might part there",
            hint="leave that out of the model, or train it without magis.optimize",
        )
    if reads.stale:
        warn(f"{reads.stale[0]} {STALE}", stacklevel=2)
    return subject, reads


def compared_step(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Batch,
    captured: tuple[Subject, Reads],
    *,
    limits: Limits,
    update: str,
    optimizer: Optimizer | None,
) -> ComparedStep:
    """Compare a captured step with eager's, and collect what planning needs. Raises CaptureError if they differ."""
    subject, reads = captured
    _ = subject.conformance
    found = subject.captured
    guards = Guards(module, loss_fn, batch, reads, found.contents, found.kept)
    rule = subject.traced.optimizer
    behind = behind_step(subject, optimizer, dict(with_keywords(module, batch).named_parameters()))
    digest = outline(found.graph) if found.drawn else subject.digest
    return ComparedStep(subject, reads, guards, behind, rule, limits, f"{update}{behind.note}", digest, batch)


def _kept_bytes(graph: Graph) -> int:
    """Return the bytes of the copies with which a step that raises can be undone; 0 if nothing in it may raise."""
    return sum((undone(graph) or {}).values())


def subject_now(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Batch,
    rule: OptimizerSpec,
    device: str,
    autocast: torch.dtype | None,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    tell: Progress | None = None,
) -> Subject:
    """Return the step as eager would run it with the current state of the generators."""
    name = f"{type(module).__module__}:{type(module).__qualname__}"
    loss = loss_fn if loss_fn is not None else own_loss
    here = Workload(name, with_keywords(module, batch), batch.inputs, batch.targets, loss, rule)
    if device != "cpu":  # steps for any device are traced on the CPU
        here = replace(
            here,
            module=deep_copy(here.module).cpu(),
            inputs=tuple(tensor.cpu() for tensor in here.inputs),
            targets=tuple(tensor.cpu() for tensor in here.targets),
        )
    # Do not time a copy of the module: closures of its patched methods would change the user's own module.
    source = Source(name, lambda _seed: here, AUTOCAST[autocast], device, 0, seeded=False, keeps_results=True)
    step = Subject(replace(source, running_seconds=math.inf), slack=limits.slack, host_limit=limits.host_limit)
    step.tell = tell or step.tell
    return step
