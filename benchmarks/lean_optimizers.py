"""Optimizers of few bytes, as part of a planned step: `python benchmarks/lean_optimizers.py [optimizer ...]`.

A decoder without biases, its norms without weights (so that Muon takes all of its parameters), is trained for 20 steps
on this CPU by each optimizer, in eager mode and by two plans: one with the optimizer's own code as part of the step,
one with the optimizer behind the step (as it is with a hook on `optimizer.step`, say). Each plan is that of the lowest
share of eager's peak for which there is one without loops, at most a tenth slower by prediction. Weights, state and
losses are compared bit by bit with eager's; measured bytes are the allocator's in one step, with all that stays. Times
are medians of 20 steps that take turns. Optimizers of bitsandbytes and torchao run where these can be imported.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from lib.program import arguments, head, printed
from torch import Tensor, nn, optim
from torch.nn import functional as fn

import magis
from magis.errors import UsageError
from magis.frontends.optimized_step import BY_ITS_CODE, OptimizedStep
from magis.runtime.measure import window_peak
from magis.units import MIB
from tests.training.optimizers import ByteAdam, HalfAdamW, SmallLion

STEPS = 20
SHARES = (0.8, 0.9, 1.0)
SECONDS = 4.0
"""Of each search."""
WIDTH, HEADS, DEPTH, WORDS, ROWS, LENGTH = 192, 4, 4, 2048, 2, 64
COLUMNS = ("state", "eager", "behind", "measured", "within", "measured", "ms eager", "behind", "within")
HEAD = f"{'optimizer':18} {' '.join(f'{name:>8}' for name in COLUMNS)}  update; numbers"
CPU = torch.device("cpu")


class Layer(nn.Module):
    """Attention and a feed-forward, on normalized inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(fn.rms_norm(x, (WIDTH,))).view(rows, length, 3 * HEADS, -1).transpose(1, 2)
        found = fn.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(fn.relu(self.up(fn.rms_norm(x, (WIDTH,)))).square())


