"""Steps that run: eager's, and generated ones, with state of the same kind. A step has its module and optimizer state.
Measured is ``run``: from before the forward to after the update, with gradients None at its start. Both kinds of step
update weights and statistics in-place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from magis.errors import MagisError
from magis.graph import Graph, Op, every_op, named_numbers, with_scalars
from magis.ops import optimizers
from magis.ops.averages import is_share, shares_of
from magis.ops.fake_results import bits_of, with_bits
from magis.ops.generators import held_generators, seed_all
from magis.ops.optimizers import AHEAD, OptimizerSpec
from magis.ops.python_objects import PREFIX, look_up
from magis.runtime.codegen import CompiledStretch, compile_step, raised_by
from magis.runtime.codegen import Step as Program
from magis.runtime.packed_weights import check_places, merged_inputs, pack_weights
from magis.runtime.swap_streams import Runtime, make_host
from magis.runtime.time_slices import TimeSlice, Watched


class Step(Protocol):
    """A training or inference step, as it is measured."""

    module: nn.Module
    generators: Mapping[str, torch.Generator]
    """The step's own generators, besides the default generator of its device."""

    def prepare(self) -> None:
        """Prepare the next step before it is measured: set gradients to None."""

    def run(self) -> Tensor:
        """Run one step; return the loss (or the first output in inference)."""

    def run_in_turns(self, turn: TimeSlice) -> Tensor:
        """Run one step, calling `turn` between its operators; return the loss."""

    def results(self) -> tuple[Tensor, ...]:
        """Return the outputs of the last step: the loss and, if they are kept, the gradients; or the outputs of
        inference."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the optimizer's state tensors by their names in the graph: "exp_avg:layer.weight"."""


def whole_step(step: Step) -> Callable[[], object]:
    """Return a function that prepares and runs a whole step, as it is timed, measured and traced."""

    def once() -> object:
        step.prepare()
        return step.run()

    return once


