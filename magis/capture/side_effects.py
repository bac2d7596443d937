"""Side effects of a forward: a captured step would have them once, eager has them at every call.

The forward is called twice on hollow tensors. Refused are Python objects that the second call changes (counters,
lists), draws from Python's or numpy's generators, and tensors that it takes over from the first call, if a captured
step cannot repeat them. State that only the first call sets up is accepted if equal at every step. The names that the
second call's code looks up are recorded: a plan is guarded by the objects that they name (`Reads`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from magis.capture.autocast import autocast as casting
from magis.capture.contents import Made, contents_of, hollow_like, is_hollow, is_readable
from magis.capture.eager_run import Heard
from magis.capture.hollow import Hollow, hollow
from magis.capture.names_in_code import Reads
from magis.capture.outside_reads import LATER, Ran, unwatched
from magis.capture.places import Places
from magis.capture.python_state import begun_as, caches_kept
from magis.capture.refusals import clear_errors, nodes_behind
from magis.capture.schemas import tensors_in
from magis.capture.snapshot import Snapshot, looks, objects_kept
from magis.capture.stand_ins import stand_ins
from magis.capture.workload import Workload, batch_by_name, roots_of
from magis.errors import CaptureError
from magis.ops.collectives import wrapped
from magis.ops.generators import HostGenerators, generators_kept, held_generators, own_kept
from magis.ops.python_objects import PLAIN, found_at, holder_of, is_of_module, leave, same, told

WHERE = "draw with torch, and compute with the tensors that it makes"
BUFFER = "keep it in a buffer of the module, updated in place"
BEFORE = "call the module once before"


class DrawError(CaptureError):
    """Error: the forward draws random numbers on the host."""


def observe_step(
    work: Workload, autocast: str | None = None, heard: Heard | None = None, *, draws: bool = False
) -> Reads:
    """Return what a training step's forward and loss read; restore the module and all generators.

    ``heard`` is the record of eager's run, for branches on data. With ``draws`` the forward may draw random numbers on
    the host, as every step is then captured again.

    Raises CaptureError, naming the attribute, for what a step could not repeat, and for forwards that raise.
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
        # On separate memory, as the next step's batch is another one.
        other = tuple(twins(batch_by_name(work.inputs, work.targets)).values())
        count = len(work.inputs)
        stack.enter_context(own_kept(held_generators(stand.module, work.loss_fn)))
        stack.enter_context(clear_errors(places))
        stack.enter_context(places.watch(stand.module))
        stack.enter_context(hollow(mode))

        def step() -> object:
            mode.follower.rewind()
            with _disable_current_modes():
                for contents, storage, before, recipe in read:  # both steps read equal numbers
                    storage.copy_(before)
                    contents.known, contents.recipe = True, recipe
            if draws:
                state.restore()
                torch.default_generator.set_state(drawn)
            inputs, targets = next(batches)
            with torch.enable_grad(), casting(autocast):
                loss: Any = work.loss_fn(stand.module(*inputs), *targets)
            if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
                # The backward runs the user's hooks and formulas, and recomputed parts of the forward.
                root = (torch.ones_like(loss),)
                with _gradients_kept(loss, *stand.parameters.values()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # already shown by the capture
                    _engine_run_backward((loss,), root, False, False, (), True, accumulate_grad=True)
            return loss

        with _disable_current_modes():  # storage copies call operators
            read = [
                (found, each.untyped_storage(), each.untyped_storage().clone(), found.recipe)
                for each in stand.buffers.values()
                if not is_hollow(each) and (found := contents_of(each)) is not None
            ]
        batches = cycle([(stand.inputs, stand.targets), (other[:count], other[count:])])
        state, drawn = HostGenerators(), torch.default_generator.get_state()
        roots = roots_of(stand.module, work.loss_fn)
        try:
            reads = observe(step, roots, [*stand.named().values(), *other], draws=draws)
        except CaptureError as error:
            if draws or not mode.drawn or isinstance(error, DrawError):
                raise
            raise DrawError(str(error)) from error
    if mode.drawn and not draws:
        raise DrawError("the forward reads random numbers, which a step would not draw anew", hint=WHERE)
    return reads


def check_stateless(reads: Reads) -> None:
    """Raise CaptureError if a forward carries tensors or numbers from one step to the next."""
    for path in sorted(reads.moved | reads.state):
        raise CaptureError(f"every forward changes {told(path)}, which the next one reads", hint=BUFFER)


@contextmanager
def _gradients_kept(loss: Tensor, *further: Tensor) -> Iterator[None]:
    """Clear the gradients of the leaves of a loss, and of further tensors, in the block; restore them at its end."""
    leaves = (*further, *(node.variable for node in nodes_behind(loss) if hasattr(node, "variable")))
    before = [(leaf, leaf.grad) for leaf in leaves]
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
    """Call a forward twice and return what its code reads; restore all objects reachable from `roots`. `tensors` are
    its parameters, buffers and inputs. Raises CaptureError for what a step could not repeat, DrawError if it draws from
    Python's or numpy's generators, unless `draws` makes both calls draw equal numbers."""
    known, carried, ran, looked = tuple(tensors), Reads(), Ran(), ""
    while True:  # until all attributes that carry state between steps are known
        try:
            found = _observe(call, roots, known, carried, ran, draws=draws)
        except Exception:
            if looked or not ran.looked:
                raise
            looked, carried = ran.looked, replace(carried, clocks={})  # try again with unshifted clocks
        else:
            same_paths = all(getattr(found, each) == getattr(carried, each) for each in ("state", "moved", "clocks"))
            if same_paths and looked:
                raise unwatched(looked)
            if same_paths:
                return found
            carried = found
        ran = Ran(0 if looked else LATER)


def _observe(
    call: Callable[[], object],
    roots: Mapping[str, object],
    known: tuple[Tensor, ...],
    carried: Reads,
    ran: Ran,
    *,
    draws: bool,
) -> Reads:
    """Call a forward twice, given the tensors (`carried.state`) and numbers (`carried.moved`) that it is known to carry
    over; return what its code reads, or `carried` with further such paths."""
    state = carried.state
    with objects_kept(roots) as start:
        held = {path: looks(tensor) for path, tensor in start.tensors.values()}
        numbers = {path: found_at(roots, path) for path in carried.moved}
        first = _Traced((*known, *_at(roots, state)))
        with first, ran.listening():
            one = call()
        for path, number in numbers.items():
            leave(roots, path, number)
        for path, ahead in carried.clocks.items():  # shifted by half as much as the clocks
            leave(roots, path, found_at(roots, path) + ahead)  # type: ignore[operator]
        between, drawn = Snapshot(roots), HostGenerators()
        beyond = Snapshot({}, ran.reads(), apart=between.met)
        new = (found for key, found in between.tensors.items() if key not in start.tensors)
        left = {_address(tensor): path for path, tensor in new if first.depends(tensor)}
        second = _Traced((*known, *_at(roots, state)), left)
        with second, ran.listening(again=True):
            other = call()
        ran.check()
        taken, changes = second.taken - state, [*between.changes()]
        for path in sorted(taken):
            found = found_at(roots, path)
            if not isinstance(found, Tensor) or held.get(path) != looks(found) or not is_of_module(roots, path):
                what = f"the forward takes the tensor {told(path)} from one step to the next"
                raise CaptureError(what, hint=BUFFER if any(path == each for each, *_ in changes) else BEFORE)
        if taken:
            return replace(carried, state=state | taken)
        reads = replace(ran.reads(), state=state, moved=carried.moved, clocks=carried.clocks)
        begun = {path: begun_as(roots, path, then) for path, then, _ in start.changes()}
        counts = partial(_only_counted, roots, reads, begun)
        clocks, moved = dict(carried.clocks), set(carried.moved)
        for path, then, now in changes:
            if type(then) is type(now) and type(now) in (int, float) and holder_of(roots, path) is not None:
                ahead = _of_clock(then, now) if ran.looked else 0
                if ahead:
                    clocks[path] = ahead
                elif path not in clocks and not (type(now) is int and counts(path, then, now)):
                    moved.add(path)
        if clocks.keys() > carried.clocks.keys() or moved > carried.moved:
            return replace(carried, clocks=clocks, moved=frozenset(moved))
        reads = _with_changes(reads, chain(changes, beyond.changes()), roots, counts, draws=draws)
        if drawn.moved() and not draws:
            what = "the forward draws from Python's or numpy's random numbers, of which a step would repeat the first"
            raise DrawError(what, hint=WHERE)
        del one, other  # kept alive until here, so that no address is reused
    pairs = zip([*first.calls, ("nothing",)], [*second.calls, ("nothing",)], strict=False)
    for was, now in ((was, now) for was, now in pairs if was != now):
        if was[0] == now[0] and was[1:2] != now[1:2]:
            two = f"{was[1]}, then {now[1]}"
            raise CaptureError(f"every forward computes {now[0]} with another number: {two}", hint=BUFFER)
        what = f"the first forward computes {was[0]} where the next one computes {now[0]}"
        raise CaptureError(what, hint=BEFORE)
    return reads


def _with_changes(
    reads: Reads,
    changes: Iterable[tuple[str, Any, Any]],
    roots: Mapping[str, object],
    counts: Callable[[str, Any, Any], bool],
    *,
    draws: bool,
) -> Reads:
    """Return the reads with counters and results that the second call changed; raise CaptureError for other changes."""
    counted, results, stale = [], set(), []
    for path, then, now in changes:
        if path in reads.moved:
            continue
        if path in reads.clocks:
            stale.append(told(path))
            results.add(path)
        elif not draws and counts(path, then, now):
            counted.append((path, now - then))
        elif not _only_results(now, then):
            raise CaptureError(f"every forward changes {told(path)}, which a captured step would not", hint=BUFFER)
        elif isinstance(now, Tensor) and isinstance(then, Tensor) and is_of_module(roots, path):
            results.add(path)
        else:
            stale.append(told(path))
            for place in reads.state:
                if any(each is found_at(roots, place) for each in tree_iter(now)):
                    what = (
                        f"the forward takes the tensor {told(place)} from one step to the next, and keeps it elsewhere"
                    )
                    raise CaptureError(what, hint=BUFFER)
    return replace(reads, counted=tuple(counted), results=frozenset(results), stale=tuple(stale))


def _only_counted(
    roots: Mapping[str, object], reads: Reads, begun: Mapping[str, Any], path: str, then: Any, now: Any
) -> bool:
    """Return True if code only increments an attribute, from `begun` on, and by equal amounts in both calls."""
    unread = reads.own is not None and path.rpartition(".")[2] not in reads.own and holder_of(roots, path) is not None
    return unread and type(then) is type(now) is int and bool(begun.get(path) == 2 * then - now)


def _of_clock(then: Any, now: Any) -> int:
    """Return half the shift of clocks, in seconds or nanoseconds, if a number changed by multiples of it; else 0."""
    for ahead in (LATER // 2, LATER // 2 * 10**9):
        times = round((now - then) / ahead)
        if 0 < times < 10**6 and abs(now - then - times * ahead) < ahead / 4000:
            return ahead
    return 0


def _at(roots: Mapping[str, object], paths: Iterable[str]) -> list[Tensor]:
    """Return the tensors at these paths."""
    return [found for path in paths if isinstance(found := found_at(roots, path), Tensor)]


def _only_results(now: Any, then: Any, depth: int = 0) -> bool:
    """Return True if two objects differ only in tensors, which a call keeps as its results."""
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
    """Dispatch mode that records calls on the step's tensors or random numbers, and uses of earlier calls' tensors."""

    def __init__(self, tensors: tuple[Tensor, ...], left: Mapping[int, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []
        self.taken = frozenset[str]()
        """Paths of tensors that operators read and that an earlier call made."""
        self._dependent: dict[int, weakref.ref[Any]] = {}
        self._left = left or {}
        for tensor in tensors:
            self._mark(tensor)

    def _mark(self, tensor: Tensor) -> None:
        address = _address(tensor)

        def died(_reference: object) -> None:  # the address may be reused
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
        self.taken |= {self._left[address] for address in map(_address, given) if address in self._left}
        dependent = torch.Tag.nondeterministic_seeded in func.tags or any(map(self.depends, given))
        if dependent:
            # The runtime computes the momentum of a batch norm with cumulative averages.
            plain = () if "batch_norm" in str(func) else tree_iter((args, kwargs))
            numbers = tuple(repr(item) for item in plain if type(item) in PLAIN)
            self.calls.append((str(func), numbers, *(tuple(tensor.shape) for tensor in (*given, *made))))
            for tensor in (*made, *(given if func._schema.is_mutable else ())):
                self._mark(tensor)
        return out


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
