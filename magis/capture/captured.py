"""Capture of a training step (or an inference) of any module as one graph.

The step runs once on hollow CPU tensors (`hollow.py`): nothing is computed, and no memory is used, whatever the sizes.
``autocast`` substitutes operators of the target device (a fused dropout, an attention kernel) during tracing; devices
are replaced when the plan is written as a graph. `record_eager` runs the step on real tensors, for a comparison.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.nn.attention import SDPBackend, sdpa_kernel

from magis.capture.attention_kernels import Capability
from magis.capture.autocast import as_on_cuda, device_forms
from magis.capture.autocast import autocast as casting
from magis.capture.contents import Made, copies, hollow_like, is_readable
from magis.capture.eager_run import Heard, Listener, by_element, readers_replaced
from magis.capture.hollow import Hollow, hollow
from magis.capture.optimizer_rule import Apart
from magis.capture.python_state import CACHES, WritesUndone, caches_kept, tensors_left
from magis.capture.recorder import Recorder
from magis.capture.refusals import (
    INFERENCE,
    check_batch,
    check_contents,
    check_loss,
    check_products,
    check_replaced,
    check_shapes,
    check_tensors,
    clear_errors,
    no_gradient_for,
    no_gradient_retained,
    no_own_backward,
    read_and_written,
    shapes,
)
from magis.capture.schemas import tensors_in
from magis.capture.snapshot import Snapshot, objects_kept
from magis.capture.stand_ins import StandIns, finder, stand_ins
from magis.capture.traced_numbers import TRACE
from magis.capture.updates import bytes_of_list, register_states, soonest, updated_early
from magis.capture.workload import roots_of
from magis.errors import CaptureError
from magis.graph import Graph
from magis.ops import optimizers
from magis.ops.averages import averages_named
from magis.ops.collectives import is_message
from magis.ops.eager_only import formulas_as_eager
from magis.ops.generators import HostGenerators, generators_kept, held_generators, own_kept, states_recorded
from magis.ops.optimizer_forms import Weight, update, updates_by_lists
from magis.ops.python_objects import find
from magis.quiet import collector_off


@dataclass(frozen=True)
class Captured:
    """A captured step.

    ``graph`` is in program order, with eager's in-place operators. ``deaths`` maps a storage to the number of operators
    after which eager frees it (a missing storage lives to the end), so that the graph in program order reproduces
    eager's memory byte for byte. ``numbers`` are first position, last position and bytes of Python numbers that
    autograd saves for the backward as small CPU tensors, outside of the graph. ``parameters`` are the names of the
    trained parameters.
    """

    graph: Graph
    deaths: Mapping[int, int]
    numbers: tuple[tuple[int, int, int], ...]
    parameters: tuple[str, ...]
    dtype: str
    rule: optimizers.OptimizerSpec
    graded: tuple[str, ...] = ()
    """Names of the trained parameters that have a gradient."""
    left: tuple[str, ...] = ()
    """Paths of the Python objects that the forward changed."""
    drawn: bool = False
    """True if Python drew random numbers: the graph is that of one draw, and another step may be another graph."""
    after: HostGenerators | None = field(default=None, compare=False)
    """Python's and numpy's generators after the step if Python drew random numbers; else None."""
    contents: frozenset[str] = frozenset()
    """Names of the tensors off which Python read numbers: the capture is valid for these contents only."""
    moved: frozenset[str] = frozenset()
    """Names of the tensors in `contents` that the step writes: numbers read off them must become graph inputs."""
    kept: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Tensors in `contents` that no path leads to, by name."""
    cached: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    """Tensors that function caches hold, by their names in the graph."""
    results: tuple[str, ...] = ()
    """Paths to attributes, buffers and data in which the forward stores tensors: graph outputs after the loss."""
    heard: Heard | None = field(default=None, compare=False)
    """Layouts and branches recorded in eager's run, as used by this capture or recorded by it; None if unused."""
    seen: tuple[Tensor, ...] = field(default=(), compare=False)
    """Outputs and gradients of a step that ran on real tensors."""
    listed: Captured | None = None
    """Eager's own step, if it updates lists of weights (foreach, fused) where this step updates single weights, or if
    an optimizer is called after this step; else None."""
    behind: Apart | None = None
    """Captured step of an optimizer that is called after this step, which then ends with gradients; else None."""

    @property
    def expects(self) -> bool:
        """True if the graph checks that branches on data go as they went in the capture."""
        return self.heard is not None and self.heard.expects

    @property
    def sends(self) -> bool:
        """True if the step has collectives, which other ranks would have to run, too."""
        return any(is_message(op.target) for op in self.graph.ops)

    @property
    def original(self) -> Captured:
        """The captured step as eager runs it."""
        return self.listed or self


