"""Memory of a running block of code by module and line: where tensors are allocated, which live at the peak."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from magis.capture.places import UserLines
from magis.capture.schemas import tensors_in
from magis.results import ModuleBytes, Peak, collapsed
from magis.runtime.storage_ledger import StorageLedger, storages_of

ROWS = 40
CARRIED_OVER = "carried over"
"""Kind of a storage that an earlier block has left."""


@dataclass(frozen=True, slots=True)
class MadeStorage:
    """A storage allocated in the block, and where; equal for corresponding storages of two steps."""

    nbytes: int
    kind: str
    module: str
    line: str


class RunningModules:
    """Tracker of the module whose forward is running: "UNet.mid.0", with the class of the outermost one."""

    def __init__(self) -> None:
        self._running: list[tuple[weakref.ref[nn.Module], str]] = []
        self._names: dict[int, tuple[weakref.ref[nn.Module], dict[int, str]]] = {}

    @property
    def path(self) -> str:
        """Return the path of the running module; "" outside of all modules."""
        return self._running[-1][1] if self._running else ""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Track the forwards of all modules within the block, by global hooks."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # compiled graphs do not call modules
            return
        path = type(module).__name__
        if self._running:
            outer, outer_path = self._running[-1]
            name = self._name(outer(), module)
            path = f"{outer_path}.{name}" if name else f"{outer_path}.{path}"
        self._running.append((weakref.ref(module), path))

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while self._running and self._running.pop()[0]() is not module:
            pass  # a sub-module left by an exception before its own hook

    def _name(self, outer: nn.Module | None, module: nn.Module) -> str:
        """Return the path of a module within the calling module; "" if it is no sub-module."""
        if outer is None:
            return ""
        known = self._names.get(id(outer))
        if known is None or known[0]() is not outer or id(module) not in known[1]:
            known = (weakref.ref(outer), {id(child): name for name, child in outer.named_modules()})
            self._names[id(outer)] = known
        return known[1].get(id(module), "")


def by_module(made: Iterable[MadeStorage]) -> tuple[ModuleBytes, ...]:
    """Return the storages' bytes by kind and module, largest first; the line is that of the largest storage."""
    rows: dict[tuple[str, str], list[MadeStorage]] = {}
    for each in made:
        rows.setdefault((each.kind, each.module), []).append(each)
    held = (
        ModuleBytes(
            kind, module, sum(each.nbytes for each in group), len(group), max(group, key=lambda each: each.nbytes).line
        )
        for (kind, module), group in rows.items()
    )
    return collapsed(held, ROWS)


