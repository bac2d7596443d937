"""Networks and strategies whose ranks do well, raise, hang and die, as the tests ask for."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from magis.capture import Workload
from magis.errors import UsageError
from magis.strategies.rank_step import World, share_of_batch


def small_net() -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """A factory: two linear layers, with dropout."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.5), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.randn(8, 64), torch.randn(8, 10), nn.functional.mse_loss


@dataclass
class DataParallelStep:
    """DDP and plain SGD; ``fault`` is called in the forward of every step."""

    work: Workload
    world: World
    fault: Callable[[int, int], None]
    steps: int = 0

    def __post_init__(self) -> None:
        self.module = DistributedDataParallel(self.work.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def prepare(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("parameters", each.data) for each in self.module.parameters())

    def run(self) -> Tensor:
        self.steps += 1
        self.fault(self.world.rank, self.steps)
        loss = self.work.loss_fn(self.module(*self.work.inputs), *self.work.targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class DataParallel:
    name: str = "ddp"
    group: int = 1
    fault: Callable[[int, int], None] = lambda rank, step: None
    refusal: Callable[[World], None] = lambda world: None

    def prepare(self, work: Workload, world: World) -> DataParallelStep:
        self.refusal(world)
        return DataParallelStep(share_of_batch(work, world.rank, world.size), world, self.fault)


def ddp() -> DataParallel:
    return DataParallel()


def _on(rank: int, step: int, act: Callable[[], Any]) -> DataParallel:
    return DataParallel(fault=lambda its_rank, its_step: act() if (its_rank, its_step) == (rank, step) else None)


def raises_on_rank_1() -> DataParallel:
    def act() -> None:
        raise ValueError("the second half\nis missing")

    return _on(1, 2, act)


def hangs_on_rank_1() -> DataParallel:
    return _on(1, 2, lambda: time.sleep(3600))


def killed_on_rank_1() -> DataParallel:
    return _on(1, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits_on_rank_0() -> DataParallel:
    return _on(0, 1, lambda: sys.exit("done here"))


def leaves_collective_out() -> DataParallel:
    """Rank 1 waits for a collective that nobody else enters."""
    return _on(1, 2, lambda: dist.all_reduce(torch.ones(3)))


def starts_processes() -> DataParallel:
    """Rank 0 starts a child that leaves the process group and has one in it, writes their ids and hangs."""

    def act() -> None:
        nested = ["sh", "-c", "sleep 3600 & echo started; wait"]
        with subprocess.Popen(nested, start_new_session=True, stdout=subprocess.PIPE) as leader:
            leader.stdout.readline() if leader.stdout is not None else None
            subprocess.Popen(["sleep", "3600"])
            Path(os.environ["MAGIS_TEST_SIGN"]).write_text("started", encoding="ascii")
            time.sleep(3600)

    return _on(0, 1, act)


def refuses() -> DataParallel:
    def refusal(world: World) -> None:
        raise UsageError(f"this needs 16 ranks, and there are {world.size}", hint="use 16")

    return DataParallel(refusal=refusal)


def out_of_memory() -> DataParallel:
    return _on(1, 1, lambda: torch.empty(2**60, dtype=torch.uint8))


def aborts_on_rank_1() -> DataParallel:
    def act() -> None:
        sys.stderr.write("these are my last words\n")
        sys.stderr.flush()
        os.abort()

    return _on(1, 1, act)


def groups_of_four() -> DataParallel:
    return DataParallel(name="tp4", group=4)


def finds_nothing_left() -> DataParallel:
    """Refuses the job where tensors of an earlier one are still there."""

    def refusal(world: World) -> None:
        # without a collection: the job begins with one, and a further one of all of torch is a long silence
        gc.unfreeze()
        found = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.nbytes > 64]
        gc.freeze()
        if len(found) > 4 + 2:  # the parameters and the batch of this job itself
            raise UsageError(f"{len(found)} tensors are there: {[tuple(each.shape) for each in found]}")

    return DataParallel(refusal=refusal)


def normalized_net() -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """A factory: batch norm, and no dropout."""
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.randn(8, 64), torch.randn(8, 10), nn.functional.mse_loss
