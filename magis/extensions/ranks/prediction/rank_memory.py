"""Peak bytes of one rank's tensors in a step: predicted on fake tensors, or measured on real ones by the same code."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from magis.capture import Workload
from magis.capture.attention_kernels import Capability
from magis.capture.autocast import as_on_cuda, device_forms
from magis.capture.contents import hollow_like, is_readable
from magis.capture.hollow import Hollow, hollow
from magis.capture.workload import convertible, fake_tensors
from magis.errors import UsageError
from magis.extensions.ranks.prediction.live_storage import LiveStorage
from magis.extensions.ranks.strategies.distributed import forget_meshes, local, quiet
from magis.ops.collectives import propagated_apart
from magis.results import Memory, RankMemory, Term
from magis.runtime.measure import collector_spared, no_collection
from magis.strategies.distributed_names import check_world, is_low_precision
from magis.strategies.rank_step import WARM_STEPS, RankStep, RankStrategy, World
from magis.strategies.single_device import on_fake_tensors

_SCALING = 3
"""Number of further warm-up steps with loss scaling on a GPU: updates are skipped until the scale fits."""


class Watch(AbstractContextManager[object], Protocol):
    """Context manager that observes the operators of a step while ``watching`` is True."""

    watching: bool


class _Blind(nullcontext[None]):
    watching = False


@dataclass(frozen=True)
class RankPeak:
    """Peak bytes of a rank's tensors in a step, and the losses of all steps (None on fake tensors)."""

    peak_bytes: int
    terms: tuple[Term, ...]
    """Bytes by kind, which sum up to the peak."""
    losses: tuple[float | None, ...] = ()
    reserved_bytes: int | None = None
    """Bytes that a GPU's caching allocator would reserve by the end, at its defaults; None if not simulated."""


def rank_peak(
    strategy: RankStrategy,
    make_work: Callable[[], Workload],
    world: World,
    *,
    warm_steps: int | None = None,
    replays: bool = False,
    watched_by: Watch | None = None,
    let_threads_rest: Callable[[], object] | None = None,
) -> RankPeak:
    """Run warm-up steps and one measured step on this rank, counting every storage from the start.

    ``warm_steps`` None: as many as the strategy needs. ``watched_by`` observes the measured step. On real ranks, the
    process group must be initialized, no one else may hold the module that ``make_work`` makes, and
    ``let_threads_rest`` waits for the threads that run collectives.
    """
    warm_steps = warm_steps_of(strategy, world) if warm_steps is None else warm_steps
    losses: list[float | None] = []
    watch: Watch = _Blind() if watched_by is None else watched_by
    watch.watching = False
    with (
        collector_spared(),
        no_collection(),
        propagated_apart(),
        watch,  # below the ledger, which counts references as if no mode were above it
        LiveStorage(replays=replays, let_threads_rest=let_threads_rest) as ledger,
    ):
        step = strategy.prepare(make_work(), world)
        _name_gradients(step, ledger)
        for index in range(warm_steps + 1):
            step.prepare()
            gc.collect()
            if index == warm_steps:
                _name_held(step, ledger)
                ledger.name_rest("communication buckets")
                ledger.open_window()
                watch.watching = True
            losses.append(number(step.run(), world))
        ledger.close_window()
        watch.watching = False
        _name_held(step, ledger)
    found = ledger.at_peak()
    terms = tuple(Term(kind, nbytes) for kind, nbytes in found.items())
    reserved = None if ledger.allocator is None else ledger.allocator.reserved
    return RankPeak(ledger.peak_bytes, terms, tuple(losses), reserved)


def warm_steps_of(strategy: RankStrategy, world: World) -> int:
    """Return the number of warm-up steps after which a strategy's steps are all alike."""
    steps = int(getattr(strategy, "warm_steps", WARM_STEPS))
    scaled = world.device == "cuda" and not world.fake and is_low_precision(strategy.name)
    return steps + (_SCALING if scaled else 0)


