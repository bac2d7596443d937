"""`magis+compile` beside inductor's own memory budget, measured: at equal time, who is leaner?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/inductor.py [model ...] [--rounds 15] [--preset small] [--budget 0.5]
        [--ratios 0.9 0.8 0.7 0.6 0.5 0.4 0.3] [--output FILE]

Plain training loops on the CPU, whose forward and loss are compiled. Theirs: `torch.compile` under torch's
``activation_memory_budget``. Ours: the backend "magis" with ``inductor`` at several ratios, so the same compiler with
another choice of what is kept for the backward. In both, each weight is updated as soon as its gradient is there, in a
hook of the backward. Peaks are the allocator's bytes of one step with all that stays, as shares of eager's; times are
medians of steps that take turns, as ratios to eager's. *ours at equal time* is the leanest of ours that is at most 1%
slower than theirs. Takes about two minutes a network, most of them the compiler's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from lib.program import arguments, head, printed

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the plugin does; before torch is loaded

import torch
from checkpointing import loop, medians
from torch._dynamo import config as dynamo
from torch._functorch import config as functorch

from magis.extensions.models.network_names import GATE_NAMES
from magis.models import PRESETS, get

HEAD = f"{'model':9} {'compiled':22} {'peak':>6} {'time':>6}"
EQUAL = 1.01
"""Times that differ by less are equal."""

Compiled = Callable[[Callable[[], Any]], Callable[[], Any]]


def of_torch(call: Callable[[], Any]) -> Callable[[], Any]:
    """Inductor with what torch's partitioner keeps."""
    return torch.compile(call, fullgraph=True, isolate_recompiles=True)


def of_plan(call: Callable[[], Any], ratio: float) -> Callable[[], Any]:
    """Inductor with what a plan keeps."""
    options = {"inductor": True, "memory_ratio": ratio}
    return torch.compile(call, fullgraph=True, backend="magis", options=options, isolate_recompiles=True)


def rows(
    name: str, *, preset: str, rounds: int, budget: float, ratios: list[float], leaner: list[bool]
) -> Iterator[str]:
    """The lines of a network; whether ours is leaner is noted."""
    work = get(name).build(preset, 0)
    with ExitStack() as stack:
        # the loops share one function: each is compiled on its own, not found among the codes of the others
        stack.enter_context(dynamo.patch(fail_on_recompile_limit_hit=True))
        torch.compiler.reset()
        loops = {"eager": loop(work, stack)}
        loops["inductor"] = loop(work, stack, early=True, compiled=of_torch)
        theirs = f"inductor, budget {budget:g}"
        with functorch.patch(activation_memory_budget=budget):
            loops[theirs] = loop(work, stack, early=True, compiled=of_torch)
        for ratio in ratios:
            loops[f"magis, ratio {ratio:g}"] = loop(work, stack, early=True, compiled=partial(of_plan, ratio=ratio))
        peaks = {what: each.peak for what, each in loops.items()}
        times = dict(zip(loops, medians(list(loops.values()), rounds), strict=True))
    for what in loops:
        yield f"{name:9} {what:22} {peaks[what] / peaks['eager']:6.3f} {times[what] / times['eager']:6.3f}"
    level = [what for what in loops if what.startswith("magis") and times[what] <= EQUAL * times[theirs]]
    best = min(level, key=peaks.__getitem__, default=None)
    leaner.append(best is not None and peaks[best] < peaks[theirs])
    share = "none" if best is None else f"{best} ({peaks[best] / peaks[theirs] - 1:+.1%})"
    yield f"{name:9} ours at equal time: {share}"


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(
        __doc__,
        names=list(GATE_NAMES),
        rounds=15,
        budget=0.5,
        ratios=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
        output=Path,
    )
    parser.add_argument("--preset", default="small", choices=PRESETS)
    asked = parser.parse_args()
    leaner: list[bool] = []
    of_name = partial(
        rows, preset=asked.preset, rounds=asked.rounds, budget=asked.budget, ratios=asked.ratios, leaner=leaner
    )
    table = chain(head(f"{torch.get_num_threads()} threads"), (HEAD,), chain.from_iterable(map(of_name, asked.names)))

    def told() -> Iterator[str]:
        yield f"leaner at equal time on {sum(leaner)} of {len(leaner)} networks"

    printed(chain(table, told()), asked.output)


if __name__ == "__main__":
    main()