def capture(
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: Callable[..., Tensor] | None,
    rule: optimizers.OptimizerSpec,
    *,
    device: str = "cpu",
    explicit_attention: bool = False,
    autocast: str | None = None,
    settled: bool = True,
    heard: Heard | None = None,
    results: bool = False,
    early: bool = False,
    capability: Capability | None = None,
) -> Captured:
    """Capture ``loss_fn(module(*inputs), *targets)``, its gradients and the update as a graph.

    The tensors may be real, hollow or fake, and are not changed. ``device`` ("cpu" or "cuda") selects the operators of
    that device, ``autocast`` ("bfloat16" or "float16") the autocast dtype of forward and loss. With ``settled`` False
    the module may replace buffers, as some modules do in their first step. ``heard`` is what `record_eager` recorded of
    this step. With ``results`` the tensors that the forward stores in attributes are graph outputs, too. With ``early``
    each weight is updated in the backward, as soon as its gradient is complete. ``capability`` is that of a simulated
    GPU.

    Raises CaptureError, naming module and line, for steps that are not one static graph, BranchError if ``heard`` would
    help.
    """
    check_tensors(module, inputs, targets)
    step = _Step(module, inputs, targets, loss_fn, rule, explicit_attention, autocast, device, early, capability)
    with caches_kept() as caches:
        mode = Hollow(heard=heard, made=caches.made)
        try:
            found = _captured(step, mode, caches.made, settled=settled, results=results)
        except CaptureError:
            if not mode.drawn:
                raise
            mode = Hollow(draws=True, heard=heard, made=caches.made)
            found = _captured(step, mode, caches.made, settled=settled, results=results)
        del mode
        return replace(found, left=(*found.left, CACHES)) if caches.forget() else found


