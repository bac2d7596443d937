"""From a module, an example batch and a limit to a plan, and the plan as a file: the inside of `magis.optimize`."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture import OptimizerSpec, Workload
from magis.capture.eager_run import Heard
from magis.capture.optimizer_rule import step_apart
from magis.capture.python_state import deep_copy
from magis.capture.refusals import BranchError
from magis.capture.side_effects import DrawError, observe_step
from magis.capture.snapshot import Reads
from magis.capture.workload import Batch, own_loss, with_keywords
from magis.errors import MagisError, UsageError
from magis.frontends.branching import check_outlines, outline
from magis.frontends.fitting import latency_ratio_of
from magis.frontends.optimizer_state import Guards
from magis.graph import Graph, Value, dump, parse, verify
from magis.ops.call import undone
from magis.ops.generators import generators_kept, seed_all
from magis.planner.kept_plans import foreign_operator
from magis.planner.planning import plan
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.report import write_text_atomically
from magis.results import Case
from magis.simulate.simulator import replay, rounded
from magis.units import format_bytes, format_milliseconds, is_number, parse_bytes, share_of


@dataclass(frozen=True)
class Behind:
    """What an optimizer that runs by itself behind a step adds: its state, and the peak of its own step with all that
    stays and every gradient."""

    state_bytes: int = 0
    step_bytes: int = 0
    note: str = ""

    def peak(self, of_step: int) -> int:
        """The peak of both, one after the other."""
        return max(of_step + self.state_bytes, self.step_bytes)


def behind_step(subject: Subject, optimizer: Optimizer | None, own: Mapping[str, nn.Parameter]) -> Behind:
    """What an optimizer adds to a step that stops at gradients; `own` are the module's parameters by name."""
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


OTHER = 20261123
"""Seeds the generators for another draw, to see what drawing changes."""
STALE = "keeps results of the step that was planned, not of the last one: leave tensors in attributes of modules"
AUTOCAST = {None: "", torch.bfloat16: "amp-bfloat16", torch.float16: "amp-float16"}


@dataclass(frozen=True)
class Limits:
    """One limit, and how long to search for what keeps it."""

    memory_ratio: float | None = None
    memory_bytes: int | None = None
    latency_ratio: float | None = None
    budget: int | None = None
    seconds: float | None = None
    slack: float = Case.slack

    def bytes_of(self, original: int) -> int | None:
        """The memory limit, for a step whose original has this peak."""
        return self.memory_bytes if self.memory_ratio is None else share_of(self.memory_ratio, original)


@dataclass(frozen=True)
class PlanFigures:
    """Peaks of the original and the planned step, in bytes, and their latencies."""

    original_bytes: int
    planned_bytes: int
    limit_bytes: int | None
    latency_ratio: float
    """Predicted, by operators' times on the device: planned / original."""

    @property
    def memory_ratio(self) -> float:
        return self.planned_bytes / max(1, self.original_bytes)


