"""Dispatch mode that tracks live tensors by weak references to their storages."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magis.errors import CaptureError
from magis.ops.eager_only import unwatched


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """A storage in a ledger: a weak reference, which keeps its address from reuse but does not keep its bytes."""

    reference: StorageWeakRef
    nbytes: int
    serial: int
    """Number of the storage that, unlike its address, is never reused."""


class StorageLedger(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all storages that operators make, and their peak. Inputs and outputs of
    the running operator count as alive. The sum of live bytes is an upper bound until it exceeds the peak; only then
    are dead storages searched, so that long loops run fast."""

    supports_higher_order_operators = True
    """Lets `torch.cond`, scans and loops come to `__torch_dispatch__`, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._unwatched = unwatched()
        self._older: dict[int, StorageWeakRef] = {}
        self._alive: dict[int, StorageEntry] = {}
        self._serial = itertools.count()
        self._most = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: code is compiled under this mode as without it."""
        return True

    @property
    def alive_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        self._purge()
        return self._most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        higher = isinstance(func, HigherOrderOperator)
        if not higher:
            func = self._unwatched.form(func, args, kwargs or {})
        # torch.tensor(...) makes its storage unseen, then calls this operator
        if func is not torch.ops.aten.lift_fresh.default:
            for reference, _ in self._storages((args, kwargs)):
                if reference.cdata not in self._alive:
                    self._older[reference.cdata] = reference
        result = self._run_higher_order(func, args, kwargs or {}) if higher else func(*args, **(kwargs or {}))
        self._count(self._storages((args, kwargs, result)))
        return result

    def _run_higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a higher-order operator so that this mode also sees the operators inside its functions."""
        kinds = {type(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if not kinds <= {Tensor, torch.nn.Parameter}:
            return func(*args, **kwargs)  # a tensor subclass has its own implementation

        def seen(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*given: Any, **named: Any) -> Any:
                with self:  # torch exits the mode for the call
                    return function(*given, **named)

            return run

        functions = (FunctionType, torch.nn.Module)
        return func(*(seen(arg) if isinstance(arg, functions) else arg for arg in args), **kwargs)

    def _storages(self, tree: object) -> list[tuple[StorageWeakRef, int]]:
        return storages_of(tree)

    def _count(self, storages: Iterable[tuple[StorageWeakRef, int]]) -> None:
        more = False
        for reference, nbytes in storages:  # check sizes each time: resize_ changes them
            known = self._alive.get(reference.cdata)
            if reference.cdata in self._older or (known is not None and known.nbytes == nbytes):
                continue
            before, serial = (0, next(self._serial)) if known is None else (known.nbytes, known.serial)
            more = more or nbytes > before
            self._most += nbytes - before
            self._alive[reference.cdata] = StorageEntry(reference, nbytes, serial)
            if known is None:
                self._on_new_storage(serial)
            self._on_size(serial, nbytes)
        if more and self._is_above_peak():
            self.peak_bytes = self._most
            self._on_peak()

    def _is_above_peak(self) -> bool:
        if self._most > self.peak_bytes:
            self._purge()
        return self._most > self.peak_bytes

    def _purge(self) -> None:
        for key in [key for key, entry in self._alive.items() if entry.reference.expired()]:
            gone = self._alive.pop(key)  # without the reference, the address may be reused
            self._most -= gone.nbytes
            self._on_freed(gone.serial)

    # Hooks for subclasses; the serial number names the storage.

    def _on_new_storage(self, serial: int) -> None:
        pass

    def _on_size(self, serial: int, nbytes: int) -> None:
        pass

    def _on_freed(self, serial: int) -> None:
        pass

    def _on_peak(self) -> None:
        pass


class OverrunError(CaptureError):
    """Error: code needs more memory or time than allowed."""


class BoundedLedger(StorageLedger):
    """Dispatch mode that raises OverrunError before an operator would have more than `most_bytes` alive, or after
    `most_seconds`."""

    def __init__(self, most_bytes: int, most_seconds: float) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._end = time.thread_time() + most_seconds
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if time.thread_time() > self._end or self._bytes_after(func, args, kwargs or {}) > self._most_bytes:
            raise OverrunError("running it here takes too long, or too much memory")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _bytes_after(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the bytes that will be alive after an operator call."""
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        most = sum(map(_nbytes, given))  # for data-dependent results: as large as the inputs
        with suppress(Exception), self._fakes:
            made = func(*args, **kwargs)
            most = sum(_nbytes(tensor) for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor))
        return self.alive_bytes + most


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def storages_of(tree: object) -> list[tuple[StorageWeakRef, int]]:
    """Return weak references to the storages of all tensors in `tree`, with their sizes in bytes."""
    found: list[tuple[StorageWeakRef, int]] = []
    _add_storages(tree, found)
    return found


def _add_storages(tree: object, found: list[tuple[StorageWeakRef, int]]) -> None:
    """Collect the storages in `tree` without pytree, which is several times slower, as this runs at every operator."""
    if isinstance(tree, torch.Tensor):
        if tree.layout == torch.strided:
            storage = tree.untyped_storage()
            reference: StorageWeakRef = StorageWeakRef(storage)
            found.append((reference, storage.nbytes()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _add_storages(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _add_storages(item, found)
    elif tree is not None and not isinstance(tree, _PLAIN):
        for leaf in tree_leaves(tree):
            if leaf is not tree:
                _add_storages(leaf, found)


_ALLOCATES = "empty_strided_"


@contextmanager
def compiled_buffers(note: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Call ``note`` with each buffer that inductor's generated Python code allocates. It allocates by C++ functions of
    torch that no dispatch mode sees, and that every generated module holds under its own names."""
    source: Any = torch._C._dynamo.guards  # the module that generated code imports from
    told: dict[Any, Any] = {}

    def telling(name: str, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            made = allocate(*args)
            note(name, made)
            return made

        told[run] = allocate
        return run

    for name, allocate in list(vars(source).items()):
        if name.startswith(f"_{_ALLOCATES}"):
            setattr(source, name, telling(name, allocate))
    watching = {allocate: run for run, allocate in told.items()}
    _replace_allocators(watching)
    try:
        yield
    finally:
        _replace_allocators(told)  # also in modules compiled meanwhile


def _replace_allocators(others: Mapping[Any, Any]) -> None:
    """Replace the allocation functions of compiled code, in all modules that hold them."""
    loaded = sys.modules.get("torch._inductor.codecache")
    for module in (torch._C._dynamo.guards, *(loaded.PyCodeCache.modules if loaded else ())):
        for name, held in list(vars(module).items()):
            if name.lstrip("_").startswith(_ALLOCATES) and held in others:
                setattr(module, name, others[held])


_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
