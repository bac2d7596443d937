"""One checkpointed block: which of its operators' results are saved, told to torch while the block runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from magis.aten.facts import undeclared_writes

__all__ = ["Region", "Seen", "contexts", "wrapped"]

Seen: TypeAlias = Callable[[str], object]
"""Told the name of every operator of a region's forward as it runs."""


@dataclass(frozen=True)
class Region:
    """A block that is recomputed in its backward, but for what is saved of it."""

    path: str
    """Of the module (`get_submodule`)."""
    saved: frozenset[tuple[str, int]] = frozenset()
    """Operators by name ("aten.mm.default") and how many of that name ran in the block before."""


def contexts(region: Region, block: nn.Module, seen: Seen | None = None) -> tuple[Any, Any]:
    """What `torch.utils.checkpoint.checkpoint(context_fn=...)` makes: contexts of a forward and of its repetition.

    Buffers change once: the repetition leaves running statistics and counters as the forward left them.
    """
    counted: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(context: SelectiveCheckpointContext, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name, counter = str(op), counted[context.is_recompute]
        number = counter[name]
        counter[name] += 1
        if seen is not None and not context.is_recompute:
            seen(name)
        return CheckpointPolicy.MUST_SAVE if (name, number) in region.saved else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, _Repetition(again, block)


class _Repetition:
    """The context of torch, and around it the one that spares buffers."""

    def __init__(self, again: Any, block: nn.Module) -> None:
        self._again = again
        self._block = block
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_Sparing(self._block))
            stack.enter_context(self._again)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: object) -> bool | None:
        return self._entered.pop().__exit__(*error)  # type: ignore[arg-type]


class _Sparing(TorchDispatchMode):
    """Runs operators without what they would write to a block's buffers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = {_memory(buffer) for buffer in block.buffers()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hidden = undeclared_writes(str(func), args)
        if hidden:
            return func(*(None if place in hidden else arg for place, arg in enumerate(args)), **kwargs)
        writes = bool(func._schema.arguments) and func._schema.arguments[0].alias_info  # noqa: SLF001 (what it says of itself)
        if writes and writes.is_write and isinstance(args[0], Tensor) and _memory(args[0]) in self._buffers:
            return args[0]
        return func(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 (a storage's identity, fake ones included)


def wrapped(
    region: Region,
    block: nn.Module,
    forward: Callable[..., Any],
    *,
    preserve_rng_state: bool = True,
    seen: Seen | None = None,
) -> Callable[..., Any]:
    """A block's forward under checkpointing; plain where no gradient is wanted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            context_fn=partial(contexts, region, block, seen),
            **kwargs,
        )

    return run
