"""What a forward does besides computing: a captured step would do it once, eager does it at every call.

The forward is called twice, on tensors without memory. What the second call changes in Python (counters, lists), what
it draws from Python's or numpy's random numbers, and tensors that it takes over from the first are refused: the step
could not go on where eager does. What only the first call sets up is fine, if that is the same at every step. While the
second call runs, the names that its code looks at are collected; a plan rests on what they stand for (`Reads`).
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from magis.capture.names_read import reads_of, running
from magis.capture.places import Places
from magis.capture.python_objects import PLAIN, same
from magis.capture.python_state import caches_kept, found_at, is_of_module, leave
from magis.capture.refusals import clear_errors
from magis.capture.schemas import tensors_in
from magis.capture.snapshot import Reads, Snapshot, looks
from magis.capture.stand_ins import stand_ins
from magis.capture.workload import Workload, batch_by_name, roots_of
from magis.errors import CaptureError
from magis.ops.collectives import wrapped
from magis.ops.generators import HostGenerators, generators_kept, held_generators, own_kept
from magis.ops.held_tensors import told

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
        other = _another_batch(work, made)
        stack.enter_context(own_kept(held_generators(stand.module, work.loss_fn)))
        stack.enter_context(clear_errors(places))
        stack.enter_context(places.watch(stand.module))
        stack.enter_context(hollow(mode))

        def step() -> object:
            mode.follower.rewind()
            with _disable_current_modes():
                for contents, storage, before, recipe in read:  # a step's numbers are those of the first one
                    storage.copy_(before)
                    contents.known, contents.recipe = True, recipe
            if draws:
                state.restore()
                torch.default_generator.set_state(drawn)
            inputs, targets = next(batches)
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

        known = [each for each in stand.buffers.values() if not is_hollow(each)]
        with _disable_current_modes():  # storages are copied by operators
            read = [
                (found, each.untyped_storage(), each.untyped_storage().clone(), found.recipe)
                for each in known
                if (found := contents_of(each)) is not None
            ]
        batches = cycle([(stand.inputs, stand.targets), other])
        state, drawn = HostGenerators(), torch.default_generator.get_state()
        roots = roots_of(stand.module, work.loss_fn)
        try:
            reads = observe(step, roots, [*stand.named().values(), *chain(*other)], draws=draws)
        except DrawError:
            raise
        except CaptureError as error:
            if draws or not mode.drawn:
                raise
            raise DrawError(str(error)) from error
    if mode.drawn and not draws:
        raise DrawError("the forward reads random numbers, which a step would not draw anew", hint=WHERE)
    return reads


def check_stateless(reads: Reads) -> None:
    """Raise CaptureError where a forward takes tensors or numbers from one step to the next."""
    for path in sorted(reads.moved | reads.state):
        raise CaptureError(f"every forward changes {told(path)}, which the next one reads", hint=BUFFER)


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


def _another_batch(work: Workload, made: Made) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A batch on memory of its own: the next step is not handed what an earlier one has kept or changed."""
    found = tuple(hollow_like(batch_by_name(work.inputs, work.targets), known=is_readable, made=made).values())
    return found[: len(work.inputs)], found[len(work.inputs) :]


def observe(
    call: Callable[[], object], roots: Mapping[str, object], tensors: Iterable[Tensor], *, draws: bool = False
) -> Reads:
    """Call a forward twice and return what its code reads; all that hangs on `roots` is put back as it was.

    `tensors` are its parameters, buffers and inputs. Raises CaptureError for what a step could not repeat, DrawError
    where that is what it draws from Python's and numpy's generators, unless it `draws` the same both times.
    """
    known, state, moved = tuple(tensors), frozenset[str](), frozenset[str]()
    while True:  # until it is known which attributes take a tensor or a number from one step to the next
        found = _observe(call, roots, known, state, moved, draws=draws)
        if isinstance(found, Reads):
            return found
        state, moved = state | found[0], moved | found[1]


def _observe(
    call: Callable[[], object],
    roots: Mapping[str, object],
    known: tuple[Tensor, ...],
    state: frozenset[str],
    moved: frozenset[str],
    *,
    draws: bool,
) -> Reads | tuple[frozenset[str], frozenset[str]]:
    """The same, where the tensors at the paths `state` are replaced by every forward and the numbers at `moved` are
    changed by it, so that the second call begins with the first one's; or further such paths."""
    codes, asked = dict[types.CodeType, dict[str, Any]](), set[str]()
    start, first = Snapshot(roots), _Traced((*known, *_at(roots, state)))
    held = {path: looks(tensor) for path, tensor in start.tensors.values()}
    numbers = {path: found_at(roots, path) for path in moved}
    try:
        with first, running(codes, asked):
            one = call()
        beyond = Snapshot({}, reads_of(codes, asked))
        for path, number in numbers.items():
            leave(roots, path, number)
        between, drawn = Snapshot(roots), HostGenerators()
        second = _Traced((*known, *_at(roots, state)), _left_behind(first, start, between))
        with second, running(codes, asked):
            other = call()
        taken = second.taken - state
        if any(held.get(path) != _looks_at(roots, path) or not is_of_module(roots, path) for path in taken):
            raise CaptureError(
                f"the forward takes the tensor {told(min(taken))} from one step to the next", hint=BUFFER
            )
        if taken:
            return taken, frozenset()
        reads = replace(reads_of(codes, asked), state=state, moved=moved)
        counts = partial(_only_counted, start, roots, reads)
        further = _moved(between, roots, counts) - moved
        if further:
            return frozenset(), further
        reads = _check((between, beyond), drawn, first, second, reads, roots, counts, draws=draws)
        del one, other  # held up to here, so that no address is given to another tensor
    finally:
        start.restore()
    return reads


