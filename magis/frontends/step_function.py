"""The memory of a training loop's own step function, from several recorded calls: `magis.estimate(step, batch)`, and
`magis.estimate(step, batches=...)` for calls with one batch after the other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from magis import registry
from magis.capture.whole_steps import SETTLING, WholeStep, record_whole_step
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.errors import CaptureError, StepGivenError, UsageError
from magis.frontends.fitting import repeated
from magis.graph import Op, Storage
from magis.graph.hazards import lifetimes
from magis.models.step_parts import recipe_of
from magis.ops.optimizers import torch_optimizer
from magis.planner.bench import Bench, Make, check_device
from magis.planner.smaller_steps import MOST_BYTES
from magis.planner.traced_model import Scratches
from magis.results import Case, CaseResult, Memory, Peak, StepFigures, StepGrowth, TensorLives, Timelines
from magis.runtime.measure import collector_spared, device_identity, device_memory, free_device_memory, no_collection
from magis.simulate.peak_breakdown import Owner, alive, module_table, owners
from magis.simulate.reserved_bytes import Reserved, reserved, simulated_allocator
from magis.simulate.simulator import MemoryProfile, replay, rounded
from magis.simulate.tensor_lives import tensor_lives
from magis.units import format_bytes

CYCLE = "pass a function that runs a whole cycle, or measure the loop as it runs, by magis.peak"


@dataclass(frozen=True)
class BatchPeak:
    """The peak of calls with one of several batches."""

    number: int
    """Number of the batch, from 0 on, in the order given."""
    shapes: str
    """Shapes of the batch's tensors: "[32, 128], [32]"."""
    peak_bytes: int
    """Peak of allocated bytes, as `Estimate.peak_bytes`: what earlier calls leave in memory included."""


