"""`torch.compile` on hollow tensors: dynamo, AOTAutograd and inductor work as for a real step, up to the C++ compiler.

The Python code that inductor generates for a graph runs as it is: it allocates buffers, frees and reuses them, and
calls torch's kernels. Only its own kernels do nothing, torch's kernels return hollow tensors, and buffers are memory
that is never touched. So fusion, buffer reuse and saved activations are inductor's own, and every buffer dies when it
would in a real step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, fx
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor import ir, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.common import get_scheduling_for_device
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture.attention_kernels import Capability
from magis.capture.autocast import form_on_cuda
from magis.capture.contents import empty_storage, on_storage
from magis.capture.hollow import Hollow
from magis.capture.schemas import least_bytes, tensors_in
from magis.cost.shapes import reach

ALLOCATORS = "empty_strided_"
"""Prefix of the names under which generated code holds torch's allocation functions."""
COMPILERS = ("cpp", "cpp_pybinding", "triton")
"""Functions that generated code calls to compile its kernels."""
TRITON = ("triton", "triton.language")
"""Modules that generated code imports for Triton's kernels."""
OPERATOR_AT = {run_and_save_rng_state: 0, run_with_rng_state: 1, graphsafe_run_with_rng_state: 0}
"""Operators of recomputed parts that draw, by the position of the operator that each runs: it draws the same again."""
MOST_COMPILED = 1 << 20
"""Recompile limit while a step is predicted: each prediction compiles once more."""