class Decoder(nn.Module):
    """A decoder whose parameters are all matrices; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layers = nn.Embedding(WORDS, WIDTH), nn.Sequential(*(Layer() for _ in range(DEPTH)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.head(fn.rms_norm(self.layers(self.words(ids[:, :-1])), (WIDTH,)))
        return fn.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten())


def optimizers() -> dict[str, Callable[..., optim.Optimizer]]:
    """The optimizers that can run here, by name."""
    found: dict[str, Callable[..., optim.Optimizer]] = {
        "AdamW": partial(optim.AdamW, lr=1e-3),  # which magis has its own rows for
        "AdamW, bf16 state": partial(HalfAdamW, lr=1e-3),
        "Adam, byte state": partial(ByteAdam, lr=1e-3),
        "Lion, bf16 state": partial(SmallLion, lr=1e-4),
        "Adafactor": partial(optim.Adafactor, lr=1e-2),
        "Muon": partial(optim.Muon, lr=1e-2),
        "RMSprop": partial(optim.RMSprop, lr=1e-3),
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        bnb = importlib.import_module("bitsandbytes").optim
        found["bnb AdamW8bit"] = partial(bnb.AdamW8bit, lr=1e-3)
        found["bnb Lion8bit"] = partial(bnb.Lion8bit, lr=1e-4)
    if importlib.util.find_spec("torchao") is not None:
        ao = importlib.import_module("torchao.optim")
        found["torchao _AdamW"] = partial(ao._AdamW, lr=1e-3)  # noqa: SLF001 (its name)
        found["torchao AdamW8bit"] = partial(ao.AdamW8bit, lr=1e-3)
    return found


@dataclass(frozen=True, eq=False)
class Trained:
    """A way to train: its module and optimizer, the step, and its report."""

    module: nn.Module
    optimizer: optim.Optimizer
    step: Callable[[Tensor], Tensor]
    planned: OptimizedStep | None = None


def eager(make: Callable[..., optim.Optimizer], *, hook: bool = False) -> Trained:
    """Train as the plain loop does; with a hook on the optimizer's step, which keeps it behind a planned one."""
    module = Decoder()
    optimizer = make(module.parameters())
    if hook:
        optimizer.register_step_post_hook(lambda *_given: None)

    def step(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trained(module, optimizer, step)


def lowest(make: Callable[..., optim.Optimizer], *, hook: bool) -> Trained | None:
    """Return the step with the lowest share of eager's peak that has a plan without loops; None if none has."""
    for share in SHARES:
        plain = eager(make, hook=hook)
        try:
            step = magis.optimize(
                plain.module, {"ids": batch(0)}, None, plain.optimizer, memory_ratio=share, seconds=SECONDS
            )
        except UsageError:
            continue
        if not step.report().fission and step.report().latency_ratio <= 1.1:
            return Trained(plain.module, plain.optimizer, partial(_by_keyword, step), step)
    return None


def _by_keyword(step: OptimizedStep, ids: Tensor) -> Tensor:
    return step(ids=ids)


def batch(seed: int) -> Tensor:
    return torch.randint(WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def row(name: str, make: Callable[..., optim.Optimizer], failed: list[str]) -> str:
    """The line of one optimizer."""
    plain, behind, within = eager(make), lowest(make, hook=True), lowest(make, hook=False)
    ways = [plain, *(each for each in (behind, within) if each is not None)]
    times: dict[int, list[float]] = {id(each): [] for each in ways}
    alike = True
    for number in range(STEPS):
        losses = []
        for each in ways:
            torch.manual_seed(number)
            begun = time.perf_counter()
            losses.append(each.step(batch(number)))
            times[id(each)].append(time.perf_counter() - begun)
        alike = alike and all(torch.equal(losses[0], loss) for loss in losses)
    for each in ways[1:]:
        alike = alike and all(map(torch.equal, plain.module.parameters(), each.module.parameters()))
        alike = alike and all(map(torch.equal, states(plain.optimizer), states(each.optimizer)))
    stays = sum(each.nbytes for each in plain.module.parameters()) + batch(0).nbytes
    kept = {each.untyped_storage().data_ptr(): each for each in states(plain.optimizer) if each.dim()}
    state = sum(each.nbytes for each in kept.values())
    figures: list[float | None] = [state, peak(plain, stays + state)]
    for each in (behind, within):
        planned = None if each is None or each.planned is None else each.planned.report().planned_bytes
        figures += [planned, None if each is None else peak(each, stays + state)]
    update = "no plan" if within is None or within.planned is None else within.planned.report().update
    if not alike:
        failed.append(name)
    shown = [f"{'-' if each is None else f'{each / MIB:.2f}':>8}" for each in figures]
    shown += [
        f"{'-' if each is None else f'{1000 * statistics.median(times[id(each)]):.1f}':>8}"
        for each in (plain, behind, within)
    ]
    said = "own code" if update == BY_ITS_CODE else update.partition(":")[0]
    return f"{name:18} {' '.join(shown)}  {said}; {'as eager, bit by bit' if alike else 'others'}"


def peak(trained: Trained, stays: int) -> int:
    """Return the measured bytes of a step with all that stays."""
    trained.optimizer.zero_grad()
    ids = batch(0)
    return stays + window_peak(lambda: trained.step(ids), CPU).peak_bytes


def states(optimizer: optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, in the order of its parameters."""
    every = [each for entries in copy.copy(optimizer.state_dict())["state"].values() for each in entries.values()]
    flat = [part for each in every for part in (each if isinstance(each, list) else [each])]
    plain = (each.dequantize() if hasattr(each, "codes") else each for each in flat if isinstance(each, Tensor))
    return list(plain)


def rows(names: list[str], failed: list[str]) -> Iterator[str]:
    """The lines of all optimizers asked for that can run here."""
    for name, make in optimizers().items():
        if not names or name in names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield row(name, make, failed)


def main() -> None:
    """Print a line for each optimizer; exit with 1 if one has other numbers than eager's."""
    asked = arguments(__doc__, names=[""]).parse_args()
    failed: list[str] = []
    printed(head(f"MiB, {sum(each.nbytes for each in Decoder().parameters()) / MIB:.2f} of weights"))
    printed([HEAD])
    printed(rows([name for name in asked.names if name], failed))
    if failed:
        raise SystemExit(f"other numbers than eager's: {', '.join(failed)}")


if __name__ == "__main__":
    main()
