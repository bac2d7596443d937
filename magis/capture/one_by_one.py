"""Proof that an optimizer of any class updates each of its parameters by itself, on tensors without memory.

Two copies of the optimizer run steps: one as it is, one with a single parameter at a time (`view_of`). Every call of
torch is noted for the parameter whose tensors it takes. The two are the same optimizer if each parameter meets the same
calls with the same numbers, no call takes tensors of two parameters, and both leave the same Python numbers behind.
Numbers that Python reads off tensors (norms) are made up, others for each parameter, and once tiny and once huge: a
number of one parameter that decides about another one shows as another call, or as another number in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from magis.capture.contents import contents_of
from magis.capture.hollow import Answering, hollow
from magis.capture.optimizer_rule import Apart, has_hooks, hollow_twin, is_left_alone, recorded_step
from magis.capture.schemas import draws, tensors_in, written_by
from magis.cost.flops import is_on_lists
from magis.errors import CaptureError
from magis.ops.generators import generators_kept
from magis.ops.optimizers import AHEAD, named_tensors
from magis.ops.own_updates import StateTensor, grouped, leave_numbers, view_of

_LEVELS = (1.0, 1e-8, 1e8)
"""Sizes of the numbers in the place of those that Python reads off tensors."""
_STEPS = 2
_ALIKE = 2
"""Parameters of one kind that are compared: more of them meet the same code."""
_ONLY_READ = {"bitsandbytes::optimizer_update_8bit_blockwise": ("qmap1", "qmap2")}
"""Arguments that are only read although the schema says otherwise: tables of quantization, which parameters share."""
_OWNER = "_magis_owner"


@dataclass(frozen=True, eq=False)
class CapturedUpdate:
    """A captured update of one parameter, and the tensors that the optimizer keeps for it."""

    state: tuple[StateTensor, ...]
    step: Apart
    in_gradient: bool
    """True if it writes to the gradient."""
    counts: bool = False
    """True if steps change numbers in the optimizer's groups."""


class OneByOneError(CaptureError):
    """Error: an optimizer's own code cannot update one parameter at a time; says why."""


