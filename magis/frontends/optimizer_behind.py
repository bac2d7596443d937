"""Count the memory of an optimizer that is called after a planned step, not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from magis.capture.optimizer_rule import step_apart
from magis.planner.subject import Subject
from magis.simulate.simulator import replay, rounded


@dataclass(frozen=True)
class Behind:
    """Memory of an optimizer that is called after a planned step: its state, and the peak of its own `step()` with all
    persistent tensors and gradients, in bytes."""

    state_bytes: int = 0
    step_bytes: int = 0
    note: str = ""

    def peak(self, of_step: int) -> int:
        """Return the peak bytes of the planned step followed by the optimizer's, given that of the planned step."""
        return max(of_step + self.state_bytes, self.step_bytes)


def behind_step(subject: Subject, optimizer: Optimizer | None, own: Mapping[str, nn.Parameter]) -> Behind:
    """Count the bytes of an optimizer called after a step that ends with gradients; `own` are parameters by name."""
    if optimizer is None:
        return Behind()
    captured = subject.captured
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    graded = {name: own[name] for name in captured.graded if id(own[name]) in mine}
    apart = step_apart(optimizer, graded, subject.kind)
    if apart is None:
        return Behind(note="; what its state and its step need is not counted")
    costs = subject.costs(subject.workspaces(apart.graph, runs=False))
    profile = replay(apart.graph, costs.workspace, deaths=apart.deaths, rounding=costs.rounding)
    trained = {f"parameter:{name}" for name in graded}
    stays = {s.id: s.nbytes for s in captured.graph.storages.values() if s.persistent}
    for value in captured.graph.inputs:
        if captured.graph.values[value].name in trained:
            stays.pop(captured.graph.values[value].storage, None)
    left = [each.nbytes for name, each in own.items() if name in captured.graded and name not in graded]  # gradients
    loss = captured.graph.values[captured.graph.outputs[0]].nbytes
    beside = sum(rounded(nbytes, costs.rounding) for nbytes in (*stays.values(), *left, loss))
    state = sum(rounded(nbytes, costs.rounding) for nbytes in apart.state_bytes)
    return Behind(state, profile.peak_bytes + beside)
