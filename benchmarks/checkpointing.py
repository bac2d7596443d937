"""Magis beside activation checkpointing, measured: at the peak that checkpointing reaches, who is faster?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/checkpointing.py [model ...] [--rounds 15] [--preset small]
        [--output FILE]

Plain training loops on the CPU, none of magis in them: every block under `torch.utils.checkpoint`, or every second one;
the update after the backward, or of each weight as soon as its gradient is there, in a hook of the backward
(*early*). Each stands beside `magis.optimize` with the loop's peak as its limit. Peaks are the allocator's bytes of one
step with all that stays, as shares of eager's; times are medians of steps that take turns, as ratios to eager's.
*less*: by what share of the loop's time magis is faster.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the plugin does; before torch is loaded

import torch
from torch import Tensor, nn

import magis
from magis.capture import Workload
from magis.extensions.models.network_names import GATE_NAMES
from magis.extensions.ranks.strategies.distributed import held_by, make_optimizer, trained
from magis.models import PRESETS, get
from magis.runtime.measure import collector_spared, window_peak
from magis.strategies.single_device import blocks_of, checkpointed

HEAD = f"{'model':9} {'checkpointing':22} {'peak':>6} {'time':>6} | {'peak':>6} {'time':>6} {'less':>6}"


@dataclass(frozen=True)
class Loop:
    """A way to train a copy of a module: the step, and the bytes of what stays."""

    step: Callable[[], object]
    held: int

    @property
    def peak(self) -> int:
        """Bytes of a step with all that stays, measured."""
        with collector_spared():
            return self.held + window_peak(self.step).peak_bytes


def loop(
    work: Workload,
    stack: ExitStack,
    blocks: tuple[str, ...] = (),
    *,
    early: bool = False,
    compiled: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None,
) -> Loop:
    """A plain training loop on a copy of the module, warmed up; its forward and loss as `compiled` returns them."""
    module = copy.deepcopy(work.module)
    stack.enter_context(checkpointed(module, blocks))
    named = trained(module)
    updated = [{name: each} for name, each in named.items()] if early else [named]
    optimizers = [make_optimizer(work, each, "checkpointing") for each in updated]
    if early:
        for parameter, optimizer in zip(named.values(), optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_updated, optimizer))

    def forward() -> Tensor:
        loss: Tensor = work.loss_fn(module(*work.inputs), *work.targets)
        return loss

    call = forward if compiled is None else compiled(forward)

    def step() -> None:
        call().backward()
        if not early:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    step()
    return Loop(step, _held(module, work, optimizers))


def _held(module: nn.Module, work: Workload, optimizers: list[torch.optim.Optimizer]) -> int:
    """Bytes of what stays from step to step."""
    held = {id(tensor): tensor.nbytes for each in optimizers for _, tensor in held_by(module, each, work)}
    return sum(held.values())


def _updated(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()
    parameter.grad = None


def planned(work: Workload, limit: int) -> Loop:
    """The step of `magis.optimize` on a copy of the module within so many bytes."""
    module = copy.deepcopy(work.module)
    optimizer = make_optimizer(work, trained(module), "magis")
    step = magis.optimize(module, (work.inputs, work.targets), work.loss_fn, optimizer, memory_limit=limit)
    call = partial(step, work.inputs, work.targets)
    call()
    return Loop(call, _held(module, work, [optimizer]))


def medians(loops: Sequence[Loop], rounds: int) -> list[float]:
    """Seconds of a step of each loop, the median of so many; the loops take turns."""
    taken: list[list[float]] = [[] for _ in loops]
    for _ in range(rounds):
        for each, times in zip(loops, taken, strict=True):
            started = time.perf_counter()
            each.step()
            times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in taken]


def rows(name: str, *, preset: str, rounds: int, shares: list[float]) -> Iterator[str]:
    """The lines of a network; the shares by which magis is faster are noted."""
    work = get(name).build(preset, 0)
    blocks = blocks_of(work)
    with ExitStack() as stack:
        eager = loop(work, stack)
        whole = eager.peak
        names, loops = list[str](), [eager]
        peaks = [whole]
        for early in (False, True):
            for every in (1, 2):
                rival = loop(work, stack, blocks[::every], early=early)
                names.append(f"{'each block' if every == 1 else 'every second'}{', early' if early else ''}")
                ours = planned(work, rival.peak)
                loops += [rival, ours]
                peaks += [rival.peak, ours.peak]
        times_of = medians(loops, rounds)
        for number, what in enumerate(names):
            theirs, ours_at = 1 + 2 * number, 2 + 2 * number
            less = 1 - times_of[ours_at] / times_of[theirs]
            shares.append(less)
            figures = (f"{peaks[at] / whole:6.3f} {times_of[at] / times_of[0]:6.3f}" for at in (theirs, ours_at))
            yield f"{name:9} {what:22} {' | '.join(figures)} {less:6.1%}"


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(__doc__, names=list(GATE_NAMES), rounds=15, output=Path)
    parser.add_argument("--preset", default="small", choices=PRESETS)
    asked = parser.parse_args()
    shares: list[float] = []
    of_name = partial(rows, preset=asked.preset, rounds=asked.rounds, shares=shares)
    table = chain(head(), (HEAD,), chain.from_iterable(map(of_name, asked.names)))

    def told() -> Iterator[str]:
        at_least = sum(each >= 0.15 for each in shares)
        yield f"faster than {sum(each > 0 for each in shares)} of {len(shares)} loops, by 15% than {at_least}"

    printed(chain(table, told()), asked.output)


if __name__ == "__main__":
    main()
