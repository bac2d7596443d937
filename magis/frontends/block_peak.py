"""Peak memory of any code: `with magis.peak() as p:` counts bytes of tensors and of the allocator, by module and line.
Nothing is captured or planned: generation loops, pipelines and several training steps are measured as they run. Only
memory allocated inside the block counts, not a model that was built before; freeing older memory changes nothing."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch._C._autograd import _profiler_enabled

from magis import registry
from magis.cases.tensor_ledger import CARRIED_OVER, TensorLedger
from magis.current_gate import BLOCK_GATE
from magis.errors import UsageError, nearest
from magis.ops.eager_only import formulas_as_eager
from magis.phases import phases_told
from magis.printable import printable
from magis.results import Case, CaseResult, Memory, Peak, StepFigures
from magis.runtime.measure import (
    Allocation,
    allocations,
    device_identity,
    device_memory,
    memory_profile,
    no_collection,
    replay,
)
from magis.runtime.storage_ledger import compiled_buffers
from magis.strategies.strategy_names import BLOCK
from magis.units import format_bytes

ROWS = 40
SHOWN = 8
DEVICES = ("cpu", "cuda")


class BlockPeak:
    """Peak memory of a block of code; its figures can be read once the block has ended. The garbage collector runs
    before the block and is off inside it, so that the peak does not depend on earlier code. Tensor bytes are the same
    on every machine. What ``after``, the last block, has left and this one frees counts, too. Raises UsageError for an
    unknown device."""

    def __init__(self, device: str | None = None, after: BlockPeak | None = None) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device not in DEVICES:
            given = repr(device) if isinstance(device, str) else f"of type {type(device).__name__}"
            raise UsageError(f"magis.peak: device {given} is unknown", hint=nearest(device, DEVICES))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("magis.peak: device 'cuda' needs a GPU and none was found", hint="use 'cpu'")
        asked: object = after
        ended = isinstance(asked, BlockPeak) and asked.device == self.device and asked._figures is not None  # noqa: SLF001
        if after is not None and not ended:
            raise UsageError("magis.peak: after= is no block that has ended on this device", hint="give the last block")
        self._after = after
        self._ledger = TensorLedger(self.device, addresses=True)
        self._stack = ExitStack()
        self._figures: _Figures | None = None
        self._events: list[Allocation] | None = None
        self._why = "its block has not begun"

    def __enter__(self) -> Self:
        if self._why != "its block has not begun":
            raise UsageError("magis.peak: one object measures one block", hint="call magis.peak() again")
        self._why = "its block is still running"
        self._log = None
        stack = self._stack
        stack.enter_context(no_collection())
        if self._after is not None:
            self._ledger.inherit(self._after._ledger)  # noqa: SLF001
        self._older = self._ledger.inherited_by_address()
        if self.device == "cpu" and not _profiler_enabled():
            self._log = stack.enter_context(memory_profile())
        elif self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # cached blocks of earlier code would count as reserved
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
        stack.enter_context(formulas_as_eager() if self.device == "cpu" else nullcontext())
        stack.enter_context(self._ledger.modules.watched())
        stack.enter_context(compiled_buffers(self._ledger.note_compiled))
        stack.enter_context(phases_told(self._ledger.enter_phase))
        stack.enter_context(self._ledger)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        allocated = reserved = None
        if self.device == "cuda" and error is None:
            torch.cuda.synchronize()
            allocated = torch.cuda.max_memory_allocated() - self._start
            reserved = torch.cuda.max_memory_reserved() - self._start
        profiled = _profiler_enabled()  # another profiler, as in planning, ends this one
        if self._log is not None and not profiled:
            self._log.enabled = False  # torch before 2.12 raises an error where a profiler is ended twice
        self._stack.close()
        if error is not None:
            self._why = f"its block raised {type(error).__name__}"
            return
        older, freed = self._older, sum(self._older.values()) - sum(self._ledger.inherited_by_address().values())
        if self._log is not None and profiled and (self._after is None or self._after.allocated_bytes is not None):
            self._events = allocations(self._log)
            allocated = replay(self._events, older).peak_bytes
        elif allocated is not None and reserved is not None:
            allocated, reserved = allocated + freed, reserved + freed
        self._log = self._after = None  # the events of a whole step
        phases = self._ledger.peaks()
        at_peak = max(phases.values(), key=lambda peak: peak.tensor_bytes)
        named = {name: peak for name, peak in phases.items() if name}
        kept = self._ledger.kept_bytes
        if kept:
            gc.collect()
        self._figures = _Figures(at_peak, kept, kept - self._ledger.kept_bytes, allocated, reserved, named)

    @property
    def tensor_bytes(self) -> int:
        """Peak bytes of the tensors made in the block; each storage counts once."""
        return self._found.at_peak.tensor_bytes

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes of the tensors made in the block by phase (`magis.phase`) that runs meanwhile."""
        return {name: peak.tensor_bytes for name, peak in self._found.phases.items()}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors made in the block that are still alive at its end."""
        return self._found.kept_bytes

    @property
    def cyclic_bytes(self) -> int:
        """Bytes of these that reference cycles hold, until Python's garbage collector runs. It ran behind the block."""
        return self._found.cyclic_bytes

    @property
    def allocated_bytes(self) -> int | None:
        """Peak bytes handed out by the device's allocator, workspaces of operators included. None if another profiler
        ran."""
        return self._found.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Peak bytes that CUDA's caching allocator reserved; None on a CPU."""
        return self._found.reserved_bytes

    @property
    def at_peak(self) -> Peak:
        """The operator at the peak of tensor bytes, and the tensors alive there by module and line."""
        return self._found.at_peak

    def save_snapshot(self, path: str | Path) -> None:
        """Write the block's allocations on a CPU to a file as a memory snapshot, such as
        `torch.cuda.memory._dump_snapshot` writes, for torch's memory_viz; its peak is ``allocated_bytes``. Raises
        UsageError on a GPU, where another profiler ran, and for a path that cannot be written."""
        events = self._events
        if self._found.allocated_bytes is None or events is None:
            hint = "on a GPU, use torch.cuda.memory._record_memory_history; on a CPU, no other profiler"
            raise UsageError("save_snapshot: the block's allocations were not logged", hint=hint)
        registry.load("snapshot", "block")(path, events, self._older, self._ledger.places)

    def gate(self, name: str = "", *, tolerance: float = 0.0) -> None:
        """Compare the peak, and that of each phase, with its stored baseline, and fail the running pytest test if one
        is worse. ``name`` tells several blocks of a test apart; ``tolerance`` is the share by which bytes may grow
        (0.01: one percent). Raises UsageError outside of a test."""
        __tracebackhide__ = True
        gate = BLOCK_GATE.get()
        if gate is None:
            self._found  # noqa: B018 (raises where there is nothing to compare)
            raise UsageError("magis.peak: gate() works in a pytest test only", hint="elsewhere, read tensor_bytes")
        gate(self.rows(name), tolerance)

    def rows(self, name: str) -> dict[str, BlockPeak | PhasePeak]:
        """Return what is gated, by name: the block, and its phases that held tensors."""
        found: dict[str, BlockPeak | PhasePeak] = {name: self}
        for phase, peak in self._figures.phases.items() if self._figures is not None else ():
            if peak.held:
                found[f"{name}.{phase}" if name else phase] = PhasePeak(self.device, peak)
        return found

    def result(self, name: str, seed: int = 0) -> CaseResult:
        """Return the figures as a result of the gate, of strategy "peak" and with ``name`` as its model."""
        found, nbytes = self._found, self.tensor_bytes
        if not nbytes:
            raise UsageError(f"magis.peak: the block made no tensor on {self.device}: there is nothing to gate")
        allocated = nbytes if found.allocated_bytes is None else found.allocated_bytes
        memory = Memory(nbytes, max(allocated, nbytes), found.reserved_bytes)
        return _row(name, seed, self.device, memory, found.at_peak)

    def __str__(self) -> str:
        """Return the figures and the largest groups of tensors at the peak, as lines of text."""
        if self._figures is None:
            return self._nothing
        found, peak = self._figures, self._figures.at_peak
        in_cycles = f", {format_bytes(found.cyclic_bytes)} of it in reference cycles" if found.cyclic_bytes else ""
        besides = [f"{format_bytes(found.kept_bytes)} kept{in_cycles}"]
        if found.allocated_bytes is not None:
            besides.insert(0, f"{format_bytes(found.allocated_bytes)} allocated")
        if found.reserved_bytes is not None:
            besides.insert(1, f"{format_bytes(found.reserved_bytes)} reserved")
        where = f", at {peak.op} of {peak.module or 'no module'} ({peak.line})" if peak.op else ""
        lines = [f"peak of tensors {format_bytes(peak.tensor_bytes)} ({', '.join(besides)}){where}"]
        if found.phases:
            each = (f"{name} {format_bytes(nbytes)}" for name, nbytes in self.phases.items())
            lines.append(f"by phase: {', '.join(each)}")
        for row in peak.held[:SHOWN]:
            place = f" at {row.line}" if row.line else ""
            what = f"{row.kind}s" if row.kind != CARRIED_OVER else "tensors of the last block, freed in this one"
            lines.append(f"{format_bytes(row.nbytes):>12}  {row.module or 'no module'}: {row.count} {what}{place}")
        return "\n".join(map(printable, lines))

    @property
    def _found(self) -> _Figures:
        if self._figures is None:
            raise UsageError(self._nothing)
        return self._figures

    @property
    def _nothing(self) -> str:
        return f"magis.peak: there are no figures: {self._why}"


