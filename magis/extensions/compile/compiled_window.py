"""Storages of a compiled forward, loss and backward, followed on hollow tensors: bytes and kinds at the peak, order of
allocations and frees, and the calls of torch's own kernels, whose scratch is added to the tensors alive in them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from magis.capture.attention_kernels import Capability
from magis.capture.autocast import cuda_rules
from magis.capture.contents import hollow_like, is_readable
from magis.capture.python_state import caches_kept
from magis.capture.schemas import looks_of
from magis.capture.snapshot import objects_kept
from magis.capture.stand_ins import stand_ins
from magis.capture.workload import Workload, no_reports, roots_of
from magis.errors import CaptureError, UsageError
from magis.extensions.compile.hollow_inductor import Graphs, HollowCode, drawing, triton_rules, without_kernels
from magis.graph import Op, Ref, Value
from magis.ops.call import CallError, from_torch
from magis.ops.fake_results import bits_of
from magis.ops.generators import generators_kept
from magis.ops.optimizers import torch_optimizer
from magis.runtime.storage_ledger import StorageLedger
from magis.simulate.simulator import rounded

COMPILING = 2
"""Steps in which a compiled update is compiled: the first one sees new state."""


@dataclass(frozen=True)
class Call:
    """One call of a torch kernel: the operator, its values, and the bytes alive in it without its scratch."""

    op: Op
    values: Mapping[int, Value]
    alive_bytes: int


@dataclass(frozen=True)
class CompiledWindow:
    """Memory of forward, loss and backward above what exists before them."""

    tensor_bytes: int
    kept_bytes: int
    """Bytes alive at the end: gradients, and the loss."""
    held: tuple[tuple[str, int], ...]
    """Kind and bytes of each tensor at the peak."""
    where: str
    """Operator, or allocation of compiled code, at the peak."""
    phase: str
    events: tuple[tuple[int, int], ...]
    """Number of a storage and its bytes, -1 where it is freed, in order."""
    calls: tuple[Call, ...]
    graphs: int
    breaks: tuple[str, ...]


class Ledger(StorageLedger):
    """Ledger of a compiled step: kinds at the peak, allocations and frees in order, calls of torch's kernels."""

    def __init__(self, rounding: int) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.calls: list[Call] = []
        self.held: tuple[tuple[str, int], ...] = ()
        self.where = ""
        self.counts = False
        """True once the step runs that is measured: the first one only compiles."""
        self._rounding = rounding
        self._running = ""
        self._kinds: dict[int, tuple[str, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the compiler itself runs outside of this mode."""
        return True

    def note(self, made: Tensor) -> Tensor:
        """Count a buffer that generated code allocates; return it."""
        if self.counts:
            self._running = "inductor's code"
            self._count(self._storages(made))
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._running = str(func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        own = result[1] if func is run_and_save_rng_state else result
        func, args = drawing(func, args) or (func, args)
        if isinstance(func, OpOverload) and not looks_of(func).view:
            made = _as_call(func, args, kwargs or {}, own, self._most)
            self.calls.extend([] if made is None else [made])
        return result

    def _storages(self, tree: object) -> list[tuple[StorageWeakRef, int]]:
        return [(each, rounded(nbytes, self._rounding)) for each, nbytes in super()._storages(tree)]

    def _count(self, storages: Iterable[tuple[StorageWeakRef, int]]) -> None:
        self._purge()  # each time, so that frees are in order
        super()._count(storages)

    def _on_size(self, serial: int, nbytes: int) -> None:
        backward: Any = torch._C._current_autograd_node()  # noqa: SLF001 (None outside of the backward, unlike the stub)
        self._kinds[serial] = ("activation" if backward is None else "gradient"), nbytes
        self.events.append((serial, nbytes))

    def _on_freed(self, serial: int) -> None:
        del self._kinds[serial]
        self.events.append((serial, -1))

    def _on_peak(self) -> None:
        self.where, self.held = self._running, tuple(self._kinds.values())


def _as_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, alive: int) -> Call | None:
    """Return a call of a kernel as an operator of a graph; None if an argument has no form there."""
    values: dict[int, Value] = {}

    def of(tensor: Tensor) -> int:
        number = len(values)
        shape, stride, dtype = tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
        values[number] = Value(number, shape, stride, dtype, number, bits=bits_of(tensor))
        return number

    def argument(item: Any) -> Any:
        if isinstance(item, Tensor):
            return Ref(of(item))
        if isinstance(item, (list, tuple)):
            return tuple(map(argument, item))
        return None if isinstance(item, torch.Generator) else from_torch(item)

    try:
        given = tuple(map(argument, args))
        named = tuple((name, argument(item)) for name, item in sorted(kwargs.items()))
    except CallError:
        return None
    many = isinstance(result, (list, tuple))
    made = tuple(of(each) if isinstance(each, Tensor) else None for each in (result if many else (result,)))
    return Call(Op(0, str(func), given, named, made, many), values, alive)


def compiled_window(
    work: Workload,
    what: str,
    cast: str | None,
    rounding: int,
    kind: str = "cpu",
    capability: Capability | None = None,
) -> CompiledWindow:
    """Run forward, loss and backward of a workload, and a compiled update (``what`` is "step"), on hollow tensors.

    They are compiled for a kind of device, "cpu" or "cuda". The tensors are a CPU's for either kind: "cuda" stands for
    the operators and autocast rules of a GPU, of a compute capability, and for code lowered by Triton's rules. Raises
    UsageError where torch.compile fails, CaptureError where numbers are read off data between compiled graphs.
    """
    training = work.optimizer.kind != "none"
    trained = tuple(name for name, each in work.module.named_parameters() if training and each.requires_grad)
    graphs, ledger = Graphs(on_gpu=kind == "cuda", capability=capability), Ledger(rounding)
    with ExitStack() as stack:
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(generators_kept())
        caches = stack.enter_context(caches_kept())
        twins = partial(hollow_like, known=is_readable, made=caches.made)
        stand = stack.enter_context(stand_ins(work.module, work.inputs, work.targets, trained, twins))
        stack.enter_context(objects_kept(roots_of(stand.module, work.loss_fn)))
        mode = HollowCode(made=caches.made)

        def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
            return ledger.note(mode.buffer(shape, stride, dtype))

        def whole() -> Any:
            loss: Callable[..., Any] | None = work.loss_fn
            # without a name for the network's output, which would keep it alive while the loss runs
            return call(*stand.inputs) if loss is None else loss(call(*stand.inputs), *stand.targets)

        call: Callable[..., Any] = graphs.compiled(stand.module) if what == "model" else stand.module
        run = whole if what == "model" else graphs.compiled(whole)
        leaves = {name: stand.parameters[name] for name in trained}
        optimizer = torch_optimizer(work.optimizer, leaves) if what == "step" else None
        update = None if optimizer is None else graphs.compiled(optimizer.step)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH) if work.explicit_attention else nullcontext())
        stack.enter_context(without_kernels(allocate))
        if kind == "cuda":
            stack.enter_context(triton_rules())
            stack.enter_context(cuda_rules())
        stack.enter_context(no_reports())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the capture has shown the step's own
        stack.enter_context(mode)

        def step(update: Callable[[], object] | None) -> Any:
            for each in stand.parameters.values():
                each.grad = None
            with torch.set_grad_enabled(training), _casting(cast):
                result = run()
            if training:
                result.backward()
            if update is not None:
                update()
            return result

        refused = Counter(counters["unimplemented"])
        try:
            step(None if optimizer is None else optimizer.step)  # compiles; the update makes its state
            for _ in range(0 if update is None else COMPILING):
                step(update)
            for each in stand.parameters.values():
                each.grad = None
            ledger.counts = True
            with ledger:
                kept = step(update)
                reasons = Counter(counters["unimplemented"]) - refused
                window = CompiledWindow(
                    tensor_bytes=ledger.peak_bytes,
                    kept_bytes=ledger.alive_bytes,
                    held=ledger.held,
                    where=ledger.where,
                    phase="backward" if any(kind == "gradient" for kind, _ in ledger.held) else "forward",
                    events=tuple(ledger.events),
                    calls=tuple(ledger.calls),
                    graphs=graphs.count,
                    breaks=tuple(dict.fromkeys(graphs.breaks)) or _reasons(reasons),
                )
            del kept
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            where = f": {graphs.breaks[0]}" if graphs.breaks else ""
            raise CaptureError(
                f"compiled, the step reads numbers off data between its graphs{where}",
                hint="remove the graph break, or predict the eager step",
            ) from error
        except TorchDynamoException as error:
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise UsageError(f"torch.compile does not compile the step: {type(error).__name__}: {first}") from error
    return window


def _reasons(refused: Counter[str]) -> tuple[str, ...]:
    """Return dynamo's reasons for leaving functions to eager mode, one line each."""
    return tuple(dict.fromkeys(reason.strip().splitlines()[0] for reason in refused if reason.strip()))


def _casting(cast: str | None) -> AbstractContextManager[object]:
    return nullcontext() if cast is None else torch.autocast("cpu", getattr(torch, cast))
