"""Llama 3 8B on the ranks of one machine, weights in shards: plans at shares of what a rank needs without one.

    python benchmarks/ranks_llama.py [--ranks 8] [--length 8192] [--device sim:h100] [--shares 0.8 0.6 0.4 0.3]
        [--layers 32] [--budget N] [--output FILE]

bfloat16, AdamW, one sequence a rank, `fully_shard` by layer. First what a rank needs without a plan: bytes as predicted
for `fsdp`, the time of its operators and messages with every layer's weights gathered again for the backward, and how
much more full checkpointing of each layer takes: its forward once more. Then a row per share: whether the plan keeps
it; its peak as a share of that of `fsdp`; its latency above that of `fsdp`; tensors made again, GiB swapped, seconds of
planning from the captured step, largest resident memory, parts. Messages count as waited for, in all rows alike.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import torch
from lib.llama import Llama, Sizes
from torch import Tensor
from torch.nn import functional

from magis.capture import Workload
from magis.capture.workload import fake_tensors
from magis.models.building import numbered
from magis.ops.collectives import is_collective
from magis.ops.optimizers import OptimizerSpec
from magis.planner.planned_ranks import PlannedRanks
from magis.planner.subject import Subject
from magis.predict.rank_memory import fake_world, predict_rank
from magis.strategies.distributed_names import distributed_strategy
from magis.strategies.rank_step import World

HEAD = (
    f"{'share':>6} {'kept':>5} {'peak':>6} {'overhead':>8} {'again':>6} {'GiB swapped':>11} {'s':>6} {'RSS GiB':>7}"
    "  parts"
)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(layers: int, ranks: int, length: int) -> Workload:
    """On whatever tensors are in force: a sequence for each rank."""
    tokens = torch.zeros(ranks, length, dtype=torch.long)
    rule, blocks = OptimizerSpec("adamw", lr=1e-4, weight_decay=0.1), numbered("layers", layers)
    sizes = Sizes(length, width=4096, inner=14336, heads=32, groups=8, vocabulary=128256)
    return Workload("llama", Llama(layers, sizes), (tokens,), (tokens,), loss, rule, blocks).to("bfloat16")


def without(subject: Subject) -> tuple[int, int]:
    """Nanoseconds of a rank's step under `fsdp`, which gathers each layer's weights twice, and of the layers' forward
    without messages."""
    graph, costs = subject.captured.graph, subject.roofline
    again = forward = 0
    for op in graph.ops:
        if op.phase != "forward" or not op.module.startswith("layers."):
            continue
        if is_collective(op.target):
            again += costs.nanoseconds(op, graph.values)
        else:
            forward += costs.nanoseconds(op, graph.values)
    return subject.original_ns + again, forward


def rows(ranks: int, layers: int, length: int, device: str, shares: list[float], budget: int | None) -> Iterator[str]:
    """The lines of the table."""
    make = partial(llama, layers, ranks, length)
    memory = predict_rank(distributed_strategy("fsdp"), make, ranks, 0, device="cuda")
    peak = memory.predicted.tensor_bytes if memory.predicted else 0
    with fake_world(ranks, 0):
        strategy = PlannedRanks("magis+fsdp", device=device, budget=budget)
        with fake_tensors():
            work = make()
        started = time.perf_counter()
        subject = strategy.subject(strategy.own_part(work, World(ranks, 0, "cuda", fake=True)))
        seconds = time.perf_counter() - started
        plain_ns, forward_ns = without(subject)
        yield (
            f"fsdp: {peak / 2**30:.2f} GiB a rank, {plain_ns / 1e6:.1f} ms; {len(subject.captured.graph.ops)} operators"
            f" captured in {seconds:.1f} s; checkpointing of every layer: {forward_ns / plain_ns:+.1%}"
        )
        yield HEAD
        for share in shares:
            planner = strategy.within(int(share * peak), budget, device)
            started = time.perf_counter()
            found = planner.planned(subject)
            seconds = time.perf_counter() - started
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            yield (
                f"{share:6.2f} {'yes' if found.feasible else 'NO':>5} {found.peak / peak:6.3f}"
                f" {found.latency_ns / plain_ns - 1:+8.2%} {found.recomputed_ops:6} {found.swapped_bytes / 2**30:11.2f}"
                f" {seconds:6.1f} {rss:7.2f}  {found.fission or '-'}"
            )


def main() -> None:
    """Print the table, and write it."""
    asked = arguments(
        __doc__,
        ranks=8,
        layers=32,
        length=8192,
        device="sim:h100",
        shares=[0.8, 0.6, 0.4, 0.3],
        budget=int,
        output=Path,
    ).parse_args()
    found = rows(asked.ranks, asked.layers, asked.length, asked.device, asked.shares, asked.budget)
    printed(chain(head(), found), asked.output)


if __name__ == "__main__":
    main()
