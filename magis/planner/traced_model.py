"""A captured model: its workload on hollow and on real tensors, its signatures and their scratch bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch

from magis.capture import Captured, Workload, capture
from magis.capture.captured import record_eager
from magis.capture.eager_run import Heard
from magis.capture.hollow import Hollow, hollow
from magis.capture.python_state import CACHES, caches_kept, deep_copy, put_back, settle, whole_numbers
from magis.capture.refusals import BranchError
from magis.capture.with_optimizer import followed_by, joined
from magis.cost.signature import signature
from magis.dtypes import autocast_type, tensor_type
from magis.errors import CaptureError
from magis.graph import Graph, Op, Value, every_op, verify
from magis.ops.call import shaped_by_contents
from magis.ops.generators import generators_kept
from magis.planner.conformance import MOST_BYTES
from magis.planner.workload_source import Source, own_dtype, would_change
from magis.runtime.scratch import Needs, measure_workspaces, needs, record_workspaces
from magis.runtime.steps import GraphStep
from magis.simulate.compiled_problem import redo_form
from magis.strategies.single_device import Local


class TracedModel:
    """One model at one size, data type and device kind. Heavy members are made once and kept."""

    def __init__(self, source: Source) -> None:
        self._asked = source
        self.simulated_only = source.device.startswith("sim:")
        self.kind = "cpu" if source.device == "cpu" else "cuda"
        self._variants: dict[str, tuple[Captured, int]] = {}
        self._settles = False
        self._heard: Heard | None = None

    @cached_property
    def source(self) -> Source:
        """With the model's own data type, where none was asked for."""
        return self._asked if self._asked.dtype else replace(self._asked, dtype=own_dtype(self.traced))

    @property
    def keeps_dtypes(self) -> bool:
        """Whether tensors stay of the data types that they are built with."""
        return not self._asked.dtype

    @cached_property
    def workload(self) -> Workload:
        """The real workload, on the CPU."""
        return self.make()

    @cached_property
    def traced(self) -> Workload:
        """The workload on hollow tensors, to be captured. The real one of a factory that does on real tensors what
        hollow ones cannot: it reads numbers off them, say."""
        try:
            with caches_kept() as caches, hollow(Hollow(made=caches.made)):
                work = self.make()
                caches.forget(*work.module.parameters(), *work.module.buffers(), *work.inputs, *work.targets)
                return work
        except Exception:
            if not self._asked.of_user:
                raise
        return self.workload

    def make(self) -> Workload:
        """The workload anew, on whatever kind of tensors is in force."""
        made = self._asked.make(self._asked.seed)
        if not self._asked.dtype:
            return made
        dtype = tensor_type(self._asked.dtype)
        if self._asked.of_user and would_change(made.module, getattr(torch, dtype)):
            made = replace(made, module=deep_copy(made.module))  # the user may have it at hand: it stays as it is
        return made.to(dtype)

    @cached_property
    def captured(self) -> Captured:
        """The step in program order, with eager's in-place operators; verified."""
        found = self._first_capture()
        if not found.left:
            return found
        self._settles = True
        if CACHES in found.left:
            self.__dict__["traced"] = self.workload
        before = whole_numbers(self.traced)
        settle(self.traced)
        if self._heard is not None:
            self._listen()
        found = self._captured(self.traced)
        put_back(before, found.left)
        return found

    def _first_capture(self) -> Captured:
        """Of the hollow workload, else of the real one: its batch may have what a hollow one has not, lengths say."""
        try:
            return self._captured(self.traced, settled=False)
        except CaptureError as error:
            branches = isinstance(error, BranchError)
            if not branches and (not self._asked.of_user or self.traced is self.workload):
                raise
        self.__dict__["traced"] = self.workload
        try:
            return self._captured(self.workload, settled=False)
        except BranchError:
            weights = sum(each.numel() * each.element_size() for each in self.workload.module.parameters())
            if 4 * weights > MOST_BYTES:
                raise
            self._listen()  # what eager's run tells of the ways that it takes
        return self._captured(self.workload, settled=False)

    def _listen(self) -> None:
        """Run the real workload once, for the ways that its branches take."""
        work = self.workload
        with generators_kept():
            self._asked.start()
            self._heard = record_eager(
                *work.parts,
                explicit_attention=work.explicit_attention,
                autocast=autocast_type(self._asked.dtype),
                expects=True,
            ).heard

    @cached_property
    def _settled(self) -> Workload:
        """The real workload as it is from the second step on."""
        work = self.workload
        left = self.captured.left
        if self._settles and work.module is not self.traced.module:
            before = whole_numbers(work)
            settle(work)
            put_back(before, left)
        return work

    def captured_as(self, strategy: Local) -> tuple[Captured, int]:
        """The same under a strategy that can be captured, and the bytes that it moves over the host's link; kept."""
        if strategy.name not in self._variants:
            with strategy.in_capture(self.traced, self.kind) as moved:
                captured = self._captured(self.traced, strategy.cast)
            self._variants[strategy.name] = captured, moved.nbytes
        return self._variants[strategy.name]

    def _captured(self, workload: Workload, cast: str = "", *, settled: bool = True) -> Captured:
        with generators_kept():
            self._asked.start()
            found = capture(
                *workload.parts,
                device=self.kind,
                explicit_attention=workload.explicit_attention,
                autocast=cast or autocast_type(self._asked.dtype),
                settled=settled,
                heard=self._heard,
                results=self._asked.keeps_results,
            )
            found = self.followed(found, workload)
        verify(found.graph)
        verify(found.original.graph)
        return found

    def hear(self, heard: Heard | None) -> None:
        """Capture with what eager's run of the step told another capture of it."""
        self._heard = heard

    def followed(self, captured: Captured, workload: Workload) -> Captured:
        """A captured step with the optimizer that runs by itself behind it, where there is one."""
        own = workload.optimizer.own
        return captured if own is None else followed_by(captured, own, workload.module, self.kind)

    def whole(self, graph: Graph) -> Captured | None:
        """A graph of ours with the optimizer that runs by itself behind it; None where there is none."""
        return None if self.captured.behind is None else joined(self.captured, graph)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind)

    @property
    def holders(self) -> Mapping[str, object]:
        """Where tensors are that Python holds, by the names that their paths begin with."""
        return {"module": self._settled.module, "loss": self._settled.loss_fn}

    def fresh(self) -> Workload:
        """A workload of its own, with the same weights and batch, on the device."""
        device = self.torch_device
        base = self._settled
        # Forwards may write into their batch: each step has one of its own, whose tensors share memory as these do.
        inputs, targets = copy.deepcopy((base.inputs, base.targets))
        return replace(
            base,
            module=deep_copy(base.module).to(device),
            inputs=tuple(t.to(device) for t in inputs),
            targets=tuple(t.to(device) for t in targets),
        )

    @property
    def _step_seed(self) -> int | None:
        """What every step is seeded with, where another draw would make it another step."""
        graph = self.captured.graph
        drawn = self.captured.drawn or (
            self.captured.expects
            and any(op.random for op in graph.ops)
            and any(shaped_by_contents(op, graph.values) for op in graph.ops)
        )
        return self._asked.seed if drawn and self._asked.seeded else None

    def _around(self) -> AbstractContextManager[object]:
        """The context of eager's forward and loss."""
        cast = autocast_type(self._asked.dtype)
        return nullcontext() if cast is None else torch.autocast(self.kind, getattr(torch, cast))

    @property
    def blocks(self) -> tuple[str, ...]:
        return self.traced.blocks


