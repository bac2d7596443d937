"""Candidates: the step of a strategy of one rank, simulated, and the comparison of its numbers with eager's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from magis import registry
from magis.cases.case_rows import Replayed
from magis.cases.comparison import compare_by_kind, compare_losses, shared_tensors
from magis.dtypes import autocast_type
from magis.errors import UsageError, nearest
from magis.graph import Graph
from magis.planner.subject import Subject
from magis.results import Case, Memory, SearchStats
from magis.runtime.steps import Step
from magis.strategies.single_device import Local, blocks_of, local, window_of_compiled
from magis.strategies.strategy_names import ACCUMULATES, LISTED, check_planned, family

SCALER = 0.001
"""Relative tolerance of peaks with a GradScaler, whose few tensors are not in the captured step."""
ORDER_OFF = 1e-4
"""Relative tolerance of the loss for strategies that add up in another order, in float32."""
MOST_OFF = 0.05
"""Relative tolerance of the loss for strategies that compute other numbers, other random numbers included."""
PLANNED = "inductor's code, which keeps what a plan keeps: bytes are of inductor's own choice, latency is of eager"
COMPILED = "compiled code: bytes are of its forward and backward without fused operators, latency is of eager"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A step to compare with the original: its simulation, and a function that builds it."""

    simulated: Memory
    simulated_ns: int
    make: Callable[[ExitStack], Step]
    stats: SearchStats
    workspaces: Mapping[str, int]
    reserved: int | None
    replayed: Replayed | None
    """The step for replay in the simulator; None without a graph of the step."""
    strategy: Local | None = None
    off_by: float = 0.0
    """Relative tolerance of the step's tensor bytes (see `CaseResult.off_by`)."""
    priced: bool = True
    """False if eager's latency is reported for the step (see `CaseResult.priced`)."""
    note: str = ""
    """Caveat about the simulation, for readers."""
    portable: bool = True
    """True if the plan uses a baseline's workspaces, of whatever machine; False: this machine's."""


def strategy_of(case: Case, subject: Subject) -> Local | None:
    """Return the strategy of a case; None if it is no strategy of one rank. Raises UsageError for unknown strategies,
    and for ones that do not support the case."""
    kind = family(case.strategy)
    if kind is None:
        check_planned(case.strategy)
        raise UsageError(f"unknown strategy {case.strategy!r}", hint=nearest(case.strategy, LISTED))
    check_precision(case)
    if kind != "local":
        return None
    strategy = local(case.strategy, subject.kind, memory_ratio=case.memory_ratio, latency_ratio=case.latency_ratio)
    strategy.check(subject.traced)
    return replace(strategy, given=autocast_type(case.dtype or "") or "")


def check_precision(case: Case) -> None:
    """Raise UsageError if both the strategy and the case's data type set the precision, and for micro-batches of a
    strategy that has none."""
    kind, dtype = family(case.strategy), case.dtype
    if case.accumulate > 1 and (kind in ("ort", "distributed") or ACCUMULATES.match(case.strategy)):
        what = f"strategy {case.strategy!r} does not run {case.accumulate} batches for one update"
        raise UsageError(what, hint="leave out accumulate")
    casts = any(part.startswith(("amp", "half")) for part in case.strategy.split("+"))
    if dtype in (None, "float32") or kind in ("original", "plan"):
        return
    if kind == "local" and not casts:
        return
    if casts:
        what = f"strategy {case.strategy!r} casts float32 weights, those asked for are {dtype}"
        raise UsageError(what, hint="leave out the data type (--magis-dtype)")
    if dtype == "tf32" or autocast_type(str(dtype)) is not None:
        what = f"strategy {case.strategy!r} has no {dtype}"
        raise UsageError(what, hint=f"leave out the data type, or use amp+{case.strategy} where there is one")


def make_candidate(subject: Subject, strategy: Local | None, allocator: str = "") -> Candidate:
    """Return the simulated candidate of a strategy (None: of the original); ``allocator``: as in `Case`."""
    captured, moved_ns = subject.captured.original, 0
    if strategy is not None and strategy.is_captured:
        under, moved = subject.captured_as(strategy)
        captured = under.original
        moved_ns = subject.roofline.nominal.transfer_ns(moved) if moved else 0
    profile = subject.simulate(captured)
    found = Candidate(
        Memory(profile.tensor_bytes, profile.peak_bytes),
        subject.latency_ns(captured.graph) + moved_ns,
        partial(_make_step, subject, strategy),
        SearchStats(),
        {},
        subject.reserved_bytes(captured, allocator),
        Replayed(subject, captured.graph, captured),
        strategy,
        off_by=SCALER if strategy is not None and strategy.is_scaled else 0.0,
        note=strategy.note(subject.traced) if strategy is not None else "",
    )
    if strategy is None or strategy.is_captured:
        return found
    predict = registry.optional("compiled", "figures") if strategy.name == "compile" else None
    if predict is not None:
        figures, said = predict(subject, "loss", allocator)
        return replace(
            found,
            simulated=figures.simulated,
            reserved=figures.reserved_bytes,
            replayed=None,
            note=f"{said}; a predicted latency is of eager",
            off_by=math.inf,
            priced=False,
        )
    nbytes = subject.captured.graph.persistent_bytes() + window_of_compiled(strategy, subject.traced)
    return replace(
        found,
        simulated=Memory(nbytes, nbytes),
        reserved=None,
        replayed=None,
        note=PLANNED if strategy.limits else COMPILED,
        off_by=math.inf,
        priced=False,
    )


def _make_step(subject: Subject, strategy: Local | None, stack: ExitStack) -> Step:
    if strategy is None:
        return subject.eager()
    work = subject.fresh()
    stack.enter_context(strategy.wrapped(work.module, blocks_of(work)))
    return strategy.step(work)


def numbers_of(candidate: Candidate, subject: Subject, graph: Graph | None, eager: Step, step: Step, seed: int) -> str:
    """Compare the step's numbers with eager's; return the text of `CaseResult.numbers`."""
    strategy = candidate.strategy
    if strategy is None or strategy.keeps_numbers:
        return compare_by_kind(subject, graph, eager, step, seed)
    if strategy.micro_batches > 1:  # which draws random numbers, and knows statistics of the batch, as its parts do
        eager = subject.eager(shares=strategy.micro_batches)
    off = compare_losses(eager, step, seed, shared_tensors(subject))
    if strategy.compiled and any(op.random for op in subject.captured.graph.ops) and math.isfinite(off):
        return f"another compiler, other random numbers: loss within {100 * off:.2g}%"
    sums = strategy.chunks_loss or strategy.micro_batches > 1
    reasons = (("precision", strategy.cast), ("compiler", strategy.compiled), ("order of sums", sums))
    why = " and ".join(name for name, given in reasons if given)
    whole = why == "order of sums" and subject.source.dtype in ("float32", "float64")
    if not off <= (ORDER_OFF if whole else MOST_OFF):
        return f"differs: loss by {100 * off:.2g}%, more than another {why} explains"
    return f"another {why}: loss within {100 * off:.2g}%"
