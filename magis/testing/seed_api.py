"""``setup_training_graph`` and ``run_optimization``: the seed's calls, on real capture and real execution."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from magis.capture import OptimizerSpec, Workload
from magis.cases.run_case import CaseRun
from magis.dtypes import check_dtype
from magis.errors import UsageError
from magis.graph import dump
from magis.plain_records import to_plain
from magis.planner.bench import Bench, check_device, default_device
from magis.planner.workload_source import Source, running_seconds
from magis.progress import on_stderr, shown_if_slow
from magis.report import append_rows, row_from_result, write_text_atomically
from magis.results import Case, CaseResult
from magis.testing.nn import SeedGraph, SeedOutput
from magis.units import is_number

DATA = Path("data")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,120}")


@dataclass(frozen=True)
class TrainingGraph:
    """A network and how a training step updates it. Nothing is built yet."""

    graph: SeedGraph
    update_weight: bool
    inplace: bool

    def make(self, seed: int) -> Workload:
        """Build the workload: with the seed's plain weight update, or gradients only."""
        work = self.graph.make(seed)
        return work if self.update_weight else replace(work, optimizer=OptimizerSpec("gradients"))


def setup_training_graph(
    graph: SeedGraph, output: SeedOutput, update_weight: bool = True, inplace: bool = False
) -> TrainingGraph:
    """Describe the training step of a network: loss on its output, backward, and weight update.

    ``update_weight`` False leaves the weights alone and keeps all gradients to the end. ``inplace`` governs point-wise
    operators only: whether the optimized step may write their results over inputs that die; weights are
    always updated in place. Raises UsageError when ``output`` is another network's.
    """
    if not isinstance(graph, SeedGraph):
        raise UsageError(
            f"G is a {type(graph).__name__}", hint="pass G and y as a builder of magis.testing.nn returns them"
        )
    if getattr(output, "graph", None) != graph.name:  # scripts are rarely type-checked: anything may come in
        raise UsageError(f"y is not the output of {graph.name}", hint="pass G and y as one builder returned them")
    return TrainingGraph(graph, bool(update_weight), bool(inplace))


def run_optimization(
    graph: TrainingGraph,
    name: str,
    mem_limit_ratio: float | None = None,
    lat_limit_ratio: float | None = None,
    time_budget: float | None = None,
    save_graph: bool = False,
    dump_file: IO[str] | None = None,
    dtype: str = "float32",
    device: str | None = None,
    search: str = "magis",
) -> CaseResult:
    """Capture the step with ``dtype``, optimize it under one limit, run and measure both steps where they fit.

    ``mem_limit_ratio`` is a share (0..1] of the un-optimized peak, ``lat_limit_ratio`` (>= 1) a multiple of the
    un-optimized latency; exactly one of them is given. ``time_budget`` caps the search in seconds, and running both
    steps as well, but never below a minute (10 minutes without it): what takes longer is simulated, and the note says
    so. ``search`` "paper" plans with the method as it was published. What takes over two seconds says so on
    standard error.
    ``save_graph``
    writes ``data/<name>.graph`` (text form, operators in schedule order) and ``data/<name>.json`` (the result).
    ``dump_file`` gets a row of results.csv, after a header if the file is empty. Default device: "cuda" where
    there is a GPU, else "cpu". Raises UsageError, in one line, for arguments that cannot be.
    """
    case = _case(graph, name, mem_limit_ratio, lat_limit_ratio, time_budget, dtype, device or default_device())
    case = replace(case, search=search)
    seconds = running_seconds(time_budget)
    source = Source(name, graph.make, dtype, case.device, case.seed, reuse=graph.inplace, running_seconds=seconds)
    with shown_if_slow(on_stderr(), name) as progress:
        run = CaseRun(case, Bench().keep((name, graph.graph.name), source), progress)
        result = run.result(None, None)
    if save_graph and run.graph is not None:
        DATA.mkdir(exist_ok=True)
        write_text_atomically(DATA / f"{name}.graph", dump(run.graph))
        write_text_atomically(DATA / f"{name}.json", json.dumps(to_plain(result), indent=1, sort_keys=True) + "\n")
    if dump_file is not None:
        append_rows(dump_file, [row_from_result(result)])
        dump_file.flush()
    return result


def _case(
    graph: TrainingGraph,
    name: str,
    memory: float | None,
    latency: float | None,
    seconds: float | None,
    dtype: str,
    device: str,
) -> Case:
    if not isinstance(graph, TrainingGraph):
        raise UsageError(f"G is a {type(graph).__name__}", hint="pass what setup_training_graph returned")
    if not _NAME.fullmatch(str(name)):
        raise UsageError(f"name {name!r} cannot be a file name", hint="use letters, digits, '.', '_', '-' and '+'")
    if (memory is None) == (latency is None):
        raise UsageError(
            f"mem_limit_ratio={memory!r} and lat_limit_ratio={latency!r}", hint="give exactly one of the two limits"
        )
    if memory is not None and not (is_number(memory) and 0 < memory <= 1):
        raise UsageError(
            f"mem_limit_ratio={memory!r}", hint="use a share of the un-optimized peak, above 0 and at most 1"
        )
    if latency is not None and not (is_number(latency) and latency >= 1):
        raise UsageError(f"lat_limit_ratio={latency!r}", hint="use a multiple of the un-optimized latency, at least 1")
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise UsageError(f"time_budget={seconds!r}", hint="use a positive number of seconds")
    check_device(device)
    check_dtype(dtype, device)
    return Case(
        model=name,
        strategy="magis",
        device=device,
        preset="paper",
        dtype=dtype,
        memory_ratio=memory,
        latency_ratio=latency,
        seconds=seconds,
    )
