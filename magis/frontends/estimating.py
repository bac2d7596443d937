"""Predict a training step's memory on a device before it runs: by kind and module, and with ways to reduce it. A model
that a function builds is built and captured on fake tensors, without allocating memory of its size. Every figure equals
that of a case of the gate ("eager", "checkpoint", or "magis" with a memory limit), byte for byte."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from magis import registry
from magis.capture import OptimizerSpec, Workload
from magis.cases.case_rows import Replayed
from magis.cases.run_case import run_case
from magis.cost.cards import limit_bytes
from magis.errors import MagisError, UsageError
from magis.frontends.adapters import ADAPTER_RANK, with_adapters
from magis.frontends.fitting import MOST, compiled_result, resized
from magis.frontends.limits import largest
from magis.frontends.step_function import BatchPeak, StepFunction, check_arguments, plain_step, problem_of_batches
from magis.models.step_parts import in_one_order, recipe_of
from magis.planner.bench import Bench, Make, default_device
from magis.planner.subject import Subject
from magis.printable import printable
from magis.results import Case, CaseResult, Peak, TensorLives
from magis.runtime.measure import device_memory, usable_memory
from magis.simulate.allocator_settings import allocator_settings, allocator_text
from magis.units import format_bytes, format_milliseconds, in_one_word

QUICK = 3_000
"""Budget of the search, in plans evaluated, as with `--magis-budget=quick`."""
RATIO_STEPS = 10_000
"""Memory ratios that are suggested for the gate have four decimal places, rounded down."""
EXPANDABLE = "expandable_segments:True"
SHOWN = 6


@dataclass(frozen=True)
class Remedy:
    """A way to run the step with less memory, and the bytes and time that the step then needs."""

    name: str
    """ "expandable", "checkpoint", "magis" or "lora"; of `magis.why`, one of its names, or two joined by " + "."""
    needed_bytes: int
    """Bytes reserved by the caching allocator on a GPU, peak of allocated bytes on a CPU."""
    latency_ratio: float
    """Predicted latency divided by that of the unchanged step."""
    fits: bool
    how: str
    peak_bytes: int
    """Peak of allocated bytes."""


class Estimate:
    """The predicted memory of one training step on a device."""

    def __init__(
        self,
        result: CaseResult,
        bench: Bench,
        make: Make | None,
        limit: int,
        *,
        is_devices_limit: bool = False,
        compiled: bool | str = False,
        function: StepFunction | None = None,
    ) -> None:
        self.result = result
        """Result of the gate's case "eager" on the device; of a compiled step, its predicted figures."""
        self._compiled, self._function = compiled, function
        self.limit_bytes = limit
        """Memory limit in bytes: the one that was given, else what the device has without CUDA's context and other
        processes."""
        self.is_devices_limit = is_devices_limit
        """True if no limit was given."""
        self._bench = bench
        self._make = make

    @property
    def peak_bytes(self) -> int:
        """Peak of allocated bytes: tensors, persistent ones included, and workspaces of operators."""
        return self.result.original_memory.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Peak bytes that CUDA's caching allocator will reserve, fragmentation included; None for a CPU."""
        return self.result.original.reserved_bytes

    @property
    def allocator(self) -> str:
        """Settings of the allocator, as in PYTORCH_ALLOC_CONF; empty for torch's defaults."""
        return self.result.case.allocator

    @cached_property
    def releases(self) -> int | None:
        """Number of requests in two steps that fail at first within the limit, until torch releases what it has cached;
        None if one fails nonetheless, for a CPU, for a compiled step and for a step function."""
        if self._compiled or self._function is not None:
            return None
        subject = self._subject
        found = subject.reserved(subject.captured.original, self.allocator, self.limit_bytes)
        return None if found is None or found.failed else found.retries

    @property
    def needed_bytes(self) -> int:
        """Bytes that the device must have: reserved bytes on a GPU, peak bytes on a CPU."""
        return self.reserved_bytes or self.peak_bytes

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes of a step function by phase (`magis.phase`) that runs meanwhile."""
        return {} if self._function is None else self._function.phases

    @property
    def batches(self) -> tuple[BatchPeak, ...]:
        """Peaks of a step function's calls by batch, in the order given."""
        return () if self._function is None else self._function.batch_peaks

    @property
    def worst_first_bytes(self) -> int | None:
        """Reserved bytes if a step function meets its batches in falling order of their peaks; None for a CPU, and
        without several batches."""
        found = self._function.worst_first if self._function is not None and len(self.batches) > 1 else None
        return None if found is None else found.reserved_bytes

    @property
    def cyclic_bytes(self) -> int:
        """Bytes that a step function's call leaves in reference cycles, until Python's garbage collector runs. They
        count as freed at the end of the call."""
        return 0 if self._function is None else self._function.cyclic_bytes

    @property
    def latency_ms(self) -> float:
        """Predicted time of a step in milliseconds; of a compiled step, that of eager."""
        return self.result.original.simulated_ms

    @property
    def at_peak(self) -> Peak:
        """The operator at the peak, and the bytes alive there by kind and module."""
        found = self.result.original.at_peak
        if found is None:  # the simulator of another plugin
            raise MagisError(f"{self.result.case.model}: nothing is known of what is held at the peak")
        return found

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by kind ("parameter", "state", "gradient", "activation", ...), largest first."""
        found: Counter[str] = Counter()
        for row in self.at_peak.held:
            found[row.kind] += row.nbytes
        return dict(found.most_common())

    def fits(self, limit: str | int | None = None) -> bool:
        """Return True if the step fits the device's memory, or a given limit (bytes, or a text: "24 GiB", "rtx4090"),
        without a release of cached memory."""
        return self.missing_bytes(limit) <= 0

    def missing_bytes(self, limit: str | int | None = None) -> int:
        """Return the bytes by which the step exceeds the device's memory or a given limit; negative if bytes are
        left."""
        return self.needed_bytes - (self.limit_bytes if limit is None else limit_bytes(limit))

    def against(self, other: Estimate) -> dict[str, int]:
        """Return by kind how many more bytes this step holds at its peak than another step; largest differences
        first."""
        mine, theirs = self.by_kind, other.by_kind
        changed = {kind: mine.get(kind, 0) - theirs.get(kind, 0) for kind in {*mine, *theirs}}
        return dict(sorted(((kind, n) for kind, n in changed.items() if n), key=lambda item: -abs(item[1])))

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Ways to need less memory: segments that grow, checkpointing of each block, a plan for the limit (and, if none
        fits, with state in host memory), LoRA adapters instead of full training; none for a compiled step and a step
        function. Left out is one that cannot be applied (no repeated blocks), or saves no memory."""
        found: list[Remedy] = []
        if self._compiled or self._function is not None:
            return ()
        case = self.result.case
        growing = ",".join(filter(None, (self.allocator, EXPANDABLE)))
        grown = self._subject.reserved_bytes(self._subject.captured.original, growing)
        if grown is not None:
            how = f"let segments grow: PYTORCH_ALLOC_CONF={growing}"
            found.append(Remedy("expandable", grown, 1.0, grown <= self.limit_bytes, how, self.peak_bytes))
        checkpointed = self._tried(strategy="checkpoint")
        if checkpointed is not None:
            how = "checkpoint each block" + (": --magis-strategies=checkpoint" if case.accumulate == 1 else "")
            found.append(self._remedy("checkpoint", checkpointed, how))
        what = "peak" if self.reserved_bytes is None else "reserved"
        ratio = min(1.0, math.floor(RATIO_STEPS * self.limit_bytes / self.needed_bytes) / RATIO_STEPS)
        asked: dict[str, Any] = {"memory_ratio": ratio or None, "memory_limit_of": what, "budget": QUICK}
        of = "" if what == "peak" else f" --magis-memory-limit-of={what}"
        of += f" --magis-allocator={self.allocator}" if self.allocator else ""
        how = f"plan the step: --magis-budget=quick{of} --magis-memory-ratios={ratio:g}"
        for host_limit in dict.fromkeys((0, self.by_kind.get("state", 0))) if case.accumulate == 1 else ():
            planned = self._tried(strategy="magis", host_limit=host_limit, **asked)
            if planned is not None:
                host = f" --magis-host-limit={in_one_word(host_limit)}" if host_limit else ""
                found.append(self._remedy("magis and host" if host else "magis", planned, how + host))
                if found[-1].fits:
                    break
        adapted = self._tried(partial(with_adapters, self.make_workload))
        if adapted is not None:
            how = f"train adapters (LoRA of rank {ADAPTER_RANK} in all linear layers) instead of the weights"
            found.append(self._remedy("lora", adapted, how))
        return tuple(remedy for remedy in found if remedy.needed_bytes < self.needed_bytes)

    @property
    def _subject(self) -> Subject:
        return self.subject_of()

    def subject_of(self, make: Make | None = None, **changes: Any) -> Subject:
        """Return the step under test, with changes as in ``changed``."""
        return self._bench.subject(replace(self.result.case, **changes), make or self._make)

    def make_workload(self, seed: int) -> Workload:
        """Build the step's workload."""
        return self.subject_of(seed=seed).source.make(seed)

    def changed(self, make: Make | None = None, *, compiled: bool | str = False, **changes: Any) -> CaseResult:
        """Price the step with changes of its case (``strategy``, ``dtype``, ...), with the workload that ``make``
        builds, or compiled. Raises MagisError if that cannot be captured or run."""
        return _result(replace(self.result.case, **changes), self._bench, make or self._make, compiled)

    def _tried(self, make: Make | None = None, **changes: Any) -> CaseResult | None:
        try:
            return self.changed(make, **changes)
        except MagisError:
            return None

    def _remedy(self, name: str, result: CaseResult, how: str) -> Remedy:
        needed = result.optimized.reserved_bytes or result.memory.peak_bytes
        ratio = result.optimized.simulated_ms / self.latency_ms
        return Remedy(name, needed, ratio, needed <= self.limit_bytes, how, result.memory.peak_bytes)

    def largest_batch(self, limit: str | int | None = None, *, dim: int = 0, most: int = MOST) -> int | None:
        """Return the batch's largest extent along ``dim`` that fits, or None; each size that is tried is captured."""
        allowed, function = self.limit_bytes if limit is None else limit_bytes(limit), self._function
        make, case, spare = self._make or self.make_workload, self.result.case, dict[int, int]()

        def fits(size: int) -> bool:
            try:
                if function is not None:
                    found = function.resized(dim, size).result()
                else:
                    found = _result(case, self._bench, lambda seed: resized(make(seed), dim, size), self._compiled)
            except MagisError:
                return False
            spare[size] = allowed - (found.original.reserved_bytes or found.memory.peak_bytes)
            return spare[size] >= 0

        start = self._subject.traced.inputs[0].shape[dim] if function is None else function.extent(dim)
        return largest(fits, start, most, spare=spare)

    def save_snapshot(self, path: str | Path) -> None:
        """Write the predicted step to a file as a memory snapshot, such as `torch.cuda.memory._dump_snapshot` writes,
        for torch's memory_viz. Raises UsageError for a compiled step, and for a path that cannot be written."""
        step = self._replayed("save_snapshot")
        if isinstance(step, StepFunction):
            registry.load("snapshot", "calls")(path, step)
        else:
            registry.load("snapshot", "step")(path, step, self.allocator)

    def save_report(self, path: str | Path, *, before: Estimate | None = None) -> None:
        """Write the predicted step to a file as a page for a browser: memory over time, and at any moment all tensors
        that are alive, by module and kind. With ``before``, both steps are side by side, with the difference by module.
        Raises UsageError for a compiled step, and for a path that cannot be written."""
        write = registry.load("output", "steps")
        steps = {"step": self} if before is None else {"before": before, "now": self}
        lives = {name: each.lives() for name, each in steps.items()}
        lines = str(self) if before is None else f"before: {before}\nnow: {self}"
        shown = [line for line in lines.splitlines() if line[:1].strip()]  # the rest is in the table
        case = self.result.case
        write(Path(path), f"a step of {case.model}", shown, lives, f"{case.device} ({self.result.dtype})")

    def lives(self) -> TensorLives:
        """Return every call of the predicted step, and every tensor with its birth and its death. Raises UsageError for
        a compiled step."""
        return self._replayed("lives").lives()

    def _replayed(self, caller: str) -> Replayed | StepFunction:
        """Return the step for the simulator. Raises UsageError for a compiled one."""
        if self._compiled:
            text = f"{caller}: a compiled step is not predicted operator by operator"
            raise UsageError(text, hint="leave out compiled")
        if self._function is not None:
            return self._function
        captured = self._subject.captured.original
        return Replayed(self._subject, captured.graph, captured)

    def __str__(self) -> str:
        """Return the estimate as lines of text."""
        result = self.result
        reserved = f", {format_bytes(self.reserved_bytes)} reserved" if self.reserved_bytes else ""
        took = f"a step takes {format_milliseconds(self.latency_ms)}" if result.priced else result.note
        missing = self.missing_bytes()
        verdict = f"does not fit: {format_bytes(missing)} too much" if missing > 0 else "fits"
        peak = f"peak {format_bytes(self.peak_bytes)}{reserved}"
        lines = [
            f"{result.case.model} on {result.case.device}, {result.dtype}: {peak}; {took}",
            f"{verdict} for {format_bytes(self.limit_bytes)}{self._limit_in_words()}",
            *([] if missing <= 0 or self.releases is None else [RELEASED.format(self.releases)]),
            "at the peak: " + ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in self.by_kind.items()),
            *self._of_the_loop(),
        ]
        for row in self.at_peak.held[:SHOWN]:
            place = f" at {row.line}" if row.line else ""
            lines.append(f"{format_bytes(row.nbytes):>12}  {row.kind} of {row.module or 'no sub-module'}{place}")
        return "\n".join(map(printable, lines))

    def _of_the_loop(self) -> Iterator[str]:
        """Yield the lines of a step function: its phases, its batches, and what it leaves in reference cycles."""
        if self.phases:
            yield "by phase: " + ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.phases.items())
        batches = self.batches
        if len(batches) > 1:
            worst = max(batches, key=lambda each: each.peak_bytes)
            for each in batches:
                mark = ", sets the peak" if each is worst else ""
                yield f"batch {each.number + 1} of {each.shapes}: peak {format_bytes(each.peak_bytes)}{mark}"
            if self.worst_first_bytes is not None:
                first = f"{format_bytes(self.worst_first_bytes)} with the worst batch first"
                yield f"reserved after all: {format_bytes(self.reserved_bytes or 0)} in this order, {first}"
        if self.cyclic_bytes:
            more = f"{format_bytes(self.cyclic_bytes)} more in reference cycles until Python's collector runs"
            yield f"each call leaves {more}: the peak counts none of it after the call"

    def _limit_in_words(self) -> str:
        device = self.result.case.device
        if device == "cpu":
            return ""
        of = f", what CUDA leaves of {format_bytes(device_memory(device))}" if self.is_devices_limit else ""
        return f"{of}, with {self.allocator or 'the default allocator'}"


