"""Guards of a planned step, on module, loss and torch's settings; and the state of its optimizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.library import _impls
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from magis.capture.names_in_code import Reads
from magis.capture.optimizer_rule import Update, age_of, needs_closure, with_rates
from magis.capture.snapshot import Snapshot, looks
from magis.capture.workload import Batch, with_keywords
from magis.cases.tensor_ledger import RunningModules
from magis.errors import CaptureError, UsageError
from magis.ops.eager_only import REGISTERED
from magis.ops.optimizers import new_state, scalars, state_names
from magis.ops.python_objects import PREFIX, follow, found_at, look_up, told
from magis.planner.bench import check_device
from magis.runtime.swap_streams import is_on_host, on_host


@dataclass(eq=False)
class OptimizerState:
    """The state tensors of an optimizer, by their names in the graph ("exp_avg:layer.weight")."""

    optimizer: Optimizer
    update: Update
    trained: Mapping[str, nn.Parameter]
    members: tuple[tuple[nn.Parameter, ...], ...]
    """Parameters by rule of the update; all parameters of a rule have done equally many steps."""
    first: list[bool]
    """True for each rule whose parameters have done no step yet."""
    moved: Collection[str] = ()
    """Names of tensors that are in host memory between updates."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _adopted: list[tuple[nn.Parameter, str, Tensor]] = field(default_factory=list)
    """The same tensors by parameter and name in its state, which every step looks up."""
    made: list[tuple[nn.Parameter, str, bool]] = field(default_factory=list)
    """State entries that the optimizer did not have before the next step, and True if the entry existed as None."""

    def is_current(self) -> bool:
        """Return True if the optimizer still holds these tensors (`load_state_dict` replaces them), and all parameters
        of a rule have done equally many steps."""
        state = self.optimizer.state
        if any(state[parameter].get(kind) is not tensor for parameter, kind, tensor in self._adopted):
            return False
        return all(len({*torch.stack(some).tolist()}) == 1 for some in self._counters() if some)

    @contextmanager
    def step_to_come(self) -> Iterator[Mapping[str, float]]:
        """Yield the named scalars of the next step; advance Adam's step counters, but not if the step raises."""
        rules = self._counters()
        counters = [counter for some in rules for counter in some]
        if counters:
            torch._foreach_add_(counters, 1)
            numbers = tuple(float(some[0]) if some else 1.0 for some in rules)
        else:
            numbers = tuple(1.0 if first else 2.0 for first in self.first)
        try:
            yield scalars(with_rates(self.update, self.optimizer), numbers)
        except BaseException:
            if counters:
                torch._foreach_sub_(counters, 1)
            raise
        self.first = [False] * len(self.first)
        self.made.clear()

    def adopt(self) -> None:
        """Take the optimizer's state tensors, and create missing ones as its own first step would."""
        rule, names = self.update.spec, {id(parameter): name for name, parameter in self.trained.items()}
        kinds = state_names(rule)
        parameters = (each for group in self.optimizer.param_groups for each in group["params"] if id(each) in names)
        for parameter in parameters if kinds else ():  # the order of torch's states and of `state_dict`
            name, state = names[id(parameter)], self.optimizer.state[parameter]
            if rule.kind in ("adam", "adamw") and "step" not in state:
                state["step"] = new_state("step", parameter) if rule.fused else torch.tensor(0.0, dtype=torch.float32)
                self.made.append((parameter, "step", False))
            for kind in kinds:
                if state.get(kind) is None:  # before its first step, SGD has None here
                    self.made.append((parameter, kind, kind in state))
                    state[kind] = new_state(kind, parameter)
                    if kind == "momentum_buffer":  # torch copies the first gradient: -0.0 + x is x
                        state[kind].neg_()
                to_host = f"{kind}:{name}" in self.moved
                if is_on_host(state[kind], parameter.device) != to_host:
                    state[kind] = carried(state[kind], parameter, to_host=to_host)
                self.tensors[f"{kind}:{name}"] = state[kind]
                self._adopted.append((parameter, kind, state[kind]))

    def forget(self) -> None:
        """Remove state entries that were created for a first step that failed."""
        for parameter, kind, known in self.made:
            state = self.optimizer.state[parameter]
            state[kind] = None
            if not known:
                del state[kind]
            if not state:
                del self.optimizer.state[parameter]
        self.made.clear()

    def _counters(self) -> list[list[Tensor]]:
        if self.update.spec.kind not in ("adam", "adamw") or self.update.spec.fused:  # kernels count
            return []
        state = self.optimizer.state
        return [[state[parameter]["step"] for parameter in some] for some in self.members]