@dataclass(frozen=True)
class PlanReport(PlanFigures):
    """What a step was planned to need. Bytes are peaks with everything that stays (weights, optimizer, batch)."""

    recomputed_ops: int
    swapped_bytes: int
    fission: str
    """What runs in parts, in words; empty: nothing does."""
    update: str
    """Where the weight update happens, in words."""
    seconds: float
    """What the search took."""

    def __str__(self) -> str:
        peaks = f"{format_bytes(self.planned_bytes)}, eager {format_bytes(self.original_bytes)}"
        lines = [
            f"peak memory  {peaks} (ratio {self.memory_ratio:.3f})",
            f"latency      {self.latency_ratio:.3f} times eager's, predicted",
            f"recomputed   {self.recomputed_ops} operators",
            f"swapped      {format_bytes(self.swapped_bytes)}",
            f"in parts     {self.fission or 'nothing'}",
            f"update       {self.update}",
            f"search       {format_milliseconds(1000 * self.seconds)}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan for batches like one."""

    graph: Graph
    graded: tuple[str, ...]
    """Parameters with a gradient, in the order in which the graph returns them (where it does)."""
    digest: str
    """Of the captured step: a plan holds for this step alone (the outline, where its forward draws on the host)."""
    rule: OptimizerSpec
    report: PlanReport
    guards: Guards
    cached: Mapping[str, Tensor]
    """Tensors that caches of functions hold, by their names in the graph."""
    counted: tuple[tuple[str, int], ...]
    """Numbers that the forward counts on: path from its module (`model`) or loss (`loss`), and by how much."""
    results: tuple[str, ...]
    """Attributes of modules in which the forward leaves tensors: results of the graph, behind the loss."""
    drawn: bool
    """Whether another step may be another graph, by what its forward draws on the host."""


def planned(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Batch,
    rule: OptimizerSpec,
    limits: Limits,
    *,
    device: str,
    autocast: torch.dtype | None,
    update: str,
    optimizer: Optimizer | None = None,
    graph: Graph | None = None,
    expected: str = "",
    known: Mapping[str, Planned] | None = None,
) -> Planned | None:
    """Capture the step and plan it; or take `graph`, a plan made earlier for the step with the digest `expected`.

    `optimizer` is one that runs by itself behind the step: bytes are of both. `known` are plans of this step by
    digest: one of the same graph holds again. None where the forward draws on the host and the update is part of the
    step, which parameters of layers that are left out would miss.
    Raises CaptureError for a step that is no single static graph, UsageError for a limit that no plan is found for.
    """
    subject = subject_now(module, loss_fn, batch, rule, device, autocast, limits.slack)
    cast = None if autocast is None else str(autocast).removeprefix("torch.")
    reads = _observed(subject, cast)
    if reads.stale:
        warnings.warn(f"{reads.stale[0]} {STALE}", stacklevel=2)
    _ = subject.conformance
    captured = subject.captured
    guards = Guards(module, loss_fn, batch, reads, captured.contents)
    if captured.drawn and rule.kind != "gradients":
        return None
    if captured.drawn:
        with generators_kept():
            seed_all(OTHER)
            check_outlines(captured.graph, subject_now(module, loss_fn, batch, rule, device, autocast).captured.graph)
    behind = behind_step(subject, optimizer, dict(with_keywords(module, batch).named_parameters()))
    update = f"{update}{behind.note}"
    digest = outline(captured.graph) if captured.drawn else subject.digest
    made = partial(
        Planned, graded=captured.graded, digest=digest, rule=rule, guards=guards, cached=captured.cached,
        counted=reads.counted, results=captured.results, drawn=captured.drawn,
    )  # fmt: skip
    same = (known or {}).get(digest)
    if same is not None:
        return made(graph=same.graph, report=replace(same.report, update=update))
    if graph is not None and digest != expected:
        raise UsageError(
            "the saved plan is of another step: its model, loss, optimizer or batch differ", hint="optimize again"
        )
    original = behind.peak(subject.original.peak_bytes)
    limit = limits.bytes_of(original)
    if graph is not None:
        _check_fits(graph, captured.graph)
        peak = behind.peak(subject.simulate_graph(graph).peak_bytes + _kept_bytes(graph))
        ratio = latency_ratio_of(subject, subject.latency_ns(graph))
        report = PlanReport(original, peak, limit, ratio, 0, 0, "as saved", update, 0.0)
        return made(graph=graph, report=report)
    latency_limit = share_of(limits.latency_ratio, subject.latency_ns(subject.captured.original.graph))
    found = plan(
        subject,
        memory_limit=None if limit is None else max(1, limit - behind.state_bytes - _kept_bytes(captured.graph)),
        latency_limit_ns=latency_limit,
        budget=limits.budget,
        seconds=limits.seconds,
        seed=0,
        stored=None,
    )
    peak = behind.peak(found.peak + _kept_bytes(found.graph))
    if limit is not None and (peak > limit or not found.feasible):
        raise UsageError(
            f"no plan found that needs at most {format_bytes(limit)}: the best needs {format_bytes(peak)}, none"
            f" less than {format_bytes(behind.peak(subject.lower_bound))}, eager {format_bytes(original)}",
            hint="raise the limit",
        )
    report = PlanReport(
        original,
        peak,
        limit,
        latency_ratio_of(subject, found.latency_ns),
        found.recomputed_ops,
        found.swapped_bytes,
        found.fission,
        update,
        found.seconds,
    )
    return made(graph=found.graph, report=report)


def _observed(subject: Subject, autocast: str | None) -> Reads:
    heard: Heard | None = None
    draws = False
    while True:
        try:
            return observe_step(subject.workload, autocast, heard, draws=draws)
        except BranchError:
            if heard is not None:
                raise
            heard = subject.captured.heard
        except DrawError:
            if draws:
                raise
            draws = True


def _kept_bytes(graph: Graph) -> int:
    """Of copies of what a step changes before it knows that all branches go as expected."""
    return sum((undone(graph) or {}).values())


def _check_fits(graph: Graph, step: Graph) -> None:
    """A graph from a file may hold operators and tensors of the step that it is for, and what plans make of them;
    UsageError."""
    target = foreign_operator(graph, step)
    if target is not None:
        raise UsageError(f"the saved plan holds {target}, which its step has not", hint="optimize again")
    known = {_looks(step.values[value]) for value in step.inputs}
    for value in (graph.values[value] for value in graph.inputs):
        if value.name and _looks(value) not in known:
            looks = f"{value.dtype}{list(value.shape)}"
            raise UsageError(
                f"the saved plan works on {value.name} as {looks}, its step does not", hint="optimize again"
            )


def _looks(value: Value) -> tuple[str, str, tuple[int, ...]]:
    return value.name, value.dtype, value.shape


def subject_now(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Batch,
    rule: OptimizerSpec,
    device: str,
    autocast: torch.dtype | None,
    slack: float = Case.slack,
) -> Subject:
    """The step as eager would run it now, with the generators as they are."""
    name = f"{type(module).__module__}:{type(module).__qualname__}"
    loss = loss_fn if loss_fn is not None else own_loss
    here = Workload(name, with_keywords(module, batch), batch.inputs, batch.targets, loss, rule)
    if device != "cpu":  # steps are traced on the CPU, whatever they are for
        here = replace(
            here,
            module=deep_copy(here.module).cpu(),
            inputs=tuple(tensor.cpu() for tensor in here.inputs),
            targets=tuple(tensor.cpu() for tensor in here.targets),
        )
    # No copy of the module is run to time it: what its patched methods close over would be the user's own module.
    source = Source(name, lambda _seed: here, AUTOCAST[autocast], device, 0, seeded=False, keeps_results=True)
    return Subject(replace(source, running_seconds=math.inf), slack=slack)


RANGES = {
    "memory_ratio": (0.0, 1.0, "use a share above 0 and at most 1"),
    "latency_ratio": (1.0, math.inf, "use a multiple of at least 1"),
    "budget": (1, math.inf, "use a whole number of plans above 0"),
    "seconds": (0.0, math.inf, "use a number above 0"),
    "memory_limit": (0.0, math.inf, 'use an amount above 0, such as "8 GiB"'),
    "slack": (0.0, Case.MOST_SLACK, f"use a share from 0 to {Case.MOST_SLACK}"),
}
"""What may be asked for: least, most, and what to write instead."""


def limits_of(asked: Mapping[str, Any], hints: Mapping[str, str] = MappingProxyType({})) -> Limits:
    """The limits among what a caller wrote, by name. Raises UsageError for one that cannot be; `hints` replace ours."""
    found = {name: asked.get(name) for name in RANGES}
    if isinstance(found["memory_limit"], str):
        found["memory_limit"] = parse_bytes(found["memory_limit"])
    for name, (least, most, hint) in RANGES.items():
        number = found[name]
        if number is None:
            continue
        fits = is_number(number) and least <= number <= most and (number > 0 or name == "slack")
        if not fits or (name == "budget" and number != int(number)):
            raise UsageError(f"{name}={asked[name]!r}", hint=hints.get(name, hint))
    whole = found["memory_limit"], found["budget"]
    nbytes, budget = (None if number is None else int(number) for number in whole)
    slack = Case.slack if found["slack"] is None else found["slack"]
    return Limits(found["memory_ratio"], nbytes, found["latency_ratio"], budget, found["seconds"], slack)


# A plan as a file: readable text, no pickle. Two lines of header, then the graph in its text form.
#
#     magis plan 1
#     {"digest": "..."}
#     magis graph 1
#     ...
#
# Reading one runs no code. What it may make a step do is bounded (`magis.frontends.planned`): every operator must be
# one of the step that it is for, which must have the digest that the file names, or one that plans are made of.

HEADER = "magis plan 1"


def write_plan(path: Path, plan: Planned) -> None:
    """Write the file in one step."""
    head = json.dumps({"digest": plan.digest}, sort_keys=True)
    write_text_atomically(path, f"{HEADER}\n{head}\n{dump(plan.graph)}")


def read_plan(path: Path) -> tuple[Graph, str]:
    """The graph of a file, verified, and the digest of the step that it is for. Raises UsageError in one line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read the plan {path}: {reason}") from None
    header, _, rest = text.partition("\n")
    head, _, body = rest.partition("\n")
    if header != HEADER:
        raise UsageError(f"{path} is no plan of this version: it begins with {header[:40]!r}", hint="save it again")
    try:
        digest = json.loads(head)["digest"]
        graph = parse(body)
        verify(graph)
    except (MagisError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"the plan {path} is corrupt: {error}", hint="save it again") from None
    return graph, str(digest)
