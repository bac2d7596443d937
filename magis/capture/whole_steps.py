"""A training loop's own step function, recorded over several calls: forwards, backwards and updates as it runs them.

Everything that the function reaches by name (modules, optimizers, schedulers, tensors) is on placeholder memory
meanwhile, and afterwards as it was. The calls are one graph, so that what one call leaves for the next, and what the
next one drops, is counted without a rule of its own.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from magis.capture.attention_kernels import Capability
from magis.capture.autocast import as_on_cuda, device_forms
from magis.capture.contents import copies, hollow_like, is_readable
from magis.capture.hollow import hollow
from magis.capture.optimizer_rule import needs_closure
from magis.capture.python_state import WritesUndone
from magis.capture.recorder import Recorder
from magis.capture.refusals import clear_errors, of_contents
from magis.capture.snapshot import objects_kept
from magis.capture.stand_ins import StandIns, Twins, finder, stand_ins
from magis.errors import CaptureError
from magis.graph import Graph
from magis.ops.eager_only import formulas_as_eager
from magis.ops.generators import generators_kept, held_generators, own_kept, states_recorded
from magis.ops.optimizers import named_tensors
from magis.ops.python_objects import (
    CONTAINERS,
    MISSING,
    attributes,
    cell_content,
    codes_within,
    is_of_system,
    is_of_user,
    lasting,
    walk,
)
from magis.phases import phases_told

CALLS, SETTLING, FEWEST = 24, 2, 4
"""Calls that are recorded; those at the start that differ in any step; and those recorded of a step of many
operators."""
MOST_OPERATORS = 50_000
COMPILED = "give its network, batch and loss with compiled=True, or the function without torch.compile"
LOOK = "its arguments, closure and globals, and what these hold, are looked through: name it there"

Step = Callable[..., Any]


@dataclass(frozen=True)
class WholeStep:
    """Several calls of a step function as one graph."""

    graph: Graph
    deaths: Mapping[int, int]
    """Storage -> number of operators after which it is freed; a missing one lives to the end."""
    numbers: tuple[tuple[int, int, int], ...]
    """First position, last position and bytes of Python numbers that autograd saves."""
    begins: tuple[int, ...]
    """Position of the first operator of each call, and at last the number of all operators."""
    state: frozenset[int]
    """Storages of the optimizers' state."""
    counters: frozenset[int]
    """Storages of the optimizers' step counters, which no figure counts."""
    handed: frozenset[int]
    """Storages of the copies of batches that calls are given, where there are several batches."""
    cyclic: frozenset[int]
    """Storages that the last call left in reference cycles, and that the collector then freed."""
    phases: tuple[tuple[int, str], ...]
    """Positions from which a phase of the loop runs (`magis.phase`), and its name; "": none."""


def record_whole_step(
    step: Step, batches: Sequence[Any], device: str, most_bytes: int, capability: Capability | None = None
) -> WholeStep:
    """Record calls of ``step(batch)`` on hollow tensors, with one batch after the other, again and again. If Python
    reads numbers off data, the calls run on copies of the tensors, where these have at most ``most_bytes``. Python's
    garbage collector is to be off. Raises CaptureError for a step that cannot be recorded."""
    reached, twins = _Reached(step), partial(hollow_like, known=is_readable)
    try:
        return _recorded(reached, step, batches, device, twins, capability)
    except CaptureError as error:
        tensors = [each for each in tree_leaves(list(batches)) if isinstance(each, Tensor)]
        tensors += [*reached.holder.parameters(), *reached.holder.buffers()]
        if not of_contents(error) or sum(each.nbytes for each in tensors) > most_bytes:
            raise
    return _recorded(reached, step, batches, device, copies, capability)


