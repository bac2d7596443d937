"""Steps as recordings of a device that exists on paper: what is recorded, when, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magis.aten.optimizers import OptimizerSpec
from magis.backend import replayed
from magis.backend.replayed import ReplayedStep, obstacle
from magis.backend.steps import GraphStep
from magis.errors import MagisError
from magis.ir import Graph, verify
from magis.rewrite.normalize import functionalize
from magis.rewrite.realize import realize
from magis.simulate.compile import compile_problem
from magis.simulate.evaluator import expand
from magis.simulate.events import RECOMPUTE, SWAP
from tests.backend.simulated_gpu import SimulatedGpu
from tests.backend.test_streams import Costs
from tests.nets import ADAMW, Built, Net, rows
from tests.oracles import captured, differences, history, one_thread

MOMENTUM = OptimizerSpec("momentum", lr=0.1, momentum=0.9, weight_decay=0.1)


class Recorded(TorchDispatchMode):
    """Operators with the very tensors that they took and made, which stay alive: a recording's memory is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, dict(kwargs or {}), tree_leaves(result)))
        return result

    def replay(self) -> None:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, made in self.calls:
                for before, now in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
                        before.copy_(now)


class PaperRecorder:
    """Records what is run, and undoes it: a device that records runs nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tensors: tuple[Tensor, ...] = ()
        self.made: Recorded | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.log.append("aside")
        yield

    def record(self, run: Callable[[], None]) -> PaperRecorder:
        self.log.append("record")
        before, state = [tensor.detach().clone() for tensor in self.tensors], torch.get_rng_state()
        self.made = Recorded()
        with self.made:
            run()
        with torch.no_grad():
            for tensor, old in zip(self.tensors, before, strict=True):
                tensor.copy_(old)
        torch.set_rng_state(state)
        return self

    def replay(self) -> None:
        self.log.append("replay")
        assert self.made is not None
        self.made.replay()


def net(rule: OptimizerSpec) -> Built:
    return Net(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)),
        rows(6, 4), rows(6, 2), rule=rule,
    ).build()  # fmt: skip


def plan(built: Built, flag: int | None) -> Graph:
    graph = functionalize(captured(built).graph)
    if flag is None:
        return graph
    compiled = compile_problem(graph, Costs())
    flags = np.full(compiled.problem.n_storages, flag, dtype=np.int8)
    order = np.arange(compiled.problem.n_nodes, dtype=np.int32)
    found = realize(compiled, expand(compiled.problem, order, flags))
    verify(found)
    return found


def step_of(graph: Graph, built: Built, gpu: SimulatedGpu | None = None) -> GraphStep:
    return GraphStep(graph, copy.deepcopy(built.module), built.inputs, built.targets, built.rule, runtime=gpu)


def replaying(graph: Graph, built: Built, recorder: PaperRecorder, gpu: SimulatedGpu | None = None) -> ReplayedStep:
    step = step_of(graph, built, gpu)
    recorder.tensors = step.tensors
    return ReplayedStep(step, graph, built.rule, recorder, warm_up=2)


@pytest.mark.parametrize("flag", [None, SWAP])
def test_replays_do_what_runs_do(flag: int | None) -> None:
    """Six steps: weights, statistics, momentum, random numbers and loss are those of the step as it is."""
    with one_thread():
        built = net(MOMENTUM)
        graph = plan(built, flag)
        assert any(op.random for op in graph.ops)
        assert (flag is None) != any(op.target == "magis.load" for op in graph.ops)
        recorder = PaperRecorder()
        found = history(replaying(graph, built, recorder, SimulatedGpu()), 6)
        assert differences(history(step_of(graph, built), 6), found) == []
        assert recorder.log == ["aside", "aside", "record", "replay", "replay", "replay", "replay"]


@pytest.mark.parametrize("rule", [ADAMW, OptimizerSpec("adam")])
def test_numbers_that_change_would_be_wrong_and_are_refused(
    rule: OptimizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_thread():
        built = net(rule)
        graph = plan(built, None)
        with pytest.raises(MagisError, match=r"replayed: adamw? takes another bias_correction2_sqrt at") as no:
            replaying(graph, built, PaperRecorder())
        assert "\n" not in str(no.value)
        monkeypatch.setattr(replayed, "obstacle", lambda _graph, _rule: None)
        found = history(replaying(graph, built, PaperRecorder()), 6)
        assert differences(history(step_of(graph, built), 6), found) != []


def test_states_of_the_generator_on_the_host_are_refused() -> None:
    built = net(MOMENTUM)
    graph = plan(built, RECOMPUTE)
    assert any(op.target == "magis.rng_enter" for op in graph.ops)
    with pytest.raises(MagisError, match="generator's state on the host"):
        replaying(graph, built, PaperRecorder())


def test_rates_that_nobody_takes_do_not_matter() -> None:
    """Inference and gradients alone have no update; the rates of an optimizer without a trained weight are unused."""
    for kind in ("none", "gradients"):
        built = net(OptimizerSpec(kind))
        assert obstacle(plan(built, None), built.rule) is None
    assert obstacle(plan(net(OptimizerSpec("none")), None), ADAMW) is None


def test_a_tensor_that_has_moved_is_noticed() -> None:
    built = net(MOMENTUM)
    step = replaying(plan(built, None), built, PaperRecorder())
    history(step, 3)
    weight = step.module[0].weight
    weight.data = weight.data.clone()
    with pytest.raises(MagisError, match="lies no longer where it was"):
        step.run()


def test_the_copy_stream_has_joined_when_the_recording_ends() -> None:
    """Whatever the copy stream was given since the recording began, the compute stream has waited for it."""
    with one_thread():
        built = net(MOMENTUM)
        graph = plan(built, SWAP)
        gpu, recorder = SimulatedGpu(), PaperRecorder()
        step = replaying(graph, built, recorder, gpu)
        history(step, 2)
        made = len(gpu.pinned_bytes)
        start = len(gpu.actions)
        history(step, 1)
        during = gpu.actions[start:]
        copied = [action.records for action in during if action.stream == 1 and action.records is not None]
        joined = [action.awaits for action in during if action.stream == 0 and action.awaits is not None]
        assert copied
        assert max(joined) == max(copied)  # one stream: the last event stands for all
        assert len(gpu.pinned_bytes) == made  # no memory of the host is asked for while it records


def test_what_the_copy_stream_was_left_with_is_joined() -> None:
    gpu = SimulatedGpu()
    built = net(MOMENTUM)
    step = step_of(plan(built, None), built, gpu)
    step.finish()
    assert gpu.actions == []  # nothing to wait for: an event from outside of a recording could not be waited for
    parked = step._host.store(torch.ones(3))
    step.finish()
    assert [action.awaits for action in gpu.actions if action.stream == 0][-1] == parked.stored  # type: ignore[union-attr]


def test_a_step_must_run_before_it_is_recorded() -> None:
    built = net(MOMENTUM)
    graph = plan(built, None)
    with pytest.raises(ValueError, match="must run before it is recorded"):
        ReplayedStep(step_of(graph, built), graph, built.rule, PaperRecorder(), warm_up=0)


def test_the_side_stream_waits_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What warms up on a side stream comes after what was there, and before what comes next."""
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        said.append(f"on {which.name}")
        yield
        said.append(f"off {which.name}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with replayed._Aside(torch.device("cuda"), Stream("side")):
        said.append("run")
    assert said == ["side waits for current", "on side", "run", "off side", "current waits for side"]
