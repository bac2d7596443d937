"""Llama 3 8B on the ranks of one machine, weights in shards: plans at shares of what a rank needs without one.

    python benchmarks/ranks_llama.py [--ranks 8] [--length 8192] [--device sim:h100] [--shares 0.8 0.6 0.4 0.3]
        [--layers 32] [--budget N] [--output FILE]

bfloat16, AdamW, one sequence a rank, `fully_shard` by layer. First what a rank needs without a plan: bytes as predicted
for `fsdp`, and the time of its step in program order with every layer's weights gathered again for the backward. Then
a row per share: whether the plan keeps it; its peak as a share of that of `fsdp`; its latency above that of `fsdp`;
tensors made again, GiB swapped, seconds of planning from the captured step, largest resident memory, parts. Then how
users checkpoint: every layer, every second one, and torchtitan's selection of operators (it keeps attention, every
second product and reduce-scatters), each with its peak, what it computes again as a share of the step's time, and the
plan at that very peak. Messages run beside the operators in all rows, each sent ahead of its first reader, one at a
time, as `fully_shard` does; of the rows that checkpoint none is waited for longer than in the step without.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import numpy as np
import torch
from lib.llama import Llama, Sizes
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from magis.capture import Workload
from magis.capture.workload import fake_tensors
from magis.cost.devices import find_device
from magis.cost.links import links_of
from magis.extensions.models.building import numbered
from magis.extensions.ranks.plans.planned_ranks import PlannedRanks
from magis.extensions.ranks.prediction.rank_memory import fake_world, predict_rank
from magis.extensions.ranks.prediction.step_time import StepTime
from magis.ops.optimizers import OptimizerSpec
from magis.planner.subject import Subject
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import evaluate
from magis.simulate.problem import KEEP, RECOMPUTE
from magis.strategies.distributed_names import distributed_strategy
from magis.strategies.rank_step import World

Context: TypeAlias = "Callable[[], Any]"
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
    rule, blocks = OptimizerSpec("adamw", lr=1e-4, weight_decay=0.1), tuple(numbered("layers", layers))
    sizes = Sizes(length, width=4096, inner=14336, heads=32, groups=8, vocabulary=128256)
    return Workload("llama", Llama(layers, sizes), (tokens,), (tokens,), loss, rule, blocks).to("bfloat16")


def without(subject: Subject) -> int:
    """Nanoseconds of a rank's step under `fsdp`, which gathers each layer's weights twice; to put them in their places
    again counts nothing."""
    compiled = compile_problem(subject.normal, subject.roofline)
    problem = compiled.problem
    flags = np.full(problem.n_storages, KEEP, dtype=np.int8)
    longest = problem.message_ns.max()  # of the embedding and the head, which stay
    for node in np.flatnonzero(problem.message_ns).tolist():
        if compiled.nodes[node][0].phase == "forward" and problem.message_ns[node] < longest:
            table = int(problem.outputs(node)[0])
            flags[[*problem.inputs(node), table]] = RECOMPUTE
            for reader in range(problem.n_nodes):
                if table in problem.inputs(reader):
                    flags[problem.outputs(reader)] = RECOMPUTE
    free = replace(problem, redo_ns=np.zeros_like(problem.redo_ns), ceiling=1 << 62)
    return evaluate(free, np.arange(problem.n_nodes, dtype=np.int32), flags).latency_ns


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
        plain_ns = without(subject)
        yield (
            f"fsdp: {peak / 2**30:.2f} GiB a rank, {plain_ns / 1e6:.1f} ms; {len(subject.captured.graph.ops)} operators"
            f" captured in {seconds:.1f} s"
        )
        yield HEAD
        for share in shares:
            yield plan_row(strategy.within((int(share * peak),), budget, device), subject, peak, plain_ns)
    usual_ns = computed(make, ranks, device)[1]
    for name, choose in CHECKPOINTING.items():
        its_peak, its_ns = computed(partial(checkpointed, make, choose), ranks, device)
        overhead = (its_ns - usual_ns) / plain_ns
        yield f"{name}: peak {its_peak / peak:.3f}, overhead {overhead:+.2%}; the plan at that peak:"
        with fake_world(ranks, 0):
            yield plan_row(strategy.within((its_peak,), budget, device), subject, peak, plain_ns)


def plan_row(planner: PlannedRanks, subject: Subject, peak: int, plain_ns: int) -> str:
    """The plan within the planner's limit."""
    started = time.perf_counter()
    found = planner.planned(subject)
    seconds = time.perf_counter() - started
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{planner.limits[0] / peak:6.2f} {'yes' if found.feasible else 'NO':>5} {found.peak / peak:6.3f}"
        f" {found.latency_ns / plain_ns - 1:+8.2%} {found.recomputed_ops:6} {found.swapped_bytes / 2**30:11.2f}"
        f" {seconds:6.1f} {rss:7.2f}  {found.fission or '-'}"
    )


def computed(make: Callable[[], Workload], ranks: int, device: str) -> tuple[int, int]:
    """Peak bytes of a rank under `fsdp`, and the nanoseconds of its operators without messages."""
    pace = StepTime(find_device(device), links_of(device))
    memory = predict_rank(distributed_strategy("fsdp"), make, ranks, 0, device="cuda", watched_by=pace)
    return (memory.predicted.tensor_bytes if memory.predicted else 0), pace.compute_ns


def checkpointed(make: Callable[[], Workload], choose: Callable[[int], Context | None]) -> Workload:
    """The workload with those of its layers checkpointed that have a context, by number."""
    work = make()
    for number, layer in enumerate(work.module.layers):  # type: ignore[arg-type]
        context = choose(number)
        if context is not None:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=context)
    return work


def selected() -> Any:
    """Contexts in which attention, every second product and reduce-scatters are kept."""
    seen = Counter[bool]()

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        name = operator.name()
        if name == "aten::mm":
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        else:
            kept = "attention" in name or "reduce_scatter" in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def nothing_kept() -> Any:
    """Contexts in which nothing is kept."""
    return nullcontext(), nullcontext()


CHECKPOINTING: Mapping[str, Callable[[int], Context | None]] = {
    "every layer checkpointed": lambda _: nothing_kept,
    "every second layer checkpointed": lambda number: nothing_kept if number % 2 == 0 else None,
    "selected operators kept": lambda _: selected,
}


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