RELEASED = "runs nonetheless: where memory runs out, torch releases what is cached ({} in two steps), which takes time"


@in_one_order("magis.estimate", ("module", "optimizer", "batch", "loss"), {"model": "module"})
def estimate(
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
    seed: int = 0,
    compiled: bool | str = False,
    accumulate: int = 1,
    batches: Sequence[Any] | None = None,
) -> Estimate:
    """Predict what a training step of a model needs on a device: bytes by kind and module, reserved bytes, time.

    ``batch`` is `(inputs, targets)` or a dictionary of the module's keywords, and ``loss`` takes the module's output
    and the targets, unless the module returns its loss. ``module`` may also be a tuple of these arguments; a function
    without arguments that returns one, which is called on fake tensors and so allocates no memory of its size; or a
    name ("bert", "package.module:factory"). ``optimizer`` is a torch optimizer of the module's parameters, or "adamw",
    "adam", "sgd", "momentum" or "none". ``memory_limit`` (bytes, "24 GiB", or a card: "rtx4090") replaces the device's
    memory. ``allocator`` are settings of a GPU's caching allocator, "expandable_segments:True" for example; None takes
    those of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF. With ``compiled``, torch.compile's inductor compiles the
    network (True), network and loss as one function ("loss"), or the update, too ("step"); its kernels are neither
    built nor run. With ``accumulate``, the batch is one of so many micro-batches, whose gradients are added up for one
    update.

    A function together with a batch is a whole step of the caller's own: it is called as ``step(batch)``, runs forward,
    backward and update on what it reaches by name, and is recorded over several calls, whose results are dropped.
    With ``batches`` in place of a batch, the calls get one after the other, in this order; of a module, its steps.
    Raises MagisError for models that cannot be captured, and for invalid arguments.
    """
    asked = None if memory_limit is None else limit_bytes(memory_limit)
    device = default_device() if device is None else device
    settings = allocator_text(allocator, device)
    bench, make, function = Bench(), None, None
    if batches is not None and (problem := problem_of_batches(module, batch, batches)):
        hint = "give a module or a step function, and a list of batches in place of one"
        raise UsageError(f"magis.estimate: {problem}", hint=hint)
    if batches is not None and isinstance(module, nn.Module):
        if (dtype, preset, accumulate, compiled) != (None, None, 1, False):
            what = "several batches of a module run as its plain step"
            raise UsageError(f"magis.estimate: {what}", hint="leave out what changes the step")
        module, batches = plain_step(module, batches, loss, optimizer)
        loss = optimizer = None
    is_function = callable(module) and not isinstance(module, (nn.Module, type))
    given = batches if batch is None else [batch]
    if given is not None and callable(module) and is_function:
        if (loss, optimizer, dtype, preset, accumulate, compiled) != (None, None, None, None, 1, False):
            what = "a function brings its own batch and loss, a step function brings its loss and update"
            raise UsageError(f"magis.estimate: {what}", hint="give nothing beside it, or the step's batch alone")
        name = getattr(module, "__name__", type(module).__name__)
        function = StepFunction(module, given, Case(name, "eager", device, "small", allocator=settings), bench)
        result = function.result()
    else:
        if is_function:
            check_arguments(module)
        name, make = recipe_of("magis.estimate", module, batch, loss, optimizer)
        case = Case(name, "eager", device, preset or ("small" if device == "cpu" else "paper"), dtype, seed=seed)
        result = _result(replace(case, allocator=settings, accumulate=accumulate), bench, make, compiled)
    limit = asked
    if limit is None:
        limit = result.device_memory_bytes if device == "cpu" else usable_memory(device)
        limit = min(limit, allocator_settings(settings).allowed_bytes(device_memory(device)) or limit)
    devices = asked is None
    return Estimate(result, bench, make, limit, is_devices_limit=devices, compiled=compiled, function=function)


def _result(case: Case, bench: Bench, make: Make | None, compiled: bool | str) -> CaseResult:
    """Return the figures of a case, eager or compiled."""
    if not compiled:
        return run_case(case, cache=bench, make=make)
    return compiled_result(case, bench.subject(case, make), compiled)