def updates_one_by_one(optimizer: Optimizer, parameters: Sequence[Tensor], device: str) -> dict[int, CapturedUpdate]:
    """Return the captured update of each parameter, by its `id`; nothing is changed. Raises OneByOneError if the
    optimizer may not run on one parameter at a time, or cannot be captured."""
    if not is_left_alone(optimizer) or has_hooks(optimizer):
        raise OneByOneError("its step is patched, or hooks run before or after it")
    mine = Counter(id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
    if mine != Counter(map(id, parameters)):
        raise OneByOneError("its parameters are not those that the model trains, each of them once")
    kinds, counts, shared = _kinds(optimizer), False, set[str]()
    try:
        with generators_kept() as hosts, torch.enable_grad():
            for level in _LEVELS:
                reads, counts, shared = _compared(optimizer, kinds, device, level)
                if not reads:
                    break
            found = {kind: _captured_update(optimizer, some[0], device) for kind, some in kinds.items()}
            if hosts.moved():
                raise OneByOneError("its step draws random numbers")
    except OneByOneError:
        raise
    except Exception as error:  # anybody's code
        what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise OneByOneError(f"its step cannot be captured ({what})") from error
    return {
        id(each): replace(
            update,
            counts=counts,
            state=tuple(kept for kept in update.state if each is parameters[0] or kept.path not in shared),  # once
        )
        for kind, update in found.items()
        for each in kinds[kind]
    }


def told(item: Any) -> Any:
    """Return what a comparison of Python objects sees: numbers and texts, layouts of tensors, one element's value."""
    if isinstance(item, Tensor):
        contents = contents_of(item)
        one = item.numel() == 1 and item.device.type == "cpu" and (contents is None or contents.known)
        with _disable_current_modes():
            value = repr(item.detach().cpu().tolist()) if one else ""
        return (tuple(item.shape), item.stride(), str(item.dtype), value)
    if isinstance(item, Mapping):
        return [(told(name), told(part)) for name, part in item.items()]
    if isinstance(item, (list, tuple, set)):
        return [told(part) for part in item]
    return repr(item) if isinstance(item, (bool, int, float, complex, str, type(None))) else type(item).__qualname__


def numbers_of(optimizer: Optimizer) -> tuple[Any, Any, Any]:
    """Return what a step may change in Python: numbers of the groups, attributes, and state of no parameter."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    attributes = {name: each for name, each in vars(optimizer).items() if name not in ("param_groups", "state", "step")}
    entries: Mapping[Any, Any] = optimizer.state
    return told(groups), told(attributes), told({n: kept for n, kept in entries.items() if not isinstance(n, Tensor)})


def _kinds(optimizer: Optimizer) -> dict[Any, list[Tensor]]:
    """Return the parameters by group, layout and state: those of a kind meet the same code."""
    found: dict[Any, list[Tensor]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for each in group["params"]:
            if each.requires_grad:
                kind = repr((number, told(each.detach())[:3], told(optimizer.state.get(each, {}))))
                found.setdefault(kind, []).append(each)
    return found


class _CallsByParameter(Answering):
    """A mode that notes calls by the parameter whose tensors they take."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self._level = level
        self.reads = Counter[int]()
        self.calls: dict[int, list[Any]] = {}

    def belongs(self, tensor: Tensor, owner: int) -> None:
        """Note that a tensor belongs to a parameter, by its number."""
        setattr(tensor.untyped_storage(), _OWNER, owner)

    def answer(self, _tensor: Tensor) -> float:
        owner = self._owner([_tensor])
        number = -1 if owner is None else owner
        self.reads[number] += 1
        return self._level * (1 + number / 64 + self.reads[number] / 4096)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            raise OneByOneError("it keeps tensors of a class of their own")
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            raise OneByOneError("its step draws random numbers")
        lists = [each for each in args if isinstance(each, (list, tuple)) and next(tensors_in(each), None) is not None]
        if not lists or not is_on_lists(str(func)):
            self._note(func, args, kwargs, out)
            return out
        for index in range(len(lists[0])):  # a call on lists is one for each place in them

            def at(each: Any, place: int = index) -> Any:
                return each[place] if isinstance(each, (list, tuple)) and len(each) == len(lists[0]) else each

            self._note(func, [at(each) for each in args], {name: at(each) for name, each in kwargs.items()}, at(out))
        return out

    def _owner(self, tensors: Collection[Tensor]) -> int | None:
        every = (getattr(tensor.untyped_storage(), _OWNER, None) for tensor in tensors)
        owners = {each for each in every if each is not None}
        if len(owners) > 1:
            raise OneByOneError("its step computes with several parameters at once")
        return owners.pop() if owners else None

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given = [*tensors_in(args), *tensors_in(kwargs)]
        owner = self._owner(given)
        if owner is None:
            return
        looks = tree_map_only(Tensor, told, (args, kwargs))
        self.calls.setdefault(owner, []).append((str(func), repr(looks)))
        spared = {id(kwargs.get(name)) for name in _ONLY_READ.get(func._schema.name, ())}
        spared |= {
            id(arg)
            for arg, about in zip(args, func._schema.arguments, strict=False)
            if about.name in _ONLY_READ.get(func._schema.name, ())
        }
        for tensor in (*tensors_in(out), *written_by(func, args, kwargs)):
            if id(tensor) not in spared:
                self.belongs(tensor, owner)


def _compared(
    optimizer: Optimizer, kinds: Mapping[Any, list[Tensor]], device: str, level: float
) -> tuple[bool, bool, set[str]]:
    """Compare steps of the whole optimizer and of one parameter at a time; return True if they read numbers off
    tensors, True if they change numbers of groups, and the paths of state that parameters share. Raises OneByOneError
    where they differ."""
    some = [each for alike in kinds.values() for each in alike[:_ALIKE]]
    found = []
    for alone in (False, True):
        made, twins = hollow_twin(optimizer, {}, device)
        own = [twins[id(each)] for each in some]
        made = view_of(made, grouped(made, {*map(id, own)}))
        before = numbers_of(made)[0]
        watch, common = _CallsByParameter(level), {place for place, _ in _shared(made, own)}
        with hollow(watch), torch.compiler.set_stance("force_eager"):
            for number, each in enumerate(own):
                state = [tensor for _, tensor in named_tensors(made.state.get(each, {}))]
                for tensor in (each, *(tensor for tensor in state if tensor.untyped_storage()._cdata not in common)):
                    watch.belongs(tensor, number)
            for _ in range(_STEPS):
                for number, each in enumerate(own):
                    each.grad = torch.empty_like(each)
                    watch.belongs(each.grad, number)
                among = [[id(each)] for each in own] if alone else [[*map(id, own)]]
                views = [(view_of(made, homes), homes) for homes in (grouped(made, {*each}) for each in among)]
                for view, _ in views:
                    view.step()
                for view, homes in views:
                    leave_numbers(made, view, homes)
            states = [told(made.state.get(each, {})) for each in own]
            paths = {path for _, path in _shared(made, own)}
        left = numbers_of(made)
        found.append((watch.calls, states, left, bool(watch.reads), left[0] != before, paths))
    if found[0] != found[1]:
        raise OneByOneError("its step does something else with several parameters than with each of them")
    return found[0][3:]


def _shared(optimizer: Optimizer, parameters: Sequence[Tensor]) -> set[tuple[int, str]]:
    """Return storage and path of the tensors that the optimizer keeps for several parameters: tables, say."""
    met = [
        {(tensor.untyped_storage()._cdata, path) for path, tensor in named_tensors(optimizer.state.get(each, {}))}
        for each in parameters
    ]
    times = Counter(place for some in met for place in {place for place, _ in some})
    return {(place, path) for some in met for place, path in some if times[place] > 1}


def _captured_update(optimizer: Optimizer, parameter: Tensor, device: str) -> CapturedUpdate:
    """Capture a later step on one parameter; return its state and the step."""
    one = {"it": parameter}
    apart = recorded_step(optimizer, one, one, device, AHEAD, Answering(), alone=True)
    graph = apart.graph
    inputs = [graph.values[value] for value in graph.inputs]
    written = {storage for op in graph.ops for storage, _ in op.writes}
    kept, in_gradient = [], False
    for value in inputs:
        in_gradient = in_gradient or (value.name == "gradient:it" and value.storage in written)
        if graph.storages[value.storage].kind == "state":
            path = value.name.split(":")[1]
            if value.storage in apart.deaths:
                raise OneByOneError(f"its step puts a new tensor in the place of {path!r}")
            kept.append(StateTensor(path, value.shape, value.stride, value.dtype))
    return CapturedUpdate(tuple(kept), apart, in_gradient)
