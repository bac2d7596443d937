"""`magis.tag_joint_graph`: a plan as tags for other partitioners of joint graphs.

A joint graph holds forward and backward of a step. `torch._functorch.partitioners`, inductor and graph-based trainers
split it by `node.meta["recompute"]`, one `torch.utils.checkpoint.CheckpointPolicy` per node of the forward:

    MUST_SAVE        the forward saves the value for the backward
    MUST_RECOMPUTE   the backward recomputes the value

A plan decides about values, tags about operators. So a saved view is tagged by its base; and an operator of which the
plan saves some results and recomputes others is saved or recomputed as a whole, whichever holds for most of its bytes.
For a recomputed operator that draws random numbers, torch's partitioners save the RNG state.

Graphs of forward, loss and backward in one, as some trainers trace them, begin their backward with `ones_like` of the
loss instead of tangents.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher
from torch.utils.checkpoint import CheckpointPolicy

from magis.errors import CaptureError, UsageError
from magis.extensions.compile.compile_options import CompileReport, as_options
from magis.extensions.compile.inductor_partitioner import REFUSED, SEEDS, draws, kept_nodes
from magis.extensions.compile.joint_graph import BATCH_NORM, STATISTICS, Joint, capture_joint, placeholders, why_not
from magis.extensions.compile.joint_plan import plan_joint
from magis.ops.generators import STATE_BYTES
from magis.units import format_bytes

__all__ = ["JointTags", "tag_joint_graph"]


@dataclass(frozen=True)
class JointTags:
    """Tags of a joint graph, by names of its nodes."""

    saved: tuple[str, ...]
    """Nodes whose values a partitioner saves from forward to backward, in graph order, without arguments of the
    forward, which the caller holds."""
    recomputed: tuple[str, ...]
    """Nodes of the forward, without views, that the backward recomputes."""
    saved_bytes: int
    """Bytes alive from forward to backward: storages of ``saved``, each counted once, without arguments and results of
    the forward, plus RNG states. Compare with ``plan.saved_bytes``."""
    plan: CompileReport
    """Plan that the tags express. Its peaks hold in the plan's order, which tags cannot express."""

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.saved_bytes)} in {len(self.saved)} values saved from forward to backward (plan:"
            f" {format_bytes(self.plan.saved_bytes)}), {len(self.recomputed)} operators recomputed"
        )


def tag_joint_graph(
    joint: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    memory_ratio: float | None = None,
    memory_limit: str | int | None = None,
    latency_ratio: float | None = None,
    budget: int | None = None,
    seconds: float | None = None,
    save_random: bool = False,
) -> JointTags:
    """Plan a joint graph, and tag each node of its forward as saved or recomputed by the plan.

    Call it first in a `partition_fn` of AOTAutograd, with the same arguments, then call a partitioner:
    `min_cut_rematerialization_partition` and `default_partition` of `torch._functorch.partitioners` save exactly the
    tagged values. A graph of forward, loss and backward in one (`make_fx` of a function that calls
    `torch.autograd.grad` of its loss) is tagged for passes that copy recomputed nodes to their uses in the backward.
    Earlier tags are replaced; nodes of the backward get none. The min-cut partitioner merges equal operators before it
    reads tags, and then saves less than `saved_bytes`, unless `fx_graph_cse` ran on the graph before.

    `num_fwd_outputs` is the number of the graph's results that belong to the forward. One limit: `memory_ratio` (share
    of the unplanned peak of forward and backward; default 0.8), `memory_limit` (bytes, or "8 GiB") or `latency_ratio`;
    `budget` (plans) and `seconds` bound the search. `save_random`: save results of random operators, for passes that
    cannot draw the same numbers twice.

    Raises UsageError for invalid arguments, CaptureError, in one line, for a graph that cannot be planned; its tags are
    then unchanged. A limit that no plan meets is not an error: `plan.feasible` is False.
    """
    given = {
        "memory_ratio": memory_ratio, "memory_limit": memory_limit, "latency_ratio": latency_ratio,
        "budget": budget, "seconds": seconds,
    }  # fmt: skip
    options = as_options({name: value for name, value in given.items() if value is not None} | {"link": 0})
    (last,) = joint.graph.find_nodes(op="output")
    results = len(last.args[0])
    if not 0 < num_fwd_outputs <= results:
        raise UsageError(f"num_fwd_outputs={num_fwd_outputs!r}, but the graph returns {results} values")
    reason = why_not(joint)
    if reason:
        raise CaptureError(f"the joint graph cannot be planned: {reason}")
    split = _with_tangents(joint, num_fwd_outputs)
    try:
        with no_python_dispatcher():
            captured = capture_joint(split, num_fwd_outputs)
            planned, report = plan_joint(captured, options)
            kept = kept_nodes(captured, planned)
    except REFUSED as error:
        raise CaptureError(f"the joint graph cannot be planned: {type(error).__name__}: {error}") from error
    tags = _Tags(split, captured, num_fwd_outputs, save_random)
    tags.save(kept)
    decided = tags.decided()
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
        if node.name in decided:
            node.meta["recompute"] = decided[node.name]
    return JointTags(
        saved=tuple(node.name for node in tags.taken),
        recomputed=tuple(node.name for node in tags.again if tags.does_work(node)),
        saved_bytes=tags.saved_bytes(),
        plan=report,
    )


