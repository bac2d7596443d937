"""What two ranks do with modules that they share: a plain loop, and `magis.optimize`, on the same batches."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import magis
from magis.extensions.ranks.plans.plain_twins import parameter_groups
from magis.ops.collectives import is_collective
from magis.runtime.measure import collector_spared, window_peak

RANKS, WORDS, WIDTH = 2, 57, 33


class Block(nn.Module):
    """Of widths that two ranks do not divide."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.changed, x, use_reentrant=False) if self.again else self.changed(x)
        return x + out

    def changed(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.down(functional.gelu(self.up(self.norm(x)))))
        return out


class Settings:
    """Which the model refers to."""

    def __init__(self) -> None:
        self.scale, self.bias = 1.0, torch.zeros(())


class Net(nn.Module):
    """Words in, words out; with tied ends, a frozen parameter and a buffer, if asked for."""

    def __init__(self, *, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(again=again) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        self.settings = Settings()
        if tied:
            self.head.weight = self.words.weight
            self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)) * self.settings.scale + self.settings.bias
        return out


def loss_of(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def sharded(net: Net) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def grouped(net: Net) -> nn.Module:
    for block in net.blocks:
        fully_shard(block)
    fully_shard([net.norm, net.head])
    return fully_shard(net)


def mixed(net: Net) -> nn.Module:
    half = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=half)
    return fully_shard(net, mp_policy=replace(half, output_dtype=torch.float32))


def replicated(net: Net) -> nn.Module:
    return DistributedDataParallel(net, broadcast_buffers=False)


class Row(nn.Module):
    """Has no parameters of its own, so that fully_shard gathers nothing for it; but it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def bare_root() -> nn.Module:
    row = Row()
    fully_shard(row.net, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    return fully_shard(row, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))


def frozen(net: Net) -> nn.Module:
    """A block that no gradient reaches the parameters of, though one passes through it."""
    net.blocks[1].requires_grad_(False)
    return sharded(net)


KINDS: Mapping[str, Callable[[], nn.Module]] = {
    "fully_shard": lambda: sharded(Net()),
    "tied": lambda: sharded(Net(tied=True)),
    "grouped": lambda: grouped(Net()),
    "mixed": lambda: mixed(Net()),
    "checkpointed": lambda: sharded(Net(again=True)),
    "bare root": bare_root,
    "frozen": lambda: frozen(Net()),
    "blocks alone": lambda: only_blocks(Net()),
    "DistributedDataParallel": lambda: replicated(Net()),
}


def only_blocks(net: Net) -> nn.Module:
    """What is in no block is the rank's own, and no gradient of it is averaged."""
    for block in net.blocks:
        fully_shard(block)
    return net


