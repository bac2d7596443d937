"""magis inside each rank: ranks that run a planned step, whose messages are operators of the plan.

`magis+ddp` averages gradients unit by unit, `magis+fsdp` also holds weights, gradients and the optimizer's state in
shards. Every rank runs the same step on its share of the batch, so one plan is everybody's: the first rank searches,
the others get its plan, and none begins before all have the same step and the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from magis.capture import Workload
from magis.errors import MagisError
from magis.graph import Graph, digest, dump, parse, verify
from magis.ops.collectives import register_group
from magis.planner.planning import plan
from magis.planner.plans import Plan
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.runtime.steps import GraphStep
from magis.strategies.distributed import check_update, place
from magis.strategies.distributed_names import PLANNED, plain_of
from magis.strategies.rank_step import World, share_of_batch
from magis.strategies.sharded_weights import average_weights, shard_weights
from magis.strategies.single_device import on_fake_tensors
from magis.units import share_of

T = TypeVar("T")
ROLE = "dp"
SHARE = 0.6
"""Of the peak of a rank's own step: the limit where none is given."""
_WEIGHTS = {"ddp": average_weights, "fsdp": shard_weights}


@dataclass(frozen=True)
class PlannedRanks:
    """`magis+ddp` or `magis+fsdp`. Each rank's tensors keep ``memory_limit`` bytes."""

    name: str
    memory_limit: int | None = None
    budget: int | None = None
    """Plans evaluated; None: as many as for a case of one rank."""
    device: str = "cpu"
    """Whose operators and prices plans are made with: "cpu" or "sim:<name>"."""

    plans: dict[str, Plan] = field(default_factory=dict, compare=False, repr=False)
    """By the digest of the step: what was planned already."""

    group = 1
    warm_steps = 1

    def within(self, memory_limit: int | None, budget: int | None, device: str = "cpu") -> PlannedRanks:
        """The same under a limit."""
        return replace(self, memory_limit=memory_limit, budget=budget, device=device, plans={})

    def prepare(self, work: Workload, world: World) -> PlannedStep:
        """The step on this rank's share of the batch. CaptureError where it is no single static graph, MagisError
        where ranks do not agree on it."""
        shards = plain_of(self.name) == "fsdp"
        lengths = {name: len(p) for name, p in work.module.named_parameters() if shards and p.dim()}
        own = self.own_part(work, world)
        with _disable_current_modes():
            subject = partial(self.subject, own)
            graph = self.planned(subject()).graph if world.fake else agreed(subject, self.planned, world)
        step = GraphStep(graph, own.module, own.inputs, own.targets, own.optimizer, device=place(world))
        return PlannedStep(own.module, own, step, world.rank, lengths)

    def own_part(self, work: Workload, world: World) -> Workload:
        """The workload with this rank's share of the batch and of the weights; the module is taken over."""
        check_update(work, self.name)
        work = share_of_batch(work, world.rank, world.size)
        name = register_group(dist.distributed_c10d._get_default_group(), ROLE)  # noqa: SLF001 (nothing public)
        _WEIGHTS[plain_of(self.name)](work.module, work.blocks, world.size, world.rank, name)
        return work

    def subject(self, own: Workload) -> Subject:
        """What is planned: a rank's own part, captured. CaptureError where it is no single static graph."""
        _, fake = on_fake_tensors(own)
        found = Subject(Source(own.name, lambda _seed: fake, "", self.device, 0))
        _ = found.captured
        return found

    def planned(self, subject: Subject) -> Plan:
        """The plan of a rank's own part. No machine's scratch decides it."""
        if subject.digest not in self.plans:
            self.plans[subject.digest] = self._searched(subject)
        return self.plans[subject.digest]

    def _searched(self, subject: Subject) -> Plan:
        limit = self.memory_limit
        if limit is None:
            limit = share_of(SHARE, subject.original_with({}).peak_bytes)
        stored: dict[str, int] | None = {} if self.device == "cpu" else None  # no machine's scratch
        return plan(
            subject, memory_limit=limit, latency_limit_ns=None, budget=self.budget, seconds=None, seed=0, stored=stored
        )


FACTORIES: Mapping[str, str] = {name: f"{__name__}:{plain_of(name)}" for name in PLANNED}
"""By the names of strategies that plan: what makes them, as ranks are told."""
ddp: Callable[[], PlannedRanks] = partial(PlannedRanks, "magis+ddp")
fsdp: Callable[[], PlannedRanks] = partial(PlannedRanks, "magis+fsdp")


def agreed(subject: Callable[[], Subject], planned: Callable[[Subject], Plan], world: World) -> Graph:
    """The plan of the first rank, which all ranks run.

    Raises MagisError, with the same line on all ranks, where one of them captures no step or another one than the
    others, where the first finds no plan, and where one gets another plan.
    """
    if world.size == 1:
        return planned(subject()).graph
    found = attempt(subject)
    same("step", *((found, "") if isinstance(found, str) else ("", found.digest)), world)
    said: list[tuple[str, str]] = [("", "")]  # what is wrong, and the plan
    if world.rank == 0 and isinstance(found, Subject):
        best = attempt(partial(planned, found))
        said = [(best, "") if isinstance(best, str) else ("", dump(best.graph))]
    dist.broadcast_object_list(said, src=0)
    wrong, text = said[0]
    if wrong:
        raise MagisError(f"rank 0 has no plan: {wrong}")
    graph = attempt(partial(_read, text))
    same("plan", *((graph, "") if isinstance(graph, str) else ("", digest(graph))), world)
    if isinstance(graph, str):
        raise MagisError(graph)
    return graph


def attempt(make: Callable[[], T]) -> T | str:
    """What ``make`` makes, or in one line why it does not."""
    try:
        return make()
    except MagisError as error:
        return str(error)


def same(what: str, wrong: str, mine: str, world: World) -> None:
    """Raise MagisError, the same on all ranks, unless all of them say that nothing is wrong, and have the same."""
    told: list[tuple[str, str]] = [("", "")] * world.size
    dist.all_gather_object(told, (wrong, mine))
    for rank, (each, _) in enumerate(told):
        if each:
            raise MagisError(f"rank {rank} has no {what}: {each}")
    others = [rank for rank, (_, each) in enumerate(told) if each != told[0][1]]
    if others:
        raise MagisError(
            f"the {what} of rank {', '.join(map(str, others))} is another one than that of rank 0",
            hint="give all ranks the same network, batch size, versions and options",
        )


def _read(text: str) -> Graph:
    graph = parse(text)
    verify(graph)
    return graph


@dataclass
class PlannedStep:
    """One rank's step."""

    module: nn.Module
    work: Workload
    step: GraphStep
    rank: int
    lengths: Mapping[str, int]
    """First dimensions of whole parameters, of those in shards."""

    def prepare(self) -> None:
        """Nothing is left of the last step but what it returned."""
        self.step.prepare()

    def run(self) -> Tensor:
        """One whole step; the mean loss of the share."""
        return self.step.run().detach()

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """What the rank holds for longer than an operator, each with its kind."""
        yield from (("parameters", parameter) for parameter in self.module.parameters())
        yield from (("buffers", buffer) for buffer in self.module.buffers())
        yield from (("batch", tensor) for tensor in (*self.work.inputs, *self.work.targets))
        yield from (("optimizer state", tensor) for tensor in self.step.state().values())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts of the parameters by their names, without padding."""
        for name, own in self.module.named_parameters():
            length = self.lengths.get(name)
            yield name, own.detach() if length is None else own.detach()[: max(0, length - self.rank * len(own))]
