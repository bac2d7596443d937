"""Checkpointed blocks by the library `torch_remat`, which saves calls of sub-modules instead of operators' results.

    y = torch_remat.checkpoint(region_name="layers.0")(block)(x)
    # and in the block, of every sub-module that is kept:
    out = torch_remat.region(part, "up", recompute=False)(x); torch_remat.recompute_needs_tensor(out)

A kept sub-module is not run again: all that autograd saves in it stays, and so does its result. The generator's state
is noted where a block begins and behind every kept sub-module, from where a repetition goes on.
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
    """The library; UsageError, one line, where it is not installed."""
    try:
        return import_module("torch_remat")
    except ImportError:
        raise UsageError("torch_remat is not installed", hint='pip install "pytest-magis[remat]"') from None


class _GeneratorState:
    """What a checkpointed call tells torch_remat of the generators: a `RecomputeStateHook`.

    A repetition puts earlier states back; `leave` gives the generators the state in which it found them.
    """

    def __init__(self) -> None:
        self._found: list[Tensor] | None = None

    def snapshot(self) -> list[Tensor]:
        """States of the CPU's generator and, where CUDA is in use, of the current device's."""
        cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
        return [torch.get_rng_state(), *cuda]

    def restore(self, state: list[Tensor]) -> None:
        """Put noted states back."""
        if self._found is None:
            self._found = self.snapshot()
        self._set(state)

    def leave(self) -> None:
        """A repetition is over."""
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
    """A block's forward under torch_remat; plain where no gradient is wanted. Its buffers change once.

    `kept` are paths of sub-modules below the block; `sparing` makes the mode under which a repetition leaves buffers;
    `seen` is told the path of every sub-module without parts of its own that the forward, not a repetition, calls.
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
                    stack.enter_context(_kept(remat, block.get_submodule(name), name))
                if seen is not None and not again:
                    for name in leaves(block):
                        stack.enter_context(_told(block.get_submodule(name), name, seen))
                return forward(*given, **named)

        hooks = (state,) if preserve_rng_state else ()
        return remat.checkpoint(region_name=path, recompute_state_hooks=hooks)(body)(*args, **kwargs)

    return run


def leaves(block: nn.Module) -> tuple[str, ...]:
    """Paths below a block of its sub-modules that have no parts of their own."""
    return tuple(name for name, part in block.named_modules() if name and not any(True for _ in part.children()))


@contextmanager
def forward_as(part: nn.Module, forward: Forward) -> Iterator[None]:
    """A part whose forward is another one for the duration of a block."""
    own = vars(part).get("forward")
    part.forward = forward
    try:
        yield
    finally:
        if own is None:
            del part.forward
        else:
            part.forward = own


def _kept(remat: Any, part: nn.Module, name: str) -> Any:
    """A sub-module whose call is saved, and whose result whoever runs again may read."""
    call = remat.region(part.forward, name, recompute=False)

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        remat.recompute_needs_tensor(out)
        return out

    return forward_as(part, forward)


def _told(part: nn.Module, name: str, seen: Callable[[str], object]) -> Any:
    """A sub-module whose calls are told; one whose result is no tensor cannot be kept, and is not."""
    own = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        seen(name if isinstance(out, Tensor) else "")
        return out

    return forward_as(part, forward)
