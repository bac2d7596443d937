"""Known remedies as changes of a step: a strategy, a data type, another update, other weights, a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch.nn.modules.batchnorm import _BatchNorm

from magis.capture import Workload
from magis.cost.devices import find_device
from magis.errors import UsageError
from magis.extensions.why.eight_bit_adam import EightBitAdam
from magis.frontends.adapters import ADAPTER_RANK, with_adapters
from magis.frontends.estimating import EXPANDABLE, QUICK, Estimate
from magis.models.custom import spec_of_optimizer
from magis.planner.bench import Make
from magis.strategies.chunked_loss import CHUNKS
from magis.strategies.rank_step import batch_size
from magis.strategies.single_device import blocks_of
from magis.strategies.strategy_names import CHUNKED_LOSS, EARLY_UPDATE
from magis.units import format_bytes

PARTS = (2, 4)
"""Numbers of micro-batches that are tried."""
LATENCY_RATIO = 1.1
"""Time that a plan may take where the step fits as it is, times eager's."""
PLAN_SECONDS = 20.0

Rebuilt: TypeAlias = Callable[[Make, int], Workload]


@dataclass(frozen=True)
class Treatment:
    """One change that a user can make by hand."""

    name: str
    how: str
    """Instruction in one line."""
    strategy: str = ""
    """Part of the name of a strategy of the gate."""
    case: dict[str, Any] = field(default_factory=dict)
    """Other changes of the case."""
    rebuilt: Rebuilt | None = None
    """Builds the workload anew, from its factory and the seed."""
    compiles: bool = False
    plans: bool = False
    moves_state: bool = False
    other_training: bool = False
    """True if other weights are trained, weights of another type, or with statistics of other batches."""

    @property
    def family(self) -> str:
        """Name without the number of micro-batches, and without the choice of what a checkpoint keeps."""
        return self.name.removeprefix("selective-").rstrip("0123456789")

    def goes_with(self, other: Treatment) -> bool:
        """Return True if both can be applied to one step. A plan goes with none: it takes as long as all others."""
        names = {self.family, other.family}
        for one, two in ((self, other), (other, self)):
            if one.plans or (one.compiles and (two.strategy or two.moves_state)):
                return False
            if one.moves_state and two.family in ("loop-update", EARLY_UPDATE):
                return False
        return len(names) > 1 and not any(
            clash <= names
            for clash in (
                {"amp", "bfloat16"}, {EARLY_UPDATE, "accumulate"}, {EARLY_UPDATE, "8-bit-state"},
                {EARLY_UPDATE, "loop-update"}, {"8-bit-state", "loop-update"},
            )
        )  # fmt: skip


