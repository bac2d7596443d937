"""A captured model: its workload on hollow and on real tensors, its operator signatures and their workspaces."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial

import torch

from magis.capture import Captured, Workload, capture
from magis.capture.captured import record_eager
from magis.capture.contents import is_hollow
from magis.capture.eager_run import Heard
from magis.capture.hollow import Hollow, hollow
from magis.capture.python_state import CACHES, caches_kept, deep_copy, put_back, settle
from magis.capture.refusals import BranchError, of_contents
from magis.capture.snapshot import Snapshot
from magis.capture.with_optimizer import followed_by, joined, with_eager_optimizer
from magis.capture.workload import roots_of
from magis.cost.devices import find_device
from magis.cost.signature import signature
from magis.dtypes import autocast_type, tensor_type
from magis.errors import CaptureError, FactoryError, UsageError
from magis.graph import Graph, Op, Value, every_op, verify
from magis.ops.call import shaped_by_contents
from magis.ops.generators import generators_kept
from magis.planner.smaller_steps import MOST_BYTES, MOST_SECONDS, held_bytes, seconds_on_cpu, smaller_step, tensors_of
from magis.planner.workload_source import Source, conversion_changes, own_dtype
from magis.progress import Progress
from magis.runtime.measure import trim
from magis.runtime.scratch import Needs, measure_workspaces, needs, packed_by, record_workspaces
from magis.runtime.steps import GraphStep
from magis.runtime.storage_ledger import BoundedLedger, OverrunError
from magis.simulate.compiled_problem import redo_form
from magis.strategies.single_device import Local
from magis.units import format_bytes

QUICK_SECONDS = 1.0
"""Longest predicted run of a smaller step that is timed only to rate this machine's speed."""
MOST_GUESSES = 1 << 12
"""Most branches on data in a step for which a smaller size is searched."""


