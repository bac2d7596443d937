"""Undo of a planned step that raises: restore what it wrote, or run eager to raise eager's own error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.python_state import WritesKept
from magis.capture.snapshot import Snapshot
from magis.capture.workload import roots_of
from magis.errors import PartialUpdateError
from magis.graph import Graph
from magis.ops.call import follows_data
from magis.ops.generators import HostGenerators, generator_of, held_generators
from magis.ops.raising import undone
from magis.runtime.measure import is_out_of_memory
from magis.runtime.steps import GraphStep

NAMED = 3
"""Number of updated weights that an error names."""
LOAD = "load the state of model and optimizer from before it (load_state_dict)"


@dataclass(frozen=True, eq=False)
class Undo:
    """Storages and generators that a planned step writes besides weights and optimizer state, if it may raise."""

    step: GraphStep
    positions: tuple[int, ...]
    """Indices into the step's tensors, which each batch replaces."""
    generators: tuple[torch.Generator, ...]
    expects: bool = False
    """True if batches may take another branch on data than planned."""

    def now(self) -> ContentsBefore:
        """Copy the current contents of these storages and generators."""
        tensors = self.step.tensors
        memory = [tensors[position].untyped_storage() for position in self.positions]
        return ContentsBefore(
            [(storage, storage.clone()) for storage in memory],
            [(generator, generator.clone_state()) for generator in self.generators],  # no tensor, unlike get_state
        )


@dataclass(frozen=True, eq=False)
class ContentsBefore:
    """Copies of the contents of storages and of the states of generators."""

    memory: Sequence[tuple[torch.UntypedStorage, torch.UntypedStorage]]
    generators: Sequence[tuple[torch.Generator, torch.Generator]]

    def put_back(self) -> None:
        """Restore the contents of the storages and generators."""
        for storage, contents in self.memory:
            storage.copy_(contents)
        for generator, before in self.generators:
            generator.set_state(before.get_state())


def undo_of(graph: Graph, step: GraphStep, device: str) -> Undo:
    """Return what must be restored if the step of a graph raises; empty if no operator may raise."""
    names = undone(graph)
    if names is None:
        return Undo(step, (), ())
    positions = (at for at, value in enumerate(graph.inputs) if graph.values[value].name in names)
    draws = any(graph.storages[storage].kind == "generator" for op in graph.ops for storage, _ in op.writes)
    generators = (generator_of(device), *step.generators.values()) if draws else ()
    return Undo(step, tuple(positions), generators, follows_data(graph))


def raise_as_eager(
    error: Exception,
    eager: Callable[[], Tensor],
    holders: tuple[nn.Module, Callable[..., Tensor] | None],
    device: str,
    *,
    late: bool = False,
) -> NoReturn:
    """Run eager's forward and backward, which raise eager's own error and leave the state that eager leaves. If they
    raise nothing, restore gradients, and unless the error came as `late` as the backward also buffers, generators and
    Python objects, then raise `error`."""
    traceback.clear_frames(error.__traceback__)  # frames hold the step's tensors
    module, loss_fn = holders
    generators = (generator_of(device), *held_generators(module, loss_fn).values())
    before = ContentsBefore(
        [(each.untyped_storage(), each.untyped_storage().clone()) for each in module.buffers() if each.numel()],
        [(generator, generator.clone_state()) for generator in generators],
    )
    hosts = HostGenerators()
    gradients = [(each, each.grad, None if each.grad is None else each.grad.clone()) for each in module.parameters()]
    state, writes = Snapshot(roots_of(module, loss_fn)), WritesKept()
    try:
        with writes:
            eager()
    except Exception as own:
        raise own from None
    for parameter, gradient, contents in gradients:
        parameter.grad = gradient
        if gradient is not None and contents is not None:
            gradient.copy_(contents)
    if not late:
        state.restore()
        writes.undo()
        before.put_back()
        hosts.restore()
    raise error


def raises_again(error: BaseException, target: str) -> bool:
    """Return True if eager should run to raise an operator's error itself; not after running out of memory."""
    return isinstance(error, Exception) and not (target.startswith("aten.") and is_out_of_memory(error))


class PartialUpdate:
    """Weights and optimizer states that a step had updated when it raised."""

    def __init__(self, updated: Mapping[str, Tensor]) -> None:
        self._versions = {name: (tensor, tensor._version) for name, tensor in updated.items()}  # noqa: SLF001

    def error(self, error: BaseException) -> PartialUpdateError:
        """Return the error to raise for a step that raised `error`."""
        weights = [name.partition(":")[2] for name in self._versions if name.startswith("parameter:")]
        listed = ", ".join(weights[:NAMED]) + (f" and {len(weights) - NAMED} more" if len(weights) > NAMED else "")
        what = f"the step has updated {listed or 'the state of the optimizer'} before it raised"
        return PartialUpdateError(f"{what} {type(error).__name__}: {error}", hint=LOAD)

    def check(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        """Raise PartialUpdateError while a half-updated weight or state has not been loaded again."""
        parameters = dict(module.named_parameters())
        for name, (tensor, version) in self._versions.items():
            kind, _, path = name.partition(":")
            state, _, path = path.rpartition(":")
            now: object = parameters.get(path)
            if kind == "state" and optimizer is not None and path in parameters:
                now = optimizer.state.get(parameters[path], {}).get(state)
            if now is tensor and tensor._version == version:  # noqa: SLF001
                what = f"{state or 'weight'} {path}"
                raise PartialUpdateError(f"{what} is left half updated by a step that raised", hint=LOAD)