def treatments(found: Estimate) -> Iterator[Treatment]:
    """Yield the changes that a step may take, those of one factory next to each other."""
    case, work = found.result.case, found.subject_of().traced
    is_gpu, rule, dtype = case.device != "cpu", work.optimizer, found.result.dtype
    blocks = blocks_of(work)
    if blocks:
        some = f"{len(blocks)} blocks ({blocks[0]}, ...)"
        yield Treatment("checkpoint", f"run each of {some} under torch.utils.checkpoint", "checkpoint")
        how = f"checkpoint {some}, but keep products and attention (create_selective_checkpoint_contexts)"
        yield Treatment("selective-checkpoint", how, "selective-checkpoint")
    how = f"run head and loss in {CHUNKS} chunks of rows, each under torch.utils.checkpoint, or a fused loss of Liger"
    yield Treatment(CHUNKED_LOSS, how, CHUNKED_LOSS)
    rows, coupled = batch_size(work), any(isinstance(each, _BatchNorm) for each in work.module.modules())
    for parts in PARTS if case.accumulate == 1 else ():
        if rows % parts == 0 and rows >= parts:
            how = f"run {parts} micro-batches of {rows // parts}, add their gradients up, update once"
            how += "; BatchNorm then has the statistics of a micro-batch" if coupled else ""
            yield Treatment(f"accumulate{parts}", how, f"accumulate{parts}", other_training=coupled)
    if case.accumulate == 1 and not rule.stops:
        how = "update each weight in its register_post_accumulate_grad_hook, and drop the gradient"
        yield Treatment(EARLY_UPDATE, how, EARLY_UPDATE)
    casts = "bfloat16" if (find_device(case.device).capability or (8, 0)) >= (8, 0) else "float16"
    if dtype == "float32":
        yield Treatment("amp", f"run forward and loss under torch.autocast({casts})", f"amp-{casts}")
    if is_gpu:
        growing = ",".join(filter(None, (case.allocator, EXPANDABLE)))
        yield Treatment("expandable", f"set PYTORCH_ALLOC_CONF={growing}", case={"allocator": growing})
        yield Treatment("offload", "run the forward under torch.autograd.graph.save_on_cpu(pin_memory=True)", "offload")
        if not rule.stops and rule.way("cuda") == "foreach":
            yield Treatment("loop-update", "give the optimizer foreach=False", rebuilt=_looped)
    if rule.kind in ("adam", "adamw", "momentum"):
        how = "keep the optimizer's state in pinned host memory, and copy it in and out weight by weight"
        yield Treatment("host-state", how, rebuilt=_looped, moves_state=True)
    if rule.kind in ("adam", "adamw"):
        yield Treatment("8-bit-state", "use an optimizer with 8-bit state (bitsandbytes, torchao)", rebuilt=_eight_bit)
    yield Treatment("compile", "compile network and loss with torch.compile", compiles=True)
    if case.accumulate == 1:
        yield _plan(found)
    if dtype == "float32" and casts == "bfloat16":
        how = "convert module and batch to bfloat16: weights, gradients and state are halved"
        yield Treatment("bfloat16", how, case={"dtype": "bfloat16"}, other_training=True)
    how = f"train LoRA adapters of rank {ADAPTER_RANK} in all linear layers in place of the weights"
    yield Treatment("lora", how, rebuilt=with_adapters, other_training=True)


def _plan(found: Estimate) -> Treatment:
    """Return the plan for the limit; for a step that fits, the leanest that takes little more time."""
    ratio, what = found.limit_bytes / found.needed_bytes, "peak" if found.reserved_bytes is None else "reserved"
    if ratio >= 1:
        asked: dict[str, Any] = {"latency_ratio": LATENCY_RATIO}
        how = f"magis.optimize(..., latency_ratio={LATENCY_RATIO})"
    else:
        asked = {"memory_ratio": ratio, "memory_limit_of": what}
        how = f"magis.optimize(..., memory_limit='{format_bytes(found.limit_bytes)}')"
    case = {**asked, "strategy": "magis", "budget": QUICK, "seconds": PLAN_SECONDS}
    return Treatment("magis", how, case=case, plans=True)


def _looped(make: Make, seed: int) -> Workload:
    """Return the workload with an update weight by weight."""
    work = make(seed)
    return replace(work, optimizer=work.optimizer.looped())


def _eight_bit(make: Make, seed: int) -> Workload:
    """Return the workload with 8-bit optimizer state. Raises UsageError for another optimizer than Adam and AdamW."""
    work = make(seed)
    rule = work.optimizer
    if rule.kind not in ("adam", "adamw"):
        raise UsageError(f"{work.name}: its optimizer is no Adam")
    trained = [each for each in work.module.parameters() if each.requires_grad]
    numbers = {"lr": rule.lr, "betas": rule.betas, "eps": rule.eps, "weight_decay": rule.weight_decay}
    update = EightBitAdam(trained, **numbers, decoupled=rule.kind == "adamw")  # type: ignore[arg-type]
    return replace(work, optimizer=spec_of_optimizer(work.name, update, work.module))


def rebuilt_by(treatments: tuple[Treatment, ...], make: Make) -> Make | None:
    """Return the factory of a workload with all changes of workloads; None without any."""
    found = None
    for each in treatments:
        if each.rebuilt is not None:
            found = partial(each.rebuilt, found or make)
    return found