class TensorLedger(StorageLedger):
    """A storage ledger that records where storages are allocated, and which are alive at the peak. With ``addresses``
    it also reads where each one lies, which makes a Python object of the storage for a moment."""

    def __init__(self, device: str, *, addresses: bool = False) -> None:
        super().__init__()
        self.modules = RunningModules()
        self._device, self._addresses = device, addresses
        self._lines = UserLines()
        self._places: dict[int, tuple[str, str]] = {}
        self._made: dict[int, MadeStorage] = {}
        self._running: tuple[Any, tuple[str, str, str] | None] = (None, None)
        """Running operator, and its (kind, module, line) once it has allocated something."""
        self._phase = ""
        self._peaks: dict[str, tuple[int, tuple[str, str, str, str], Mapping[int, MadeStorage]]] = {}
        """Bytes, operator and storages at the peak by phase of the block, without the running one's."""
        self._at_peak: Mapping[int, MadeStorage] = {}
        self._where = ("", "", "", "")
        self._inherited: set[int] = set()
        """Storages that an earlier ledger saw made."""
        self.places: dict[tuple[int, int], list[tuple[str, str, str, str]]] = defaultdict(list)
        """Kind, module, phase and line of each storage made on a CPU, by address and bytes."""

    def inherit(self, earlier: TensorLedger) -> None:
        """Count, ahead of all operators, what an earlier ledger's block has left alive, if this block frees it."""
        earlier._purge()
        for address, entry in earlier._alive.items():
            serial = next(self._serial)
            self._alive[address] = replace(entry, serial=serial)
            self._made[serial] = replace(earlier._made[entry.serial], kind=CARRIED_OVER)
            self._most += entry.nbytes
            self._inherited.add(serial)

    def inherited_by_address(self) -> Mapping[int, int]:
        """Return the bytes of inherited storages that are alive, by address of their memory."""
        self._purge()
        entries = [each for each in self._alive.values() if each.serial in self._inherited]
        return {_address(each.reference): each.nbytes for each in entries}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the storages made under this ledger that are alive."""
        return sum(each.nbytes for serial, each in self.alive().items() if serial not in self._inherited)

    def enter_phase(self, name: str) -> None:
        """Go on with the peak of another phase of the block; what is alive now counts in it."""
        self._peaks[self._phase] = self.peak_bytes, self._where, self._at_peak
        self._phase, self._running = name, ("", None)
        self.peak_bytes, self._where, self._at_peak = self._peaks.get(name, (0, ("", "", "", ""), {}))
        if self._is_above_peak():
            self.peak_bytes = self._most
            self._on_peak()

    def peaks(self) -> Mapping[str, Peak]:
        """Return by phase ("": outside of all) the operator at the peak, and the storages alive there. Inherited ones
        that are still alive are of no step's own: weights, an optimizer's state."""
        self.enter_phase(self._phase)
        lasting = self._inherited & self.alive().keys()
        found = {}
        for name, (_, (op, module, phase, line), made) in self._peaks.items():
            held = (each for serial, each in made.items() if serial not in lasting)
            found[name] = Peak(op, module, phase, line, by_module(held))
        return found

    def alive(self) -> Mapping[int, MadeStorage]:
        """Return the storages allocated under the ledger that are still alive, by serial number."""
        self._purge()
        return dict(self._made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # outside of inference mode, autograd has decomposed composite operators; higher-order ones cannot be
        if torch.is_inference_mode_enabled() and isinstance(func, OpOverload):
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        self._running = func, None
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note_compiled(self, name: str, made: Tensor) -> None:
        """Count a buffer that compiled code allocates without an operator."""
        self._running = name, None
        self._count(self._storages(made))

    def _storages(self, tree: object) -> list[tuple[StorageWeakRef, int]]:
        return storages_of([tensor for tensor in tensors_in(tree) if tensor.device.type == self._device])

    def _on_size(self, serial: int, nbytes: int) -> None:
        func, place = self._running
        place = place or self._where_it_runs()
        self._running = func, place
        self._made[serial] = MadeStorage(nbytes, *place)
        newest = next(reversed(self._alive.values())) if self._addresses and self._device == "cpu" else None
        if newest is not None and newest.serial == serial:
            kind, module, line = place
            phase = self._phase or ("backward" if kind == "gradient" else "forward")
            address = _address(newest.reference)
            if address:
                self.places[address, nbytes].append((kind, module, phase, line))

    def _on_freed(self, serial: int) -> None:
        del self._made[serial]

    def _on_peak(self) -> None:
        func, place = self._running
        kind, module, line = place or ("", "", "")
        self._where = (str(func), module, "backward" if kind == "gradient" else "forward", line)
        self._at_peak = dict(self._made)

    def _where_it_runs(self) -> tuple[str, str, str]:
        """Return kind, module and line of the running operator; a backward operator has module and line of its
        forward."""
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001
        if node is not None:
            return "gradient", *self._places.get(node._sequence_nr(), ("", ""))  # noqa: SLF001
        module, line = self.modules.path, self._lines.here()
        if torch.is_grad_enabled():
            self._places.setdefault(_get_sequence_nr() - 1, (module, line))
        return "tensor", module, line


def _address(reference: StorageWeakRef) -> int:
    """Return the address of the memory of a storage that is alive; 0 for torch's fake tensors, which have none."""
    made: Any = torch.UntypedStorage
    storage = made._new_with_weak_ptr(reference.cdata)  # noqa: SLF001
    return 0 if storage.device.type == "meta" else int(storage.data_ptr())
