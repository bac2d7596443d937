"""Training loops of many kinds, each a step function with its batch, and the memory that they really need."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import magis
from magis.phases import phases_told
from magis.runtime.measure import allocations, memory_profile

F = nn.functional
Loop = tuple[Callable[[Any], object], Any]
MARK = 7_654_321


def net(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Tanh())


SHARED = net()


def batch(rows: int = 256, width: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def clipped() -> Loop:
    """Clipping between backward and update."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(given: tuple[Tensor, Tensor]) -> None:
        x, y = given
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, batch()


def scheduled() -> Loop:
    """A scheduler's step, and gradients dropped at the end."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def step(given: tuple[Tensor, Tensor]) -> None:
        x, y = given
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

    return step, batch()


def recurrent() -> Loop:
    """Kernels that read bytes which others have packed."""
    model = nn.ModuleDict({"first": nn.LSTM(32, 48, 2, batch_first=True), "then": nn.GRU(48, 32, batch_first=True)})
    optimizer = torch.optim.AdamW(model.parameters())

    def step(given: tuple[Tensor, Tensor]) -> None:
        x, y = (each.unflatten(0, (16, 16)) for each in given)
        optimizer.zero_grad()
        F.mse_loss(model["then"](model["first"](x)[0])[0], y).backward()
        optimizer.step()

    return step, batch()


def accumulated() -> Loop:
    """Gradients of four parts of the batch, by hand."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())

    def step(given: tuple[Tensor, Tensor]) -> None:
        for x, y in zip(given[0].chunk(4), given[1].chunk(4), strict=True):
            (F.mse_loss(model(x), y) / 4).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, batch()


def two_losses() -> Loop:
    """Two heads, whose losses have a backward each."""
    model, first, second = net(), nn.Linear(32, 10), nn.Linear(32, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *first.parameters(), *second.parameters()])

    def step(given: dict[str, Tensor]) -> None:
        hidden = model(given["x"])
        F.cross_entropy(first(hidden), given["y"]).backward(retain_graph=True)
        (0.1 * second(hidden).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, {"x": torch.randn(256, 32), "y": torch.randint(0, 10, (256,))}


def carried_over() -> Loop:
    """The output of the last call is held until the next one has its own; gradients are dropped at the beginning."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last: Any = None

    def step(given: tuple[Tensor, Tensor]) -> None:
        nonlocal last
        optimizer.zero_grad(set_to_none=True)
        out = model(given[0])
        loss = F.mse_loss(out, given[1])
        if last is not None:
            loss = loss + 0.1 * F.mse_loss(out, last)
        loss.backward()
        optimizer.step()
        last = out.detach()

    return step, batch()


def kept_in_place() -> Loop:
    """Gradients that are zeroed and kept."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(given: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(given[0]), given[1]).backward()
        optimizer.step()

    return step, batch()


def every_third() -> Loop:
    """A cycle: an update in every third call."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    count = 0

    def step(given: tuple[Tensor, Tensor]) -> None:
        nonlocal count
        (F.mse_loss(model(given[0]), given[1]) / 3).backward()
        count += 1
        if count % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step, batch()


def phases() -> Loop:
    """A generator and a discriminator, one after the other, each with an optimizer."""
    make, judge = net(), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    first, second = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())

    def step(real: Tensor) -> None:
        fake = make(torch.randn(len(real), 32))
        second.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        first.step()

    return step, torch.randn(256, 32)


def averaged() -> Loop:
    """A teacher that is an average of the weights, and is not trained."""
    model = net()
    teacher = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> None:
        with torch.no_grad():
            wanted = teacher(x)
        F.mse_loss(model(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)

    return step, torch.randn(256, 32)


def offloaded() -> Loop:
    """Activations that are packed by the loop's own hooks, in half of their bytes."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def pack(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if not isinstance(tensor, nn.Parameter) else tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32)

    def step(given: tuple[Tensor, Tensor]) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = F.mse_loss(model(given[0]), given[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, batch()


def logged() -> Loop:
    """A loop that reads its loss, and leaves out updates by steep gradients; on blocks that are checkpointed."""
    blocks = nn.ModuleList(net() for _ in range(3))
    optimizer = torch.optim.AdamW(blocks.parameters())
    history: list[float] = []

    def step(given: tuple[Tensor, Tensor]) -> None:
        x = given[0]
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = F.mse_loss(x, given[1])
        loss.backward()
        steep = clip_grad_norm_(blocks.parameters(), 1.0)
        if steep.item() < 1e6:
            optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())

    return step, batch()


class Trainer:
    """A loop as an object, with autocast and a scaler that is off."""

    def __init__(self) -> None:
        self.model, self.ema = net(), 0.0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), amsgrad=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(self.model(x), y)

    def step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        loss = self.loss(*given)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.calls += 1
        return loss.detach()


def as_object() -> Loop:
    return Trainer().step, batch()


def evaluated() -> Loop:
    """An evaluation behind each update, on a part of the batch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(given: tuple[Tensor, Tensor]) -> None:
        with magis.phase("training"):
            F.mse_loss(model(given[0]), given[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with magis.phase("evaluation"), torch.no_grad():
            F.mse_loss(model(given[0][:64]), given[1][:64])
        model.train()

    return step, batch()


def last_loss() -> Loop:
    """The last call's loss is held with its graph until the next one is there."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last: Any = None

    def step(given: tuple[Tensor, Tensor]) -> None:
        nonlocal last
        loss = F.mse_loss(model(given[0]).square(), given[1])
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        last = loss

    return step, batch()


def in_cycles() -> Loop:
    """Objects that hold each other, of which the last call's are held until the next ones are there."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last: Any = None

    def step(given: tuple[Tensor, Tensor]) -> None:
        nonlocal last
        now: dict[str, Any] = {"output": model(given[0])}
        now["itself"] = now
        F.mse_loss(now["output"], given[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        last = now

    return step, batch()


def nested_phases() -> Loop:
    """Phases within a phase, and one in which nothing runs while tensors are held."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @magis.phase("training")
    def step(given: tuple[Tensor, Tensor]) -> None:
        with magis.phase("forward"):
            loss = F.mse_loss(model(given[0]), given[1])
        with magis.phase("logging"):
            pass
        with magis.phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, batch()


def updated_in_hooks() -> Loop:
    """An optimizer for each parameter, which is its key, stepped as soon as the gradient is there."""
    model = net()
    optimizers = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)

    def step(given: tuple[Tensor, Tensor]) -> int:
        F.mse_loss(model(given[0]), given[1]).backward()
        return len(optimizers)

    return step, batch()