def _recorded(
    reached: _Reached,
    step: Step,
    batches: Sequence[Any],
    device: str,
    twins: Twins,
    capability: Capability | None = None,
) -> WholeStep:
    leaves, spec = tree_flatten(list(batches))
    given = [each for each in leaves if isinstance(each, Tensor)]
    trained = [name for name, each in reached.holder.named_parameters() if each.requires_grad]
    made, cached = dict[str, torch.Generator](), dict[str, Tensor]()
    own = held_generators(reached.holder, step)
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(generators_kept())
        stack.enter_context(reached.kept(device))
        stand = stack.enter_context(stand_ins(reached.holder, given, (), trained, twins))
        recorder = Recorder({}, _found_by(finder(stand, step, cached)), {**own, **made})
        stack.enter_context(own_kept(own))
        stack.enter_context(clear_errors(recorder.places, "the step function"))
        stack.enter_context(objects_kept({"step": step, **dict(reached.others)}))
        stack.enter_context(device_forms(device, capability))
        if device == "cuda":
            stack.enter_context(as_on_cuda())
        stack.enter_context(states_recorded(device, own, made))
        stack.enter_context(_phases(recorder, reached.optimizers))
        stack.enter_context(_offloading(device))
        if twins is copies:
            stack.enter_context(formulas_as_eager())
            stack.enter_context(WritesUndone())
        else:
            stack.enter_context(hollow())
        for name, tensor in stand.named().items():
            kind = name.partition(":")[0]
            given_as = "batch" if len(batches) == 1 else "host"  # several batches are a loader's, copied for each call
            recorder.register(tensor, given_as if kind == "input" else kind, name)
        begins, phases, handed, cyclic = [0], list[tuple[int, str]](), set[int](), frozenset[int]()
        stack.enter_context(phases_told(lambda name: phases.append((len(recorder.graph(()).ops), name))))
        with recorder.places.watch(stand.module), recorder:
            while len(begins) <= _calls(begins, len(batches)):
                batch = tree_unflatten(_in_place_of(leaves, stand), spec)[(len(begins) - 1) % len(batches)]
                if len(batches) > 1:
                    batch = tree_map_only(Tensor, _handed_over, batch)
                    copied = [recorder.value_of(each) for each in tree_leaves(batch) if isinstance(each, Tensor)]
                    handed |= {recorder.graph(()).values[each].storage for each in copied}
                step(batch)
                del batch
                dead = recorder.deaths.keys()
                gc.collect()
                cyclic = frozenset(recorder.deaths.keys() - dead)
                begins.append(len(recorder.graph(()).ops))
        state, counters = _state_of(reached.optimizers, recorder)
        found = recorder.graph(()), recorder.deaths, recorder.numbers, tuple(begins), state, counters
        return WholeStep(*found, frozenset(handed), cyclic, tuple(phases))


def _handed_over(tensor: Tensor) -> Tensor:
    """Return a copy of a batch's tensor, as a loader makes one for each call."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _found_by(find: Callable[[Tensor], str | None]) -> Callable[[Tensor], str]:
    """Return a function that names a tensor as `find` does, and refuses one without a name."""

    def found(tensor: Tensor) -> str:
        name = find(tensor)
        if name is None:
            raise CaptureError(f"the step uses a tensor of shape {tuple(tensor.shape)} that was not found", hint=LOOK)
        return name

    return found


def _calls(begins: Sequence[int], batches: int) -> int:
    """Return how many calls are recorded, given where the calls so far begin: fewer of a step of many operators, but
    three with each batch where there are several."""
    most = CALLS if len(begins) == 1 else max(FEWEST, min(CALLS, MOST_OPERATORS // max(1, begins[1])))
    return most if batches == 1 else max(most, 3 * batches)


def _in_place_of(leaves: Sequence[Any], stand: StandIns) -> list[Any]:
    """Return a batch's leaves with placeholders in place of tensors."""
    twins = iter(stand.inputs)
    return [next(twins) if isinstance(each, Tensor) else each for each in leaves]


def _state_of(optimizers: Sequence[Optimizer], recorder: Recorder) -> tuple[frozenset[int], frozenset[int]]:
    """Return the storages of the optimizers' state, and those of its numbers."""
    storages, found = recorder.graph(()), (set[int](), set[int]())
    for optimizer in optimizers:
        for _, tensor in named_tensors(dict(enumerate(optimizer.state.values()))):
            found[not tensor.dim()].add(storages.values[recorder.value_of(tensor)].storage)
    return frozenset(found[0]), frozenset(found[1])