def redo_graph(graph: Graph) -> Graph:
    """A graph that holds every operator in the form in which it is recomputed; only good for asking for costs."""
    return replace(graph, ops=tuple(_redone(op, graph) for op in graph.ops))


def _redone(op: Op, graph: Graph) -> Op:
    form = redo_form(op, graph)
    return form if form.body is None else replace(form, body=replace(form.body, graph=redo_graph(form.body.graph)))


def signatures(graph: Graph) -> dict[str, tuple[Op, Mapping[int, Value]]]:
    """Every distinct operator signature of a graph with an example; swaps left out."""
    return {signature(op, values): (op, values) for op, values in every_op(graph) if not op.target.startswith("magis.")}


class Scratches:
    """Workspace bytes of this machine, by signature."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._unknown: dict[str, str] = {}
        """Operator -> module of one call, of those that nothing could measure."""

    def add(self, graph: Graph, limit: int | None, step: Callable[[], GraphStep] | None) -> None:
        """Find out what the graph's operators need; `step` makes one that runs the graph, where that is possible.

        Each operator by itself but for those whose scratch hangs on what is in their tensors: these in the step.
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
            self.known.update(measure_workspaces(missing.values(), limit))
        if limit is None:
            self._unknown.update({op.target: op.module for key, (op, _) in missing.items() if key not in self.known})

    @property
    def note(self) -> str:
        """Which operators nothing is known of; empty if there are none."""
        if not self._unknown:
            return ""
        calls = ", ".join(f"{target} in {module or '(root)'}" for target, module in sorted(self._unknown.items()))
        return f"workspace unknown: {calls}"
