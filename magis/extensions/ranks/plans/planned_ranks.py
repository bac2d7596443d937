"""Strategies whose ranks run planned steps, with collectives as operators of the plan.

`magis+ddp` averages gradients unit by unit; `magis+fsdp` also shards weights, gradients and the optimizer's state; with
both, every rank runs the same step on its share of the batch. In `magis+tp2` two ranks share each block, in `magis+pp2`
two ranks hold half of the blocks each. Ranks with equal steps run one plan: the first of them searches and sends its
plan to the others, and no rank runs before all agree (`magis/extensions/ranks/plans/agreed_plans.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture import Workload
from magis.errors import UsageError, VerifyError
from magis.extensions.ranks.plans.agreed_plans import agreed
from magis.extensions.ranks.plans.pipelined_step import HiddenState, Stage, pipelined
from magis.extensions.ranks.plans.sharded_weights import Replica, average_weights, shard_weights
from magis.extensions.ranks.plans.tensor_parts import hold_parts
from magis.extensions.ranks.strategies.distributed import mesh, place, trained
from magis.extensions.ranks.strategies.model_parallel import ModelParallel, hidden_state, micro_batches, tied_group
from magis.extensions.ranks.strategies.stage_cuts import cut_of, keep_stages, stage_blocks
from magis.extensions.ranks.strategies.tensor_cuts import share_network
from magis.ops.collectives import NAMED, REPLICAS, is_message, name_group, register_group
from magis.planner.planning import plan
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.runtime.steps import GraphStep
from magis.strategies.distributed_names import check_world, group_of, is_planned, plain_of
from magis.strategies.rank_step import World, batch_size, check_update, share_of_batch
from magis.strategies.single_device import on_fake_tensors
from magis.units import share_of

SHARE = 0.6
"""Default limit, as a share of the peak of a rank's own unplanned step."""


@dataclass(frozen=True)
class PlannedRanks:
    """Strategy `magis+ddp`, `magis+fsdp`, `magis+tpN`, `magis+tpN+sp` or `magis+ppN`."""

    name: str
    limits: tuple[int, ...] = ()
    """Limits in bytes of tensors, one per rank of a group, or one for all ranks; empty: the default `SHARE`."""
    budget: int | None = None
    """Search budget in plans evaluated; None: the default of a case on one rank."""
    device: str = "cpu"
    """Device that plans are made for, "cpu" or "sim:<name>"."""

    plans: dict[str, Plan] = field(default_factory=dict, compare=False, repr=False)
    """Cached plans, by digest of the step."""

    warm_steps = 1

    @property
    def group(self) -> int:
        return group_of(self.name)

    def within(self, limits: tuple[int, ...], budget: int | None, device: str = "cpu") -> PlannedRanks:
        """Return this strategy with other limits, budget and device."""
        return replace(self, limits=limits, budget=budget, device=device, plans={})

    def prepare(self, work: Workload, world: World) -> PlannedStep:
        """Return the step on this rank's share of the batch.

        Raises CaptureError if the step is not a single static graph, MagisError if ranks do not agree on it.
        """
        check_world(self, world.size)
        shards = plain_of(self.name) == "fsdp"
        lengths = {name: len(p) for name, p in work.module.named_parameters() if shards and p.dim()}
        own = self.own_part(work, world)
        with _disable_current_modes():
            subject, planned = partial(self.subject, own), partial(self.planned, rank=world.rank)
            graph = planned(subject()).graph if world.fake else agreed(subject, planned, world, group=self.group)
        step = GraphStep(graph, own.module, own.inputs, own.targets, own.optimizer, device=place(world))
        sees_loss = not plain_of(self.name).startswith("pp") or world.rank % self.group == self.group - 1
        return PlannedStep(own.module, own, step, world.rank, lengths, sees_loss)

    def own_part(self, work: Workload, world: World) -> Workload:
        """Return the workload with this rank's share of the batch and of the weights; modifies its module in place."""
        check_update(work, self.name)
        return _OWN_PARTS[re.sub(r"\d", "", plain_of(self.name))](work, world, self.group)

    def subject(self, own: Workload) -> Subject:
        """Capture a rank's own part for planning. Raises CaptureError if it is not a single static graph."""
        _, fake = on_fake_tensors(own)
        found = Subject(Source(own.name, lambda _seed: fake, "", self.device, 0))
        names = {str(op.args[-1]) for op in found.captured.graph.ops if is_message(op.target)}
        if strange := sorted(name for name in names if not name.startswith(NAMED)):
            raise VerifyError(
                f"messages of {self.name} go to a group called {strange[0]}, which differs from rank to rank"
            )
        return found

    def planned(self, subject: Subject, rank: int = 0) -> Plan:
        """Return the plan of a rank's own part; independent of this machine's workspaces, so that all ranks agree."""
        if subject.digest not in self.plans:
            limits = self.limits or (share_of(SHARE, subject.original_with({}).peak_bytes),)
            self.plans[subject.digest] = plan(
                subject, memory_limit=limits[rank % len(limits)], latency_limit_ns=None, budget=self.budget,
                seconds=None, seed=0, stored={} if self.device == "cpu" else None,
            )  # fmt: skip
        return self.plans[subject.digest]