class Moved:
    """Simulated host memory for offloading during a capture: hooks that pack a tensor off the device and unpack it as a
    new one."""

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes copied, both directions together."""

    def away(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.nbytes += tensor.nbytes
        return tensor.shape, tensor.dtype

    def back(self, packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        shape, dtype = packed
        found = torch.empty(shape, dtype=dtype)
        self.nbytes += found.nbytes
        return found


class _Reached:
    """The modules, tensors and optimizers that a step function reaches by name."""

    def __init__(self, step: Step) -> None:
        self.optimizers: list[Optimizer] = []
        self.others: list[tuple[str, object]] = []
        """Globals, schedulers, scalers and other objects whose attributes a step may change."""
        self._functions: list[FunctionType] = []
        self.holder = nn.Module()
        modules, tensors = dict[str, nn.Module](), list[tuple[str, Tensor]]()
        for path, item in walk({"": step}, _further):
            last = path.rpartition("/")[2]
            name = last.lstrip(".(@[{#") or "step"
            if _is_compiled(attributes(item) or {}):
                raise CaptureError("the step calls code of torch.compile", hint=COMPILED)
            if isinstance(item, nn.Module):
                modules[name if name not in modules else f"{name}_{len(modules)}"] = item
            elif isinstance(item, Optimizer):
                if needs_closure(item):
                    what = f"{type(item).__name__}.step runs forward and backward as often as numbers say"
                    raise CaptureError(what, hint="measure the loop as it runs, by magis.peak")
                self.optimizers.append(item)
            elif isinstance(item, Tensor):
                tensors.append((name, item))
            elif isinstance(item, FunctionType):
                if is_of_user(item) and not is_of_system(item):
                    self._functions.append(item)
            elif _is_of_loops(item):
                self.others.append((path, item))
            if last.startswith("@") and (isinstance(item, (nn.Module, *CONTAINERS)) or is_of_user(type(item))):
                self.others.append((path, item))
        self._hold(modules, tensors)

    def _hold(self, modules: Mapping[str, nn.Module], tensors: Sequence[tuple[str, Tensor]]) -> None:
        inner = {id(part) for each in modules.values() for part in each.modules() if part is not each}
        for name, module in modules.items():
            if id(module) not in inner:
                self.holder.add_module(name.replace(".", "_"), module)
        self.holder.training = any(each.training for each in self.holder.children())
        known = {id(each) for each in (*self.holder.parameters(), *self.holder.buffers())}
        for number, (name, tensor) in enumerate(tensors):
            if id(tensor) in known or tensor.layout is not torch.strided:
                continue
            known.add(id(tensor))
            free = f"{name.replace('.', '_')}_{number}"
            if isinstance(tensor, nn.Parameter):
                self.holder.register_parameter(free, tensor)
            else:
                self.holder.register_buffer(free, tensor, persistent=False)

    @contextmanager
    def kept(self, device: str) -> Iterator[None]:
        """Give the optimizers empty states within the block, and restore them, closure variables, globals and
        gradients at its end."""
        cells = [(cell, cell_content(cell)) for each in self._functions for cell in each.__closure__ or ()]
        names = [(each.__globals__, name) for each in self._functions for name in _names(each)]
        globals_ = [(space, name, space.get(name, MISSING)) for space, name in names]
        owners = [(each, dict(vars(each)), [dict(group) for group in each.param_groups]) for each in self.optimizers]
        loose = [each for each in self.holder.buffers() if each.requires_grad and each.is_leaf]
        gradients = [each.grad for each in loose]
        try:
            for tensor in loose:
                tensor.grad = None
            for optimizer in self.optimizers:
                optimizer.state = defaultdict(dict)
                for group in optimizer.param_groups:
                    if device != "cpu" and group.get("foreach", False) is None and not group.get("fused"):
                        group["foreach"] = True  # as torch chooses on a GPU
            yield
        finally:
            for optimizer, before, groups in owners:
                vars(optimizer).clear()
                vars(optimizer).update(before)
                for group, then in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(then)
            for cell, content in cells:
                if content is MISSING:
                    del cell.cell_contents  # also of an empty cell
                else:
                    cell.cell_contents = content
            for space, name, value in globals_:
                if value is MISSING:
                    space.pop(name, None)
                else:
                    space[name] = value
            for tensor, gradient in zip(loose, gradients, strict=True):
                tensor.grad = gradient


def _names(function: FunctionType) -> set[str]:
    """Return the global names in a function's code, and in that of functions inside."""
    return {name for code in codes_within(function.__code__) for name in code.co_names}


