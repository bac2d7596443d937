"""Execution of one case: capture, plan, run, measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from magis import registry
from magis.cases.case_rows import (
    NOT_BOTH,
    NOT_COMPARED,
    NOT_RUN,
    Replayed,
    attempt,
    fits_alone,
    other_result,
    ran_out,
    run_alone,
    too_large,
)
from magis.cases.check import growth
from magis.cases.comparison import TIMING_ROUNDS, TimingLooks
from magis.cases.contenders import Candidate, check_precision, make_candidate, numbers_of, strategy_of
from magis.cases.kept_results import KeptResults
from magis.errors import UsageError
from magis.graph import Graph, every_op
from magis.planner.bench import Bench, Make, products_of
from magis.planner.planning import plan, planning_workspaces, within_reserved
from magis.planner.plans import Plan, worst_latency_ratios
from magis.planner.search_progress import compiling_told
from magis.planner.subject import Subject
from magis.progress import Progress
from magis.results import Case, CaseResult, Memory, RatioInterval, SearchOutcome, SearchStats, StepFigures, Timelines
from magis.runtime.behind_step import BehindStep
from magis.runtime.measure import collector_spared
from magis.runtime.steps import EagerStep, Step
from magis.simulate.peak_breakdown import changes
from magis.strategies.distributed_names import is_planned
from magis.strategies.strategy_names import PLANS, RESERVED, SEARCHES, check_limit_of, family
from magis.units import is_number, share_of


def run_case(
    case: Case,
    *,
    cache: Bench | None = None,
    make: Make | None = None,
    planning_workspaces: Mapping[str, int] | None = None,
    expected_graph: str | None = None,
    latency_bounds: Sequence[float] = (),
    rough: bool = False,
    progress: Progress | None = None,
    timelines: bool = False,
    growing: bool = False,
    snapshots: Callable[[str], Path] | None = None,
) -> CaseResult:
    """Run one case and return its result. Raises MagisError if the step cannot be captured or run.

    ``make`` builds the workload from the seed, if the model's name does not. ``planning_workspaces`` (operator
    signature -> bytes) and ``expected_graph`` (digest) are stored in a baseline: if the graph is unchanged, planning
    uses them, for the same plan on every machine. Timing continues while one of ``latency_bounds`` is inside the
    latency ratio's interval (`StoppingRule`), in two measurements; with ``rough`` it stops early, for a ratio that is
    neither compared nor stored. ``progress`` is called with progress messages. ``timelines`` adds the time lines of
    both steps, ``growing`` the growth of a user's network from step to step. ``snapshots``
    returns the file for a memory snapshot of the "original" or "optimized" step, if that is predicted by operators.
    """
    with ExitStack() as stack:
        bench = cache if cache is not None else stack.enter_context(closing(Bench()))
        subject = bench.subject(case, make)
        kind = family(case.strategy)
        by: Callable[[str], Callable[..., CaseResult]] = partial(registry.load, "strategy")
        told: Progress = stack.enter_context(compiling_told(progress)) if progress else lambda _text: None
        check_precision(case)
        if kind == "ort":
            return by(kind)(case, subject, told, latency_bounds, rough=rough)
        keeps = None if timelines or snapshots else bench.keeps(case)
        results = None if keeps is None else KeptResults(keeps, subject, case)
        if kind == "distributed":
            ranked = by("planned" if is_planned(case.strategy) else kind)
            pool = bench.pool_for(subject, make)
            key = results.key(pooled=pool is not None) if results else ""
            return _load_or_run(bench, results, key, lambda: ranked(case, subject, pool, told))
        run = CaseRun(case, subject, told, latency_bounds, rough, timelines, growing, snapshots)
        with collector_spared():
            key = results.key(planning_workspaces, expected_graph, latency_bounds, rough=rough) if results else ""
            return _load_or_run(bench, results, key, lambda: run.result(planning_workspaces, expected_graph))


def _load_or_run(bench: Bench, results: KeptResults | None, key: str, run: Callable[[], CaseResult]) -> CaseResult:
    """Return the cached result of the key, else run the case and cache the result."""
    if results is None:
        return run()
    bench.remember(results.case, key)
    return results.load(key) or results.save(key, run())


@dataclass(frozen=True)
class _RunFigures:
    """Measured memory and milliseconds of each step (None or (): it did not run), with the reason in ``note``."""

    original: Memory | None = None
    original_ms: tuple[float, ...] = ()
    optimized: Memory | None = None
    optimized_ms: tuple[float, ...] = ()
    ratio: RatioInterval | None = None
    numbers: str = NOT_RUN
    note: str = ""


@dataclass(eq=False)
class CaseRun:
    """The run of one case. After ``result``, ``graph`` is the plan's graph, None except for "magis"."""

    case: Case
    subject: Subject
    progress: Progress = lambda _text: None
    latency_bounds: Sequence[float] = ()
    rough: bool = False
    timelines: bool = False
    growing: bool = False
    snapshots: Callable[[str], Path] | None = None
    graph: Graph | None = None

    def __post_init__(self) -> None:
        check_amounts(self.case)
        self.subject.tell = self.progress
        self._strategy = strategy_of(self.case, self.subject)

    def result(self, stored: Mapping[str, int] | None, expected_graph: str | None) -> CaseResult:
        """Run the case and return its result, given ``planning_workspaces`` and ``expected_graph`` of `run_case`."""
        with products_of(self.subject.source.dtype):
            subject, case = self.subject, self.case
            self.progress("capturing")
            _ = subject.conformance  # first, since it may correct the layouts of the captured step
            original_ns = subject.latency_ns(subject.captured.original.graph)
            if subject.kind == "cpu":
                self.progress("timing one step")
            measured, refusal = None, ""
            if subject.runs:
                self.progress("measuring the original")
                measured = attempt(lambda: subject.original_measured)
                refusal = "" if measured else ran_out(subject)
            elif not subject.simulated_only:  # simulated devices need no reason
                refusal = subject.too_slow or too_large(subject)
            reference = measured or subject.original
            table = planning_workspaces(subject, stored, expected_graph)
            original_bytes = reference.peak_bytes
            if case.memory_limit_of == RESERVED:
                predicted = subject.reserved_bytes(subject.captured.original, case.allocator)
                original_bytes = reference.reserved_bytes or predicted or 0
            limit = case.memory_limit or share_of(case.memory_ratio, original_bytes)
            if case.strategy in PLANS:
                candidate = self._plan_candidate(table, limit, original_ns, reference)
            else:
                candidate = make_candidate(subject, self._strategy, case.allocator)
            if measured is not None:
                outcome = self._run_both(candidate, measured)
            else:
                outcome = self._run_only_optimized(candidate, refusal)
            return self._assemble(candidate, outcome, limit, original_ns)

    def _plan_candidate(
        self, table: Mapping[str, int] | None, limit: int | None, original_ns: int, reference: Memory
    ) -> Candidate:
        case, subject = self.case, self.subject
        self.progress("searching")
        target = limit
        if limit is not None and table is not None and case.memory_limit_of != RESERVED:
            # The limit of the baseline's machine: the plan must not depend on this machine's workspaces.
            stored = subject.original_with(table) if subject.kind == "cpu" else reference
            target = case.memory_limit or share_of(case.memory_ratio, stored.peak_bytes)
        latency_limit = share_of(case.latency_ratio, original_ns)
        if target is None and latency_limit is None:
            raise UsageError("a magis case needs a memory limit or a latency ratio")

        def search(nbytes: int | None, seconds: float | None, stored: Mapping[str, int] | None = table) -> Plan:
            return plan(
                subject,
                memory_limit=nbytes,
                latency_limit_ns=latency_limit,
                budget=case.budget,
                seconds=seconds,
                seed=case.seed,
                stored=stored,
                search=case.search,
                tell=self.progress,
            )

        if target is not None and case.memory_limit_of == RESERVED:
            found = within_reserved(subject, target, case.seconds, search, case.allocator)
        else:
            found = search(target, case.seconds)
        portable = True
        if table is not None and limit is not None and case.memory_limit_of != RESERVED and found.feasible:
            portable = subject.simulate_graph(found.graph).peak_bytes <= limit
        if not portable:
            self.progress("searching with this machine's workspaces")
            left = None if case.seconds is None else max(case.seconds - found.seconds, case.seconds / 10)
            found = search(limit, left, None)
        self.graph = found.graph
        outcome = {each.name: getattr(found, each.name) for each in fields(SearchOutcome)}
        worst, halved = worst_latency_ratios(subject, found.graph)
        stats = SearchStats(
            **outcome, changes=changes(found.graph), worst_latency_ratio=worst, halved_latency_ratio=halved
        )
        whole = subject.whole(found.graph)
        step = Replayed(subject, found.graph) if whole is None else Replayed(subject, whole.graph, whole)
        return Candidate(
            subject.simulate_graph(found.graph),
            found.latency_ns,
            lambda _stack: subject.generated(found.graph),
            stats,
            found.workspaces,
            subject.reserved_bytes(found.graph, case.allocator),
            step,
            portable=portable,
        )

    def _run_only_optimized(self, candidate: Candidate, refusal: str) -> _RunFigures:
        """Run the optimized step alone if it fits into memory, else nothing."""
        found = None
        if self.case.strategy != "eager" and fits_alone(self.subject, candidate.simulated.peak_bytes):
            found = self._run_alone(candidate)
            refusal += "" if found else "; nor does the optimized step fit, which ran out of memory too"
        if found is None:
            return _RunFigures(note=f"{NOT_RUN}: {refusal}" if refusal else "")
        note = f"the original was not run: {refusal}"
        return replace(found, numbers=NOT_COMPARED, note=note)

    def _run_alone(self, candidate: Candidate) -> _RunFigures | None:
        self.progress("measuring and timing the optimized step alone")
        with ExitStack() as stack:
            found = run_alone(self.subject, lambda: candidate.make(stack))
        return None if found is None else _RunFigures(optimized=found.memory, optimized_ms=found.times_ms)

    def _run_both(self, candidate: Candidate, measured: Memory) -> _RunFigures:
        """Run and compare both steps, or each alone if both together do not fit into memory."""
        subject = self.subject
        if self.case.strategy == "eager":
            times = subject.original_times_ms
            return _RunFigures(measured, times, measured, times, numbers="reference")
        found = attempt(lambda: self._compare(candidate, measured))
        if found is not None:
            return found
        single = self._run_alone(candidate)
        note = "" if single else "; the optimized step ran out of memory even alone"
        return replace(
            single or _RunFigures(),
            original=measured,
            original_ms=attempt(lambda: subject.original_times_ms) or (),
            numbers=NOT_BOTH,
            note=f"not compared with the original: both together do not fit{note}",
        )

    def _compare(self, candidate: Candidate, measured: Memory) -> _RunFigures:
        subject, rounds = self.subject, self.case.timing_rounds
        looks = TimingLooks(
            subject.torch_device,
            rounds or TIMING_ROUNDS,
            tuple(self.latency_bounds),
            rough=self.rough and rounds is None,
            turning=subject.runs_together and not self._is_compiled,  # which nobody can interrupt
        )
        with ExitStack() as stack:
            eager = subject.eager()
            step = candidate.make(stack)
            self.progress("compiling the step, and comparing numbers" if self._is_compiled else "comparing numbers")
            numbers = numbers_of(candidate, subject, self.graph, eager, step, self.case.seed)
            self.progress("measuring memory")
            memory = subject.measure(step, compiled=self._is_compiled)
            self.progress("timing")
            found = [looks.look(eager, step)]
            if self._is_compiled and looks.wants_another(found[0]):  # compiling again would take a minute
                found.append(looks.look(eager, step))
            del eager, step
        if not self._is_compiled and looks.wants_another(found[0]):
            self.progress("timing again")
            with ExitStack() as stack:
                found.append(looks.look(subject.eager(), candidate.make(stack)))
        whole = found[0].whole
        return _RunFigures(measured, whole.first_ms, memory, whole.second_ms, looks.ratio(found), numbers)

    @property
    def _is_compiled(self) -> bool:
        return self._strategy is not None and not self._strategy.is_captured

    def _assemble(self, candidate: Candidate, outcome: _RunFigures, limit: int | None, original_ns: int) -> CaseResult:
        case, subject, opt_step = self.case, self.subject, candidate.replayed
        ori_step = Replayed(subject, subject.captured.original.graph, subject.captured.original)
        eager = subject.reserved_bytes(subject.captured.original, case.allocator)
        expected_ns = subject.predicted_ns(subject.captured.original.graph, original_ns)
        original = StepFigures(
            subject.original,
            expected_ns / 1e6,
            outcome.original,
            outcome.original_ms,
            eager,
            ori_step.at_peak(),
        )
        planned_ns = candidate.simulated_ns
        opt = StepFigures(
            candidate.simulated,
            (planned_ns if opt_step is None else subject.predicted_ns(opt_step.graph, planned_ns)) / 1e6,
            outcome.optimized,
            outcome.optimized_ms,
            candidate.reserved,
            None if opt_step is None else opt_step.at_peak(),
        )
        if case.strategy == "eager":
            opt = original
        growing = self.growing and case.strategy == "eager" and subject.source.of_user
        latency = original.measured_ms or original.simulated_ms
        partings = [_byte_difference("original", original, ori_step, subject.eager)]
        graph = self.graph or (opt_step.graph if opt_step and subject.captured.behind is None else None)
        if opt_step is not None and opt is not original and graph is not None:
            partings.append(_byte_difference("optimized", opt, opt_step, partial(subject.generated, graph)))
        whole = None
        if self.timelines:
            planned = None if opt_step is None else (opt_step.spans(), opt_step.lives())
            spans, lives = planned or ((), None)
            whole = Timelines(ori_step.spans(), spans, ori_step.lives(), lives)
        if self.snapshots is not None:
            for name, step in (("original", ori_step), ("optimized", opt_step if opt is not original else None)):
                if step is not None:
                    registry.load("snapshot", "step")(self.snapshots(name), step, case.allocator)
        found, stats = other_result(case, subject, original, opt), candidate.stats
        if limit is not None and case.memory_limit_of == RESERVED and opt.needed_bytes(RESERVED) > limit:
            # predicted reserved bytes may be off, since the allocator's initial state differs between runs
            stats = replace(stats, feasible=False)
        # part of the identity, since other prices give other plans; on a CPU planning uses none
        prices = {"profile": subject.pricing.digest} if subject.pricing.digest and subject.kind != "cpu" else {}
        return replace(
            found,
            identity={**found.identity, **_unlike_others(outcome, subject), **prices},
            ratio=outcome.ratio,
            memory_limit_bytes=None if self._is_compiled else limit,  # of "magis+compile": the unfused graph's
            latency_limit_ms=None if case.latency_ratio is None else case.latency_ratio * latency,
            lower_bound_bytes=subject.lower_bound,
            bound=str(subject.floor),
            numbers=outcome.numbers,
            note="; ".join(filter(None, _notes(outcome.note or candidate.note, subject, ori_step.graph, partings))),
            search=stats,
            provenance=subject.provenance((opt_step or ori_step).graph),
            planning_workspaces=dict(candidate.workspaces),
            off_by=candidate.off_by,
            priced=candidate.priced,
            portable=candidate.portable and not self._is_compiled,
            growth=growth(subject) if growing else None,
            timelines=whole,
        )


