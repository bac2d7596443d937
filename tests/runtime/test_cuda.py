"""The CUDA backend on a real GPU: what the tests with devices on paper claim, and what those cannot know."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.lib.chrome_trace import write_trace
from magis.capture.workload import Workload
from magis.cases.comparison import SAME, compare
from magis.cases.run_case import run_case
from magis.graph import Graph, verify
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.results import Case
from magis.rewrite.realize import realize
from magis.runtime.measure import free_device_memory, others_memory
from magis.runtime.steps import GraphStep
from magis.runtime.swap_streams import CudaRuntime
from magis.runtime.timing import alone, host_clock
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.problem import KEEP, RECOMPUTE, SWAP
from magis.units import MIB
from tests.api.nets import Block

pytestmark = pytest.mark.cuda

DEVICE = "cuda"
MEMORY_ERROR = 0.01
RESERVED_ERROR, RESERVED_SLACK = 0.10, 42 * MIB
"""Reserved bytes may be off by a tenth and by two blocks of 20 MiB with a small one: the allocator's start differs."""
CYCLES = 20_000_000
"""Of the GPU's clock: about ten milliseconds."""
ADAMW, MOMENTUM = OptimizerSpec("adamw", weight_decay=0.01), OptimizerSpec("momentum", lr=0.01, momentum=0.9)


def blocks(rule: OptimizerSpec, batch: int = 16384) -> Workload:
    """Four residual blocks, 256 wide, on 16384 rows: activations of 16 and 64 MiB."""
    body = nn.Sequential(nn.Linear(64, 256), *(Block(256) for _ in range(4)), nn.Linear(256, 10))
    names = tuple(str(index) for index in range(1, 5))
    inputs, targets = (torch.randn(batch, 64),), (torch.randint(10, (batch,)),)
    return Workload("blocks", body.train(), inputs, targets, F.cross_entropy, rule, blocks=names)


def subject_of(rule: OptimizerSpec = ADAMW) -> Subject:
    def make(seed: int) -> Workload:
        torch.manual_seed(seed)
        return blocks(rule)

    return Subject(Source("blocks", make, "float32", DEVICE, 0))


class FastLink:
    """The subject's costs, but for a link so fast that nearly everything can be swapped."""

    link_bytes_per_s = 1e15

    copy_ns = 0

    def __init__(self, subject: Subject) -> None:
        self.nanoseconds = subject.roofline.nanoseconds
        self.workspace = subject.roofline.workspace
        self.rounding = subject.roofline.rounding


def plan(subject: Subject, flag: int) -> Graph:
    """The step with one decision for everything that it is possible for."""
    compiled = compile_problem(subject.normal, FastLink(subject))
    flags = np.full(compiled.problem.n_storages, flag, dtype=np.int8)
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    graph = realize(compiled, expand(compiled.problem, order, flags))
    verify(graph)
    return graph


def targets(graph: Graph) -> set[str]:
    return {op.target for op in graph.ops}


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Kernels that give the same numbers every time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize(
    ("flag", "target"), [(KEEP, "aten.addmm.default"), (SWAP, "magis.load"), (RECOMPUTE, "magis.rng_enter")]
)
def test_numbers_are_eagers(flag: int, target: str) -> None:
    """Swaps, recomputed random numbers, neither: bit by bit over three steps."""
    subject = subject_of()
    graph = plan(subject, flag)
    assert target in targets(graph)
    assert compare(subject.eager(), subject.generated(graph), 0) == SAME


class SlowCopies(CudaRuntime):
    """Whatever goes to a copy stream comes late."""

    @contextmanager
    def running_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with super().running_on(stream):
            torch.cuda._sleep(CYCLES)
            yield


class SlowOperators(CudaRuntime):
    """Whatever goes to the compute stream after a copy was asked for comes late."""

    @contextmanager
    def running_on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with super().running_on(stream):
            yield
        torch.cuda._sleep(CYCLES)


def swapping(runtime: CudaRuntime) -> tuple[Subject, GraphStep]:
    """A step that swaps all it can, on such a device."""
    subject = subject_of()
    work, graph = subject.fresh(), plan(subject, SWAP)
    step = GraphStep(graph, work.module, work.inputs, work.targets, work.optimizer, device=DEVICE, runtime=runtime)
    return subject, step


