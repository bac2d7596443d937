"""What libraries do beside the strategies of magis, as their code has it: for the second set of published figures.

    Accumulating    gradients stay from one micro-batch to the next, or are zeroed in place (torch before 2.0)
    Megatron        a buffer of gradients that is always there, float32 masters, the fused Adam (Megatron-LM)
    Titan           `fully_shard` with sums in float32, and checkpoints that keep every second product (torchtitan)

Each is built on a strategy of magis. docs/strategies.md says where every assumption comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from magis.capture import Workload
from magis.capture.autocast import device_forms
from magis.extensions.ranks.strategies.distributed import (
    LossScaler,
    PlainStep,
    local,
    make_optimizer,
    mesh,
    of_kind,
    quiet,
    trained,
)
from magis.extensions.ranks.strategies.model_parallel import ModelParallel, PipelineStep
from magis.strategies.rank_step import RankStep, RankStrategy, World, Wrapping, share_of_batch


@dataclass(frozen=True)
class OneGpu:
    """The plain step on one GPU; ``amp``: under autocast to float16, with scaled gradients."""

    amp: bool = False

    group = 1
    warm_steps = 1

    @property
    def name(self) -> str:
        return "amp" if self.amp else "eager"

    def prepare(self, work: Workload, world: World) -> PlainStep:
        """The step."""
        optimizer = make_optimizer(work, trained(work.module), self.name)
        return PlainStep(work.module, work, optimizer, world, self.amp, work.module)


@dataclass(frozen=True)
class Accumulating(Wrapping):
    """Another strategy, whose gradients are there before the forward: those of the micro-batch before."""

    strategy: RankStrategy

    def prepare(self, work: Workload, world: World) -> RankStep:
        """The inner strategy's step, which lets gradients be."""
        step = self.strategy.prepare(work, world)
        setattr(step, "prepare", _nothing)  # noqa: B010  # a method of a class that is not ours
        return step


def _nothing() -> None:
    """What there is to do before a step that keeps its gradients."""


def checkpoint_blocks(work: Workload, contexts: Callable[[], Any] = lambda: (nullcontext(), nullcontext())) -> Workload:
    """The workload, with the forward of each block under `torch.utils.checkpoint`.

    ``contexts``: of the forward, and of the forward again. The latter gets the operators of a GPU, too: modes for
    torch's functions are off in a backward.
    """

    def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = contexts()
        return first, _together(device_forms("cuda"), again)

    for path in work.blocks:
        block = work.module.get_submodule(path)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=both)
    return work


@contextmanager
def _together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


# Megatron-LM.


class VocabularyLoss(torch.autograd.Function):
    """Megatron-LM's cross-entropy of tokens: logits [..., vocabulary], targets [...] -> losses [...], in float32.

    One float32 copy of the logits becomes, in place, what is kept for the backward and then the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        wide = logits.float()
        wide -= wide.max(dim=-1, keepdim=True)[0]
        wanted = wide.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        wide.exp_()
        total = wide.sum(dim=-1)
        wide.div_(total.unsqueeze(-1))
        ctx.save_for_backward(wide, target)
        return torch.log(total) - wanted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        wide, target = ctx.saved_tensors
        wide.scatter_add_(-1, target.unsqueeze(-1), torch.full_like(target.unsqueeze(-1), -1, dtype=wide.dtype))
        return wide.mul_(grads[0].unsqueeze(-1)), None


def vocabulary_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean of `VocabularyLoss`."""
    losses: Tensor = VocabularyLoss.apply(logits, target)  # type: ignore[no-untyped-call]
    return losses.mean()


@dataclass(frozen=True)
class Megatron:
    """Megatron-LM with ``tensor`` x ``stages`` ranks to a copy of the weights, which are of type ``dtype``.

    Bytes per parameter: 2, a buffer of gradients (2 in float16, 4 beside bfloat16), 4 of masters, 8 of Adam; in float16
    each gradient is float32 during the update. ``sharded``: masters, state and float32 gradients are 1/ranks of it
    (`--use-distributed-optimizer`).
    """

    tensor: int = 1
    stages: int = 1
    dtype: str = "float16"
    micro_batches: int | None = None
    sharded: bool = False

    warm_steps = 1

    @property
    def name(self) -> str:
        return f"half+tp{self.tensor}+pp{self.stages}"

    @property
    def group(self) -> int:
        return self.tensor * self.stages

    def prepare(self, work: Workload, world: World) -> PlainStep | PipelineStep:
        """The step of this rank; its optimizer owns the buffer of gradients."""
        work = replace(work.to(self.dtype), optimizer=replace(work.optimizer, fused=True))
        step: PlainStep | PipelineStep
        if self.group > 1:
            inner = ModelParallel(self.tensor, self.stages, micro_batches=self.micro_batches, vocabulary=False)
            step = inner.prepare(work, world)
        else:
            step = OneGpu().prepare(share_of_batch(work, world.rank, world.size), world)
        ranks = world.size // self.group if self.sharded else 1
        update = partial(make_optimizer, step.work, strategy=self.name)
        step.optimizer = BufferedMasters(trained(step.module), update, ranks)
        step.scale(LossScaler(world, enabled=self.dtype == "float16"))
        return step


