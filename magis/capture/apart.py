"""The memory of an optimizer that runs by itself after a step: its own code, on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer
from torch.optim import optimizer as global_hooks

from magis.aten.held import PREFIX
from magis.aten.host_random import generators_kept
from magis.aten.own_optimizer import AHEAD, OwnOptimizer, copied, named_tensors, refitted
from magis.capture.hollow import hollow, hollow_like
from magis.capture.recorder import Recorder
from magis.errors import CaptureError
from magis.ir import Graph

__all__ = ["ALONE", "Apart", "is_left_alone", "step_apart", "step_behind"]

ALONE = "gate forward and backward alone, with the optimizer 'gradients'"


@dataclass(frozen=True)
class Apart:
    """A step of an optimizer on trained parameters and their gradients (kind "batch"), as in `Captured`."""

    graph: Graph
    deaths: Mapping[int, int]

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Of every tensor that the optimizer keeps."""
        return tuple(s.nbytes for s in self.graph.storages.values() if s.kind == "state")


def is_left_alone(optimizer: Optimizer) -> bool:
    """Whether its step is that of its class, without patches of its own and hooks on every optimizer."""
    own = vars(optimizer)
    patched = getattr(own.get("step"), "__func__", own.get("step"))
    hooked = global_hooks._global_optimizer_pre_hooks or global_hooks._global_optimizer_post_hooks
    return not hooked and (patched is None or getattr(patched, "_wrapped_by_lr_sched", False))


def step_apart(optimizer: Optimizer, graded: Mapping[str, Tensor], device: str) -> Apart | None:
    """What `optimizer.step()` does once it has state, with gradients for the parameters `graded`; nothing is changed.

    None for an optimizer whose step cannot be looked at: it reads numbers off gradients, say, or is patched.
    """
    if not is_left_alone(optimizer):
        return None
    try:
        with generators_kept(), torch.enable_grad():
            return _recorded(optimizer, graded, graded, device, AHEAD)
    except Exception:  # noqa: BLE001  (anybody's code)
        return None


def step_behind(own: OwnOptimizer, graded: Mapping[str, Tensor], device: str) -> Apart:
    """The same of an optimizer on other parameters, `graded` by name. CaptureError for one that cannot be looked at, or
    whose steps differ."""
    mine = {name: each for name, each in own.parameters.items() if name in graded}
    try:
        with generators_kept(), torch.enable_grad():
            found, later = (_recorded(own.optimizer, mine, graded, device, AHEAD + more) for more in (0, 1))
    except Exception as error:
        why = f"cannot be recorded: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if isinstance(error, DataDependentOutputException):
            why = "reads numbers off its tensors, by which its operators may differ"
        raise CaptureError(f"{own.name}.step {why}", hint=ALONE) from error
    if _course(found) != _course(later):
        raise CaptureError(f"{own.name}.step runs other operators in step {AHEAD + 2} than before", hint=ALONE)
    for storage in found.graph.storages.values():
        if storage.kind == "state" and storage.id in found.deaths:
            (name, *_) = (value.name for value in found.graph.values.values() if value.storage == storage.id)
            what = f"{own.name}.step puts a new tensor in the place of {name.removeprefix('state:')!r}"
            raise CaptureError(what, hint=f"write it in place (copy_), or {ALONE}")
    return found


def _course(apart: Apart) -> list[tuple[str, tuple[int, ...]]]:
    """The operators of a step, with the bytes that each makes."""
    values = apart.graph.values
    return [(op.target, tuple(values[made].nbytes for made in op.made())) for op in apart.graph.ops]


def _recorded(
    optimizer: Optimizer, graded: Mapping[str, Tensor], likes: Mapping[str, Tensor], device: str, ahead: int
) -> Apart:
    made, twins = _twin(optimizer, {id(each): likes[name] for name, each in graded.items()}, device)
    names = {id(twins[id(each)]): name for name, each in graded.items()}
    met = count()
    with hollow():
        for group in made.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter) if id(parameter) in names else None
        for _ in range(ahead):
            made.step()
        recorder = Recorder({}, lambda _tensor: f"{PREFIX}optimizer/{next(met)}")
        recorder.phase = "update"
        for group in made.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    continue
                name = names[id(parameter)]
                recorder.register(parameter, "parameter", f"parameter:{name}")
                recorder.register(parameter.grad, "batch", f"gradient:{name}")
        for owner, entries in made.state.items():
            for path, tensor in named_tensors(entries):
                name = f"state:{path}:{names.get(id(owner), next(met))}"
                recorder.register(tensor, "state" if tensor.dim() else "host", name)
        with recorder:
            made.step()
        return Apart(recorder.graph(()), recorder.deaths)


def _twin(optimizer: Optimizer, likes: Mapping[int, Tensor], device: str) -> tuple[Optimizer, Mapping[int, Any]]:
    """An optimizer like this one, on parameters (as `likes` has them, by their `id`) and state without memory; and the
    twins of its tensors by their `id`."""
    held = {id(each): likes.get(id(each), each) for group in optimizer.param_groups for each in group["params"]}
    kept = list(_state(optimizer, held))
    with hollow():  # a twin for a GPU's tensor, too
        looks = {
            f"{name}": torch.empty_like(each, device="cpu") if each.is_cuda else each for name, each in held.items()
        }
        for tensor, dtype in kept:
            same = dtype == tensor.dtype and not tensor.is_cuda
            looks[f"{id(tensor)}"] = tensor if same else torch.empty_like(tensor, dtype=dtype, device="cpu")
    found = hollow_like(looks, known=lambda _name, each: not each.dim())
    twins: dict[int, Any] = {id(tensor): found[f"{id(tensor)}"] for tensor, _ in kept}
    for group in optimizer.param_groups:
        for each in group["params"]:
            twins[id(each)] = nn.Parameter(found[f"{id(each)}"], each.requires_grad)
    made = copied(optimizer, twins)
    for group in made.param_groups:
        if device != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True  # as torch chooses on a GPU
    return made, twins


def _state(optimizer: Optimizer, likes: Mapping[int, Tensor]) -> Iterator[tuple[Tensor, torch.dtype]]:
    """The tensors that an optimizer keeps, and the data type of each where its parameter is like these."""
    for parameter, entries in optimizer.state.items():
        for _, tensor in named_tensors(entries):
            yield tensor, refitted(tensor, parameter, likes.get(id(parameter), parameter))
