"""Predicted steps as memory snapshots: eager's or a plan's, and calls of a step function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from magis.cases.case_rows import Replayed
from magis.cost.machines import Times
from magis.extensions.snapshots.memory_snapshot import WORKSPACE, CallStacks, Change, save, snapshot
from magis.frontends.step_function import StepFunction
from magis.graph import Graph
from magis.runtime.measure import device_memory
from magis.simulate.peak_breakdown import KINDS
from magis.simulate.reserved_bytes import RELEASE, StepEvent, simulated_allocator, step_events
from magis.simulate.simulator import Workspace, rounded
from magis.simulate.timeline import moments

FIRST_SCALAR = 1 << 40
"""Name of the allocation of the first scalar, beyond those of a step."""


@dataclass(frozen=True)
class Schedule:
    """A schedule of calls, with what is known of their memory; most fields as the arguments of ``replay``."""

    graph: Graph
    times: Times
    workspace: Workspace
    rounding: int
    deaths: Mapping[int, int] | None
    scalars: tuple[tuple[int, int, int], ...]
    """First position, last position and bytes of scalars that eager keeps for the backward."""
    start: int | None = None
    """Position from which on recorded calls are written; None: a step, which runs twice, as in ``reserved``, and is
    written the second time."""
    kinds: Mapping[int, str] = field(default_factory=dict)
    """Kinds of storages that do not follow from the phase."""


def save_step(path: str | Path, step: Replayed, allocator: str) -> None:
    """Write eager's step or a plan to a file; ``allocator`` are settings as in PYTORCH_ALLOC_CONF."""
    subject, eager = step.subject, step.captured
    costs = subject.costs(subject.workspaces(step.graph))
    scalars = eager.numbers if eager is not None and subject.kind == "cpu" else ()
    deaths = None if eager is None else eager.deaths
    schedule = Schedule(step.graph, subject.predicting, costs.workspace, costs.rounding, deaths, scalars)
    save(path, lambda: schedule_snapshot(schedule, subject.source.device, allocator))


def save_calls(path: str | Path, function: StepFunction) -> None:
    """Write the last cycle of a step function's calls to a file, with what earlier calls leave in memory."""
    whole, costs = function.recorded, function.costs
    schedule = Schedule(
        whole.graph, costs, costs.workspace, costs.rounding, whole.deaths,
        scalars=whole.numbers if function.kind == "cpu" else (),
        start=whole.begins[-1 - function.cycle],
        kinds=dict.fromkeys(whole.handed, "batch") | dict.fromkeys(whole.state, "state"),
    )  # fmt: skip
    save(path, lambda: schedule_snapshot(schedule, function.case.device, function.case.allocator))


def schedule_snapshot(schedule: Schedule, device: str, settings: str = "") -> bytes:
    """Return the snapshot of a schedule on a device, on a new allocator with ``settings``."""
    stacks, graph, start = CallStacks(), schedule.graph, schedule.start
    events = list(step_events(graph, schedule.workspace, schedule.deaths, count()))
    step = list(_changes(schedule, events, stacks))
    at = len(step) if start is None else [event.op for event in events].index(graph.ops[start])
    before = [*_persistent(schedule, stacks), *chain.from_iterable(step[:at])]
    if start is None:
        before += [Change(each.name, RELEASE, 0) for each in events if each.op is None]
    allocator = simulated_allocator(settings, device_memory(device))
    return snapshot(before, chain.from_iterable(step[0 if start is None else at :]), allocator, settings)


def _persistent(schedule: Schedule, stacks: CallStacks) -> Iterator[Change]:
    """Yield the allocations of persistent storages, in order."""
    graph = schedule.graph
    names = {graph.values[value].storage: graph.values[value].name for value in reversed(graph.inputs)}
    for number, (storage, each) in enumerate(sorted(graph.storages.items()), 1):
        if each.persistent:
            kind, name = schedule.kinds.get(storage, each.kind), names.get(storage, "").partition(":")[2]
            module = name.rpartition(":")[2].rpartition(".")[0] if each.kind != "batch" else ""
            counted = rounded(each.nbytes, schedule.rounding)
            yield Change(-number, each.nbytes, 0, counted, kind, stacks.of(f"{kind} {name}".strip(), module))


def _changes(schedule: Schedule, events: Iterable[StepEvent], stacks: CallStacks) -> Iterator[list[Change]]:
    """Yield for each event of a step the changes that it makes, those of scalars included, up to the step's end."""
    graph, now, position = schedule.graph, 0, 0
    ends = moments(graph, schedule.times)
    born, dying = defaultdict[int, list[Change]](list), defaultdict[int, list[Change]](list)
    for number, (first, last, size) in enumerate(schedule.scalars, FIRST_SCALAR):
        of = graph.ops[max(first - 1, 0)]  # they are kept from behind their operator on
        frames = stacks.of(f"number for the backward of {of.target}", of.module, of.phase, of.line)
        born[first].append(Change(number, size, 0, size, WORKSPACE, frames))
        dying[last].append(Change(number, RELEASE, 0))
    for name, nbytes, op, storage in events:
        if op is None:
            return
        frames = stacks.of(op.target, op.module, op.phase, op.line)
        if storage is not None:
            kind = schedule.kinds.get(storage) or KINDS.get(op.phase, op.phase)
            yield [Change(name, nbytes, now, rounded(nbytes, schedule.rounding), kind, frames)]
        elif nbytes != RELEASE:
            beside = [each._replace(ns=now) for each in born[position]]
            yield [*beside, Change(name, nbytes, now, nbytes, WORKSPACE, frames)]
        else:
            now = next(ends)
            yield [Change(name, RELEASE, now), *(each._replace(ns=now) for each in dying[position])]
            position += 1
