"""A generated step as one recording of the device (a CUDA graph): replayed without Python, operator by operator.

Off unless asked for. The recording fixes everything that the host decides: addresses, Python numbers, the order of
streams. So a step is refused whose numbers change from one run to the next, or that reads and sets the generator's
state on the host. Random operators are fine: torch hands the generator's place in its sequence to each replay.

What is recorded must wait for all that it starts. A generated step waits for each of its copies (``streams``), so the
copy stream has joined the recording at its end; ``finish`` makes sure of it.

Two things differ from the step as it is: results lie in the same memory every time, which the next run overwrites; and
the memory of the step stays with the recording between runs. Peaks are therefore measured on the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from magis.aten import optimizers
from magis.aten.averages import is_share
from magis.aten.expect import EXPECT
from magis.aten.optimizers import OptimizerSpec
from magis.aten.states import GET_STATE, SEED, SEED_MADE, SET_STATE
from magis.backend.steps import GraphStep
from magis.backend.turns import Turn
from magis.errors import MagisError
from magis.ir import Const, Graph, every_op

__all__ = ["WARM_UP", "CudaRecorder", "Recorder", "Recording", "ReplayedStep", "obstacle"]

WARM_UP = 3
"""Runs as they are, on another stream, before the one that is recorded: libraries set themselves up in those."""

_ON_THE_HOST = ("magis.rng_save", "magis.rng_enter", "magis.rng_leave", GET_STATE, SET_STATE, SEED, SEED_MADE, EXPECT)


class Recording(Protocol):
    """What a stream was given, to be given to it again: ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Run it once more."""


class Recorder(Protocol):
    """What recording needs of a device."""

    def aside(self) -> AbstractContextManager[object]:
        """The block runs on a stream of its own, after what came before it and before what comes after it."""

    def record(self, run: Callable[[], None]) -> Recording:
        """Everything that ``run`` gives to the device, which does not run now."""


class CudaRecorder:
    """A GPU by way of ``torch.cuda``."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._side = torch.cuda.Stream(self._device)

    def aside(self) -> AbstractContextManager[object]:
        return _Aside(self._device, self._side)

    def record(self, run: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # Synchronizes, collects garbage and empties the cache before it starts; registers the default generator.
        with torch.cuda.graph(graph, stream=self._side):
            run()
        return graph


class _Aside:
    """A block on a side stream that waits for the current one, and that the current one waits for afterwards."""

    def __init__(self, device: torch.device, side: Any) -> None:
        self._around: Any = torch.cuda.current_stream(device)
        self._side = side
        self._context = torch.cuda.stream(side)

    def __enter__(self) -> None:
        self._side.wait_stream(self._around)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
        self._around.wait_stream(self._side)


def obstacle(graph: Graph, rule: OptimizerSpec) -> str | None:
    """Why the step cannot be recorded, in one line; None if it can."""
    first, second = optimizers.scalars(rule, 1), optimizers.scalars(rule, 2)
    for name in sorted({name for op, _ in every_op(graph) for name in op.scalars()}):
        if is_share(name):
            return "a batch norm averages over all batches (momentum=None), and a recording has one share of the last"
        if first[name] != second[name]:
            return (
                f"{rule.kind} takes another {name} at every step ({first[name]:.6g}, then {second[name]:.6g}), and a "
                "recording has one"
            )
    for op, _ in every_op(graph):
        if op.target in _ON_THE_HOST:
            return f"{op.target} reads or sets the generator's state on the host, which a recording leaves out"
        for arg in (*op.args, *(arg for _, arg in op.kwargs)):
            if isinstance(arg, Const) and arg.kind == "generator":
                return f"{op.target} draws from a generator of the step's own, which a recording would not move on"
    return None


class ReplayedStep:
    """A generated step that runs as it is ``warm_up`` times, is recorded then, and replayed from there on.

    Every ``run`` is one step, whichever way. Raises MagisError for a step that cannot be recorded, and when a tensor
    that it works on has moved since.
    """

    def __init__(
        self,
        step: GraphStep,
        graph: Graph,
        rule: OptimizerSpec,
        recorder: Recorder | None = None,
        *,
        warm_up: int = WARM_UP,
    ) -> None:
        why = obstacle(graph, rule)
        if why is not None:
            raise MagisError(f"the step cannot be replayed: {why}", hint="run it without replay")
        if warm_up < 1:
            raise ValueError(f"a step must run before it is recorded, not {warm_up} times: its buffers are made then")
        self.module = step.module
        self.generators = step.generators
        self._step = step
        self._recorder = recorder if recorder is not None else CudaRecorder()
        self._warm_up = warm_up
        self._runs = 0
        self._recording: Recording | None = None
        self._places: tuple[int, ...] = ()

    def prepare(self) -> None:
        """As the step's own, until it is recorded: a recording checks by itself where its tensors lie."""
        if self._recording is None:
            self._step.prepare()

    def run(self) -> Tensor:
        if self._runs < self._warm_up:
            with self._recorder.aside():
                self._step.run()
        else:
            if self._recording is None:
                self._places = self._now()
                self._recording = self._recorder.record(self._record)
            elif self._now() != self._places:
                raise MagisError(
                    "a tensor of the step lies no longer where it was when the step was recorded",
                    hint="make the step again after moving or replacing the module's tensors",
                )
            self._recording.replay()
        self._runs += 1
        return self._step.results()[0]

    def _record(self) -> None:
        self._step.run()
        self._step.finish()

    def _now(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._step.tensors)

    def run_in_turns(self, turn: Turn) -> Tensor:
        """A replay cannot be interrupted: the turn comes after it."""
        result = self.run()
        turn()
        return result

    def results(self) -> tuple[Tensor, ...]:
        return self._step.results()

    def state(self) -> Mapping[str, Tensor]:
        return self._step.state()
