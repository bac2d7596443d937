"""Partitioners that split AOTAutograd's joint graph into forward and backward by a plan, alone or within inductor.

Inductor fuses operators and chooses their order itself, so only the set of saved values is taken from the plan; the
backward recomputes all other values in its fused kernels.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._functorch import partitioners
from torch._functorch.compile_utils import raise_getitems
from torch._functorch.partitioners import default_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._ops import OpOverload

from magis.errors import CaptureError, MagisError
from magis.extensions.compile.compile_options import CompileReport, Options
from magis.extensions.compile.joint_graph import Joint, capture_joint, placeholders, why_not
from magis.extensions.compile.joint_plan import crossing, halves, plan_joint
from magis.graph import Graph
from magis.planner.search_progress import planning_shown
from magis.printable import printable, warn
from magis.rewrite.functionalize import functionalize
from magis.units import format_bytes

Halves: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward graph module."""

REFUSED = (MagisError, RuntimeError, TypeError, ValueError, LookupError, NotImplementedError)
"""Errors of capture and planning that mean "not planned": torch's operators raise any of these on fake tensors."""


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    options: Options,
    **further: Any,
) -> Halves:
    """Return the forward and the backward of a joint graph, planned under the limit of the options.

    A graph that cannot be planned is split by torch's default partitioner, with one warning that gives the reason. If
    no plan meets the limit, the plan that exceeds it least runs, with a warning.
    """
    found = _split_by_plan(joint, num_fwd_outputs, options, partial(halves, joint))
    if found is not None:
        return found
    forward, backward = default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **further)
    return forward, backward


def _split_by_plan(
    joint: fx.GraphModule, num_fwd_outputs: int, options: Options, split: Callable[[Joint, Graph], Halves]
) -> Halves | None:
    """Plan a joint graph and split it by `split`; if it cannot be planned, warn and return None."""
    reason = why_not(joint)
    if not reason:
        try:
            # AOTAutograd's dispatcher decomposes operators that run as one kernel
            with planning_shown("torch.compile, backend magis") as progress, no_python_dispatcher():
                captured = capture_joint(joint, num_fwd_outputs)
                progress("searching")
                planned, report = plan_joint(captured, options)
                found = split(captured, planned)
        except REFUSED as error:
            reason = printable(f"{type(error).__name__}: {error}")
        else:
            tell(report, options)
            return found
    report_unplanned(reason, options)
    return None


def report_unplanned(reason: str, options: Options) -> None:
    """Warn why a graph is not planned, and report the reason with all numbers 0."""
    what = "inductor chooses what" if options.inductor else "all that"
    saved = "is saved" if options.inductor else "its backward needs is saved"
    warn(f"magis: a graph is not planned, {what} {saved}: {reason}", stacklevel=3)
    if options.report is not None:
        options.report(CompileReport(0, 0, None, 1.0, False, 0, (), 0.0, reason, options.outside))


def tell(report: CompileReport, options: Options) -> None:
    """Warn if the plan misses its limit, and pass the report to the user's callback."""
    if not report.feasible and report.limit_bytes is not None:
        warn(
            f"magis: no plan found for a graph within {format_bytes(report.limit_bytes)}: it will need"
            f" {format_bytes(report.planned_bytes)}, unplanned {format_bytes(report.original_bytes)}",
            stacklevel=3,
        )
    if options.report is not None:
        options.report(report)


def by_inductor(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Options) -> Callable[..., Any]:
    """Compile one dynamo graph with inductor, which saves for the backward the values that the plan saves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of a part that inductor imports
        from torch._inductor.compile_fx import compile_fx
    patches = {"custom_partitioner_fn": Partitioner(options)}
    return cast("Callable[..., Any]", compile_fx(gm, list(inputs), config_patches=patches))


@dataclass(frozen=True)
class Partitioner(CustomPartitionerFn):
    """Custom partitioner of inductor that saves the values chosen by a plan."""

    options: Options

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **further: Any) -> Halves:
        """Split a joint graph into forward and backward; warn and split as inductor does if planning fails."""
        count: int = further["num_fwd_outputs"]

        def split(captured: Joint, planned: Graph) -> Halves:
            return _split_saving(gm, kept_nodes(captured, planned), count)

        found = _split_by_plan(gm, count, self.options, split)
        if found is not None:
            return found
        forward, backward = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **further)
        return forward, backward

    def uuid(self) -> None:
        """Return None, which disables inductor's code cache, since the code depends on the plan."""


def kept_nodes(captured: Joint, planned: Graph) -> tuple[fx.Node, ...]:
    """Return the nodes of the joint graph whose values the planned forward saves for the backward.

    Values without a node (an RNG state, the result of an operator that the plan fused) are left out, and so recomputed.
    """
    source = {op.id: op for op in functionalize(captured.graph).ops}
    origins: dict[int, int] = {}
    for op in planned.ops:
        original = source.get(-1 if op.origin is None else op.origin)
        if original is not None and len(original.outputs) == len(op.outputs):
            pairs = zip(op.outputs, original.outputs, strict=True)
            origins.update((value, before) for value, before in pairs if value is not None and before is not None)
    known = captured.nodes
    nodes = (known.get(value) or known.get(origins.get(value, value)) for value in crossing(captured, planned))
    return tuple(dict.fromkeys(node for node in nodes if node is not None))


def needed_nodes(wanted: Iterable[fx.Node], kept: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes to save besides ``kept`` to compute ``wanted``: placeholders and random operators."""
    known = set(kept)
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in known:
            continue
        known.add(node)
        if node.op == "placeholder" or draws(node):
            yield node
        else:
            stack.extend(node.all_input_nodes)


def draws(node: fx.Node) -> bool:
    """Return True if a node, or the multi-output call that it is a result of, draws random numbers."""
    made = node.args[0] if node.target is operator.getitem else node
    target = made.target if isinstance(made, fx.Node) else None
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target in SEEDS


SEEDS = (torch.ops.prims.inductor_seed.default, torch.ops.prims.inductor_seeds.default)
"""Inductor's seed operators; its random numbers are a function of the seeds."""


def _split_saving(joint: fx.GraphModule, kept: Sequence[fx.Node], num_fwd_outputs: int) -> Halves:
    _, tangents = placeholders(joint.graph)
    (last,) = joint.graph.find_nodes(op="output")
    gradients = [item for item in last.args[0][num_fwd_outputs:] if isinstance(item, fx.Node)]
    every = {*kept, *needed_nodes(gradients, (*kept, *tangents))} - set(tangents)
    saved = [node for node in joint.graph.nodes if node in every]
    written = {node.args[0] for node in joint.graph.nodes if node.target is torch.ops.aten.copy_.default}
    if not written.isdisjoint(saved):
        raise CaptureError("the backward reads an argument that the forward changes")
    extract = vars(partitioners)["_extract_fwd_bwd_modules"]
    forward, backward = extract(joint, saved, [], num_fwd_outputs=num_fwd_outputs)
    # recomputed nodes come first in the joint graph: move each to where the backward needs it
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    return raise_getitems(forward), raise_getitems(backward)