@dataclass(frozen=True, eq=False)
class _Step:
    """Module, batch, loss and update of a step, and the device whose operators the capture uses."""

    module: nn.Module
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    loss_fn: Callable[..., Tensor] | None
    rule: optimizers.OptimizerSpec
    explicit_attention: bool
    autocast: str | None
    device: str = "cpu"
    early: bool = False
    capability: Capability | None = None

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that the step trains. Raises CaptureError if a training step has none."""
        training = self.rule.kind != "none"
        trained = tuple(name for name, p in self.module.named_parameters() if training and p.requires_grad)
        if training and not trained:
            raise CaptureError("there is nothing to train: no parameter requires a gradient", hint=INFERENCE)
        return trained


@contextmanager
def _watched(
    step: _Step,
    stand: StandIns,
    cached: dict[str, Tensor],
    *,
    expects: bool,
    told: Callable[[bool], None] = lambda _of_batch: None,
) -> Iterator[tuple[Recorder, Snapshot, Callable[[Graph], None]]]:
    """Prepare the recording of a step on placeholder memory; yield the recorder, a snapshot of Python objects, and a
    check of batch norms with cumulative averages. Tensors of function caches are added to `cached`."""
    own, made = held_generators(stand.module, step.loss_fn), dict[str, torch.Generator]()
    sentinels = {number: name for name, number in optimizers.sentinels(step.rule).items()}
    find = finder(stand, step.loss_fn, cached)
    recorder = Recorder(sentinels, find, ChainMap(made, own), expects=expects, told=told)
    with ExitStack() as stack:
        stack.enter_context(own_kept(own))
        stack.enter_context(clear_errors(recorder.places))
        stack.enter_context(no_own_backward(lambda: recorder.phase))
        kept = stack.enter_context(objects_kept(roots_of(stand.module, step.loss_fn)))
        if step.explicit_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # In force for the backward, too: activation checkpointing runs parts of the forward again in it.
        stack.enter_context(device_forms(step.device, step.capability))
        if step.device == "cuda":  # also for autocast inside the module
            stack.enter_context(as_on_cuda())
        stack.enter_context(states_recorded(step.device, own, made))
        yield recorder, kept, stack.enter_context(averages_named(stand.module, sentinels))


def _captured(step: _Step, mode: Hollow, twins: Made, *, settled: bool, results: bool) -> Captured:
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        hosts = stack.enter_context(generators_kept())
        twin = partial(hollow_like, known=is_readable, made=twins)
        stand = stack.enter_context(stand_ins(step.module, step.inputs, step.targets, step.trained, twin))
        given, cached = shapes(stand), dict[str, Tensor]()
        memory = {id(each): each.untyped_storage()._cdata for each in stand.named().values()}
        roots, left = roots_of(stand.module, step.loss_fn), dict[str, Tensor]()
        watched = _watched(step, stand, cached, expects=mode.follower.expects, told=mode.expected)
        recorder, kept, check_averages = stack.enter_context(watched)
        if results:
            stack.enter_context(no_gradient_retained())
        with hollow(mode):
            look = partial(tensors_left, roots, kept, memory) if results else dict
            found = _recorded(step, recorder, stand, look, left)
        check_shapes(given, stand)
        check_batch(stand)
        check_averages(found.graph)
        check_replaced(stand, memory, left.values(), settled=settled)
        check_products(found.graph)
        holders = {"module": stand.module, "loss": step.loss_fn}
        names = {name: find(holders, tensor) or name for name, tensor in mode.kept.items() if name in mode.read}
        contents = {names.get(name, name) for name in mode.read}
        moved = read_and_written(found.graph, contents | cached.keys())
        if not results or any(not name.startswith("buffer:") for name in moved):
            check_contents(moved)
        trace, drawn = TRACE.get(), mode.drawn or hosts.moved()
        if trace is not None:
            trace.look()
            drawn = mode.drawn or not trace.explains(hosts)
        return replace(
            found,
            contents=frozenset(contents),
            moved=moved,
            kept={name: tensor.detach() for name, tensor in mode.kept.items() if name in contents},
            left=tuple(path for path, *_ in kept.left()),
            cached=cached,
            drawn=drawn,
            after=HostGenerators() if drawn else None,
            heard=mode.follower.heard,
        )


def record_eager(
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: Callable[..., Tensor] | None,
    rule: optimizers.OptimizerSpec,
    *,
    explicit_attention: bool = False,
    autocast: str | None = None,
    expects: bool = False,
    within: AbstractContextManager[object] | None = None,
) -> Captured:
    """Record forward, loss and backward of a step as the CPU really runs them, on copies of the tensors.

    The graph ends before the update. Modules, tensors and random-number generators are left unchanged. ``heard`` of the
    result is what a capture on hollow tensors cannot know; with ``expects``, the integers that Python reads are in the
    graph. Hollow tensors get made-up contents. The step runs inside the context ``within``, if given.
    """
    rule = replace(rule, kind="none" if rule.kind == "none" else "gradients", groups=())
    step, seen = _Step(module, inputs, targets, loss_fn, rule, explicit_attention, autocast), list[Tensor]()
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stand = stack.enter_context(stand_ins(module, inputs, targets, step.trained, copies))
        recorder, *_ = stack.enter_context(_watched(step, stand, {}, expects=expects))
        stack.enter_context(formulas_as_eager())
        stack.enter_context(WritesUndone())
        if expects:
            stack.enter_context(readers_replaced(by_element))
        with Listener(expects=expects) as listener, within or nullcontext():
            found = _recorded(step, recorder, stand, seen=seen)
        return replace(found, heard=listener.heard(), seen=tuple(seen))


def _recorded(
    step: _Step,
    recorder: Recorder,
    stand: StandIns,
    attributes: Callable[[], Mapping[str, Tensor]] = dict,
    left: dict[str, Tensor] | None = None,
    seen: list[Tensor] | None = None,
) -> Captured:
    """Run and record the step on its placeholders. `left` is filled with those `attributes`, tensors stored by the
    forward, that are outputs; `seen` with outputs and gradients."""
    rule, trained, device = step.rule, step.trained, step.device
    training = rule.kind != "none"
    leaves = [stand.parameters[name] for name in trained]
    states = [optimizers.new_states(rule, name, leaf) for name, leaf in zip(trained, leaves, strict=True)]
    numbers, done = optimizers.sentinels(rule), set[str]()
    for name, tensor in stand.named().items():
        kind = name.partition(":")[0]
        recorder.register(tensor, "batch" if kind in ("input", "target") else kind, name)
    with collector_off(), recorder.places.watch(stand.module), recorder:
        grads: Sequence[Tensor | None] = ()
        result: Any = None
        for inputs, targets in rule.micro_batches(stand.inputs, stand.targets):
            recorder.phase = "forward"
            with torch.set_grad_enabled(training), casting(step.autocast):
                # as eager calls it: a name for the module's output would keep it alive while the loss runs
                made = partial(stand.module, *inputs)
                result = rule.share(made() if step.loss_fn is None else step.loss_fn(made(), *targets))
            if training:
                check_loss(result)
                recorder.phase = "backward"
                early = updated_early(recorder, rule, device, trained, leaves, states, done)
                with no_gradient_for(recorder.graded.values(), result), early if step.early else nullcontext():
                    # Held to the end of the step, as ``.grad`` holds them in eager.
                    grads = _gradients(result, leaves)
        if training:
            recorder.phase = "update"
            register_states(recorder, trained, grads, states)
        left = {} if left is None else left
        left.update({name: tensor for name, tensor in attributes().items() if recorder.is_result(tensor)})
        if seen is not None:
            seen += [tensor.detach() for tensor in (*tensors_in(result), *grads) if tensor is not None]
        returned, gradients = [*tensors_in(result), *left.values()], [g for g in grads if g is not None]

        def found(*, stops: bool) -> Captured:
            outputs = [*returned, *gradients] if stops else returned
            return Captured(
                graph=recorder.graph(tuple(recorder.value_of(t) for t in outputs)),
                deaths=recorder.deaths,
                numbers=recorder.numbers,
                parameters=trained,
                dtype=next((str(p.dtype).removeprefix("torch.") for p in stand.module.parameters()), "float32"),
                rule=rule,
                graded=tuple(n for n, grad in zip(trained, grads, strict=False) if grad is not None or n in done),
                results=tuple(left),
            )

        listed, most = found(stops=True) if rule.kind == "own" else None, 0
        weights = [Weight(*each) for each in zip(trained, leaves, grads, states, strict=True)]
        with torch.no_grad():
            if updates_by_lists(rule, device):
                with recorder.aside():
                    update(rule, weights, numbers, device=device)
                    listed = found(stops=False)
                weights, most = soonest(recorder, weights), bytes_of_list(weights, device)
            update(rule, weights, numbers, device=device, most_bytes=most)
        return replace(found(stops=rule.stops), listed=listed)


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Run ``loss.backward()`` below function modes; return the gradients, None for a parameter without one.
    `Tensor.backward` would disable ``device_forms`` in the backward, where checkpointing runs forwards again. Gradients
    are accumulated as in eager, which copies those that are shared or have other strides than their parameter."""
    root = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward((loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return [leaf.grad for leaf in leaves]
