"""A policy of selective checkpointing: its blocks, its application to a module, and its JSON file.

    {"format": "magis checkpoint policy", "version": 1, "planned_bytes": ..., "regions": [
        {"path": "layers.0", "saved": [["aten.addmm.default", 0], ...]}, ...]}

A policy for `torch_remat` has version 2 and `"library": "torch_remat"`; its regions list the `"modules"` to save.
Loading a file runs no code, and a policy never changes the numbers that a step computes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import getattr_static
from pathlib import Path
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

from magis.atomic_files import read_regular
from magis.capture.schemas import written_by
from magis.errors import UsageError
from magis.extensions.compile.checkpointing.remat_regions import by_remat
from magis.ops.operators import op_info
from magis.printable import printable
from magis.report import write_text_atomically
from magis.units import format_bytes

__all__ = ["RegionPolicies"]

TORCH, REMAT = "torch", "torch_remat"
LIBRARIES = (TORCH, REMAT)
"""Libraries that can run a policy; a file's version is the 1-based index in this tuple."""

Seen: TypeAlias = Callable[[str], object]
"""Callback that receives the name of every operator in a block's forward as it runs."""


@dataclass(frozen=True)
class CheckpointedRegion:
    """Block (sub-module) whose forward is recomputed in the backward, except for saved results."""

    path: str
    """Path of the module (`get_submodule`)."""
    saved: frozenset[tuple[str, int]] = frozenset()
    """Results to save: operator name ("aten.mm.default") and the index among calls of that name in the block."""
    modules: frozenset[str] = frozenset()
    """For torch_remat: paths, below the block, of sub-modules whose calls are saved; ``saved`` is then empty."""


def contexts(region: CheckpointedRegion, block: nn.Module, seen: Seen | None = None) -> tuple[Any, Any]:
    """Return the contexts of forward and recomputation, for `torch.utils.checkpoint.checkpoint(context_fn=...)`.

    The recomputation does not write to buffers, so running statistics and counters are updated once.
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
    for mode in (first, again):
        mode.__class__ = _past_casts(type(mode))  # type: ignore[arg-type]
    return first, _Repetition(again, block)


def is_weight_cast(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operator casts a trained weight.

    Autocast caches casts of weights, so a block's forward and its recomputation may run different casts.
    """
    if func is not torch.ops.aten._to_copy.default:  # noqa: SLF001 (its name)
        return False
    return bool(args[0].is_leaf and args[0].requires_grad)


@cache
def _past_casts(kind: type[Any]) -> type[Any]:
    """Return a subclass of torch's checkpointing mode that passes casts of weights through uncounted."""

    class PastCasts(kind):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_weight_cast(func, args):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return PastCasts


class _Repetition:
    """Context of a recomputation: torch's own context, nested in the mode that skips writes to buffers."""

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
    """Dispatch mode that runs operators without their writes to a block's buffers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = {memory(buffer) for buffer in block.buffers()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        hidden = op_info(str(func)).undeclared_writes(args)
        if hidden:
            return func(*(None if place in hidden else arg for place, arg in enumerate(args)), **kwargs)
        written = written_by(func, args, kwargs)
        return args[0] if may_be_left_out(func, args, written, self._buffers) else func(*args, **kwargs)


def may_be_left_out(func: Any, args: tuple[Any, ...], written: Sequence[Tensor], buffers: set[int]) -> bool:
    """Return True if a call writes only to its first argument, one of the ``buffers``, and returns that argument."""
    returns = func._schema.returns  # noqa: SLF001 (what it says of itself)
    alone = len(written) == 1 and bool(args) and written[0] is args[0] and len(returns) == 1
    return alone and returns[0].alias_info is not None and memory(args[0]) in buffers


def memory(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, also of a fake tensor."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 (its only name)


def wrapped(
    region: CheckpointedRegion,
    block: nn.Module,
    forward: Callable[..., Any],
    *,
    library: str = TORCH,
    preserve_rng_state: bool = True,
    seen: Seen | None = None,
) -> Callable[..., Any]:
    """Return a block's forward under checkpointing; without grad mode it runs the plain forward."""
    if library == REMAT:
        return by_remat(
            region.path,
            region.modules,
            block,
            forward,
            _Sparing,
            preserve_rng_state=preserve_rng_state,
            seen=seen,
        )

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


@dataclass(frozen=True, eq=False)
class _Forward:
    """Checkpointed forward, set as an attribute of its block. An object instead of a closure, so that a copied or
    unpickled block runs its own forward, not the original's."""

    block: nn.Module
    region: CheckpointedRegion
    library: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = type(self.block)
        own = getattr_static(kind, "forward")
        forward = own.__get__(self.block, kind) if hasattr(own, "__get__") else own
        return wrapped(self.region, self.block, forward, library=self.library)(*args, **kwargs)


FORMAT = "magis checkpoint policy"
AGAIN = "plan and save it again"


