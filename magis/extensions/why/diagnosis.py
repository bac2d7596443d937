"""The peak of a step, and the step under each known remedy and under pairs of them, captured and simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import nn
from torch.optim import Optimizer

from magis.capture import Captured, OptimizerSpec, Workload
from magis.cases.contenders import make_candidate, strategy_of
from magis.errors import MagisError, UsageError, nearest
from magis.extensions.why.treatments import Treatment, rebuilt_by, treatments
from magis.frontends.estimating import Estimate, Remedy, estimate
from magis.graph import HOST_COPIES
from magis.graph.hazards import lifetimes
from magis.planner.bench import Make
from magis.planner.subject import Subject
from magis.printable import printable
from magis.progress import Progress
from magis.results import Case
from magis.rewrite.moved_state import movable_state, with_moved_state
from magis.simulate.timeline import elapsed_ns
from magis.strategies.single_device import Local
from magis.units import aligned, format_bytes, format_milliseconds

__all__ = ["Diagnosis", "why"]

LEAST_SAVED = 0.01
"""Share of the step's bytes that a remedy must save to be listed."""
PAIRED = 5
"""Number of remedies, the best ones, whose pairs are tried."""


@dataclass(frozen=True)
class Diagnosis:
    """The peak of a step, and what each remedy makes of it."""

    estimate: Estimate
    """The step as it is."""
    remedies: tuple[Remedy, ...]
    """Remedies that save memory, the best one first; of one kind (numbers of micro-batches) the best one alone."""
    tried: tuple[Remedy, ...]
    """All that could be priced, by name."""
    refused: tuple[tuple[str, str], ...]
    """Names of those that could not, with the reason."""

    def remedy(self, name: str) -> Remedy:
        """Return one of those tried. Raises UsageError for another name, with the reason if it was refused."""
        found = next((each for each in self.tried if each.name == name), None)
        if found is None:
            why = dict(self.refused).get(name, "was not tried")
            raise UsageError(f"no remedy {name!r}: {why}", hint=nearest(name, [each.name for each in self.tried]))
        return found

    def __str__(self) -> str:
        found, column = self.estimate, "peak" if self.estimate.reserved_bytes is None else "reserved"
        rows = [
            ("remedy", column, "of it", "step", "of it", "", "by hand"),
            *(
                (
                    each.name, format_bytes(each.needed_bytes), f"{each.needed_bytes / found.needed_bytes:.2f}",
                    format_milliseconds(each.latency_ratio * found.latency_ms), f"{each.latency_ratio:.2f}",
                    "fits" if each.fits else "too much", each.how,
                )
                for each in self.remedies
            ),
        ]  # fmt: skip
        listed = {name for each in self.remedies for name in each.name.split(" + ")}
        idle = [each.name for each in self.tried if " + " not in each.name and each.name not in listed]
        lines = [
            str(found),
            "",
            *(aligned(rows, left=(0, 5, 6)) if self.remedies else ["no remedy saves memory"]),
            *([f"saves less than {LEAST_SAVED:.0%}, or less than its like: {', '.join(idle)}"] if idle else []),
            *(printable(f"not priced: {name}: {why}") for name, why in self.refused),
        ]
        return "\n".join(lines)


@dataclass(eq=False)
class _Clinic:
    """Prices treatments of one step."""

    found: Estimate
    makes: dict[tuple[str, ...], Make | None]

    def priced(self, parts: tuple[Treatment, ...]) -> Remedy:
        """Return the step under treatments. Raises MagisError for one that cannot be captured or simulated."""
        found, make = self.found, self._make(parts)
        changes: dict[str, Any] = {name: value for each in parts for name, value in each.case.items()}
        strategies = sorted((each.strategy for each in parts if each.strategy), key=lambda name: name[:3] != "acc")
        if strategies:
            changes["strategy"] = "+".join(strategies)
        name, how = " + ".join(each.name for each in parts), "; ".join(each.how for each in parts)
        needed, peak, ms = self._figures(parts, make, changes)
        return Remedy(name, needed, ms / found.latency_ms, needed <= found.limit_bytes, how, peak)

    def _figures(
        self, parts: tuple[Treatment, ...], make: Make | None, changes: dict[str, Any]
    ) -> tuple[int, int, float]:
        """Return needed bytes, peak bytes and milliseconds."""
        found = self.found
        subject, case = found.subject_of(make, **changes), replace(found.result.case, **changes)
        if any(each.compiles or each.plans for each in parts):
            result = found.changed(make, compiled="loss" if any(each.compiles for each in parts) else False, **changes)
            peak = result.memory.peak_bytes
            return result.optimized.reserved_bytes or peak, peak, result.optimized.simulated_ms
        strategy = strategy_of(case, subject)
        if any(each.moves_state for each in parts):
            return _with_state_on_host(subject, strategy, case)
        # Not through `run_case`: the network was compared with a recorded run once, for the step as it is.
        step = make_candidate(subject, strategy, case.allocator)
        return step.reserved or step.simulated.peak_bytes, step.simulated.peak_bytes, step.simulated_ns / 1e6

    def _make(self, parts: tuple[Treatment, ...]) -> Make | None:
        """Return the factory of a workload, one for equal changes, so that its captures are shared."""
        key = tuple(each.name for each in parts if each.rebuilt is not None)
        if key not in self.makes:
            self.makes[key] = rebuilt_by(parts, self.found.make_workload)
        return self.makes[key]


