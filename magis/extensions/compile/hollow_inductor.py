"""`torch.compile` on hollow tensors: dynamo, AOTAutograd and inductor work as for a real step, up to the C++ compiler.

The Python code that inductor generates for a graph runs as it is: it allocates buffers, frees and reuses them, and calls
torch's kernels. Only its own kernels do nothing, torch's kernels return hollow tensors, and buffers are memory that is
never touched. So fusion, buffer reuse and saved activations are inductor's own, and every buffer dies when it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture.contents import empty_storage
from magis.capture.hollow import Hollow
from magis.cost.shapes import reach

ALLOCATORS = "empty_strided_"
"""Prefix of the names under which generated code holds torch's allocation functions."""
COMPILERS = ("cpp", "cpp_pybinding")
"""Functions that generated code calls to compile its kernels."""
MOST_COMPILED = 1 << 20
"""Recompile limit while a step is predicted: each prediction compiles once more."""


class HollowCode(Hollow):
    """Dispatch mode of hollow tensors under which torch compiles as it does without a mode."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: code is compiled under this mode as without it."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: the compiler itself runs outside of this mode."""
        return True

    def buffer(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a buffer of generated code, of unknown contents."""
        nbytes = reach(tuple(shape), tuple(stride)) * dtype.itemsize
        storage = empty_storage(nbytes, self._own_contents(known=False))
        with _disable_current_modes():
            return torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride)  # type: ignore[call-overload, no-any-return]


@dataclass
class Graphs:
    """Backend of torch.compile that runs inductor, and counts the graphs and the graph breaks that ended some."""

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
        return compile_fx(gm, inputs)  # type: ignore[no-any-return, arg-type]

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled by this backend, with fixed sizes."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        code: CodeType = run.__code__.replace()  # its own: compiled code is kept by the code object that it replaces
        own = FunctionType(code, run.__globals__, run.__name__, None, run.__closure__)
        return torch.compile(own, backend=self, dynamic=False)  # type: ignore[no-any-return, call-overload]


@contextmanager
def without_kernels(allocate: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]) -> Iterator[None]:
    """Let inductor's generated code allocate by ``allocate``, with kernels that do nothing. Code compiled in the block
    is in no cache of torch, neither before nor after."""

    def load(key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None) -> ModuleType:
        found: Any = ModuleType(f"{__name__}.{key}")
        found.__file__, found.key = path, key
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(found))  # noqa: S102 (inductor's own)
        vars(found).update(attrs or {})
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


def _no_kernel(_compiler: object, *_source: object, **_settings: object) -> Callable[..., None]:
    return _nothing


def _nothing(*_args: object) -> None:
    pass
