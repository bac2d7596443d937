"""What a forward does besides computing: a captured step would do it once, eager does it at every call.

The forward is called twice, on tensors without memory. What the second call changes in Python (counters, lists), what
it draws from Python's or numpy's random numbers, and tensors that it takes over from the first are refused: the step
could not go on where eager does. What only the first call sets up is fine, if that is the same at every step. While the
second call runs, the names that its code looks at are collected; a plan rests on what they stand for (`Reads`).
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magis.capture.autocast import autocast as casting
from magis.capture.captured import is_readable
from magis.capture.eager_run import Heard
from magis.capture.hollow import Hollow, Made, hollow, hollow_like
from magis.capture.places import Places
from magis.capture.python_state import caches_kept, counting_loads, holder_of, runs_later
from magis.capture.refusals import clear_errors
from magis.capture.schemas import tensors_in
from magis.capture.snapshot import Reads, Snapshot, is_of_torch, same
from magis.capture.stand_ins import stand_ins
from magis.capture.workload import Workload, batch_by_name
from magis.errors import CaptureError
from magis.ops.collectives import wrapped
from magis.ops.generators import HostGenerators, called_first, generators_kept, held_generators, own_kept

WHERE = "draw with torch, and compute with the tensors that it makes"
BUFFER = "keep it in a buffer of the module, updated in place"
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "eval", "exec", "__getattribute__"})
"""What code that reads attributes by names made at run time mentions."""
_ALWAYS = frozenset(
    {"forward", "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_is_full_backward_hook"}
)
_BELOW = ("magis.capture", "magis.ops", "torch._", "torch.fx", "torch.utils._")
"""Code below the forward's own: it runs operators, or watches them."""


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

        def forward() -> object:
            mode.follower.rewind()
            if draws:
                state.restore()
                torch.default_generator.set_state(drawn)
            inputs, targets = batches.pop(0)
            with torch.enable_grad(), casting(autocast):
                return work.loss_fn(stand.module(*inputs), *targets)

        batches = [(stand.inputs, stand.targets), other]
        state, drawn = HostGenerators(), torch.default_generator.get_state()
        roots = {"model": stand.module, "loss": work.loss_fn}
        try:
            reads = observe(forward, roots, [*stand.named().values(), *chain(*other)], draws=draws)
        except DrawError:
            raise
        except CaptureError as error:
            if draws or not mode.drawn:
                raise
            raise DrawError(str(error)) from error
    if mode.drawn and not draws:
        raise DrawError("the forward reads random numbers, which a step would not draw anew", hint=WHERE)
    return reads


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
    known, codes = tuple(tensors), dict[types.CodeType, dict[str, Any]]()
    start, first = Snapshot(roots), _Traced(known)
    try:
        with first:
            one = call()
        between, drawn = Snapshot(roots), HostGenerators()
        second = _Traced(known, _left_behind(first, start, between))
        with second, _running(codes):
            other = call()
        reads = _reads(codes)
        counts = partial(_only_counted, start, roots, reads, codes)
        reads = _check(between, drawn, first, second, reads, roots, counts, draws=draws)
        del one, other  # held up to here, so that no address is given to another tensor
    finally:
        start.restore()
    return reads


def _check(
    between: Snapshot,
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
    if second.taken:
        raise CaptureError(
            f"the forward takes the tensor {_pretty(second.taken)} from one step to the next", hint=BUFFER
        )
    for path, then, now in between.changes():
        if not draws and type(then) is int and type(now) is int and counts(path, now - then):
            counted.append((path, now - then))
        elif not _only_results(now, then):
            raise CaptureError(f"every forward changes {_pretty(path)}, which a captured step would not", hint=BUFFER)
        elif isinstance(now, Tensor) and isinstance(then, Tensor) and holder_of(roots, path):
            results.add(path)
        else:
            stale.append(_pretty(path))
    if drawn.moved() and not draws:
        raise DrawError(
            "the forward draws from Python's or numpy's random numbers, of which a step would repeat the first",
            hint=WHERE,
        )
    if first.calls != second.calls:
        pairs = zip([*first.calls, ("nothing",)], [*second.calls, ("nothing",)], strict=False)
        one, other = next((one, other) for one, other in pairs if one != other)
        raise CaptureError(
            f"the first forward computes {one[0]} where the next one computes {other[0]}",
            hint="call the module once before",
        )
    return replace(reads, counted=tuple(counted), results=frozenset(results), stale=tuple(stale))


def _only_counted(
    start: Snapshot, roots: Mapping[str, object], reads: Reads, codes: Collection[types.CodeType], path: str, step: int
) -> bool:
    """Whether no code looks at an attribute but to add to it, and both calls have added the same."""
    name = path.rpartition(".")[2]
    if reads.own is None or name in reads.own or holder_of(roots, path) is None or runs_later(codes, roots.values()):
        return False
    begun = next(((then, now) for known, then, now in start.changes() if known == path), None)
    return begun is not None and all(isinstance(each, int) for each in begun) and begun[1] - begun[0] == 2 * step  # type: ignore[operator]


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
            self.calls.append((str(func), *(tuple(tensor.shape) for tensor in (*given, *made))))
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


@contextmanager
def _running(codes: dict[types.CodeType, dict[str, Any]]) -> Iterator[None]:
    """Collect the code of every Python function that is called, with its globals.

    Garbage is not collected meanwhile: whoever is called then (`gc.callbacks`, `__del__`) is not part of the forward.
    """

    def called(frame: types.FrameType, event: str, _arg: object) -> None:
        if event == "call":
            codes.setdefault(frame.f_code, frame.f_globals)

    collecting = gc.isenabled()
    gc.disable()
    try:
        with called_first(called):
            yield
    finally:
        if collecting:
            gc.enable()


def _reads(codes: Mapping[types.CodeType, dict[str, Any]]) -> Reads:
    names: set[str] = set(_ALWAYS)
    by_name = False
    wanted: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for code, namespace in codes.items():
        module = str(namespace.get("__name__", ""))
        if module.startswith(_BELOW):
            continue
        if is_of_torch(module) or module.partition(".")[0] in sys.stdlib_module_names:
            names.update(code.co_names)
            continue
        read = _names_read(code)
        names.update(read)
        by_name = by_name or not _BY_NAME.isdisjoint(code.co_names)
        wanted.setdefault(id(namespace), (namespace, set()))[1].update(name for name in read if name in namespace)
    found = frozenset(names)
    spaces = tuple((namespace, tuple(sorted(read))) for namespace, read in wanted.values() if read)
    return Reads(None if by_name else found, found, spaces)


@functools.lru_cache(maxsize=4096)
def _names_read(code: types.CodeType) -> frozenset[str]:
    """Names that are looked up somewhere, and strings that may be: not what is only stored to, or counted on."""
    counts = counting_loads(code)
    found = {
        str(one.argval)
        for one in dis.get_instructions(code)
        if one.opname.startswith("LOAD_") and one.argval in code.co_names and one.offset not in counts
    }
    strings = {item for item in _flat(code.co_consts) if isinstance(item, str) and item.isidentifier()}
    return frozenset(found | strings)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    """The constants of code, those within tuples, too: names that a `match` looks at."""
    for item in items:
        if isinstance(item, (tuple, frozenset)):
            yield from _flat(item)
        else:
            yield item


def _pretty(path: str) -> str:
    for part in ("_modules.", "_parameters.", "_buffers."):
        path = path.replace(part, "")
    return path
