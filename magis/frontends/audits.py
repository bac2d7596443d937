"""Audits: repeated captures of a planned step that detect changes which its guards miss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor, nn

from magis.capture import OptimizerSpec, capture
from magis.capture.contents import is_readable
from magis.capture.snapshot import Snapshot
from magis.capture.untouched_memory import untouched
from magis.capture.workload import Batch, own_loss, with_keywords, with_targets
from magis.dtypes import autocast_type
from magis.errors import CaptureError
from magis.frontends.limits import AUTOCAST
from magis.frontends.number_inputs import with_numbers
from magis.frontends.planned import Planned
from magis.graph import ITEM_SIZE, Graph, Value, digest, dump
from magis.ops.python_objects import PREFIX, look_up
from magis.planner.conformance import first_difference

SHARE = 0.01
"""Largest share of a step's running time that audits of the step take."""
RARER = 1.1
"""Factor by which a step's total running time grows until the next audit: a change that an audit detects happened in
the last tenth of the training at most."""


@dataclass(eq=False)
class Audits:
    """Schedule of the audits of one planned step; times are seconds of running the step."""

    costs: float
    """Seconds that the slowest audit took; before the first audit, an estimate."""
    agreed: int
    """Number of the last step whose capture equalled the planned one."""
    ran: float = 0.0
    spent: float = 0.0
    due: float = 0.0
    """Running time of the step, in seconds, at which the next audit is due."""

    def __post_init__(self) -> None:
        self._schedule()

    def check(self, number: int, difference: Callable[[], str]) -> CaptureError | None:
        """Audit step `number` before it runs: return an error if it differs from its plan twice in the same way, else
        None."""
        started = perf_counter()
        try:
            found = difference()
            again = found and difference()
        finally:
            took = perf_counter() - started
            self.costs = max(self.costs, took) if self.spent else took
            self.spent += took
            self._schedule()
        if not found:
            self.agreed = number
        if not found or found != again:
            return None
        since = self.agreed + 1
        when = f"at step {number:,}" if since == number else f"at some step from {since:,} to {number:,}"
        return CaptureError(
            f"the step has become another one than was planned, {when}: {found}",
            hint="something that it reads changes where nobody sees it: keep that in an attribute of the model, and go"
            f" on from a state of before step {since:,}",
        )

    def _schedule(self) -> None:
        self.due = max((self.spent + self.costs) / SHARE, RARER * self.ran)


def step_difference(
    module: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    batch: Batch,
    plan: Planned,
    given: Mapping[str, float],
    autocast: torch.dtype | None,
) -> str:
    """Capture the step again and describe in words where it differs from the planned step; return "" if it does not.
    `given` are the values of the graph's scalars. The capture runs on hollow tensors on the CPU, computes nothing, and
    restores the state of module and loss."""
    module, loss_fn = with_keywords(module, batch), with_targets(loss_fn, batch) or own_loss
    tensors = _laid_out(batch, plan.captured)
    inputs, targets = tensors[: len(batch.inputs)], tensors[len(batch.inputs) :]
    before, cast = Snapshot({"model": module, "loss": loss_fn}), autocast_type(AUTOCAST[autocast])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # already shown when the step was planned
            now = capture(
                module, inputs, targets, loss_fn, OptimizerSpec("gradients"),
                autocast=cast, settled=False, heard=plan.heard, results=True,
            ).graph  # fmt: skip
    except CaptureError as error:
        return f"it is refused, {error}"
    finally:
        before.restore()
    count = 1 + len(plan.results)
    known = _before_update(plan.captured if plan.inputs is None else with_numbers(plan.captured, given), count)
    now = _named_alike(_before_update(now, count), known, {"module": module, "loss": loss_fn})
    if digest(now) == digest(known):
        return ""
    pairs = zip(dump(now).splitlines(), dump(known).splitlines(), strict=False)
    return first_difference(known, now, sides=("now", "planned")) or next(
        (f"{ours!r} now, {theirs!r} planned" for ours, theirs in pairs if ours != theirs), "it ends elsewhere"
    )


def _laid_out(batch: Batch, known: Graph) -> list[Tensor]:
    """Return the batch's tensors with the storage sizes and offsets of the captured graph, where they are views there.
    A tensor that is moved is hollow, unless Python may read numbers off it: then its contents are copied."""
    values = {known.values[number].name: known.values[number] for number in known.inputs}
    memory, found = dict[int, torch.UntypedStorage](), dict[object, Tensor]()

    def moved(name: str, tensor: Tensor) -> Tensor:
        value = values[name]
        storage, looks = known.storages[value.storage], (tensor.untyped_storage().nbytes(), tensor.storage_offset())
        if storage.kind != "batch" or looks == (storage.nbytes, value.offset):
            return tensor
        if storage.id not in memory:
            memory[storage.id] = untouched(storage.nbytes)
        twin = tensor.new_empty(0).set_(memory[storage.id], value.offset, value.shape, value.stride)
        if is_readable(name, twin):
            once = tuple(slice(0, 1) if not step else slice(None) for step in value.stride)  # expanded ones
            twin[once].copy_(tensor[once])
        return twin

    for name, tensor in batch.by_name.items():
        same = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()  # equal tensors share a name in the graph
        found[name] = found[same] = moved(name, tensor) if name in values else found.get(same, tensor)
    return [found[name] for name in batch.by_name]


def _before_update(graph: Graph, returned: int) -> Graph:
    """Return forward and backward of a step with its first `returned` outputs; guards check what the update depends on.
    Storages of buffers get size 0 and begin at their first buffer, as a buffer that a step replaces may be a view."""
    ops, outputs = tuple(op for op in graph.ops if op.phase != "update"), graph.outputs[:returned]
    used = {value for op in ops for value in (*op.inputs(), *op.made())} | {*outputs}
    values = {number: value for number, value in graph.values.items() if number in used}
    begins = dict[int, int]()
    for value in (graph.values[number] for number in graph.inputs):
        if graph.storages[value.storage].kind == "buffer":
            offset = value.offset * ITEM_SIZE[value.dtype]
            begins[value.storage] = min(begins.get(value.storage, offset), offset)
    for number, value in values.items():
        offset = value.offset - begins.get(value.storage, 0) // ITEM_SIZE[value.dtype]
        values[number] = value if offset == value.offset else replace(value, offset=offset)
    held = {value.storage for value in values.values()}
    return Graph(
        storages={
            number: replace(storage, nbytes=0) if number in begins else storage
            for number, storage in graph.storages.items()
            if number in held
        },
        values=values,
        ops=ops,
        inputs=tuple(number for number in graph.inputs if number in used),
        outputs=outputs,
        constants={number: data for number, data in graph.constants.items() if number in used},
    )


def _named_alike(now: Graph, known: Graph, roots: Mapping[str, object]) -> Graph:
    """Return a new capture with the tensor names of a known one, where several paths lead to one tensor."""

    def named(value: Value) -> Value:
        name = known.values[value.id].name if value.id in known.values else ""
        alias = value.name != name and value.name.startswith(PREFIX) and name.startswith(PREFIX)
        same = alias and look_up(roots, value.name) is look_up(roots, name)
        return replace(value, name=name) if same else value

    return replace(now, values={number: named(value) for number, value in now.values.items()})