def inferred() -> Loop:
    """An evaluation in inference mode and autocast, in which operators arrive before they are decomposed."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(given: tuple[Tensor, Tensor]) -> None:
        F.mse_loss(model(given[0]), given[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            F.mse_loss(model(given[0]), given[1])

    return step, batch()


LOOPS = (
    inferred, nested_phases, updated_in_hooks, recurrent,
    clipped, scheduled, accumulated, two_losses, carried_over, kept_in_place, every_third, phases, averaged, offloaded,
    logged, as_object, evaluated, last_loss, in_cycles,
)  # fmt: skip


def measured(make: Callable[[], Loop], calls: int = 8, cycle: int = 3, *, phase: str | None = None) -> int:
    """Return the most bytes that the allocator had handed out at once in the last calls of a loop, or in a phase of
    these, everything that was made for it included, without the counters of optimizers."""
    with memory_profile() as log:
        step, given = make()
        for call in range(calls):
            if call == calls - cycle:
                torch.empty(MARK, dtype=torch.uint8)
            with phases_told(lambda name: torch.empty(MARK + 1 + (name == phase), dtype=torch.uint8)):
                step(given)
            gc.collect()
    live, peak, is_last, runs = dict[int, int](), 0, False, phase is None
    for event in allocations(log):
        if MARK <= event.nbytes <= MARK + 2:
            is_last = is_last or event.nbytes == MARK
            runs = phase is None or event.nbytes == MARK + 2
            peak = max(peak, sum(live.values())) if is_last and runs else peak
            continue
        if event.nbytes < 0:
            live.pop(event.address, 0)
        else:
            live[event.address] = event.nbytes
        if is_last and runs:
            peak = max(peak, sum(live.values()))
    counters = [
        tensor.nbytes
        for optimizer in _optimizers(step)
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, Tensor) and not tensor.dim()
    ]
    return peak - sum(counters)


def _optimizers(step: Any) -> list[torch.optim.Optimizer]:
    held = [cell.cell_contents for cell in getattr(step, "__closure__", None) or ()]
    held += vars(step.__self__).values() if hasattr(step, "__self__") else []
    inner = [found for each in held if isinstance(each, FunctionType) for found in _optimizers(each)]
    return [*inner, *(each for each in held if isinstance(each, torch.optim.Optimizer))]
