"""Ledger of all live storages of a rank, real or fake, with their bytes and kinds.

Unlike `magis.runtime.measure.tensor_peak`, it also counts persistent tensors, follows resized storages (sharded weights
are freed and gathered by resizing), and unwraps DTensors. One ledger serves predictions on fake tensors and
measurements on real ones, so both count alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from magis.extensions.ranks.strategies.distributed import KIND
from magis.ops.call import as_mixed
from magis.ops.operators import op_info
from magis.runtime.storage_ledger import StorageLedger, storages_of
from magis.simulate.cuda_caching_allocator import CachingAllocator

TEMPORARY = "activations and temporaries"
GATHERED = "gathered parameters"
COLLECTIVES = ("c10d", "_c10d_functional")


class LiveStorage(StorageLedger):
    """Dispatch mode that counts live bytes after every operator, inputs and outputs included, and every resize.

    Enter it before the first tensor is made. ``peak_bytes`` is the highest sum since `open_window`; `at_peak` splits
    the peak by kind, as given by `name` and `KIND`.
    """

    def __init__(self, *, replays: bool = False, let_threads_rest: Callable[[], object] | None = None) -> None:
        """``replays``: also simulate the bytes that a GPU's caching allocator would reserve (``allocator``).

        ``let_threads_rest`` is called before a new peak counts that includes storages passed to a collective: a
        backend's threads release them shortly after the collective ends.
        """
        super().__init__()
        self.allocator = CachingAllocator() if replays else None
        self._let_threads_rest = let_threads_rest
        self._lent: set[int] = set()
        """Serial numbers of storages that were created in the window and passed to collectives."""
        self._kinds: dict[int, str] = {}
        self._peak: dict[int, int] = {}
        self._window_from = 0
        self._watching = False
        self._stack = ExitStack()

    def open_window(self) -> None:
        """Start a new peak from the storages alive now."""
        self._watching = True
        if self._let_threads_rest is not None:
            self._let_threads_rest()
        self._purge()
        self._lent = set()
        self._window_from = next(self._serial)
        self.peak_bytes = self._most
        self._on_peak()

    def close_window(self) -> None:
        """End the window: later operators do not affect the peak."""
        self._watching = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return False, so that code under the mode runs eagerly instead of compiled."""
        return False

    def name(self, kind: str, tensor: torch.Tensor) -> None:
        """Set the kind of a tensor's storage, unless it has one."""
        found = storages_of(tensor)
        self._count(found)
        for reference, _ in found:
            self._kinds.setdefault(self._alive[reference.cdata].serial, kind)

    def name_rest(self, kind: str) -> None:
        """Set ``kind`` for all live storages that have none."""
        self._purge()
        for entry in self._alive.values():
            self._kinds.setdefault(entry.serial, kind)

    def at_peak(self) -> dict[str, int]:
        """Return the bytes by kind at the window's peak, in descending order; they sum up to the peak."""
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
        result = _as_allocated(func, args, as_mixed(str(func), args, func(*args, **(kwargs or {}))))
        of_args = storages_of(args)
        given = [*of_args, *storages_of(kwargs)]
        # A storage that no operator made is a backend's own scratch (gloo's, in reduce_scatter), except for
        # torch.tensor(...), which makes its storage out of sight and announces it by this operator.
        if func is not torch.ops.aten.lift_fresh.default:
            given = [each for each in given if each[0].cdata in self._alive]
        arguments = {reference.cdata for reference, _ in of_args}
        # a wrapper subclass (of an asynchronous result, for example) has no bytes beside its inner tensors'
        wraps = isinstance(result, torch.Tensor) and is_traceable_wrapper_subclass_type(type(result))
        made = [] if wraps else [each for each in storages_of(result) if each[0].cdata not in arguments]
        self._count((*given, *made))
        if func.namespace in COLLECTIVES:
            serials = (self._alive[reference.cdata].serial for reference, _ in (*given, *made))
            self._lent.update(serial for serial in serials if serial > self._window_from)
        return result

    def _on_new_storage(self, serial: int) -> None:
        purpose = KIND.get()
        if purpose is not None:
            self._kinds[serial] = purpose

    def _is_above_peak(self) -> bool:
        exceeds = self._watching and super()._is_above_peak()
        if exceeds and self._let_threads_rest is not None and self._lent:
            self._let_threads_rest()
            return super()._is_above_peak()
        return exceeds

    def _on_size(self, serial: int, nbytes: int) -> None:
        if self.allocator is not None:
            self.allocator.release(serial)
            self.allocator.allocate(serial, nbytes)

    def _on_freed(self, serial: int) -> None:
        self._lent.discard(serial)
        self._on_size(serial, 0)
        if serial not in self._peak:
            self._kinds.pop(serial, None)

    def _on_peak(self) -> None:
        self._peak = {entry.serial: entry.nbytes for entry in self._alive.values()}  # none is gone: after a purge


def _as_allocated(func: Any, args: Sequence[Any], result: Any) -> Any:
    """Return a fake result in as much memory as its kernel allocates: a loss is a full tensor that has shrunk."""
    info = op_info(str(func))
    if not info.input_size or not isinstance(result, torch.Tensor):
        return result
    largest = max(each.nbytes for each in args if isinstance(each, torch.Tensor))
    least = info.least_bytes(0, result, largest)
    if result.untyped_storage().nbytes() >= least:
        return result
    return result.new_empty(-(-least // result.element_size())).as_strided(result.shape, result.stride())


@contextmanager
def _resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call ``seen`` with every storage that Python code resizes, since dispatch modes do not see resizes."""
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