def _replicated(work: Workload, world: World, _group: int) -> Workload:
    """Return the workload of data parallelism, with all weights on every rank."""
    work = share_of_batch(work, world.rank, world.size)
    average_weights(work.module, work.blocks, world.size, register_group(_all_ranks(), REPLICAS))
    return work


def _sharded(work: Workload, world: World, _group: int) -> Workload:
    """Return the workload of FSDP, with a shard of every weight."""
    work = share_of_batch(work, world.rank, world.size)
    shard_weights(work.module, work.blocks, world.size, world.rank, register_group(_all_ranks(), REPLICAS))
    return work


def _tensor_parallel(work: Workload, world: World, tensor: int, *, sequence: bool = False) -> Workload:
    """Return the workload of tensor parallelism: this rank's part of blocks, vocabulary and ``sequence``."""
    count = world.size // tensor
    ranks = mesh(world, {REPLICAS: count, "tp": tensor})
    work = share_of_batch(work, ranks.get_local_rank(REPLICAS), count)
    own = ranks["tp"]
    name_group(own, "tp")
    work = share_network(work, own, sequence=sequence)
    wrappers = hold_parts(work.module)
    average_weights(work.module, work.blocks, count, register_group(ranks.get_group(REPLICAS), REPLICAS), wrappers)
    return work


def _pipeline(work: Workload, world: World, stages: int) -> Workload:
    """Return the workload of pipeline parallelism, with the blocks of this rank's stage."""
    replicas, cut = world.size // stages, cut_of(work, stages)
    ranks = mesh(world, {REPLICAS: replicas, "pp": stages, "tp": 1})
    index = ranks.get_local_rank("pp")
    work = share_of_batch(work, ranks.get_local_rank(REPLICAS), replicas)
    count = micro_batches(ModelParallel(stages=stages), work)
    mode, fake = on_fake_tensors(work)
    with mode:
        hidden = hidden_state(fake, cut, count, nullcontext())
    keep_stages(work, cut, stages, (index,))
    if not trained(work.module):
        raise UsageError(
            f"{work.name}: nothing is trained in stage {index} of {stages}, and magis plans training steps",
            hint="use fewer stages, or pp without magis",
        )
    ends = tied_group(ranks, stages) if cut.tied else None
    averaged = Replica((), replicas, register_group(ranks.get_group(REPLICAS), REPLICAS))
    stage = Stage(
        cut,
        stage_blocks(len(cut.blocks), stages, index),
        index,
        stages,
        count,
        batch_size(work),
        HiddenState(tuple(hidden.shape), hidden.dtype, hidden.device),
        register_group(ranks.get_group("pp"), "pp"),
        averaged,
        "" if ends is None else register_group(ends, "ends"),
    )
    return pipelined(work, stage)


def _all_ranks() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


_OWN_PARTS: Mapping[str, Callable[[Workload, World, int], Workload]] = {
    "ddp": _replicated,
    "fsdp": _sharded,
    "tp": _tensor_parallel,
    "tp+sp": partial(_tensor_parallel, sequence=True),
    "pp": _pipeline,
}


def factory_of(name: str) -> str:
    """Return the name under which ranks find a strategy: "module:factory" for a planned strategy, else its own name."""
    return f"{__name__}:{plain_of(name).replace('+', '_')}" if is_planned(name) else name


def __getattr__(name: str) -> Callable[[], PlannedRanks]:
    """Return a factory of planned strategies: ``ddp``, ``fsdp``, ``tp2``, ``tp2_sp``, ..."""
    planned = f"magis+{name.replace('_', '+')}"
    if not is_planned(planned):
        raise AttributeError(name)
    return partial(PlannedRanks, planned)


@dataclass
class PlannedStep:
    """Planned step of one rank."""

    module: nn.Module
    work: Workload
    step: GraphStep
    rank: int
    lengths: Mapping[str, int]
    """Size of the first dimension of every sharded parameter, by name."""
    sees_loss: bool = True
    """True if this rank computes the loss; in a pipeline, only the last stage does."""

    def prepare(self) -> None:
        """Free everything left from the last step except its results."""
        self.step.prepare()

    def run(self) -> Tensor | None:
        """Run one whole step, and return the mean loss of this rank's share; None on a rank without the loss."""
        loss = self.step.run().detach()
        return loss if self.sees_loss else None

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, tensor) for all tensors that the rank keeps alive between steps."""
        yield from (("parameters", parameter) for parameter in self.module.parameters())
        yield from (("buffers", buffer) for buffer in self.module.buffers())
        yield from (("batch", tensor) for tensor in (*self.work.inputs, *self.work.targets))
        yield from (("optimizer state", tensor) for tensor in self.step.state().values())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the parameters by name, without padding."""
        for name, own in self.module.named_parameters():
            length = self.lengths.get(name)
            yield name, own.detach() if length is None else own.detach()[: max(0, length - self.rank * len(own))]