@pytest.mark.parametrize("runtime", [SlowCopies, SlowOperators])
def test_one_stream_may_lag_behind(runtime: type[CudaRuntime]) -> None:
    subject, step = swapping(runtime(DEVICE))
    assert compare(subject.eager(), step, 0) == SAME


@pytest.mark.parametrize("flag", [KEEP, SWAP, RECOMPUTE])
def test_memory_is_as_simulated(flag: int) -> None:
    subject = subject_of()
    graph = plan(subject, flag)
    step = subject.generated(graph)
    for _ in range(2):
        step.prepare()
        step.run()
    measured, simulated = subject.measure(step), subject.simulate_graph(graph)
    assert abs(simulated.peak_bytes - measured.peak_bytes) <= MEMORY_ERROR * measured.peak_bytes
    assert abs(simulated.tensor_bytes - measured.tensor_bytes) <= MEMORY_ERROR * measured.tensor_bytes
    predicted = subject.reserved_bytes(graph)
    assert predicted is not None
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= measured.peak_bytes
    assert abs(predicted - measured.reserved_bytes) <= RESERVED_ERROR * predicted + RESERVED_SLACK


def test_the_originals_memory_is_as_simulated() -> None:
    subject = subject_of()
    measured, simulated = subject.original_measured, subject.original
    assert abs(simulated.peak_bytes - measured.peak_bytes) <= MEMORY_ERROR * measured.peak_bytes


def test_events_and_the_hosts_clock_agree_on_a_long_step() -> None:
    big = torch.rand(8192, 8192, device=DEVICE)

    def step() -> None:
        for _ in range(10):
            torch.mm(big, big)

    def waited() -> None:
        step()
        torch.cuda.synchronize()

    by_events = float(np.median(alone(step, 9, DEVICE)))
    by_host = float(np.median([host_clock(waited) for _ in range(9)]))
    assert by_events == pytest.approx(by_host, rel=0.1)


def test_the_host_is_not_held_up_by_swaps() -> None:
    """With copies that take a tenth of a second in all, handing out the step takes a fraction of that."""
    _, step = swapping(SlowCopies(DEVICE))
    for _ in range(2):
        step.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step.run()
    handed_out = time.perf_counter() - start
    torch.cuda.synchronize()
    assert handed_out < 0.5 * (time.perf_counter() - start)


def test_a_whole_case() -> None:
    result = run_case(Case("tests.api.nets:blocks", "magis", DEVICE, "small", memory_ratio=0.7, timing_rounds=8))
    assert result.numbers in (SAME, "within tolerance")
    assert result.ratio is not None
    assert 0.5 < result.ratio.ratio < 5.0
    for step in (result.original, result.optimized):
        assert step.measured is not None
        assert abs(step.simulated.peak_bytes - step.measured.peak_bytes) <= MEMORY_ERROR * step.measured.peak_bytes
        assert step.measured_reserved_bytes is not None


def test_an_original_that_does_not_fit() -> None:
    """The allocator is given too little for the original: a real error, after which the optimized step runs."""
    subject = subject_of()
    middle = subject.original.peak_bytes * 8 // 10 + 64 * MIB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((middle + torch.cuda.memory_allocated()) / total)
    try:
        bench = Bench()
        case = Case("tests.runtime.test_cuda:large", "magis", DEVICE, "small", memory_ratio=0.5, timing_rounds=8)
        result = run_case(case, cache=bench)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not result.original.is_measured
    assert result.optimized.is_measured
    assert "ran out of memory" in result.note


def large() -> Workload:
    """The step of these tests as a model of its own."""
    return blocks(ADAMW)


def test_kernels_and_copies_are_in_the_trace(tmp_path: Path) -> None:
    subject = subject_of()
    path = tmp_path / "step.json"
    write_trace(path, subject.generated(plan(subject, SWAP)), DEVICE)
    kinds = {event.get("cat") for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]}
    assert {"cpu_op", "kernel", "gpu_memcpy"} <= kinds


def test_memory_of_others() -> None:
    total = torch.cuda.mem_get_info()[1]
    assert 0 <= others_memory(DEVICE) < total
    assert others_memory(DEVICE) + free_device_memory(DEVICE) <= total