def batches(rank: int, count: int, samples: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(5 + rank)
    for _ in range(count):
        x, t = torch.randint(0, WORDS, (2, samples, 20), generator=drawn)
        yield x, t


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = KINDS[kind]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def numbers(model: nn.Module, losses: list[float]) -> list[Any]:
    """Losses, then sums and first elements of all that a rank holds."""
    found: list[Any] = losses
    for tensor in (*model.parameters(), *model.buffers()):
        own = getattr(tensor, "to_local", lambda tensor=tensor: tensor)().detach()
        found += [own.double().sum().item(), own.flatten()[:1].tolist()]
    return found


def plainly(kind: str, rank: int) -> list[Any]:
    model, optimizer = made(kind)
    torch.manual_seed(7 + rank)
    losses = []
    for number, (x, t) in enumerate(batches(rank, 3)):
        turned(model, number)
        optimizer.zero_grad()
        loss = loss_of(model(x), t)
        loss.backward()
        optimizer.step()
        losses += [loss.item(), tried(model, x, t)]
    return numbers(model, losses)


def settings_of(model: nn.Module) -> Settings:
    net: Any = model.net if isinstance(model, Row) else getattr(model, "module", model)
    found: Settings = net.settings
    return found


def turned(model: nn.Module, number: int) -> None:
    """Change what the model only refers to, before its third step."""
    if number == 2:
        settings_of(model).scale = 0.5
        settings_of(model).bias.add_(1.0)


def tried(model: nn.Module, x: Tensor, t: Tensor) -> float:
    """The loss that the model has between two steps."""
    model.eval()
    with torch.no_grad():
        loss = loss_of(model(x), t)
    model.train()
    return loss.item()


def planned(kind: str, rank: int) -> list[Any]:
    model, optimizer = made(kind)
    step = magis.optimize(model, next(batches(rank, 1)), loss_of, optimizer, memory_ratio=0.8, budget=300)
    assert step.report().memory_ratio <= 0.8
    torch.manual_seed(7 + rank)
    losses = []
    for number, (x, t) in enumerate(batches(rank, 3)):
        turned(model, number)
        losses += [step(x, t).item(), tried(model, x, t)]
    return numbers(model, losses)


def peak(kind: str, rank: int) -> list[int]:
    """Bytes of a step with all that stays, as measured (the least of four: gloo holds copies of messages for a while)
    and as planned; and of the largest message."""
    model, _ = made(kind)
    x, t = next(batches(rank, 1))
    step = magis.optimize(model, (x, t), loss_of, None, memory_ratio=0.8, budget=300)
    step(x, t)
    peaks = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        with collector_spared():
            peaks.append(window_peak(lambda: step(x, t)).peak_bytes)
    held = {getattr(each, "_local_tensor", each).untyped_storage() for each in model.parameters()}
    beside = (*model.buffers(), settings_of(model).bias, x, t)
    stays = sum(tensor.nbytes for tensor in beside) + sum(memory.nbytes() for memory in held)
    graph = step._entries[-1].plan.graph
    sent = [graph.values[op.made()[0]].nbytes for op in graph.ops if is_collective(op.target)]
    return [min(peaks) + stays, step.report().planned_bytes, max(sent)]


def clipped(rank: int, *, plan: bool) -> list[Any]:
    """Gradients of two batches, clipped together."""
    model, optimizer = made("fully_shard")
    if plan:
        first = next(batches(rank, 1))
        step = magis.optimize(model, first, loss_of, None, memory_ratio=0.8, budget=300)
    torch.manual_seed(7 + rank)
    losses = []
    for number, (x, t) in enumerate(batches(rank, 4)):
        if plan:
            loss = step(x, t)
        else:
            loss = loss_of(model(x), t)
            loss.backward()
        losses.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return numbers(model, losses)


def line(make: Callable[[], object]) -> str:
    try:
        make()
    except magis.MagisError as error:
        return str(error)
    return "no error"


def refusals(rank: int) -> dict[str, str]:
    first = next(batches(rank, 1))

    def optimized(model: nn.Module, batch: Any = first, **further: Any) -> object:
        return magis.optimize(model, batch, loss_of, None, **(further or {"memory_ratio": 0.8}))

    def divided() -> object:
        return optimized(
            parallelize_module(Net(), init_device_mesh("cpu", (RANKS,)), {"blocks.*.up": ColwiseParallel()})
        )

    def moved() -> object:
        model = sharded(Net())
        step = magis.optimize(model, first, loss_of, None, memory_ratio=0.9, budget=100)
        state: Any = model
        for param in parameter_groups(state._get_fsdp_state())[0].fsdp_params:
            param._sharded_param_data = param._sharded_param_data.clone()
        return step(*first)

    def branching() -> object:
        model = sharded(Net())
        model.register_forward_pre_hook(lambda _module, given: given if (given[0] > 3).any() else (given[0] + 1,))
        return optimized(model)

    def changed() -> object:
        model = sharded(Net())
        step = magis.optimize(model, first, loss_of, None, memory_ratio=0.9, budget=100)
        model.blocks[0].drop.p = 0.0
        return step(*first)

    def parted() -> object:
        step = magis.optimize(sharded(Net()), first, loss_of, None, memory_ratio=0.9, budget=100)
        return step(*next(batches(rank, 1, samples=6 + rank)))

    def hooked() -> object:
        model = DistributedDataParallel(Net(), broadcast_buffers=False)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        return optimized(model)

    def foreign() -> object:
        model = sharded(Net())
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        return magis.optimize(model, first, loss_of, optimizer, memory_ratio=0.9)

    norms = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return {
        "tensor parallel": line(divided),
        "statistics": line(lambda: optimized(DistributedDataParallel(norms))),
        "other batch": line(lambda: optimized(sharded(Net()), next(batches(rank, 1, samples=6 + rank)))),
        "no plan": line(lambda: optimized(sharded(Net()), memory_limit="1 KiB")),
        "moved": line(moved),
        "changed": line(changed),
        "parted": line(parted),
        "hooked": line(hooked),
        "foreign": line(foreign),
        "around": line(lambda: optimized(nn.Sequential(DistributedDataParallel(Net(), broadcast_buffers=False)))),
        "one limit": line(lambda: optimized(sharded(Net()), memory_ratio=2.0 if rank else 0.9)),
        "two limits": line(lambda: optimized(sharded(Net()), memory_ratio=0.8 if rank else 0.9)),
        "no file": line(lambda: optimized(sharded(Net()), memory_ratio=0.9, plan=f"{rank}.plan")),
        "branch": line(branching),
    }


def run(rank: int, at: str, port: int, kinds: list[str]) -> None:
    """One rank: writes what it found of these kinds, and of all refusals, to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {kind: [plainly(kind, rank), planned(kind, rank)] for kind in kinds}
    found["clipped"] = [clipped(rank, plan=False), clipped(rank, plan=True)]
    found["peaks"] = [peak(kind, rank) for kind in kinds]
    found["refusals"] = refusals(rank)
    (Path(at) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
