"""Every storage alive, real or fake, from the start of a rank's life: what its tensors take, and what they are for.

Unlike `magis.runtime.measure.tensor_peak`, which counts above a start, it counts persistent tensors too, follows
storages that change their size (sharded weights come and go that way), and looks into distributed tensors. The same
ledger counts a prediction on fake tensors and a measurement on real ones, so that both mean the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from magis.ops.call import as_mixed
from magis.ops.eager_only import unwatched
from magis.runtime.measure import storages_of
from magis.simulate.cuda_caching_allocator import CachingAllocator
from magis.strategies.distributed import KIND

TEMPORARY = "activations and temporaries"
GATHERED = "gathered parameters"
_COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True)
class _Tracked:
    reference: StorageWeakRef
    nbytes: int
    serial: int
    """Addresses are used again, these are not."""


class LiveStorage(TorchDispatchMode):
    """Counts after every operator, and after every change of a storage's size, with inputs and outputs alive.

    Enter it before the first tensor is made. ``peak_bytes`` is the highest sum since `open_window`; `at_peak` tells it
    apart by kind, as far as `name` and `KIND` said what storages are for.
    """

    def __init__(self, *, replays: bool = False, let_threads_rest: Callable[[], None] | None = None) -> None:
        """``replays``: also what a GPU's caching allocator would reserve for it all (``allocator``).

        ``let_threads_rest`` is called before a sum counts in which there are storages that a collective took part in: a
        backend's threads let go of them a moment after the collective has ended.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self.allocator = CachingAllocator() if replays else None
        self._let_threads_rest = let_threads_rest
        self._lent: set[int] = set()
        """Storages younger than the window that were given to collectives."""
        self._unwatched = unwatched()
        self._alive: dict[int, _Tracked] = {}
        self._kinds: dict[int, str] = {}
        self._peak: dict[int, int] = {}
        self._serial = itertools.count()
        self._window_from = 0
        self._most = 0
        """Bytes of all entries, of which some may be gone: no more than that are alive."""
        self._watching = False
        self._stack = ExitStack()

    def open_window(self) -> None:
        """Start anew with what is alive now."""
        self._watching = True
        if self._let_threads_rest is not None:
            self._let_threads_rest()
        self._purge()
        self._lent = set()
        self._window_from = next(self._serial)
        self._peak = {}
        self.peak_bytes = 0
        self._note()

    def close_window(self) -> None:
        """What comes from now on does not count."""
        self._watching = False

    @property
    def held_bytes(self) -> int:
        """The bytes alive now."""
        self._purge()
        return self._most

    def name(self, kind: str, tensor: torch.Tensor) -> None:
        """Say what the storage of a tensor is for, unless that was said before."""
        found = storages_of(tensor)
        self._count(found)
        for reference, _ in found:
            self._kinds.setdefault(self._alive[reference.cdata].serial, kind)

    def name_rest(self, kind: str) -> None:
        """Call all storages alive, of which nothing was said, ``kind``."""
        self._purge()
        for entry in self._alive.values():
            self._kinds.setdefault(entry.serial, kind)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the window's peak, most first; they sum up to it."""
        found: Counter[str] = Counter()
        for key, nbytes in self._peak.items():
            found[self._kinds.get(key, TEMPORARY)] += nbytes
        return {kind: nbytes for kind, nbytes in found.most_common() if nbytes}

    def __enter__(self) -> Self:
        self._stack.enter_context(_resizes(self._resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        reference: StorageWeakRef = StorageWeakRef(storage)
        self._count([(reference, storage.nbytes())])
        self._kinds.setdefault(self._alive[reference.cdata].serial, GATHERED)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its parts' operators come by
        func = self._unwatched.form(func, args, kwargs or {})
        if self.allocator is not None:
            self._purge()  # what is free by now can be handed out again
        result = as_mixed(str(func), args, func(*args, **(kwargs or {})))
        of_args = storages_of(args)
        given = [*of_args, *storages_of(kwargs)]
        # What no operator made is a backend's own scratch (gloo's, in reduce_scatter), except for torch.tensor(...),
        # which makes its storage out of sight and announces it by this operator.
        if func is not torch.ops.aten.lift_fresh.default:
            given = [each for each in given if each[0].cdata in self._alive]
        arguments = {reference.cdata for reference, _ in of_args}
        made = [each for each in storages_of(result) if each[0].cdata not in arguments]
        self._count((*given, *made))
        if func.namespace in _COLLECTIVES:
            serials = (self._alive[reference.cdata].serial for reference, _ in (*given, *made))
            self._lent.update(serial for serial in serials if serial > self._window_from)
        return result

    def _count(self, storages: Iterable[tuple[StorageWeakRef, int]]) -> None:
        more = False
        purpose = KIND.get()
        for reference, nbytes in storages:
            known = self._alive.get(reference.cdata)
            if known is not None and known.nbytes == nbytes:
                continue
            more = more or known is None or nbytes > known.nbytes
            serial = next(self._serial) if known is None else known.serial
            self._replay(serial, nbytes)
            self._most += nbytes - (0 if known is None else known.nbytes)
            self._alive[reference.cdata] = _Tracked(reference, nbytes, serial)
            if known is None and purpose is not None:
                self._kinds[serial] = purpose
        if more and self._watching and self._most > self.peak_bytes:
            self._purge()
            if self._let_threads_rest is not None and self._lent and self._most > self.peak_bytes:
                self._let_threads_rest()
                self._purge()
            self._note()

    def _replay(self, serial: int, nbytes: int) -> None:
        if self.allocator is not None:
            self.allocator.release(serial)
            self.allocator.allocate(serial, nbytes)

    def _purge(self) -> None:
        for key in [key for key, entry in self._alive.items() if entry.reference.expired()]:
            gone = self._alive.pop(key)  # with the reference, the address may be used again
            self._most -= gone.nbytes
            self._lent.discard(gone.serial)
            self._replay(gone.serial, 0)
            if gone.serial not in self._peak:
                self._kinds.pop(gone.serial, None)

    def _note(self) -> None:
        if self._most > self.peak_bytes:  # nothing in it is gone: it comes behind a purge
            self.peak_bytes = self._most
            self._peak = {entry.serial: entry.nbytes for entry in self._alive.values()}


@contextmanager
def _resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Hear of every storage whose size is changed from Python: no operator tells of that."""
    own = vars(torch.UntypedStorage).get("resize_")
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def told(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        seen(storage)
        return result

    torch.UntypedStorage.resize_ = told  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if own is None:
            del torch.UntypedStorage.resize_  # the base class's is in reach again
        else:
            torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]