class BufferedMasters(Optimizer):
    """Trains half-precision weights by float32 masters; gradients go into a buffer as soon as they are there."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], make: Callable[[Mapping[str, Tensor]], Optimizer], ranks: int
    ) -> None:
        super().__init__([{"params": list(weights.values())}], {})
        self._weights = list(weights.values())
        self._ranks = ranks
        first = local(self._weights[0])
        kind = torch.float16 if first.dtype == torch.float16 else torch.float32
        with of_kind("gradients"), torch.no_grad():
            flat = torch.zeros(sum(local(each).numel() for each in self._weights), dtype=kind, device=first.device)
        self._buffers = [
            part.view(local(each).shape)
            for part, each in zip(flat.split([local(w).numel() for w in self._weights]), self._weights, strict=True)
        ]
        self._masters = [nn.Parameter(self._share(local(each).detach()).float().clone()) for each in self._weights]
        self._inner = make(dict(zip(weights, self._masters, strict=True)))
        for weight, buffer in zip(self._weights, self._buffers, strict=True):
            weight.register_post_accumulate_grad_hook(partial(_moved, buffer))

    def _share(self, tensor: Tensor) -> Tensor:
        """What this rank updates of a tensor."""
        return tensor if self._ranks == 1 else tensor.reshape(-1)[: -(-tensor.numel() // self._ranks)]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The update of the masters, of which the weights become copies; the buffer is zeros again."""
        loss = None if closure is None else closure()
        for master, buffer in zip(self._masters, self._buffers, strict=True):
            master.grad = self._share(buffer).float()
        self._inner.step()
        with torch.no_grad():
            for weight, master, buffer in zip(self._weights, self._masters, self._buffers, strict=True):
                self._share(local(weight)).copy_(master)
                master.grad = None
                buffer.zero_()
        return loss

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Masters and state, each with its kind."""
        yield from (("master weights", master) for master in self._masters)
        for state in self._inner.state.values():
            yield from (("optimizer state", item) for item in state.values() if isinstance(item, Tensor))


def _moved(buffer: Tensor, weight: Tensor) -> None:
    if weight.grad is not None:
        buffer.add_(local(weight.grad))
        weight.grad = None


# torchtitan.

_aten = torch.ops.aten
_ATTENTION = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention")
_KEPT = frozenset({_aten.mm.default, *(getattr(_aten, name).default for name in _ATTENTION)})


def _titan_contexts() -> Any:
    """Of a checkpoint that keeps attention and every second product, by torchtitan's rule."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if func is _aten.mm.default:
            seen[context.is_recompute] += 1
        second = func is _aten.mm.default and seen[context.is_recompute] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if func in _KEPT and not second else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@dataclass(frozen=True)
class Titan:
    """torchtitan's FSDP: bfloat16 in blocks, gradients summed in float32, the last block's weights kept whole."""

    group = 1
    warm_steps = 1
    name = "amp+fsdp"

    def prepare(self, work: Workload, world: World) -> PlainStep:
        """The step on this rank's share of the batch, each block under a selective checkpoint."""
        ranks = mesh(world, {"dp": world.size})
        work = share_of_batch(work, world.rank, world.size)
        checkpoint_blocks(work, _titan_contexts)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with quiet():
            for block in work.blocks:
                again = block != work.blocks[-1]
                fully_shard(work.module.get_submodule(block), mesh=ranks, mp_policy=policy, reshard_after_forward=again)
            fully_shard(work.module, mesh=ranks, mp_policy=policy, reshard_after_forward=True)
        optimizer = make_optimizer(work, trained(work.module), self.name)
        return PlainStep(work.module, work, optimizer, world, False, work.module)