@dataclass(frozen=True, eq=False)
class StepFunction:
    """A step function, the batches of its calls, one after the other, and the case of its figures."""

    step: Callable[[Any], object]
    batches: Sequence[Any]
    case: Case
    bench: Bench

    @property
    def kind(self) -> str:
        """Device type of torch: "cpu" or "cuda"."""
        return "cpu" if self.case.device == "cpu" else "cuda"

    @cached_property
    def recorded(self) -> WholeStep:
        """The recorded calls."""
        check_device(self.case.device)
        capability = find_device(self.case.device).capability
        with no_collection(), collector_spared():  # or calls would differ by when the collector runs
            whole = record_whole_step(self.step, self.batches, self.kind, MOST_BYTES // 4, capability)
        return replace(whole, graph=replace(whole.graph, storages=dict(_counted(whole, self.kind))))

    @cached_property
    def costs(self) -> RooflineCosts:
        """Costs of operators, with the workspaces of those in the last cycle."""
        gpu = torch.cuda.get_device_name() if self.case.device == "cuda" else ""
        device = find_device(self.case.device, gpu)
        prices = self.bench.pricing(self.case.device, "").prices(device)
        return RooflineCosts(device, prices.profile, self._workspaces, prices)

    @property
    def _workspaces(self) -> Mapping[str, int]:
        found = Scratches()
        if self.kind == "cpu":
            graph, start = self.recorded.graph, self.recorded.begins[-1 - self.cycle]
            found.add(replace(graph, ops=graph.ops[start:]), free_device_memory("cpu"), None)
        return found.known

    @cached_property
    def cycle(self) -> int:
        """Calls after which operators and memory repeat. Raises CaptureError if they do not."""
        profile = replay(self.recorded.graph, lambda *_: 0, deaths=self.recorded.deaths)
        begins = self.recorded.begins
        calls = [_course(self.recorded.graph.ops, profile, *pair) for pair in pairwise(begins)]
        most = next(period for period in range(len(calls), 0, -1) if max(SETTLING, period) + 2 * period <= len(calls))
        for period in range(1, most + 1):
            settled = calls[max(SETTLING, period) :]
            if settled[period:] == settled[:-period]:
                return period
        settled = calls[SETTLING:]
        grown = settled[-1][0] - settled[0][0]
        if grown > 0 and len({course[1:] for course in settled}) == 1:
            more = format_bytes(grown // (len(settled) - 1))
            raise CaptureError(f"each call of the step leaves {more} more in memory", hint="keep numbers, not tensors")
        raise CaptureError(f"calls of the step go on differing, or repeat after more than {most}", hint=CYCLE)

    @cached_property
    def _profile(self) -> MemoryProfile:
        """The memory of the last cycle: of earlier calls nothing."""
        whole, start = self.recorded, self.recorded.begins[-1 - self.cycle]
        numbers = whole.numbers if self.kind == "cpu" else ()
        rounding = self.costs.rounding
        found = replay(whole.graph, self.costs.workspace, deaths=whole.deaths, rounding=rounding, numbers=numbers)
        before = (0,) * start
        return MemoryProfile(found.persistent_bytes, before + found.tensors[start:], before + found.peaks[start:])

    @property
    def batch_peaks(self) -> tuple[BatchPeak, ...]:
        """Peaks of the calls with each batch in the last cycle, in the order given."""
        peaks, begins = self._profile.peaks, self.recorded.begins
        found = dict.fromkeys(range(len(self.batches)), 0)
        for call in range(len(begins) - 1 - self.cycle, len(begins) - 1):
            number = call % len(self.batches)
            found[number] = max(found[number], *peaks[begins[call] : begins[call + 1]])
        tensors = [[each for each in tree_leaves(batch) if isinstance(each, Tensor)] for batch in self.batches]
        shapes = [", ".join(str(list(each.shape)) for each in batch) for batch in tensors]
        return tuple(BatchPeak(number, shapes[number], nbytes) for number, nbytes in found.items())

    @cached_property
    def worst_first(self) -> Reserved | None:
        """Allocator of calls with the batches in falling order of their peaks; None on a CPU."""
        order = sorted(self.batch_peaks, key=lambda each: -each.peak_bytes)
        ordered = replace(self, batches=[self.batches[each.number] for each in order])
        return ordered.reserved(self.case.allocator)

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes in the last cycle by phase of the loop (`magis.phase`): while its operators run, and of what is
        alive where it begins or goes on."""
        whole, found, born = self.recorded, dict[str, int](), Counter[int]()
        starts = [position for position, _ in whole.phases]
        for storage, position in lifetimes(whole.graph, whole.deaths).born.items():
            each = whole.graph.storages[storage]
            born[position] += 0 if each.persistent else rounded(each.nbytes, self.costs.rounding)
        for position in range(whole.begins[-1 - self.cycle], whole.begins[-1]):
            first, behind = bisect_left(starts, position), bisect_right(starts, position)
            for _, name in whole.phases[first:behind]:
                found[name] = max(found.get(name, 0), self._profile.tensors[position] - born[position])
            name = whole.phases[behind - 1][1]
            found[name] = max(found.get(name, 0), self._profile.peaks[position])
        return {name: nbytes for name, nbytes in found.items() if name}

    @property
    def cyclic_bytes(self) -> int:
        """Bytes that a call leaves in reference cycles; they count as freed at its end."""
        storages = self.recorded.graph.storages
        return sum(rounded(storages[each].nbytes, self.costs.rounding) for each in self.recorded.cyclic)

    def reserved(self, allocator: str) -> Reserved | None:
        """Simulate a CUDA caching allocator over all calls; None on a CPU."""
        if self.kind == "cpu":
            return None
        made = simulated_allocator(allocator, device_memory(self.case.device))
        return reserved(self.recorded.graph, self.costs.workspace, self.recorded.deaths, steps=1, allocator=made)

    def result(self) -> CaseResult:
        """Return the figures of the call with the highest peak. Raises CaptureError for a step that cannot be recorded,
        and one whose calls go on differing."""
        profile, graph, case = self._profile, self.recorded.graph, self.case
        if not profile.tensors:
            raise UsageError(f"{case.model}: the step runs no operator of torch on what it reaches")
        found = self.reserved(case.allocator)
        in_cycle = graph.ops[self.recorded.begins[-1 - self.cycle] :]
        nanoseconds = sum(self.costs.nanoseconds(op, graph.values) for op in in_cycle if not self._is_of_host(op))
        figures = StepFigures(
            Memory(profile.tensor_bytes, profile.peak_bytes),
            nanoseconds / self.cycle / 1e6,
            reserved_bytes=None if found is None else found.reserved_bytes,
            at_peak=self._at_peak(),
        )
        weights = [value for value in graph.values.values() if value.name.startswith("parameter:")]
        return CaseResult(
            case=case,
            dtype=weights[0].dtype if weights else "float32",
            identity=device_identity(case.device),
            original=figures,
            optimized=figures,
            ratio=None,
            weight_bytes=sum(each.nbytes for each in graph.storages.values() if each.kind == "parameter"),
            persistent_bytes=profile.persistent_bytes,
            memory_limit_bytes=None,
            latency_limit_ms=None,
            device_memory_bytes=self.costs.memory_bytes,
            lower_bound_bytes=0,
        )

    def _is_of_host(self, op: Op) -> bool:
        """Return True if an operator counts steps of an optimizer."""
        graph = self.recorded.graph
        touched = {storage for storage, _ in op.writes} or {graph.values[each].storage for each in op.made()}
        return all(graph.storages[each].kind == "host" for each in touched)

    def _at_peak(self) -> Peak:
        """Return the operator at the peak, and what is alive there."""
        graph, rounding = self.recorded.graph, self.costs.rounding
        at = self._profile.tensors.index(self._profile.tensor_bytes)
        lives, known = lifetimes(graph, self.recorded.deaths), owners(graph, at)
        call = max(begin for begin in self.recorded.begins if begin <= at)

        def owner(storage: Storage) -> Owner:
            found = known.get(storage.id, Owner(storage.kind, ""))
            if storage.id in self.recorded.state:
                return replace(found, kind="state", line="")
            if storage.id in self.recorded.handed:
                return replace(found, kind="batch", line="")
            if storage.persistent or lives.born[storage.id] >= call:
                return found
            is_gradient = graph.ops[lives.born[storage.id]].phase == "backward"
            return replace(found, kind="gradient" if is_gradient else "carried over")

        held = module_table((owner(each), rounded(each.nbytes, rounding)) for each in alive(graph, at, lives))
        op = graph.ops[at]
        return Peak(op.target, op.module, op.phase, op.line, held)

    def lives(self) -> TensorLives:
        """Return the calls of the last cycle, and the tensors that are in memory meanwhile."""
        whole, costs, start = self.recorded, self.costs, self.recorded.begins[-1 - self.cycle]
        carried = {
            storage: "gradient" if whole.graph.ops[born].phase == "backward" else "carried over"
            for storage, born in lifetimes(whole.graph, whole.deaths).born.items()
            if born < start
        }
        kinds = carried | dict.fromkeys(whole.handed, "batch") | dict.fromkeys(whole.state, "state")
        of = whole.graph, costs, costs.workspace, self._profile
        return tensor_lives(*of, deaths=whole.deaths, rounding=costs.rounding, start=start, kinds=kinds)

    def resized(self, dim: int, size: int) -> StepFunction:
        """Return the step with another extent of a dimension of its batch: that of the first tensor, and of all that
        have the same extent there."""
        change = partial(repeated, dim=dim, before=self.extent(dim), size=size)
        return replace(self, batches=tree_map_only(Tensor, change, self.batches))

    def extent(self, dim: int) -> int:
        """Return the extent of a dimension of the batch's first tensor. Raises UsageError without one, and for several
        batches."""
        if len(self.batches) > 1:
            raise UsageError(
                f"{self.case.model}: there are {len(self.batches)} batches", hint="give the one that varies"
            )
        tensors = [each for each in tree_leaves(self.batches) if isinstance(each, Tensor)]
        if not tensors or tensors[0].ndim <= dim:
            raise UsageError(f"{self.case.model}: the batch has nothing along dimension {dim}")
        return tensors[0].shape[dim]


def plain_step(
    module: nn.Module, batches: Sequence[Any], loss: Any, optimizer: Any
) -> tuple[Callable[[Any], None], list[Any]]:
    """Return the step function of forward, loss, backward and update, and its batches. Raises UsageError without an
    update."""
    makes = [recipe_of("magis.estimate", module, batch, loss, optimizer)[1] for batch in batches]
    works = [make(0) for make in makes if make is not None]
    calls = [(work.module, work.loss_fn) for work in works]  # keywords of a batch are part of its module
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    update = torch_optimizer(works[0].optimizer, trained)
    if update is None:
        raise UsageError("magis.estimate: several batches need an update", hint="name an optimizer, such as 'adamw'")

    def step(given: tuple[int, Sequence[Tensor], Sequence[Tensor]]) -> None:
        called, loss_fn = calls[given[0]]
        result = loss_fn(called(*given[1]), *given[2])
        result.backward()
        update.step()  # while the loss, and what it holds, is alive as in a captured step
        update.zero_grad()

    step.__name__ = type(module).__name__
    return step, [(number, work.inputs, work.targets) for number, work in enumerate(works)]


def problem_of_batches(module: object, batch: object, batches: object) -> str:
    """Return why there cannot be these batches, in words; "" if there can."""
    if batch is not None:
        return "there are both batch and batches"
    if not isinstance(batches, (list, tuple)):
        return f"batches is a {type(batches).__name__}"
    if not batches:
        return "batches is empty"
    takes = isinstance(module, nn.Module) or (callable(module) and not isinstance(module, type))
    return "" if takes else f"several for a {type(module).__name__}"


def check_arguments(function: Any) -> None:
    """Raise UsageError for a function that cannot be called without arguments: a step function without its batch."""
    with suppress(ValueError):  # some built-in functions tell nothing
        try:
            signature(function).bind()
        except TypeError as error:
            hint = "give the batch of a step function, or a function without arguments that returns model and batch"
            raise UsageError(f"magis.estimate: a function without a batch: {error}", hint=hint) from None


def step_case(
    case: Case,
    make: Make,
    bench: Bench,
    snapshots: Callable[[str], Path] | None = None,
    *,
    timelines: bool = False,
) -> CaseResult:
    """Return the result of the gate's case "eager" for a test that returns a step function and its batch; ``snapshots``
    and ``timelines`` (of tensors alone) as for ``run_case``. Raises StepGivenError for any other strategy, and
    UsageError for a type."""
    try:
        make(case.seed)
    except StepGivenError as given:
        if case.strategy != "eager":
            raise
        if case.dtype is not None:
            raise UsageError(
                f"{case.model}: a step function runs in types of its own, not in dtype={case.dtype!r}",
                hint="leave out the dtype, and cast within the step",
            ) from None
        function = StepFunction(given.step, [given.batch], case, bench)
    else:
        raise UsageError(f"{case.model}: a step function in one call, and none in the next")
    found, more = function.result(), function.cyclic_bytes
    if timelines:
        found = replace(found, timelines=Timelines((), (), function.lives()))
    if snapshots is not None:
        registry.load("snapshot", "calls")(snapshots("original"), function)
    growth = StepGrowth(2 * more, 4, (), 2 * more) if more else None  # of two steps, as of other networks
    return replace(found, note="recorded from its step function, not run", growth=growth)


def _course(ops: Sequence[Op], profile: MemoryProfile, start: int, end: int) -> tuple[Any, ...]:
    """Return bytes at the start of a call, then its operators, each with the bytes by which memory differs from
    there."""
    first = profile.tensors[start] if start < end else 0
    pairs = zip(ops[start:end], profile.tensors[start:end], strict=True)
    return first, tuple((op.target, nbytes - first) for op, nbytes in pairs)


def _counted(whole: WholeStep, kind: str) -> Mapping[int, Storage]:
    """Return the storages of recorded calls. Not counted, like tensors of the host, are counters of optimizers, data of
    the program, and tensors of the caller's own that were only used in the first calls."""
    graph, uses, ones = whole.graph, Counter[int](), set[int]()
    for op in graph.ops[whole.begins[SETTLING] :]:
        uses.update({graph.values[value].storage for value in (*op.inputs(), *op.made())})
    for op in graph.ops if kind != "cpu" else ():  # on a GPU these are added to the counters on the host
        if op.writes and all(storage in whole.counters for storage, _ in op.writes):
            ones.update(graph.values[value].storage for value in op.inputs() if not graph.values[value].shape)
    loose = {value.storage for value in graph.values.values() if value.name and "." not in value.name.partition(":")[2]}

    def aside(storage: Storage) -> bool:
        unused = storage.kind == "buffer" and storage.id in loose and not uses[storage.id]
        return storage.kind == "constant" or storage.id in whole.counters | ones or unused

    return {key: replace(each, kind="host") if aside(each) else each for key, each in graph.storages.items()}