def _is_compiled(own: Mapping[str, object]) -> bool:
    """Return True for the attributes of what `torch.compile` made."""
    made = own.get("_torchdynamo_orig_callable") is not None and not own.get("_torchdynamo_disable")
    return made or own.get("_compiled_call_impl") is not None


def _is_of_loops(item: object) -> bool:
    """Return True for torch's objects that belong to training loops: schedulers, scalers of gradients."""
    return str(type(item).__module__).startswith(("torch.optim.", "torch.amp.", "torch.cuda.amp."))


def _further(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield (step of the path, object) for all that a step function's code reaches from an object."""
    yield from lasting(item)
    if isinstance(item, FunctionType) and not is_of_system(item):
        found = {name: item.__globals__[name] for name in _names(item) if name in item.__globals__}
        libraries = [
            each for each in found.values() if isinstance(each, ModuleType) and not is_of_system(each.__name__)
        ]
        found |= {name: vars(each)[name] for each in libraries for name in _names(item) if name in vars(each)}
        yield from ((f"@{name}", each) for name, each in found.items())
    elif isinstance(item, dict):  # by place what its keys do not name
        yield from ((f"[{n}", each) for n, each in enumerate(item.values()))
    elif isinstance(item, Optimizer):
        yield from ((f"[{n}", each) for n, each in enumerate(p for g in item.param_groups for p in g["params"]))
    elif _is_of_loops(item) and not isinstance(item, type):
        yield from ((f".{name}", value) for name, value in vars(item).items())
    elif not isinstance(item, (type, nn.Module)) and not is_of_system(type(item)):
        yield from ((f".{name}", each) for name, each in vars(type(item)).items() if isinstance(each, FunctionType))


@contextmanager
def _offloading(device: str) -> Iterator[None]:
    """Let `save_on_cpu` take tensors off a simulated GPU within the block: placeholders are all on one device."""
    hooks: Any = torch.autograd.graph.save_on_cpu
    plain, moved = hooks.__init__, Moved()

    def begun(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:  # noqa: ARG001 (torch's)
        torch.autograd.graph.saved_tensors_hooks.__init__(self, moved.away, moved.back)

    if device != "cpu":
        hooks.__init__ = begun
    try:
        yield
    finally:
        hooks.__init__ = plain


@contextmanager
def _phases(recorder: Recorder, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Tell the recorder within the block when a backward or an update runs. Raises CaptureError for an optimizer that
    was not reached."""
    known = {id(each) for each in optimizers}

    def begun(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) not in known:
            raise CaptureError(
                f"the step calls an optimizer, {type(optimizer).__name__}, that was not found", hint=LOOK
            )
        recorder.phase = "update"

    def ended(*_: object) -> None:
        recorder.phase = "forward"

    autograd: Any = torch.autograd
    engine, method = autograd._engine_run_backward, Tensor.backward

    def run(*given: Any, **named: Any) -> Any:
        recorder.phase, before = "backward", recorder.phase
        try:
            return engine(*given, **named)
        finally:
            recorder.phase = before

    def backward(
        self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:  # torch's own would disable `device_forms` in the backward
        recorder.phase, before = "backward", recorder.phase
        try:
            autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)
        finally:
            recorder.phase = before

    hooks = [register_optimizer_step_pre_hook(begun), register_optimizer_step_post_hook(ended)]
    autograd._engine_run_backward = run
    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        autograd._engine_run_backward = engine
        Tensor.backward = method  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