class TracedModel:
    """One model at one size, dtype and device kind. Expensive members are computed once and cached."""

    def __init__(self, source: Source) -> None:
        self._asked = source
        self.simulated_only = source.device.startswith("sim:")
        self.kind = "cpu" if source.device == "cpu" else "cuda"
        self._variants: dict[str, tuple[Captured, int]] = {}
        self._settles = False
        self.tell: Progress = lambda _text: None
        """Callback for progress messages."""
        self._heard: Heard | None = None
        self.capture_seconds = 0.0
        """Seconds that the last capture took."""

    @cached_property
    def source(self) -> Source:
        """Source of the workload, with the model's own dtype if none was requested."""
        return self._asked if self._asked.dtype else replace(self._asked, dtype=own_dtype(self.traced))

    @property
    def keeps_dtypes(self) -> bool:
        """True if tensors keep the dtypes with which they are built."""
        return not self._asked.dtype

    @cached_property
    def workload(self) -> Workload:
        """Real workload, on the CPU."""
        return self.make()

    @cached_property
    def traced(self) -> Workload:
        """Workload on hollow tensors, for capture; with data in them if the user's factory fails without."""
        try:
            return self._hollow_workload()
        except Exception as error:
            returned = isinstance(error, UsageError) and not isinstance(error, FactoryError)
            if returned or not self._asked.of_user:
                raise
            why = f"building it fails on fake tensors ({error})"
        return self._workload_with_numbers(why)

    def _hollow_workload(self, *, numbers: bool = False) -> Workload:
        with caches_kept() as caches, hollow(Hollow(made=caches.made)) as mode:
            mode.numbers = numbers
            work = self.make()
            caches.forget(*tensors_of(work))
            return work

    def _workload_with_numbers(self, why: str) -> Workload:
        """Build the workload on real tensors. If that would be too large for a simulated step, build a hollow one in
        which only integers have data."""
        if self.simulated_only:
            with suppress(Exception):  # the real workload reports the error
                work = self._hollow_workload(numbers=True)
                if held_bytes(tensors_of(work)) > MOST_BYTES:
                    return work
        self.tell(f"{why}: building it on real ones")
        return self.workload

    def make(self) -> Workload:
        """Build a new workload, on real or hollow tensors as the active mode decides."""
        made = self._asked.make(self._asked.seed)
        if self._asked.accumulate != 1:
            made = replace(made, optimizer=replace(made.optimizer, accumulate=self._asked.accumulate))
        if not self._asked.dtype:
            return made
        dtype = tensor_type(self._asked.dtype)
        if self._asked.of_user and conversion_changes(made.module, getattr(torch, dtype)):
            made = replace(made, module=deep_copy(made.module))  # the user's module stays unchanged
        return made.to(dtype)

    @cached_property
    def captured(self) -> Captured:
        """Captured step in program order, with eager's in-place operators; verified."""
        found = self._first_capture()
        if not found.left:
            return found
        self._settles = True
        if CACHES in found.left and not self.simulated_only:
            self.__dict__["traced"] = self.workload
        roots = roots_of(self.traced.module, self.traced.loss_fn)
        before = Snapshot(roots)
        with caches_kept() as caches:
            settle(self.traced, caches if self.simulated_only else None, self._bounded(self.traced))
            found = self._capture_again()
            if put_back(roots, before, found.left):  # values of the first step; a later step may compute others
                found = self._capture_again()
        return found

    def _capture_again(self) -> Captured:
        """Capture a later step than the module's first one, with the values that a new eager run records."""
        if self._heard is not None:
            self._listen()
        return self._captured(self.traced)

    def _first_capture(self) -> Captured:
        """Capture the hollow workload; if that needs tensor data (sequence lengths, say), capture the real one."""
        try:
            return self._captured(self.traced, settled=False)
        except CaptureError as error:
            branches = isinstance(error, BranchError)
            real = "workload" in vars(self)
            if not branches and (not self._asked.of_user or real or not of_contents(error)):
                raise
            why = f"capturing it fails on fake tensors ({error})"
        if not real:
            self.__dict__["traced"] = self._workload_with_numbers(why)
        try:
            return self._captured(self.traced, settled=False)
        except BranchError:
            weights = held_bytes(self.traced.module.parameters())
            if 4 * weights > MOST_BYTES or any(map(is_hollow, tensors_of(self.traced))):
                raise
            self._listen()  # record which way eager's branches go
        return self._captured(self.traced, settled=False)

    def _listen(self) -> None:
        """Run the real workload once in eager to record which way its branches go. If that is too large beside a
        simulated step, run a smaller one, which gives truth values only."""
        work = self.workload
        try:
            self._heard = self._record_eager(work, self._bounded(work))
        except OverrunError:
            trim()
            self._heard = self._record_smaller(work)
            if self._heard is None:
                most = f"{format_bytes(MOST_BYTES)} or {MOST_SECONDS:.0f} s"
                raise CaptureError(
                    f"numbers or shapes hang on data, and running the step for them takes more than {most} here",
                    hint="choose a smaller batch, or fixed shapes (torch.where)",
                ) from None

    def _bounded(self, work: Workload) -> BoundedLedger | None:
        """Return the byte and time bounds for an eager run beside a simulated step; None for other steps."""
        room = MOST_BYTES // 2 - 2 * held_bytes(tensors_of(work))  # half is left for scratch, which is not counted
        return BoundedLedger(room, MOST_SECONDS) if self.simulated_only else None

    def _record_eager(self, work: Workload, within: AbstractContextManager[object] | None = None) -> Heard | None:
        explicit = work.explicit_attention
        with generators_kept():
            self._asked.start()
            run = record_eager(
                *work.parts, explicit_attention=explicit, autocast=self._cast, expects=True, within=within
            )
        return run.heard

    def _record_smaller(self, work: Workload) -> Heard | None:
        """Record an eager run of a smaller step, found with all branches going one way; layouts are dropped. None if
        the run reads more than truth values: scalars and data-dependent shapes differ with the size."""
        for guess in (True, False):
            guessed = Heard({}, (guess,) * MOST_GUESSES, expects=True)
            with smaller_step(work, partial(self._capture_for_cpu, guessed)) as small:
                heard = (
                    None if small is None else self._record_eager(small.work, BoundedLedger(MOST_BYTES, MOST_SECONDS))
                )
                if heard is not None and all(isinstance(each, bool) for each in heard.read):
                    return replace(heard, layouts={})
        return None

    @cached_property
    def _settled(self) -> Workload:
        """Real workload in the state that it has from the second step on."""
        work = self.workload
        left = self.captured.left
        if self._settles and work.module is not self.traced.module:
            roots = roots_of(work.module, work.loss_fn)
            before = Snapshot(roots)
            settle(work)
            put_back(roots, before, left)
        return work

    def captured_as(self, strategy: Local) -> tuple[Captured, int]:
        """Return the step captured under a strategy, and the bytes moved over the host link by the strategy; cached."""
        if strategy.name not in self._variants:
            with strategy.in_capture(self.traced, self.kind) as moved:
                early, work = strategy.updates_early(self.traced), strategy.cut(self.traced)
                captured = self._captured(work, strategy.cast, early=early)
            self._variants[strategy.name] = captured, moved.nbytes
        return self._variants[strategy.name]

    def _captured(self, workload: Workload, cast: str = "", *, settled: bool = True, early: bool = False) -> Captured:
        begun = time.perf_counter()
        with generators_kept():
            self._asked.start()
            found = capture(
                *workload.parts,
                device=self.kind,
                explicit_attention=workload.explicit_attention,
                autocast=cast or self._cast,
                settled=settled,
                heard=self._heard,
                results=self._asked.keeps_results,
                early=early,
                capability=find_device(self._asked.device).capability,
            )
            found = self.followed(found, workload)
        verify(found.graph)
        verify(found.original.graph)
        self.capture_seconds = time.perf_counter() - begun
        return found

    @property
    def _cast(self) -> str | None:
        """Data type of autocast; None without autocast."""
        return autocast_type(self._asked.dtype)

    def _capture_for_cpu(self, heard: Heard | None, work: Workload) -> Captured:
        return capture(*work.parts, explicit_attention=work.explicit_attention, autocast=self._cast, heard=heard)

    def expected_seconds(self, graph: Graph, most: float) -> float:
        """Predict the seconds of a step on this CPU from its operators. If that exceeds ``most``, scale the prediction
        by the measured and predicted times of a smaller step."""
        expected = seconds_on_cpu(graph)
        if expected <= most:
            return expected
        look, quick = partial(self._capture_for_cpu, self._heard), min(most, QUICK_SECONDS)
        with smaller_step(self.traced, look, most_seconds=quick) as small, generators_kept():
            if small is None:
                return expected
            begun = time.thread_time()
            try:
                explicit = small.work.explicit_attention
                record_eager(*small.work.parts, explicit_attention=explicit, autocast=self._cast)
            except CaptureError:  # running the case reports the error
                return expected
            return expected * (time.thread_time() - begun) / small.seconds

    def hear(self, heard: Heard | None) -> None:
        """Set the values that an eager run recorded for another capture of the step; the next capture uses them."""
        self._heard = heard

    def followed(self, captured: Captured, workload: Workload) -> Captured:
        """Return a captured step followed by an unplanned optimizer (its `step()` runs after the plan), if there is
        one; its original followed by the optimizer's step, if the optimizer's own code is part of it."""
        own = workload.optimizer.own
        if workload.optimizer.kind == "own":
            return with_eager_optimizer(captured, workload.optimizer.whole)
        return captured if own is None else followed_by(captured, own, workload.module, self.kind)

    def whole(self, graph: Graph) -> Captured | None:
        """Return a planned graph followed by an unplanned optimizer; None if there is no such optimizer."""
        return None if self.captured.behind is None else joined(self.captured, graph)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def holders(self) -> Mapping[str, object]:
        """Python objects that hold tensors, by the first name in their tensors' paths."""
        return {"module": self._settled.module, "loss": self._settled.loss_fn}

    def fresh(self) -> Workload:
        """Return a new copy of the workload, with equal weights and batch, on the device."""
        device = self.torch_device
        base = self._settled
        # A forward may write into its batch: each step gets a copy with the same aliasing.
        inputs, targets = copy.deepcopy((base.inputs, base.targets))
        return replace(
            base,
            module=deep_copy(base.module).to(device),
            inputs=tuple(t.to(device) for t in inputs),
            targets=tuple(t.to(device) for t in targets),
        )

    @property
    def _step_seed(self) -> int | None:
        """Seed for every step if random draws decide which operators run; else None."""
        graph = self.captured.graph
        drawn = self.captured.drawn or (
            self.captured.expects
            and any(op.random for op in graph.ops)
            and any(shaped_by_contents(op, graph.values) for op in graph.ops)
        )
        return self._asked.seed if drawn and self._asked.seeded else None

    def _around(self) -> AbstractContextManager[object]:
        """Return the autocast context for eager's forward and loss."""
        return nullcontext() if self._cast is None else torch.autocast(self.kind, getattr(torch, self._cast))

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.traced.blocks