def _moved(between: Snapshot, roots: Mapping[str, object], counts: Callable[[str, int], bool]) -> frozenset[str]:
    """Numbers that the second call has changed and that more than counts on."""
    changes = ((path, then, now) for path, then, now in between.changes() if type(then) is type(now))
    return frozenset(
        path
        for path, then, now in changes
        if isinstance(now, float) or (type(now) is int and isinstance(then, int) and not counts(path, now - then))
        if is_of_module(roots, path)
    )


def _check(
    between: tuple[Snapshot, Snapshot],
    drawn: HostGenerators,
    first: _Traced,
    second: _Traced,
    reads: Reads,
    roots: Mapping[str, object],
    counts: Callable[[str, int], bool],
    *,
    draws: bool,
) -> Reads:
    """With what the second call has counted on, and where it left tensors; CaptureError for all else that differs from
    what the first one left."""
    counted, results, stale = [], set(), []
    for path, then, now in chain(*(each.changes() for each in between)):
        if path in reads.moved:
            continue
        if not draws and type(then) is int and type(now) is int and counts(path, now - then):
            counted.append((path, now - then))
        elif not _only_results(now, then):
            raise CaptureError(f"every forward changes {told(path)}, which a captured step would not", hint=BUFFER)
        elif isinstance(now, Tensor) and isinstance(then, Tensor) and is_of_module(roots, path):
            results.add(path)
        else:
            stale.append(told(path))
            _check_apart(roots, reads.state, now)
    if drawn.moved() and not draws:
        raise DrawError(
            "the forward draws from Python's or numpy's random numbers, of which a step would repeat the first",
            hint=WHERE,
        )
    if first.calls != second.calls:
        pairs = zip([*first.calls, ("nothing",)], [*second.calls, ("nothing",)], strict=False)
        one, other = next((one, other) for one, other in pairs if one != other)
        if one[0] == other[0] and one[1:2] != other[1:2]:
            raise CaptureError(
                f"every forward computes {one[0]} with another number: {one[1]}, then {other[1]}", hint=BUFFER
            )
        raise CaptureError(
            f"the first forward computes {one[0]} where the next one computes {other[0]}",
            hint="call the module once before",
        )
    return replace(reads, counted=tuple(counted), results=frozenset(results), stale=tuple(stale))


def _only_counted(start: Snapshot, roots: Mapping[str, object], reads: Reads, path: str, step: int) -> bool:
    """Whether no code looks at an attribute but to add to it, and both calls have added the same."""
    name = path.rpartition(".")[2]
    if reads.own is None or name in reads.own or not is_of_module(roots, path):
        return False
    begun = next(((then, now) for known, then, now in start.changes() if known == path), None)
    return begun is not None and all(isinstance(each, int) for each in begun) and begun[1] - begun[0] == 2 * step  # type: ignore[operator]


def _check_apart(roots: Mapping[str, object], state: Collection[str], left: object) -> None:
    """Raise CaptureError where a tensor that is taken to the next step lies in a list or dictionary, too."""
    for path in state:
        if any(each is found_at(roots, path) for each in tree_iter(left)):
            raise CaptureError(
                f"the forward takes the tensor {told(path)} from one step to the next, and keeps it elsewhere",
                hint=BUFFER,
            )


def _at(roots: Mapping[str, object], paths: Iterable[str]) -> list[Tensor]:
    """The tensors at some paths."""
    return [found for path in paths if isinstance(found := found_at(roots, path), Tensor)]


def _looks_at(roots: Mapping[str, object], path: str) -> tuple[Any, ...] | None:
    found = found_at(roots, path)
    return looks(found) if isinstance(found, Tensor) else None


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
        self.taken = frozenset[str]()
        """Paths to those that were."""
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
        self.taken |= {self._left[address] for address in map(_address, given) if address in self._left}
        dependent = torch.Tag.nondeterministic_seeded in func.tags or any(map(self.depends, given))
        if dependent:
            # The share of a batch norm that averages over all batches is a number that the runtime counts on.
            numbers = () if "batch_norm" in str(func) else _numbers((args, kwargs))
            self.calls.append((str(func), numbers, *(tuple(tensor.shape) for tensor in (*given, *made))))
            for tensor in (*made, *(given if func._schema.is_mutable else ())):
                self._mark(tensor)
        return out


def _left_behind(first: _Traced, start: Snapshot, between: Snapshot) -> dict[int, str]:
    """Tensors of the first call that hang on Python objects now: address of the storage -> path."""
    return {
        _address(tensor): path
        for key, (path, tensor) in between.tensors.items()
        if key not in start.tensors and first.depends(tensor)
    }


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _numbers(items: Any) -> tuple[str, ...]:
    """The plain arguments of a call."""
    return tuple(repr(item) for item in tree_iter(items) if type(item) in PLAIN)