def _with_state_on_host(subject: Subject, strategy: Local | None, case: Case) -> tuple[int, int, float]:
    """Return needed bytes, peak bytes and milliseconds of eager's step whose optimizer state is in host memory but for
    its update. Raises UsageError without state that can be moved."""
    captured: Captured = subject.captured.original
    if strategy is not None:
        captured = subject.captured_as(strategy)[0].original
    states = movable_state(captured.graph)
    if not states:
        raise UsageError(f"{case.model}: no optimizer state can be in host memory")
    graph = with_moved_state(captured.graph, states)
    # Deaths of eager's tensors are numbers of operators, which the copies have shifted. Copied state dies by its wait.
    after = [0, *(at + 1 for at, op in enumerate(graph.ops) if op.target not in HOST_COPIES)]
    deaths = {storage: after[min(number, len(after) - 1)] for storage, number in captured.deaths.items()}
    uses = lifetimes(graph).dies
    deaths |= {storage: uses[storage] + 1 for storage in uses.keys() - captured.graph.storages.keys()}
    moved = replace(captured, graph=graph, deaths=deaths)
    peak = subject.simulate(moved).peak_bytes
    return (
        subject.reserved_bytes(moved, case.allocator) or peak,
        peak,
        elapsed_ns(graph, subject.roofline.nominal) / 1e6,
    )


def order(remedy: Remedy, needed_bytes: int, others: frozenset[str] = frozenset()) -> tuple[bool, bool, int, float]:
    """Return the sort key of a remedy: those that fit come first, then those that train the same weights (``others``
    are names of those that do not), then single ones; then by bytes times time."""
    names = remedy.name.split(" + ")
    cost = remedy.needed_bytes / needed_bytes * remedy.latency_ratio
    return not remedy.fits, not others.isdisjoint(names), len(names), cost


def why(
    module: nn.Module | Workload | tuple[Any, ...] | Callable[..., object] | str,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer | OptimizerSpec | str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    preset: str | None = None,
    memory_limit: str | int | None = None,
    allocator: str | None = None,
    accumulate: int = 1,
    remedies: Sequence[str] | None = None,
    pairs: bool = True,
    progress: Progress | None = None,
) -> Diagnosis:
    """Tell what is at the peak of a training step, and what each known remedy would make of it.

    Arguments are those of `magis.estimate`; a step function has no remedies and is refused. Each remedy is the changed
    step, captured and simulated on the device; ``remedies`` names those to try (None: all), ``pairs`` tries
    pairs of the best ones, too. Raises MagisError for a step that cannot be captured, and for invalid arguments.
    """
    if batch is not None and callable(module) and not isinstance(module, nn.Module):
        raise UsageError("magis.why: a step function has no remedies", hint="give a module with its batch and loss")
    told: Progress = progress or (lambda _text: None)
    told("capturing the step")
    found = estimate(
        module, batch, loss, optimizer, device=device, dtype=dtype, preset=preset, memory_limit=memory_limit,
        allocator=allocator, accumulate=accumulate,
    )  # fmt: skip
    known, remedies = list(treatments(found)), [remedies] if isinstance(remedies, str) else remedies
    unknown = [] if remedies is None else sorted(set(remedies) - {each.name for each in known})
    if unknown:
        raise UsageError(f"magis.why: no remedy {unknown[0]!r} for this step", hint=nearest(unknown[0], _names(known)))
    clinic, tried, refused = _Clinic(found, {}), list[Remedy](), list[tuple[str, str]]()

    def attempt(parts: tuple[Treatment, ...]) -> Remedy | None:
        name = " + ".join(each.name for each in parts)
        told(f"trying {name}")
        try:
            tried.append(clinic.priced(parts))
        except MagisError as error:
            refused.append((name, str(error)))
            return None
        return tried[-1]

    others = frozenset(each.name for each in known if each.other_training)
    rank = dict[str, Any]()
    best = dict[str, tuple[Remedy, Treatment]]()
    for each in known:
        if remedies is not None and each.name not in remedies:
            continue
        single = attempt((each,))
        if single is None or single.needed_bytes > (1 - LEAST_SAVED) * found.needed_bytes:
            continue
        rank[single.name] = order(single, found.needed_bytes, others)
        if each.family not in best or rank[single.name] < rank[best[each.family][0].name]:
            best[each.family] = single, each
    chosen = sorted(best.values(), key=lambda pair: rank[pair[0].name])
    helps = [single for single, _ in chosen]
    for (one, first), (two, second) in combinations(chosen[:PAIRED], 2) if pairs else ():
        both = attempt((first, second)) if first.goes_with(second) else None
        if both is not None and both.needed_bytes < (1 - LEAST_SAVED) * min(one.needed_bytes, two.needed_bytes):
            rank[both.name] = order(both, found.needed_bytes, others)
            helps.append(both)
    helps.sort(key=lambda each: rank[each.name])
    return Diagnosis(found, tuple(helps), tuple(tried), tuple(refused))


def _names(known: Sequence[Treatment]) -> list[str]:
    return [each.name for each in known]