def predict_rank(
    strategy: RankStrategy,
    make_work: Callable[[], Workload],
    world_size: int,
    rank: int,
    *,
    device: str = "cpu",
    explicit_attention: bool = False,
    watched_by: Watch | None = None,
    capability: Capability | None = None,
) -> RankMemory:
    """Predict the memory of rank ``rank`` of ``world_size`` in a step, without allocating it.

    ``make_work`` is called under fake or hollow tensors. ``device`` "cuda" uses the operators and autocast of a GPU, of
    ``capability`` if it is a simulated one; ``explicit_attention`` materializes attention scores instead of using fused
    kernels. The bytes are those of tensors, without workspaces and CUDA context; on "cuda" also those that the caching
    allocator reserves. ``watched_by`` observes the counted step. Raises UsageError if a process group is already
    initialized.
    """
    with fake_rank(
        strategy, world_size, rank, device, explicit_attention=explicit_attention, capability=capability
    ) as world:
        found = rank_peak(strategy, make_work, world, replays=device == "cuda", watched_by=watched_by)
    return RankMemory(
        rank, predicted=Memory(found.peak_bytes, found.peak_bytes, found.reserved_bytes), terms=found.terms
    )


@contextmanager
def fake_rank(
    strategy: RankStrategy,
    size: int,
    rank: int,
    device: str,
    *,
    explicit_attention: bool = False,
    capability: Capability | None = None,
) -> Iterator[World]:
    """Act as rank ``rank`` within a `with` block: fake process group, fake tensors, operators of ``device``."""
    check_world(strategy, size)
    with ExitStack() as stack:
        stack.enter_context(fake_world(size, rank))
        inner: Any = strategy
        while hasattr(inner, "strategy"):
            inner = inner.strategy
        stack.enter_context(
            _hollow_tensors() if device == "cpu" and getattr(inner, "hollow", False) else fake_tensors()
        )
        if device == "cuda":
            stack.enter_context(as_on_cuda())
        if explicit_attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(device_forms(device, capability))
        yield World(size, rank, device, fake=True)


@contextmanager
def _hollow_tensors() -> Iterator[None]:
    """Make every new tensor in a block a hollow one. Libraries take it for a plain tensor and go their usual way; they
    check for torch's fake tensors, and go another."""
    mode = Hollow()
    mode.keeps_sources = False  # tensors live as long as in a real step
    with convertible(), hollow(mode):
        yield


def on_stand_ins(work: Workload) -> Workload:
    """Return a copy of a workload on fake or hollow tensors, depending on the active mode."""
    modes = _get_current_dispatch_mode_stack()
    if not any(isinstance(mode, Hollow) for mode in modes):
        return on_fake_tensors(work)[1]
    named: dict[str, Tensor] = {f"parameter:{index}": each for index, each in enumerate(work.module.parameters())}
    named |= {f"buffer:{index}": each for index, each in enumerate(work.module.buffers())}
    named |= {f"batch:{index}": each for index, each in enumerate((*work.inputs, *work.targets))}
    with _disable_current_modes():
        twins = hollow_like(named, is_readable)
        made: dict[int, Tensor] = {}  # memo of deepcopy: replacements by id
        for name, each in named.items():
            weight = isinstance(each, nn.Parameter)
            made[id(each)] = nn.Parameter(twins[name], each.requires_grad) if weight else twins[name]
        module = copy.deepcopy(work.module, made)
    batch = [made[id(each)] for each in (*work.inputs, *work.targets)]
    return replace(
        work, module=module, inputs=tuple(batch[: len(work.inputs)]), targets=tuple(batch[len(work.inputs) :])
    )


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Initialize torch.distributed within a `with` block with a fake process group of ``size`` ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError(
            "a rank cannot be predicted while torch.distributed is set up",
            hint="predict before init_process_group, or in another process",
        )
    forget_meshes()
    hook = sys.excepthook  # init_process_group wraps it each time
    with quiet():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        with quiet():
            dist.destroy_process_group()
        sys.excepthook = hook
        forget_meshes()


def number(loss: Tensor | None, world: World) -> float | None:
    """Return the loss as a number; None if this rank has no loss, or tensors are fake."""
    return None if loss is None or world.fake else float(loss)


def _name_gradients(step: RankStep, ledger: LiveStorage) -> None:
    """Set the kind of gradients in the ledger as they arrive, since some are freed before the step ends."""

    def came(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.name("gradients", local(parameter.grad))

    for parameter in step.module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(came)


def _name_held(step: RankStep, ledger: LiveStorage) -> None:
    held = getattr(step, "held", None)
    for kind, tensor in held() if held is not None else ():
        if torch.is_tensor(tensor):
            ledger.name(kind, tensor)