@dataclass(frozen=True)
class RegionPolicies:
    """Checkpointing policy: the blocks to recompute, and the results to save in each of them.

    Bytes are peaks of forward and backward, with parameters, buffers and batch.
    """

    regions: tuple[CheckpointedRegion, ...]
    original_bytes: int
    planned_bytes: int
    latency_ratio: float
    """Planned time / original time, predicted from times of operators."""
    library: str = TORCH
    """Library that runs the policy: "torch" (`torch.utils.checkpoint`) or "torch_remat"."""
    left: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Blocks that cannot be recomputed, with the reasons; not saved to the file."""

    def context_fn(self, path: str, block: nn.Module) -> Callable[[], tuple[Any, Any]]:
        """Return the `context_fn` for `checkpoint(block, ..., use_reentrant=False, context_fn=...)`.

        Raises UsageError for a block outside the policy, and for a policy of torch_remat.
        """
        if self.library != TORCH:
            raise UsageError(f"a policy for {self.library} has no context_fn", hint="use apply()")
        for region in self.regions:
            if region.path == path:
                return lambda: contexts(region, block)
        known = ", ".join(region.path for region in self.regions) or "none"
        raise UsageError(f"{path!r} is no region of the policy", hint=f"leave it plain; regions: {known}")

    def apply(self, module: nn.Module) -> Applied:
        """Checkpoint every block of the policy, in place. Raises UsageError if the module lacks one of the blocks."""
        blocks = [(region, _block(module, region.path)) for region in self.regions]
        for region, block in blocks:
            if "forward" in vars(block):
                hint = "remove() the policy first; a copy's: del block.forward"
                raise UsageError(f"{region.path} has a forward of its own already", hint=hint)
        forwards = tuple(_Forward(block, region, self.library) for region, block in blocks)
        for each in forwards:
            each.block.forward = each
        return Applied(forwards)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[nn.Module]:
        """Apply the policy within a `with` block."""
        handle = self.apply(module)
        try:
            yield module
        finally:
            handle.remove()

    def save(self, path: Path | str) -> None:
        """Write the policy as JSON, atomically."""
        remat = self.library == REMAT
        data = {
            "format": FORMAT,
            "version": 1 + LIBRARIES.index(self.library),
            **({"library": REMAT} if remat else {}),
            "original_bytes": self.original_bytes,
            "planned_bytes": self.planned_bytes,
            "latency_ratio": self.latency_ratio,
            "regions": [
                {"path": region.path, "modules": sorted(region.modules)}
                if remat
                else {"path": region.path, "saved": [list(each) for each in sorted(region.saved)]}
                for region in self.regions
            ],
        }
        write_text_atomically(Path(path), json.dumps(data, indent=1) + "\n")

    @staticmethod
    def load(path: Path | str) -> RegionPolicies:
        """Load a policy from a file written by `save`. Raises UsageError, one line, for any other file."""
        try:
            data = json.loads(read_regular(Path(path)))
        except OSError as error:
            raise UsageError(f"cannot read the policy {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the policy {path} is no JSON text: {error}", hint=AGAIN) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"{path} holds no {FORMAT}", hint=AGAIN)
        library = data.get("library", TORCH)
        expected = 1 + LIBRARIES.index(library) if library in LIBRARIES else 1
        if data.get("version") != expected:
            raise UsageError(f"{path} is of version {data.get('version')!r}, not {expected}", hint=AGAIN)
        try:
            return _from_json(data)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the policy {path} is corrupt: {type(error).__name__} {error}", hint=AGAIN) from None

    def __str__(self) -> str:
        saved = sum(len(region.saved) + len(region.modules) for region in self.regions)
        what = "operators" if self.library == TORCH else "sub-modules"
        lines = [f"{path} stays as it is: {why}" for path, why in self.left]
        head = (
            f"{len(self.regions)} blocks recomputed but for {saved} {what}: peak {format_bytes(self.planned_bytes)},"
            f" plain {format_bytes(self.original_bytes)}"
            f" (ratio {self.planned_bytes / max(1, self.original_bytes):.3f}), latency {self.latency_ratio:.3f} times"
        )
        return "\n".join(map(printable, (head, *lines)))


@dataclass(frozen=True)
class Applied:
    """Handle of an applied policy; `remove` restores the plain forward of its blocks."""

    forwards: tuple[_Forward, ...]

    def remove(self) -> None:
        """Undo `RegionPolicies.apply`; repeated calls do nothing, and forwards replaced since then are kept."""
        for each in self.forwards:
            if vars(each.block).get("forward") is each:
                del each.block.forward


def _block(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        raise UsageError(
            f"the policy is for a block {path!r}, which the module does not have", hint="plan it for this module"
        ) from None


def _from_json(data: dict[str, Any]) -> RegionPolicies:
    """Parse a policy from JSON data. Raises KeyError, TypeError or ValueError for invalid data."""
    regions = []
    library = data.get("library", TORCH)
    if library not in LIBRARIES:
        raise ValueError(f"library {str(library)[:40]!r}")
    for each in data["regions"]:
        saved = [(_as_name(name), _as_count(number)) for name, number in each["saved"]] if library == TORCH else []
        modules = [_as_name(name) for name in each["modules"]] if library == REMAT else []
        regions.append(CheckpointedRegion(_as_name(each["path"]), frozenset(saved), frozenset(modules)))
    if len({region.path for region in regions}) != len(regions):
        raise ValueError("a block is named twice")
    ratio = data["latency_ratio"]
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < 1e9:
        raise ValueError(f"latency_ratio {ratio!r}")
    original, planned = _as_count(data["original_bytes"]), _as_count(data["planned_bytes"])
    return RegionPolicies(tuple(regions), original, planned, float(ratio), library)


def _as_name(value: object) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise TypeError(f"{str(value)[:40]!r} is no name")
    return value


def _as_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value