def redo_graph(graph: Graph) -> Graph:
    """Return a graph with every operator in its recompute form (no generator, no running statistics), for costs
    only."""
    ops = []
    for op in graph.ops:
        form = redo_form(op, graph)
        body = None if form.body is None else replace(form.body, graph=redo_graph(form.body.graph))
        ops.append(form if body is None else replace(form, body=body))
    return replace(graph, ops=tuple(ops))


def signatures(graph: Graph) -> dict[str, tuple[Op, Mapping[int, Value]]]:
    """Return every distinct operator signature of a graph, each with one example; swaps are left out."""
    return {signature(op, values): (op, values) for op, values in every_op(graph) if not op.target.startswith("magis.")}


class Scratches:
    """Workspace bytes measured on this machine, by operator signature."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._unknown: dict[str, str] = {}
        """Operators whose workspace cannot be measured -> module of one call."""

    def add(self, graph: Graph, limit: int | None, step: Callable[[], GraphStep] | None) -> None:
        """Measure the workspaces of a graph's operators; `step`, where given, builds a step that runs the graph.

        Operators are measured one by one, but those whose workspace depends on tensor data are measured inside the
        step.
        """
        missing = {
            key: (op, values)
            for op, values in every_op(graph)
            if not op.target.startswith("magis.") and (key := signature(op, values)) not in self.known
        }
        if step is not None and any(needs(*call) is not Needs.ANYTHING for call in missing.values()):
            found = record_workspaces(graph, step)
            of_numbers = [key for key, call in missing.items() if needs(*call) is not Needs.ANYTHING]
            self.known.update({key: found[key] for key in of_numbers if key in found})
        missing = {key: call for key, call in missing.items() if key not in self.known}
        if missing:
            self.known.update(measure_workspaces(missing.values(), limit, packed_by(graph)))
        if limit is None:
            self._unknown.update({op.target: op.module for key, (op, _) in missing.items() if key not in self.known})

    @property
    def note(self) -> str:
        """Operators with unknown workspace, in words; empty if there are none."""
        if not self._unknown:
            return ""
        calls = ", ".join(f"{target} in {module or '(root)'}" for target, module in sorted(self._unknown.items()))
        return f"workspace unknown: {calls}"