TORCHS = ("aten.", "prims.", "magis.", "c10d.", "_c10d_functional.")
"""Prefixes of operators whose workspace is known."""


def _notes(first: str, subject: Subject, graph: Graph, partings: Sequence[str]) -> Iterator[str]:
    """Yield the notes on a case, in order."""
    yield from (first, subject.scratches.note)
    custom = sorted({op.target for op, _ in every_op(graph) if not op.target.startswith(TORCHS)})
    if custom and subject.source.device.startswith("sim:"):
        more = f" and {len(custom) - 1} more" if custom[1:] else ""
        yield f"what custom operators take inside is not simulated: {custom[0]}{more}"
    own = subject.traced.optimizer.own
    if own is not None and subject.kind != "cpu" and not own.is_torchs:
        yield f"{own.name}.step is simulated as its code runs on a CPU"
    yield from partings


def _byte_difference(name: str, figures: StepFigures, step: Replayed, make: Callable[[], Step]) -> str:
    """Return a note on the first operator whose measured bytes differ from the simulation; "" without one."""
    seen, simulated = figures.measured, figures.simulated
    if seen is None or step.subject.kind != "cpu" or seen.peak_bytes == simulated.peak_bytes:
        return ""
    ready = make()
    for _ in range(2):  # the first step makes the optimizer's state
        ready.prepare()
        ready.run()
    if isinstance(ready, (EagerStep, BehindStep)):
        ready.settle()
    ready.prepare()
    found = attempt(lambda: step.first_difference(ready.run))
    return "" if found is None else f"the {name} step's bytes part from the simulated ones at {found}"