def peak(device: str | None = None, *, after: BlockPeak | None = None) -> BlockPeak:
    """Measure the peak memory of a block of code: ``with magis.peak() as p: ...``, then ``p.tensor_bytes``. ``device``
    is "cpu" or "cuda"; by default "cuda" if there is a GPU. With ``after``, the block of a loop's last step, what that
    one has left and this one frees counts, too. In a test, ``p.gate()`` compares the peak with a stored baseline."""
    return BlockPeak(device, after)


@dataclass(frozen=True)
class PhasePeak:
    """Peak of one phase of a block, as a row of the gate."""

    device: str
    at_peak: Peak

    def result(self, name: str, seed: int = 0) -> CaseResult:
        """Return the figures as a result of the gate, with ``name`` as its model."""
        nbytes = self.at_peak.tensor_bytes
        return _row(name, seed, self.device, Memory(nbytes, nbytes), self.at_peak)


def _row(name: str, seed: int, device: str, memory: Memory, at_peak: Peak) -> CaseResult:
    figures = StepFigures(memory, 0.0, memory, at_peak=at_peak)
    return CaseResult(
        case=Case(name, BLOCK, device, "small", seed=seed),
        dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        identity=device_identity(device),
        original=figures,
        optimized=figures,
        ratio=None,
        weight_bytes=0,
        persistent_bytes=0,
        memory_limit_bytes=None,
        latency_limit_ms=None,
        device_memory_bytes=device_memory(device),
        lower_bound_bytes=0,
        priced=False,
    )


@dataclass(frozen=True)
class _Figures:
    at_peak: Peak
    kept_bytes: int
    cyclic_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    phases: Mapping[str, Peak]