def carried(tensor: Tensor, parameter: nn.Parameter, *, to_host: bool) -> Tensor:
    """Return a state tensor in host memory, or on its parameter's device."""
    if to_host:
        return on_host(tensor, parameter.device)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=parameter.device)
    return made.copy_(tensor)


def adopted(
    optimizer: Optimizer, update: Update, trained: Mapping[str, nn.Parameter], moved: Collection[str] = ()
) -> OptimizerState:
    """Return the state of an optimizer, with missing entries created as its own first step would create them; the
    ``moved`` ones, by name, in host memory, others on the device."""
    home = {name: number for number, group in enumerate(update.spec.groups, 1) for name in group.parameters}
    members = tuple(
        tuple(parameter for name, parameter in trained.items() if home.get(name, 0) == number)
        for number in range(len(update.homes))
    )
    first = [all(age_of(optimizer, parameter) == 0 for parameter in some) for some in members]
    state = OptimizerState(optimizer, update, trained, members, first, moved)
    try:
        state.adopt()
    except BaseException:  # out of memory, say
        state.forget()
        raise
    return state


# Guards of a plan besides its batch: module, loss and torch's settings, checked before every step.

_KERNELS = frozenset(_impls)
"""Kernels written in Python that torch itself registers."""
_KERNEL = re.compile("aten/.*/(CPU|CUDA|Autograd.*|Composite.*)")
OUTSIDE = "leave that out around the step"


class Guards:
    """All that forward and loss read, as it was when the step was captured. `contents` are names of tensors off which
    Python read numbers, which are constants of the step; `kept` are tensors that no path leads to. Raises CaptureError
    for what cannot be guarded."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        batch: Batch,
        reads: Reads,
        contents: Iterable[str] = (),
        kept: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._module, self._loss_fn, self._kept = module, loss_fn, kept
        self._contents = {name: tensor.clone() for name, tensor in self.tensors(batch, contents).items()}
        hooks = {name: found for name, found in vars(global_hooks).items() if name.startswith("_global_")}
        self._roots: dict[str, object] = {"model": module, "loss": loss_fn}
        self._hooks = hooks
        self.watched = Snapshot({**self._roots, **hooks}, reads)
        self._state = {path: looks(follow(self._roots, path)) for path in reads.state}
        if self.watched.unwatched:
            raise CaptureError(
                f"the step may read {told(self.watched.unwatched[0])}, and nobody sees when that changes",
                hint="read it before the step, and keep the number or a tensor in an attribute",
            )
        self._settings = _settings()
        if kernel := next((key for key in _impls - _KERNELS - REGISTERED if _KERNEL.fullmatch(key)), ""):
            raise CaptureError(f"another kernel was registered for {kernel}, of which no plan knows", hint=OUTSIDE)

    def hold(self, batch: Batch) -> bool:
        """Return True if nothing guarded has changed; takes some microseconds per sub-module."""
        return next(self.changes(batch), None) is None

    def changes(self, batch: Batch) -> Iterator[tuple[str, object, object]]:
        """Yield path, old value and new value of everything guarded that has changed."""
        yield from (each for each in self.watched.changes() if not _of_measurement(each[0], each[2]))
        for path, then in self._state.items():
            found = found_at(self._roots, path)
            if not isinstance(found, Tensor) or looks(found) != then:
                yield path, then, found
        if _settings() != self._settings:
            yield "torch's settings", self._settings, _settings()
        now = self.tensors(batch, self._contents)
        yield from ((name, t, now[name]) for name, t in self._contents.items() if not torch.equal(t, now[name]))

    def of_contents(self, names: Collection[str]) -> Guards:
        """Return the guards with the contents of the tensors of these names only."""
        made = copy.copy(self)
        vars(made)["_contents"] = {name: tensor for name, tensor in self._contents.items() if name in names}
        return made

    def of_reads(self, reads: Reads) -> Guards:
        """Return the guards with another set of watched names."""
        made = copy.copy(self)
        made.watched = Snapshot({**self._roots, **self._hooks}, reads)
        return made

    def tensors(self, batch: Batch, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the live tensors of these names, detached."""
        found = {}
        module = with_keywords(self._module, batch)
        for name in names:
            kind, _, rest = name.partition(":")
            if kind == "buffer":
                tensor = module.get_buffer(rest)
            elif name in self._kept:
                tensor = self._kept[name]
            elif name.startswith(PREFIX):
                tensor = look_up({"module": module, "loss": self._loss_fn}, name)
            else:
                tensor = batch.by_name[name]
            found[name] = tensor.detach()
        return found


