"""What a forward does besides computing: a captured step would do it once, eager does it at every call.

The forward is called twice, on tensors without memory. What the second call changes in Python (counters, lists), what
it draws from Python's or numpy's random numbers, and tensors that it takes over from the first are refused: the step
could not go on where eager does. What only the first call sets up is fine, if that is the same at every step. While the
second call runs, the names that its code looks at are collected; a plan rests on what they stand for (`Reads`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from magis.capture.autocast import autocast as casting
from magis.capture.captured import is_readable
from magis.capture.contents import Made, hollow_like
from magis.capture.eager_run import Heard
from magis.capture.hollow import Hollow, hollow
from magis.capture.outside_reads import LATER, Ran
from magis.capture.places import Places
from magis.capture.python_state import caches_kept
from magis.capture.refusals import clear_errors
from magis.capture.schemas import tensors_in
from magis.capture.snapshot import Reads, Snapshot, objects_kept
from magis.capture.stand_ins import stand_ins
from magis.capture.workload import Workload, batch_by_name
from magis.errors import CaptureError
from magis.ops.collectives import wrapped
from magis.ops.generators import HostGenerators, generators_kept, held_generators, own_kept
from magis.ops.python_objects import PLAIN, holder_of, same, told

WHERE = "draw with torch, and compute with the tensors that it makes"
BUFFER = "keep it in a buffer of the module, updated in place"


class DrawError(CaptureError):
    """The forward draws random numbers on the host."""


def observe_step(
    work: Workload, autocast: str | None = None, heard: Heard | None = None, *, draws: bool = False
) -> Reads:
    """What the code of a training step's forward and loss reads; the module and all generators are left as they were.

    ``heard`` is what eager's run of the step told, for its branches on data. With ``draws`` the forward may draw on the
    host: every step is captured anew.

    Raises CaptureError, naming the attribute, for what a step could not repeat, and for forwards that cannot be called.
    """
    with caches_kept() as caches:
        return _observed(work, autocast, Hollow(draws=True, heard=heard, made=caches.made), caches.made, draws=draws)


def _observed(work: Workload, autocast: str | None, mode: Hollow, made: Made, *, draws: bool) -> Reads:
    places = Places()
    trained = [name for name, parameter in work.module.named_parameters() if parameter.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        twins = partial(hollow_like, known=is_readable, made=made)
        stand = stack.enter_context(stand_ins(work.module, work.inputs, work.targets, trained, twins))
        # On memory of its own: the next step is not handed what an earlier one has kept or changed.
        other = tuple(twins(batch_by_name(work.inputs, work.targets)).values())
        count = len(work.inputs)
        stack.enter_context(own_kept(held_generators(stand.module, work.loss_fn)))
        stack.enter_context(clear_errors(places))
        stack.enter_context(places.watch(stand.module))
        stack.enter_context(hollow(mode))

        def step() -> object:
            mode.follower.rewind()
            if draws:
                state.restore()
                torch.default_generator.set_state(drawn)
            inputs, targets = batches.pop(0)
            with torch.enable_grad(), casting(autocast):
                loss = work.loss_fn(stand.module(*inputs), *targets)
            if loss.requires_grad and loss.numel() == 1:
                # Hooks and formulas of the user's own run in it, and parts of the forward again.
                root = (torch.ones_like(loss),)
                with (
                    _gradients_kept(loss, *stand.parameters.values()),
                    warnings.catch_warnings(),
                ):  # which the capture has given
                    warnings.simplefilter("ignore")
                    _engine_run_backward((loss,), root, False, False, (), True, accumulate_grad=True)
            return loss

        batches = [(stand.inputs, stand.targets), (other[:count], other[count:])]
        state, drawn = HostGenerators(), torch.default_generator.get_state()
        roots = {"model": stand.module, "loss": work.loss_fn}
        try:
            reads = observe(step, roots, [*stand.named().values(), *other], draws=draws)
        except DrawError:
            raise
        except CaptureError as error:
            if draws or not mode.drawn:
                raise
            raise DrawError(str(error)) from error
    if mode.drawn and not draws:
        raise DrawError("the forward reads random numbers, which a step would not draw anew", hint=WHERE)
    return reads


@contextmanager
def _gradients_kept(loss: Tensor, *further: Tensor) -> Iterator[None]:
    """Begin the block without gradients of the tensors that the loss depends on and further ones; put them back."""
    waiting, seen, before = [loss.grad_fn], set[Any](), [(leaf, leaf.grad) for leaf in further]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        before += [(leaf, leaf.grad)] if leaf is not None else []
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in before:
            leaf.grad = gradient


def observe(
    call: Callable[[], object], roots: Mapping[str, object], tensors: Iterable[Tensor], *, draws: bool = False
) -> Reads:
    """Call a forward twice and return what its code reads; all that hangs on `roots` is put back as it was.

    `tensors` are its parameters, buffers and inputs. Raises CaptureError for what a step could not repeat, DrawError
    where that is what it draws from Python's and numpy's generators, unless it `draws` the same both times.
    """
    known, ran = tuple(tensors), Ran()
    with objects_kept(roots) as start:
        first = _Traced(known)
        with first, ran.listening():
            one = call()
        between, beyond = Snapshot(roots), Snapshot({}, ran.reads())
        new = (found for key, found in between.tensors.items() if key not in start.tensors)
        drawn = HostGenerators()
        second = _Traced(known, {_address(tensor): path for path, tensor in new if first.depends(tensor)})
        with second, ran.listening(later=LATER):
            other = call()
        ran.check()
        if second.taken:
            what = f"the forward takes the tensor {told(second.taken)} from one step to the next"
            raise CaptureError(what, hint=BUFFER)
        changes = chain(between.changes(), beyond.changes())
        reads = _with_changes(ran.reads(), changes, start, roots, draws=draws)
        if drawn.moved() and not draws:
            what = "the forward draws from Python's or numpy's random numbers, of which a step would repeat the first"
            raise DrawError(what, hint=WHERE)
        del one, other  # held up to here, so that no address is given to another tensor
    pairs = zip([*first.calls, ("nothing",)], [*second.calls, ("nothing",)], strict=False)
    for was, now in ((was, now) for was, now in pairs if was != now):
        if was[0] == now[0] and was[1:2] != now[1:2]:
            numbers = f"{was[1]}, then {now[1]}"
            raise CaptureError(f"every forward computes {now[0]} with another number: {numbers}", hint=BUFFER)
        what = f"the first forward computes {was[0]} where the next one computes {now[0]}"
        raise CaptureError(what, hint="call the module once before")
    return reads


def _with_changes(
    reads: Reads,
    changes: Iterable[tuple[str, Any, Any]],
    start: Snapshot,
    roots: Mapping[str, object],
    *,
    draws: bool,
) -> Reads:
    """With what the second call has counted on, and where it left tensors; CaptureError for all else that differs from
    what the first one left."""
    counted, results, stale = [], set(), []
    begun = {path: then for path, then, _ in start.changes()}
    for path, then, now in changes:
        of_module = _is_of_module(roots, path)
        unread = of_module and reads.own is not None and path.rpartition(".")[2] not in reads.own
        # No code looks at it but to add to it, and both calls have added the same.
        if not draws and unread and type(then) is type(now) is int and begun.get(path) == 2 * then - now:
            counted.append((path, now - then))
        elif not _only_results(now, then):
            raise CaptureError(f"every forward changes {told(path)}, which a captured step would not", hint=BUFFER)
        elif isinstance(now, Tensor) and isinstance(then, Tensor) and of_module:
            results.add(path)
        else:
            stale.append(told(path))
    return replace(reads, counted=tuple(counted), results=frozenset(results), stale=tuple(stale))


def _is_of_module(roots: Mapping[str, object], path: str) -> bool:
    found = holder_of(roots, path)
    return found is not None and isinstance(found[0], nn.Module)


def _only_results(now: Any, then: Any, depth: int = 0) -> bool:
    """Whether what changes are results of the last call that are kept for whoever wants to look at them."""
    if same(now, then):
        return True
    if depth > 4 or type(now) is not type(then):
        return isinstance(now, Tensor) and isinstance(then, Tensor)
    if isinstance(now, Tensor):
        return True
    if isinstance(now, Mapping):
        return [*now] == [*then] and all(_only_results(now[key], then[key], depth + 1) for key in now)
    if isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(_only_results(a, b, depth + 1) for a, b in zip(now, then, strict=True))
    parts = getattr(now, "__dict__", None)
    return parts is not None and not callable(now) and _only_results(parts, then.__dict__, depth + 1)


class _Traced(TorchDispatchMode):
    """The calls on what depends on the step's tensors, or on random numbers; and tensors taken from an earlier call."""

    def __init__(self, tensors: tuple[Tensor, ...], left: Mapping[int, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []
        self.taken = ""
        self._dependent: dict[int, weakref.ref[Any]] = {}
        self._left = left or {}
        for tensor in tensors:
            self._mark(tensor)

    def _mark(self, tensor: Tensor) -> None:
        address = _address(tensor)

        def died(_reference: object) -> None:  # the address may be given to another one
            self._dependent.pop(address, None)

        if address not in self._dependent:
            memory = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
            self._dependent[address] = weakref.ref(memory, died)

    def depends(self, tensor: Tensor) -> bool:
        return _address(tensor) in self._dependent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wrapped(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        given, made = list(tensors_in((args, tuple((kwargs or {}).values())))), list(tensors_in(out))
        for tensor in given:
            self.taken = self.taken or self._left.get(_address(tensor), "")
        dependent = torch.Tag.nondeterministic_seeded in func.tags or any(map(self.depends, given))
        if dependent:
            # The share of a batch norm that averages over all batches is a number that the runtime counts on.
            plain = () if "batch_norm" in str(func) else tree_iter((args, kwargs))
            numbers = tuple(repr(item) for item in plain if type(item) in PLAIN)
            self.calls.append((str(func), numbers, *(tuple(tensor.shape) for tensor in (*given, *made))))
            for tensor in (*made, *(given if func._schema.is_mutable else ())):
                self._mark(tensor)
        return out


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