def _with_tangents(joint: fx.GraphModule, num_fwd_outputs: int) -> fx.GraphModule:
    """Return the graph, or a copy with tangent placeholders in place of the `ones_like` that begin its backward."""
    if placeholders(joint.graph)[1]:
        return joint
    graph: fx.Graph = copy.deepcopy(joint.graph)
    (last,) = graph.find_nodes(op="output")
    results = last.args[0][:num_fwd_outputs]
    begins = graph.find_nodes(op="call_function", target=torch.ops.aten.ones_like.default)
    begins = [node for node in begins if node.args[0] in results]
    if not begins:
        raise CaptureError("the joint graph has neither tangents nor ones_like of a result of its forward")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for number, node in enumerate(begins, 1):
        with graph.inserting_before(first):
            tangent = graph.placeholder(f"tangents_{number}")
        tangent.meta = dict(node.meta)
        node.replace_all_uses_with(tangent)
        graph.erase_node(node)
    return fx.GraphModule(joint, graph)


@dataclass(eq=False)
class _Tags:
    """Assignment of a joint graph's nodes to saved and recomputed ones."""

    joint: fx.GraphModule
    captured: Joint
    num_fwd_outputs: int
    save_random: bool
    saved: set[fx.Node] = field(default_factory=set)
    """Operators whose results are saved; of a multi-output operator, the results that the backward needs."""
    taken: list[fx.Node] = field(default_factory=list)
    """Values that the backward takes from the forward, without arguments, in graph order."""
    again: list[fx.Node] = field(default_factory=list)
    """Nodes of the forward that the backward recomputes."""

    def __post_init__(self) -> None:
        graph = self.captured.graph
        self._storages: dict[fx.Node, int] = {}
        self._sizes: Mapping[int, int] = {key: storage.nbytes for key, storage in graph.storages.items()}
        for value, node in self.captured.nodes.items():
            self._storages[node] = graph.values[value].storage
        primals, tangents = placeholders(self.joint.graph)
        late = set(tangents)
        for node in self.joint.graph.nodes:
            marked = bool(node.meta.get("autograd_backward"))
            if node.op != "output" and (marked or not late.isdisjoint(node.all_input_nodes)):
                late.add(node)
        self._early = [n for n in self.joint.graph.nodes if n.op == "call_function" and n not in late]
        (last,) = self.joint.graph.find_nodes(op="output")
        results = last.args[0]
        self._results = [item for item in results[: self.num_fwd_outputs] if isinstance(item, fx.Node)]
        self._gradients = [item for item in results[self.num_fwd_outputs :] if isinstance(item, fx.Node)]
        self._primals = primals
        self._late = late
        self._written = {n.args[0] for n in self.joint.graph.nodes if n.op == "call_function" and _copies(n)}

    def save(self, kept: Iterable[fx.Node]) -> None:
        """Choose the saved nodes, starting with ``kept``, until they and the arguments suffice for the backward."""
        wanted = {base for node in kept for base in self._bases(node)}
        self.saved = {_maker(node) for node in wanted if node.op == "call_function"}
        while True:  # each round saves more values, or fewer operators, and neither is undone
            reached = set(self._reached())
            again = set()
            for maker in self.saved:
                missing = [node for node in self._results_of(maker) if node in reached and node not in wanted]
                if not missing:
                    continue
                kept_bytes = sum(_nbytes(node) for node in self._results_of(maker) if node in reached & wanted)
                if self._must_stay(maker) or sum(map(_nbytes, missing)) <= kept_bytes:
                    wanted.update(missing)
                else:
                    again.add(maker)
            makers = {_maker(node) for node in reached} - self.saved
            more = {maker for maker in makers if self._must_stay(maker)}
            if not again and not more:
                break
            self.saved = (self.saved - again) | more
            wanted |= {node for node in reached if _maker(node) in more}
        reached = set(self._reached())
        self.taken = [node for node in self._early if node in reached and self._is_saved(node)]
        self.again = [node for node in self._early if node in reached and not self._is_saved(node)]

    def decided(self) -> dict[str, CheckpointPolicy]:
        """Return the tags by node name."""
        found = {}
        for node in self._early:
            if not _copies(node):
                kept = self._is_saved(node) or (draws(_maker(node)) and node not in self.again)
                found[node.name] = CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE
        return found

    def saved_bytes(self) -> int:
        """Return the bytes of the saved values, without arguments and results of the forward, plus RNG states."""
        held = {self._storages[node] for node in (*self._primals, *self._results) if node in self._storages}
        known = {self._storages[node] for node in self.taken if node in self._storages}
        # Values that are no memory of their own in a plan: statistics that a batch norm writes in place there.
        others = [node for node in self.taken if node not in self._storages]
        states = sum(draws(node) for node in self.again if node.target is not operator.getitem)
        nbytes = [self._sizes[storage] for storage in known - held] + [node.meta["val"].nbytes for node in others]
        return sum(nbytes) + states * STATE_BYTES.get(self.captured.device, 0)

    def does_work(self, node: fx.Node) -> bool:
        """Return True if a node is an operator whose results are not views of its arguments."""
        return node.target is not operator.getitem and not any(True for _ in self._below(node))

    def _below(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the arguments that a node's results are views of."""
        made = {self._storages[each] for each in (node, *node.users) if each in self._storages and _maker(each) is node}
        if node.target is operator.getitem:
            made = {self._storages[node]} if node in self._storages else set()
        for each in _maker(node).all_input_nodes:
            if self._storages.get(each) in made:
                yield each

    def _bases(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that a node is a view of, or the node itself if it is no view."""
        below = list(self._below(node))
        if not below:
            yield node
        for each in below:
            yield from self._bases(each)

    def _reached(self) -> Iterator[fx.Node]:
        """Yield the nodes of the forward whose values the backward needs, walking back to saved nodes."""
        stack = [each for node in self._late for each in node.all_input_nodes if each not in self._late]
        stack += [node for node in self._gradients if node not in self._late]
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            yield node
            if not self._is_saved(node):
                stack.extend(node.all_input_nodes)

    def _is_saved(self, node: fx.Node) -> bool:
        return _maker(node) in self.saved

    @staticmethod
    def _results_of(maker: fx.Node) -> list[fx.Node]:
        """Return the result nodes of a multi-output operator, without the updated statistics of a batch norm.

        The batch norm's backward takes the statistics but does not read them; in a plan they are buffers.
        """
        spared = STATISTICS if maker.target is BATCH_NORM else ()
        return [user for user in maker.users if user.target is operator.getitem and user.args[1] not in spared]

    def _must_stay(self, node: fx.Node) -> bool:
        """Return True if an operator cannot be recomputed: it is random, or reads an argument that is changed later."""
        if draws(node) and (self.save_random or node.target in SEEDS):
            return True
        # Statistics that a batch norm in training only updates: its other results do not depend on them.
        spared: tuple[Any, ...] = ()
        if node.target is BATCH_NORM and node.args[5] is True:
            spared = tuple(node.args[at] for at in STATISTICS)
        return any(each in self._written and each not in spared for each in node.all_input_nodes)


def _maker(node: fx.Node) -> fx.Node:
    """Return the operator that computes a node's value, skipping `getitem` nodes."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, Tensor) else 0


def _copies(node: fx.Node) -> bool:
    """Return True if a node writes in-place to an argument of the graph."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable) and isinstance(node.meta.get("val"), Tensor | None)