class EagerStep:
    """The original step: eager mode, autograd, and ``torch.optim``, with foreach or fused updates as torch or the user
    chooses."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss_fn: Callable[..., Tensor] | None,
        rule: OptimizerSpec,
        *,
        explicit_attention: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scaler: torch.amp.GradScaler | None = None,
        transform: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
        seed: int | None = None,
        early: bool = False,
    ) -> None:
        """Set up a step in eager mode. ``around`` makes a context for forward and loss, such as autocast. ``scaler``
        scales the loss. ``transform`` takes the function that computes forward and loss, and returns the function to
        call, such as compiled code. With a ``seed`` every step draws equal random numbers. ``early`` updates each
        weight in the backward, as soon as its gradient is complete."""
        self.module = module
        self._seed = seed
        self.generators: Mapping[str, torch.Generator] = held_generators(module, loss_fn)
        self._around = around
        self._batch: tuple[Sequence[Tensor], Sequence[Tensor]] = (tuple(inputs), tuple(targets))
        self._loss_fn = loss_fn
        self._rule = rule
        self._explicit = explicit_attention
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._early = optimizers.one_by_one(rule, dict(self._trained)) if early else {}
        self._optimizer = None if early else optimizers.torch_optimizer(rule, dict(self._trained))
        for name, parameter in self._trained:
            if early:
                parameter.register_post_accumulate_grad_hook(partial(_update, self._early[name]))
        self._scaler = scaler
        self._call = self._forward_and_loss if transform is None else transform(self._forward_and_loss)
        self._outputs: tuple[Tensor, ...] = ()
        self._steps = 0

    def prepare(self) -> None:
        self._outputs = ()
        if self._seed is not None:
            seed_all(self._seed)
        for _, parameter in self._trained:
            parameter.grad = None

    def run(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self._explicit else nullcontext():
            if self._rule.kind == "none":
                with torch.no_grad():
                    self._outputs = tuple(_output_tensors(self.forward()))
                    return self._outputs[0]
            batch, loss, added, scaler = self._batch, torch.empty(0), 0.0, self._scaler
            try:
                for micro_batch in self._rule.micro_batches(*batch):
                    self._batch = micro_batch
                    loss = self._rule.share(self.forward())
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    added += float(loss.detach()) if self._rule.cuts else 0.0
            finally:
                self._batch = batch
            if self._optimizer is not None:
                self._steps += 1
                if scaler is None:
                    self._optimizer.step()
                else:
                    scaler.step(self._optimizer)
                    scaler.update()
        self._outputs = (loss.new_tensor(added) if self._rule.cuts else loss.detach(),)
        return self._outputs[0]

    def run_in_turns(self, turn: TimeSlice) -> Tensor:
        with Watched(turn):
            return self.run()

    def settle(self) -> None:
        """Run an optimizer of another class until the step at which its memory is measured."""
        if self._rule.kind == "apart" and self._optimizer is not None:
            if not self._steps:
                self.prepare()
                self.run()
            self._steps = settle(self._optimizer, self._steps)

    def forward(self) -> Any:
        """Run forward and loss only, with autograd as in the whole step; this may change weights, too."""
        with self._around():
            return self._call()

    def _forward_and_loss(self) -> Any:
        inputs, targets = self._batch
        return self.module(*inputs) if self._loss_fn is None else self._loss_fn(self.module(*inputs), *targets)

    def results(self) -> tuple[Tensor, ...]:
        if not self._rule.stops:
            return self._outputs
        return (*self._outputs, *self.gradients().values())

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the last step, by parameter name."""
        return {name: p.grad for name, p in self._trained if p.grad is not None}

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights with the given gradients."""
        for name, parameter in self._trained:
            parameter.grad = gradients.get(name)
        if self._optimizer is not None:
            self._optimizer.step()
        for _, parameter in self._trained:
            parameter.grad = None

    def state(self) -> Mapping[str, Tensor]:
        parameters, every = dict(self._trained), [*self._early.values(), self._optimizer]
        named = [optimizers.states_by_name(self._rule, each, parameters) for each in every if each is not None]
        return {name: tensor for each in named for name, tensor in each.items()}


def _update(optimizer: Optimizer, _parameter: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def settle(optimizer: Optimizer, steps: int) -> int:
    """Run an optimizer, with the current gradients, until the step at which its memory is measured; return its step
    count."""
    for _ in range(steps, AHEAD):
        optimizer.step()
    return max(steps, AHEAD)


class GraphStep:
    """A graph bound to a module: the generated code, its input tensors, and the optimizer's numbers on the host.

    ``loss_fn`` holds tensors and generators that only the loss uses. With a ``seed`` every step draws equal random
    numbers. ``runtime`` replaces the device's streams. ``states`` are existing state tensors of the optimizer by name
    ("exp_avg:layer.weight"); missing ones are zeros. ``cached`` are tensors that function caches hold. ``stretches``
    are the functions of compiled stretches.
    """

    def __init__(
        self,
        graph: Graph,
        module: nn.Module,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        rule: OptimizerSpec,
        *,
        device: torch.device | str = "cpu",
        runtime: Runtime | None = None,
        states: Mapping[str, Tensor] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed: int | None = None,
        cached: Mapping[str, Tensor] | None = None,
        stretches: Mapping[str, CompiledStretch] | None = None,
    ) -> None:
        self.module = module
        self.generators: Mapping[str, torch.Generator] = held_generators(module, loss_fn)
        self._seed = seed
        self._cached = cached or {}
        self._holders = {"module": module, "loss": loss_fn}
        self._rule = rule
        self._steps = 0
        self.graph = graph
        self._device = device
        self._host = make_host(device, runtime)
        self._compile = partial(
            compile_step, graph, device, host=self._host, generators=self.generators, stretches=stretches or {}
        )
        self._step = self._compile()
        self._interrupted: Program | None = None
        self._broken = False
        self._turn: TimeSlice | None = None
        self._state: dict[str, Tensor] = dict(states or {})
        self.given: Mapping[str, float] = dict.fromkeys(named_numbers(graph), 1.0)  # the user's own numbers
        self._tensors = self._bind(graph, inputs, targets, device)
        inside = (graph.storages[graph.values[value].storage].kind == "host" for value in graph.inputs)
        self._moved = {place: self._host.copy_at(self._tensors[place]) for place, moved in enumerate(inside) if moved}
        self._places = {graph.values[value].name: place for place, value in enumerate(graph.inputs)}
        self._held = tuple(name for name in self._places if name.startswith(PREFIX))
        fed = ("input:", "target:", PREFIX)
        self._fed = [place for name, place in self._places.items() if name.startswith(fed)]
        self._is_packed = bool(merged_inputs(graph))
        self._nothing = torch.empty(0)
        scalars = (name for op, _ in every_op(graph) for name in op.scalars())
        self._averages = tuple({name for name in scalars if is_share(name)})
        self._outputs: tuple[Tensor, ...] = ()

    def _bind(
        self, graph: Graph, inputs: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device | str
    ) -> list[Tensor]:
        known = {name: tensor.to(device) for name, tensor in self._cached.items()}
        known.update({f"parameter:{name}": p for name, p in self.module.named_parameters()})
        known.update({f"buffer:{name}": b for name, b in self.module.named_buffers()})
        known.update({f"input:{i}": t for i, t in enumerate(inputs)})
        known.update({f"target:{i}": t for i, t in enumerate(targets)})
        known.update(pack_weights(graph, known))
        tensors = []
        for value_id in graph.inputs:
            value = graph.values[value_id]
            kind, _, rest = value.name.partition(":")
            if kind == "state":
                like = known[f"parameter:{rest.partition(':')[2]}"]
                is_moved = graph.storages[value.storage].kind == "host"
                if rest not in self._state:
                    made = optimizers.new_state(rest.partition(":")[0], like)
                    self._state[rest] = self._host.kept(made) if is_moved else made
                tensor = self._state[rest]
            elif kind == "constant":
                dtype = getattr(torch, value.dtype)
                data = with_scalars(graph.constants[value_id], self.given)
                tensor = torch.tensor(data, dtype=dtype, device=device).reshape(value.shape)
            elif value.name.startswith(PREFIX):
                tensor = look_up(self._holders, value.name).to(device)
            else:
                tensor = known[value.name]
            if tuple(tensor.shape) != value.shape or tensor.dtype != getattr(torch, value.dtype):
                raise MagisError(
                    f"{value.name} is {tensor.dtype}{tuple(tensor.shape)}, the graph was captured with"
                    f" {value.dtype}{value.shape}",
                    hint="capture again for these shapes",
                )
            tensors.append(tensor)
        return tensors

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the step in the order of the graph's inputs, including the module's own."""
        return tuple(self._tensors)

    @property
    def arguments(self) -> Sequence[Any]:
        """The tensors as generated code takes them: moved state as copies on the host."""
        if not self._moved:
            return self._tensors
        return [self._moved.get(place, tensor) for place, tensor in enumerate(self._tensors)]

    def prepare(self) -> None:
        """Drop the outputs of the last step; a planned step leaves no gradients. Raises MagisError if packed weights
        have been moved."""
        self._outputs = ()
        if self._seed is not None:
            seed_all(self._seed)
        if self._is_packed:
            check_places(self.graph, self._tensors)
        self.feed({name: look_up(self._holders, name).to(self._device) for name in self._held})

    def run(self) -> Tensor:
        self._steps += 1
        return self.run_with(optimizers.scalars(self._rule, self._steps))

    def numbers(self) -> dict[str, float]:
        """Return the values of the named scalars, those of the first step if none has run."""
        return self._with_own_numbers(optimizers.scalars(self._rule, max(1, self._steps)))

    def _with_own_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        return {**numbers, **self.given, **shares_of(self.module, self._averages)}

    def run_with(self, numbers: Mapping[str, float]) -> Tensor:
        """Run one step with these values of the named scalars (learning rate, bias corrections)."""
        self._broken = True
        self._outputs = self._step(self.arguments, self._with_own_numbers(numbers))
        self._broken = False
        return self._outputs[0]

    def feed(self, batch: Mapping[str, Tensor]) -> None:
        """Set the batch, by the names of the graph's inputs ("input:0", "target:0"), with unchanged shapes and dtypes.
        A tensor with other strides or conjugate bits is copied, as the plan's kernels depend on them."""
        for name, given in batch.items():
            tensor, position = given, self._places.get(name)
            if position is None:
                continue
            value = self.graph.values[self.graph.inputs[position]]
            if (tuple(tensor.shape), tensor.dtype) != (value.shape, getattr(torch, value.dtype)):
                raise MagisError(
                    f"{value.name} is {tensor.dtype}{tuple(tensor.shape)}, the step is for {value.dtype}{value.shape}"
                )
            if (tensor.stride(), bits_of(tensor)) != (value.stride, value.bits):
                copy = torch.empty_strided(value.shape, value.stride, dtype=tensor.dtype, device=tensor.device)
                tensor = with_bits(copy, value.bits).copy_(tensor)
            self._tensors[position] = tensor

    def raised(self, error: BaseException) -> tuple[Op | None, dict[str, Tensor]]:
        """Return the operator that raised this error, and the tensors that were updated before. The operator is None if
        no operator raised. The tensors are parameters and optimizer state, by their names in the graph."""
        op, done = raised_by(self.graph, error) if self._broken else (None, set())
        values = map(self.graph.values.__getitem__, self.graph.inputs)
        return op, {v.name: tensor for v, tensor in zip(values, self._tensors, strict=True) if v.storage in done}

    def release(self) -> None:
        """Drop the batch and tensors held elsewhere in Python, which are set again before the next step."""
        for position in self._fed:
            self._tensors[position] = self._nothing

    def finish(self) -> None:
        """Make later work on the compute stream wait for every copy of the step."""
        self._host.join()

    def run_in_turns(self, turn: TimeSlice) -> Tensor:
        self._turn = turn
        if self._interrupted is None:
            with turn.rest():
                self._interrupted = self._compile(between=self._give_turn)
        self._steps += 1
        self._outputs = self._interrupted(self.arguments, self.numbers())
        return self._outputs[0]

    def _give_turn(self) -> None:
        if self._turn is not None:
            self._turn()

    def results(self) -> tuple[Tensor, ...]:
        return self._outputs

    def state(self) -> Mapping[str, Tensor]:
        return self._state


def _output_tensors(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a module's output, in the order of the graph's outputs."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Mapping):
        for part in result.values():
            yield from _output_tensors(part)
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _output_tensors(part)