def _unlike_others(outcome: _RunFigures, subject: Subject) -> dict[str, str]:
    """Return an addition to the device identity for a step that did not fit, to compare only with such figures."""
    if not outcome.note:
        return {}
    if outcome.original is None and outcome.optimized is None:
        return {"simulated": "too slow to run" if subject.too_slow else "too large to run"}
    return {"simulated": "not compared" if outcome.original else "the original, too large to run"}


def check_amounts(case: Case) -> None:
    """Raise UsageError for a limit or budget that is not above 0, or an invalid search or slack."""
    amounts = {"memory ratio": case.memory_ratio, "latency ratio": case.latency_ratio, "budget": case.budget}
    amounts |= {"memory limit": case.memory_limit, "cap in seconds": case.seconds}
    for name, amount in amounts.items():
        if amount is not None and not (is_number(amount) and amount > 0):
            raise UsageError(f"the {name} of a case must be a number above 0, not {amount!r}")
    if (case.memory_ratio or 0) > 1:
        raise UsageError(f"the memory ratio of a case is {case.memory_ratio}", hint="80% of eager's peak is 0.8")
    if case.search not in SEARCHES:
        raise UsageError(f"unknown search {case.search!r}", hint=f"choose from {', '.join(SEARCHES)}")
    if case.search != SEARCHES[0] and case.strategy not in PLANS:
        raise UsageError(f"strategy {case.strategy!r} plans nothing", hint=f"leave out search={case.search!r}")
    if case.limits_memory:
        check_limit_of(case.memory_limit_of, case.strategy, case.device)
    if not 0 <= case.slack <= Case.MOST_SLACK:
        raise UsageError(f"the slack of a case must be a number from 0 to {Case.MOST_SLACK}, not {case.slack}")