def _of_measurement(path: str, now: object) -> bool:
    """Return True for global hooks by which `magis.peak` measures a block: they change no step."""
    table, _, key = path.partition("/{")
    if not table.startswith("_global_"):
        return False
    added = {int(key)} if key else {*now} if isinstance(now, dict) else set()
    tables = (global_hooks._global_forward_pre_hooks, global_hooks._global_forward_hooks)  # noqa: SLF001
    hooks = {number: hook for each in tables for number, hook in each.items()}
    return bool(added) and all(isinstance(getattr(hooks.get(each), "__self__", None), RunningModules) for each in added)


class MemoryGuard:
    """Addresses of a module's parameters and buffers. A new address needs a new binding, a new overlap a new plan."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
        self._places = [tensor.data_ptr() for tensor in self._tensors]
        self.storages = {
            tensor.untyped_storage().data_ptr(): number
            for number, tensor in enumerate(self._tensors)
            if tensor.layout is torch.strided
        }
        order = sorted(zip(self._places, range(len(self._places)), strict=True))
        self.overlaps = tuple(
            (number, other, later - start)
            for (start, number), (later, other) in pairwise(order)
            if later < start + _extent(self._tensors[number])
        )
        """Pairs of tensors that overlap in memory, by index, with the distance of their first bytes."""

    def holds(self) -> bool:
        """Return True if all tensors have the addresses that they had."""
        return [tensor.data_ptr() for tensor in self._tensors] == self._places


def _extent(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.element_size()


def check_mode(device: str) -> None:
    """Raise UsageError if the step is called in a context that eager's numbers depend on: autocast, no_grad, modes."""
    if torch.is_autocast_enabled(device) or torch.is_autocast_enabled("cpu"):
        raise UsageError(
            "the step was called under torch.autocast", hint="leave that out, and pass autocast= to magis.optimize"
        )
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise UsageError("the step was called without gradients (no_grad, inference_mode)", hint=OUTSIDE)
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001 (torch has no other way)
    if hooks:
        raise UsageError("the step was called under hooks on saved tensors", hint=OUTSIDE)
    if _len_torch_function_stack() or _len_torch_dispatch_stack():
        modes: list[Any] = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        for kind in (type(mode) for mode in modes if not getattr(mode, "is_infra_mode", bool)()):  # it changes nothing
            if kind.__module__.partition(".")[0] not in ("torch", "magis"):
                what = f"the step was called under a mode that sees what torch computes: {kind.__qualname__}"
                raise UsageError(what, hint=OUTSIDE)
    if torch.get_default_device().type == "meta":
        raise UsageError("the step was called with the default device 'meta'", hint=OUTSIDE)


def _settings() -> tuple[Any, ...]:
    """Return torch's global settings that decide which operators and dtypes a step runs."""
    backends = torch.backends
    return (
        torch.get_default_dtype(), torch.get_default_device(),
        len(_impls) - sum(key in _impls for key in REGISTERED),  # those while a block is measured change no step
        torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        backends.mkldnn.enabled, backends.cudnn.enabled, backends.cudnn.benchmark,
        backends.cudnn.deterministic, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32,
        backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(), backends.cuda.cudnn_sdp_enabled(),
    )  # fmt: skip


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a module, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def check_optimizer(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError for an optimizer whose `step` needs a closure, or that has none of the trained parameters."""
    if needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__}.step calls the loop's forward and backward itself, several times a step",
            hint="pass None as the optimizer, and let its closure call the step and return the loss",
        )
    theirs = {id(parameter) for parameter in trained.values()}
    if not any(id(parameter) in theirs for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            "the optimizer has none of the parameters that the model trains", hint="make it of model.parameters()"
        )


def check_hooks(trained: Mapping[str, nn.Parameter]) -> None:
    """Raise UsageError for hooks on gradients, which a planned step would not call."""
    for name, parameter in trained.items():
        if any(getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise UsageError(
                f"{name} has a hook on its gradient, which the step would not run",
                hint="remove it, or do its work in the loop: pass None as the optimizer and find gradients in .grad",
            )


def device_of(model: nn.Module, asked: str | None) -> str:
    """Return the one device type of a model's tensors; without tensors `asked`, or "cpu". Raises UsageError if the
    tensors are on several devices, or not on `asked`."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} or {asked or "cpu"}
    if len(kinds) != 1:
        raise UsageError(f"the model lies on {' and '.join(sorted(kinds))}", hint="move it to one device")
    (found,) = kinds
    if asked is not None and asked != found:
        raise UsageError(f"device={asked!r}, but the model lies on {found!r}", hint="move the model, or leave it out")
    check_device(found)
    return found
