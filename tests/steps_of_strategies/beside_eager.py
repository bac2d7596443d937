"""A strategy whose ranks hold their losses and weights against eager's, step by step."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from magis.capture import Workload
from magis.ops.optimizers import OptimizerSpec, torch_optimizer
from magis.strategies import World, distributed_strategy
from magis.strategies.rank_step import RankStep, RankStrategy, Wrapping, without_dropout


@dataclass
class Both:
    """The step of a strategy and eager's; weights are small and updated by plain SGD, which keeps rounding small."""

    step: RankStep
    alone: Workload

    def __post_init__(self) -> None:
        self.module: nn.Module = self.step.module
        optimizer = torch_optimizer(self.alone.optimizer, dict(self.alone.module.named_parameters()))
        assert optimizer is not None
        self.optimizer = optimizer

    def prepare(self) -> None:
        self.step.prepare()
        self.optimizer.zero_grad()

    def run(self) -> Tensor | None:
        found, work = self.step.run(), self.alone
        loss = work.loss_fn(work.module(*work.inputs), *work.targets)
        loss.backward()
        self.optimizer.step()
        if found is not None:
            torch.testing.assert_close(found, loss.detach())
        alone, compared = dict(work.module.named_parameters()), set()
        for name, parameter in self.module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            # heads that are shared out unevenly are plain parts, and rows of packed projections are ordered by rank
            if whole.shape == alone[name].shape and ".qkv." not in name:
                torch.testing.assert_close(whole, alone[name], atol=1e-6, rtol=1e-5, msg=partial("{}: {}".format, name))
                compared.add(name)
        assert any(name.endswith("word.weight") for name in compared)
        return found


@dataclass(frozen=True)
class BesideEager(Wrapping):
    strategy: RankStrategy

    def prepare(self, work: Workload, world: World) -> Both:
        without_dropout(work.module)
        work = replace(work, optimizer=OptimizerSpec("sgd", lr=0.5))
        alone = replace(work, module=copy.deepcopy(work.module))
        return Both(self.strategy.prepare(work, world), alone)


def tensor_parallel() -> BesideEager:
    return BesideEager(distributed_strategy("tp2"))


def sequence_parallel() -> BesideEager:
    return BesideEager(distributed_strategy("tp2+sp"))
