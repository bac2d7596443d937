"""Checkpointed blocks with the library `torch_remat`, which saves calls of sub-modules instead of operators' results.

    y = torch_remat.checkpoint(region_name="layers.0")(block)(x)
    # and in the block, of every sub-module that is kept:
    out = torch_remat.region(part, "up", recompute=False)(x); torch_remat.recompute_needs_tensor(out)

A kept sub-module is not recomputed: its result and all tensors that autograd saves in it stay in memory. The RNG state
is recorded at the start of a block and after every kept sub-module, and restored from there during recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from magis.errors import UsageError

Forward = Callable[..., Any]


def torch_remat() -> Any:
    """Import the library. Raises UsageError, one line, if it is not installed."""
    try:
        return import_module("torch_remat")
    except ImportError:
        raise UsageError("torch_remat is not installed", hint='pip install "pytest-magis[remat]"') from None


class _GeneratorState:
    """Saving and restoring of RNG states for torch_remat: a `RecomputeStateHook`.

    A recomputation starts from earlier states; `leave` restores the states from before the recomputation.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] | None = None

    def snapshot(self) -> list[Tensor]:
        """Return the states of the CPU's generator and, if CUDA is initialized, of the current device's generator."""
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *cuda]

    def restore(self, state: list[Tensor]) -> None:
        """Set the generators to recorded states."""
        if self._found is None:
            self._found = self.snapshot()
        self._set(state)

    def leave(self) -> None:
        """End a recomputation: restore the states that the generators had before it."""
        if self._found is not None:
            self._set(self._found)
            self._found = None

    @staticmethod
    def _set(state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for each in state[1:]:
            torch.cuda.set_rng_state(each)


def by_remat(
    path: str,
    kept: frozenset[str],
    block: nn.Module,
    forward: Forward,
    sparing: Callable[[nn.Module], TorchDispatchMode],
    *,
    preserve_rng_state: bool = True,
    seen: Callable[[str], object] | None = None,
) -> Forward:
    """Return a block's forward under torch_remat; without grad mode the plain forward. Buffers are updated once.

    `kept` are paths of sub-modules below the block; `sparing` makes the mode that skips a recomputation's writes to
    buffers; `seen` receives the path of every leaf module that the forward, not the recomputation, calls.
    """
    remat = torch_remat()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        state = _GeneratorState()

        def body(*given: Any, **named: Any) -> Any:
            again = remat.is_recomputing()
            with ExitStack() as stack:
                if again:
                    stack.callback(state.leave)
                    stack.enter_context(sparing(block))
                for name in sorted(kept):
                    stack.enter_context(_saving_calls(remat, block.get_submodule(name), name))
                if seen is not None and not again:
                    for name in leaves(block):
                        stack.enter_context(_telling_calls(block.get_submodule(name), name, seen))
                return forward(*given, **named)

        hooks = (state,) if preserve_rng_state else ()
        return remat.checkpoint(region_name=path, recompute_state_hooks=hooks)(body)(*args, **kwargs)

    return run


def leaves(block: nn.Module) -> tuple[str, ...]:
    """Return the paths of a block's leaf modules, relative to the block."""
    return tuple(name for name, part in block.named_modules() if name and not any(True for _ in part.children()))


@contextmanager
def forward_as(part: nn.Module, forward: Forward) -> Iterator[None]:
    """Replace a module's forward within a `with` block."""
    own = vars(part).get("forward")
    part.forward = forward
    try:
        yield
    finally:
        if own is None:
            del part.forward
        else:
            part.forward = own


def _saving_calls(remat: Any, part: nn.Module, name: str) -> Any:
    """Save the calls of a sub-module within a `with` block; recomputations may read their results."""
    call = remat.region(part.forward, name, recompute=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        remat.recompute_needs_tensor(out)
        return out

    return forward_as(part, forward)


def _telling_calls(part: nn.Module, name: str, seen: Callable[[str], object]) -> Any:
    """Pass a sub-module's name to ``seen`` at each call within a `with` block; "" if the result is no tensor."""
    own = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        seen(name if isinstance(out, Tensor) else "")
        return out

    return forward_as(part, forward)
