"""How planning grows with the step: Llama-like decoders of ever more layers, or networks of the gate, stage by stage.

    python benchmarks/scale.py [network ...] [--layers 8 32 80 160] [--device sim:h200] [--memory 0.6]
        [--profile FILE] [--output FILE]

Columns: operators of the step and nodes of the search; processor seconds (they mean the same on a busy machine) of the
capture, then of each stage of planning: normal form, merging of calls, search without fission, loops, the front of all
limits where it can win; of all planning together, from the captured graph to the verified plan; latency above eager's;
plans judged; largest resident memory so far. Below: the exponent of the growth between the first and the last row,
ln(t2 / t1) / ln(n2 / n1). With ``--profile`` the last row is planned under cProfile, whose figures go into the file.
"""

from __future__ import annotations

import cProfile
import math
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from lib.llama import Llama, Sizes

from magis.capture.workload import Workload
from magis.extensions.models.building import REAL, numbered, token_batch, token_loss, training_step
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench
from magis.planner.planning import plan
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.results import Case
from magis.simulate.compiled_problem import compile_problem

WARMING = 2
"""Layers of a decoder that is planned first, so that compiled code is loaded."""
BATCH = 8
SIZES = Sizes(length=512, width=1024, inner=2816, heads=16, groups=16, vocabulary=32000)
STAGES = {
    "normal": "",
    "rules": "",
    "search": "searching",
    "loops": "searching with parts of the step as loops",
    "front": "searching among plans for all limits",
}
"""Columns, and what a search says when it comes to one."""
HEAD = (
    f"{'network':>10} {'operators':>9} {'nodes':>6} {'capture':>8} {'normal':>7} {'rules':>7} {'search':>7}"
    f" {'loops':>7} {'front':>7} {'plan s':>7} {'overhead':>8} {'judged':>7} {'RSS GB':>7}"
)
T = TypeVar("T")


def llama(layers: int, seed: int) -> Workload:
    """The decoder with a batch of random tokens, trained by AdamW."""
    batch = partial(token_batch, BATCH, SIZES.length, SIZES.vocabulary)
    optimizer = OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01)
    name, blocks = f"llama-{layers}", numbered("layers", layers)
    return training_step(name, REAL, seed, partial(Llama, layers, SIZES), batch, token_loss, blocks, optimizer)


@dataclass
class Clock:
    """Processor seconds by stage."""

    spent: dict[str, float] = field(default_factory=dict)

    def of(self, name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        found = work()
        self.spent[name] = time.process_time() - start
        return found


class StageTimes:
    """Told what a search is at, it notes when a stage begins."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def __call__(self, text: str) -> None:
        self.begun.setdefault(text.split(", best so far", maxsplit=1)[0], time.process_time())

    def seconds(self) -> dict[str, float]:
        """Processor seconds of each stage up to now, in the order in which they came."""
        times = [*self.begun.values(), time.process_time()]
        spent = {text: end - begin for text, begin, end in zip(self.begun, times, times[1:], strict=False)}
        return {name: spent[text] for name, text in STAGES.items() if text in spent}


def row(name: str, subject: Subject, memory: float, profile: Path | None) -> tuple[int, float, str]:
    """Operators, processor seconds of planning, and the line of one step."""
    clock = Clock()
    captured = clock.of("capture", lambda: (subject.captured, subject.original)[0])
    eager_ns = subject.original_ns
    stages, profiler = StageTimes(), cProfile.Profile()
    start = time.process_time()
    if profile is not None:
        profiler.enable()
    clock.of("normal", lambda: subject.normal)
    clock.of("rules", lambda: subject.aggregated)
    limit = int(memory * subject.original.peak_bytes)
    found = plan(
        subject, memory_limit=limit, latency_limit_ns=None, budget=None, seconds=None, seed=0, stored=None, tell=stages
    )
    profiler.disable()
    whole = time.process_time() - start
    if profile is not None:
        profiler.dump_stats(profile)
    spent = clock.spent | stages.seconds()
    nodes = compile_problem(subject.normal, subject.costs({}), reuse=True).problem.n_nodes
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    cells = " ".join(f"{spent.get(stage, 0.0):7.2f}" for stage in STAGES)
    overhead = f"{found.latency_ns / eager_ns - 1:8.2%}" if found.feasible else f"{'-':>8}"
    operators = len(captured.graph.ops)
    line = f"{name:>10} {operators:9} {nodes:6} {spent['capture']:8.2f} {cells} {whole:7.2f} {overhead}"
    return operators, whole, f"{line} {found.states:7} {rss:7.2f}"


def rows(names: list[str], layers: list[int], device: str, memory: float, profile: Path | None) -> Iterator[str]:
    """The lines of all steps, and the exponent of the decoders'."""

    def decoder(count: int) -> Subject:
        return Subject(Source(f"llama-{count}", partial(llama, count), "bfloat16", device, 0))

    row("warming", decoder(WARMING), memory, None)
    for name in names:
        yield row(name, Bench().subject(Case(name, "magis", device, "paper")), memory, profile)[2]
    grown: list[tuple[int, float]] = []
    for count in layers if not names else ():
        profiled = profile if count == layers[-1] else None
        operators, seconds, line = row(f"llama-{count}", decoder(count), memory, profiled)
        grown.append((operators, seconds))
        yield line
    if len(grown) > 1:
        (n1, t1), (n2, t2) = grown[0], grown[-1]
        yield f"exponent: {math.log(t2 / t1) / math.log(n2 / n1):.2f}"


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(__doc__, layers=[8, 32, 80, 160], device="sim:h200", memory=0.6, profile=Path, output=Path)
    parser.add_argument("names", nargs="*", metavar="network")
    asked = parser.parse_args()
    found = rows(asked.names, asked.layers, asked.device, asked.memory, asked.profile)
    printed(chain(head(), (HEAD,), found), asked.output)


if __name__ == "__main__":
    main()