def drawing(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the operator, and its arguments, that an operator of `OPERATOR_AT` runs; None for any other."""
    at = OPERATOR_AT.get(func)
    return None if at is None else (args[at], args[at + 1 :])


class HollowCode(Hollow):
    """Dispatch mode of hollow tensors under which torch compiles as it does without a mode."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: code is compiled under this mode as without it."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the compiler itself runs outside of this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        drawn = drawing(func, args)
        if drawn is not None:
            named = {name: value for name, value in (kwargs or {}).items() if name != "rng_state"}
            again = self.__torch_dispatch__(drawn[0], types, drawn[1], named)
            return (torch.get_rng_state(), again) if func is run_and_save_rng_state else again
        if isinstance(func, HigherOrderOperator):
            raise NotImplementedError(f"{func} in code that inductor generates")
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if not isinstance(made, Tensor):
            return made
        largest = max((each.numel() * each.element_size() for each in tensors_in(args)), default=0)
        least = least_bytes(str(func), 0, made, largest)  # some kernels keep more memory than their result needs
        if least <= made.untyped_storage().nbytes():
            return made
        return on_storage(empty_storage(least, self._own_contents(known=False)), made)

    def buffer(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a buffer of generated code, of unknown contents."""
        nbytes = reach(tuple(shape), tuple(stride)) * dtype.itemsize
        storage = empty_storage(nbytes, self._own_contents(known=False))
        with _disable_current_modes():
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)


@dataclass
class Graphs:
    """Backend of torch.compile that runs inductor, and counts the graphs and the graph breaks that ended some."""

    on_gpu: bool = False
    """True if functions take the forms in which a GPU runs them."""
    capability: Capability | None = None
    """Compute capability of the GPU."""
    count: int = 0
    breaks: list[str] = field(default_factory=list)
    """Reason and line of each graph break."""

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.count += 1
        reason = getattr(gm, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            where = reason.user_stack[-1] if reason.user_stack else None
            at = "" if where is None else f" at {Path(where.filename).name}:{where.lineno}"
            first = next((line for line in str(reason.reason).splitlines() if line.strip()), "graph break")
            self.breaks.append(f"{first.strip()}{at}")
        if self.on_gpu:
            _with_gpu_forms(gm, self.capability)
        made: Any = compile_fx(gm, inputs)
        return made  # type: ignore[no-any-return]

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled by this backend, with fixed sizes."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        code: CodeType = run.__code__.replace()  # its own: compiled code is kept by the code object that it replaces
        own = FunctionType(code, run.__globals__, run.__name__, None, run.__closure__)
        return torch.compile(own, backend=self, dynamic=False)


def _with_gpu_forms(gm: fx.GraphModule, capability: Capability | None) -> None:
    """Replace the functions of a graph, and of graphs within it, that run in another form on a GPU: attention."""
    for graph in gm.modules():
        if not isinstance(graph, fx.GraphModule):
            continue
        for node in graph.graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention):
            form = form_on_cuda(node.target, capability)
            if form is not None:
                node.target = _named(form)
        graph.recompile()


def _named(form: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # graphs write functions by name
        return form(*args, **kwargs)

    return run


class _NoKernel:
    """A kernel that does nothing, called as C++ code or run as Triton code."""

    def __call__(self, *_args: object) -> None:
        pass

    def run(self, *_args: object, **_launch: object) -> None:
        """Do nothing."""


def _no_kernel(_compiler: object, *_source: object, **_settings: object) -> _NoKernel:
    return _NoKernel()


@contextmanager
def without_kernels(allocate: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]) -> Iterator[None]:
    """Let inductor's generated code allocate by ``allocate``, with kernels that do nothing. Code compiled in the block
    is in no cache of torch, neither before nor after."""

    def load(key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None) -> ModuleType:
        found: Any = ModuleType(f"{__name__}.{key}")
        found.__file__, found.key = path, key
        missing = {} if find_spec("triton") else {name: MagicMock() for name in TRITON}
        with patch.dict(sys.modules, missing):  # its head imports Triton for the kernels that are left out
            exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(found))  # noqa: S102
        vars(found).update(attrs or {}, _linemap=linemap, get_raw_stream=_stream)
        for name in [name for name in vars(found) if name.startswith(ALLOCATORS)]:
            setattr(found, name, allocate)
        module: ModuleType = found
        return module

    with ExitStack() as stack:
        stack.enter_context(patch.object(PyCodeCache, "load_by_key_path", load))
        for name in COMPILERS:
            stack.enter_context(patch.object(AsyncCompile, name, _no_kernel))
        # a cache would hold code without kernels, or return code with some
        stack.enter_context(inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False, cpp_wrapper=False))
        stack.enter_context(functorch.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False))
        stack.enter_context(dynamo.patch(recompile_limit=MOST_COMPILED, accumulated_recompile_limit=MOST_COMPILED))
        yield


@contextmanager
def triton_rules() -> Iterator[None]:
    """Let inductor lower and fuse graphs of CPU tensors as it does for Triton, which need not be installed. Where it
    asks for the kind of device, to pad rows, to keep values that are used often and to order loops, it is a GPU."""
    with ExitStack() as stack:
        stack.enter_context(inductor.patch(cpu_backend="triton", disable_padding_cpu=False))
        for holder in (ir, scheduler.BaseSchedulerNode):
            stack.enter_context(patch.object(holder, "is_cpu", _is_no_cpu))
            stack.enter_context(patch.object(holder, "is_gpu", _is_gpu))
        stack.enter_context(patch.object(scheduler, "is_gpu", _is_gpu))
        # what a GPU's index is read for, and numbers that are read off a CPU's tensors
        stack.enter_context(patch.object(scheduler.Scheduler, "create_backend", _backend))
        stack.enter_context(patch.object(scheduler.Scheduler, "update_zero_dim_cpu_tensor", _nothing))
        stack.enter_context(patch("torch.utils._triton.triton_hash_with_backend", str))  # of the missing compiler
        # a tensor of one number on a GPU stays there; on a CPU its number would be read and passed to the kernel
        stack.enter_context(patch.object(GraphLowering, "is_unspec_arg", _is_no_number))
        yield


def _is_no_number(_graph: object, _name: str) -> bool:
    return False


def _is_no_cpu(_asked: object) -> bool:
    return False


def _is_gpu(_asked: object) -> bool:
    return True


def _nothing(_scheduler: object) -> None:
    """Leave tensors of one number where they are."""


def _backend(made: scheduler.Scheduler, device: torch.device) -> scheduler.BaseScheduling:
    V.graph.add_device_info(device)
    found = get_scheduling_for_device(device.type)
    if found is None:
        raise RuntimeError(f"inductor generates no code for the device {device}")
    return found(made)


def _stream(_device: int) -> int:
    return 0
