"""magis inside each rank: data parallelism whose ranks run a planned forward and backward (`magis+ddp`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture import Workload
from magis.graph import Graph
from magis.planner.planning import plan
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.runtime.steps import GraphStep
from magis.strategies.distributed import average_gradients, held_by, make_optimizer, place, trained
from magis.strategies.distributed_names import PLANNED
from magis.strategies.rank_step import World, share_of_batch
from magis.strategies.single_device import on_fake_tensors
from magis.units import share_of

FACTORIES = {PLANNED: f"{__name__}:PlannedReplica"}
"""By the names of strategies that plan: what makes them, as ranks are told."""


@dataclass(frozen=True)
class PlannedReplica:
    """Each rank plans forward and backward of its share, runs that plan, and averages gradients behind it, in buckets.

    The optimizer is torch's own on whole weights. Gradients stay until the update, as in ddp without its buckets.
    """

    ratio: float = 0.6
    """Of the peak of a rank's own forward and backward."""
    budget: int = 3_000
    """Plans evaluated: every rank searches, and all find the same plan."""
    name: str = PLANNED
    group: int = 1
    warm_steps: int = 1

    def prepare(self, work: Workload, world: World) -> PlannedReplicaStep:
        """The step on this rank's share of the batch. CaptureError where it is no single static graph."""
        work = share_of_batch(work, world.rank, world.size)
        rule = replace(work.optimizer, kind="gradients", groups=())
        with _disable_current_modes():
            graph, graded = self._planned(replace(work, optimizer=rule))
        step = GraphStep(graph, work.module, work.inputs, work.targets, rule, device=place(world))
        parameters = trained(work.module)
        optimizer = make_optimizer(work, parameters, self.name)
        return PlannedReplicaStep(work.module, work, optimizer, step, [parameters[name] for name in graded])

    def _planned(self, work: Workload) -> tuple[Graph, tuple[str, ...]]:
        """The plan, and the parameters whose gradients it returns, by name. No machine's scratch decides it."""
        _, fake = on_fake_tensors(work)
        subject = Subject(Source(work.name, lambda _seed: fake, "", "cpu", 0))
        found = plan(
            subject,
            memory_limit=share_of(self.ratio, subject.original_with({}).peak_bytes),
            latency_limit_ns=None,
            budget=self.budget,
            seconds=None,
            seed=0,
            stored={},
        )
        return found.graph, subject.captured.graded


@dataclass
class PlannedReplicaStep:
    """One rank's step."""

    module: nn.Module
    work: Workload
    optimizer: Optimizer
    step: GraphStep
    graded: Sequence[nn.Parameter]

    def prepare(self) -> None:
        """Gradients to None."""
        self.optimizer.zero_grad(set_to_none=True)
        self.step.prepare()

    def run(self) -> Tensor:
        """One whole step; the mean loss of the share."""
        loss = self.step.run()
        for parameter, gradient in zip(self.graded, self.step.results()[1:], strict=True):
            parameter.grad = gradient
        average_gradients(self.graded, None)
        self.optimizer.step()
        return loss.detach()

    def held(self) -> list[tuple[str, Tensor]]:
        """What the rank holds for longer than an operator, each with its kind."""
        return list(held_by(self.module, self.optimizer, self.work))
