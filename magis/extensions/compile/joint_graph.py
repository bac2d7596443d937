"""Capture of AOTAutograd's joint graph (forward and backward in one fx graph) as a graph of magis.

The loss, or at least the call of ``backward``, is outside the graph: gradients of the results ("tangents") exist only
after all results do. The operator `magis.turn` between forward and backward expresses that. It takes every result,
makes every tangent, and reads the last version of everything that the forward writes:

    forward ...; %dy = magis.turn(%y); backward ...

Every order that keeps data flow and versions can therefore be split there into two functions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import cleanup_recompute_tags, must_recompute
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from magis.capture.recorder import Recorder
from magis.errors import CaptureError
from magis.graph import GENERATOR, Graph, Op, Ref, Storage, verify
from magis.ops.call import resolve
from magis.ops.fake_results import laid_out

TURN = "magis.turn"
BATCH_NORM = resolve("aten._native_batch_norm_legit_functional.default")
STATISTICS = (3, 4)
"""Indices of running mean and variance, in a batch norm's arguments and, updated, in its results."""


@dataclass(frozen=True, eq=False)
class Joint:
    """Captured joint graph, with the positions of its inputs and outputs in forward and backward.

    ``graph.outputs`` are the forward's results, the gradients, then the tangents, which the caller keeps alive;
    ``forward`` and ``backward`` are indices into ``graph.outputs``, None where the function returns None.
    """

    graph: Graph
    forward: tuple[int | None, ...]
    backward: tuple[int | None, ...]
    primals: tuple[int, ...]
    """Values of the forward's arguments, in order."""
    tangents: tuple[int, ...]
    constants: Mapping[int, str]
    """Tensor constants of the module: value -> attribute name."""
    device: str
    nodes: Mapping[int, fx.Node]
    """First fx node of each value."""
    again: frozenset[int] = frozenset()
    """Values that the user's own checkpointing recomputes in the backward."""
    once: frozenset[int] = frozenset()
    """Values that the user's own checkpointing policy saves."""


def kernel_layouts(device: str) -> AbstractContextManager[object]:
    """Return a mode that gives fake results the strides of CPU kernels; a null context for other devices.

    The workspace of the next operator depends on these strides.
    """
    return _KernelLayouts() if device == "cpu" else nullcontext()  # type: ignore[no-untyped-call]


class _KernelLayouts(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return laid_out(str(func), args, func(*args, **(kwargs or {})))


def placeholders(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the placeholders of the forward's arguments, and those of the tangents."""
    every = graph.find_nodes(op="placeholder")
    tangents = [node for node in every if node.name.startswith("tangents")]
    return [node for node in every if node not in tangents], tangents


def why_not(joint: fx.GraphModule) -> str:
    """Return the reason why a joint graph cannot be captured; "" if it can."""
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            problem = _problem_of_input(node)
        elif node.op == "call_function":
            known = isinstance(node.target, OpOverload) or node.target is operator.getitem
            problem = "" if known else f"{node.target} is no ATen operator"
        elif node.op == "get_attr":
            held = type(getattr(joint, str(node.target), None))
            known = held in (Tensor, torch.nn.Parameter) or issubclass(held, fx.GraphModule)  # its call is refused
            problem = "" if known else f"{node.target} is no plain tensor"
        else:
            problem = "" if node.op == "output" else f"it holds a {node.op}"
        if node.meta.get("partitioner_tag") == "must_be_in_backward":
            problem = problem or f"{node.target} must be in the backward"
        if node.meta.get("saved_tensor_with_no_vc_check"):
            problem = problem or "an autograd.Function keeps tensors on its own"
        if problem:
            return problem
    kinds = {node.meta["val"].device.type for node in joint.graph.find_nodes(op="placeholder")}
    return f"its tensors lie on {' and '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def _problem_of_input(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return f"input {node.name} is a {type(value).__name__}: sizes are dynamic, pass dynamic=False to torch.compile"
    if type(value) not in (FakeTensor, Tensor):
        return f"input {node.name} is a {type(value).__name__}"
    if any(not isinstance(size, int) for size in (*value.shape, *value.stride())):
        return f"the shape of {node.name} is dynamic: pass dynamic=False to torch.compile"
    return ""


def capture_joint(joint: fx.GraphModule, num_fwd_outputs: int) -> Joint:
    """Capture a joint graph by running it once on fake tensors. Raises CaptureError if it cannot be captured."""
    primals, tangents = placeholders(joint.graph)
    (last,) = joint.graph.find_nodes(op="output")
    returned: Sequence[Any] = last.args[0]
    if any(not isinstance(item, (fx.Node, type(None))) for item in returned):
        raise CaptureError("the graph returns something that is no tensor")
    device = str(primals[0].meta["val"].device.type) if primals else "cpu"
    recorder = Recorder({})
    values: dict[fx.Node, int] = {}
    held: dict[int, str] = {}
    with torch.no_grad(), FakeTensorMode() as mode:
        env: dict[fx.Node, Any] = {}
        for number, node in enumerate((*primals, *tangents)):
            like = node.meta["val"]
            env[node] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            values[node] = recorder.register(env[node], "batch", f"input:{number}")
        for node in joint.graph.find_nodes(op="get_attr"):
            env[node] = mode.from_tensor(getattr(joint, str(node.target)), static_shapes=True)
            held[recorder.register(env[node], "buffer", f"constant:{node.target}")] = str(node.target)
        with kernel_layouts(device), recorder:
            _run_nodes(joint.graph, env)
        nodes: dict[int, fx.Node] = {}
        for node in joint.graph.nodes:
            if isinstance(env.get(node), Tensor):
                nodes.setdefault(recorder.value_of(env[node]), node)
        again, once = checkpointed(joint)
        results = [None if item is None else recorder.value_of(env[item]) for item in returned]
    outputs = tuple(value for value in results if value is not None)
    given = tuple(values[node] for node in tangents)
    leaving = tuple(value for value in results[:num_fwd_outputs] if value is not None)
    graph = _with_turn(recorder.graph((*outputs, *given)), leaving, given)
    verify(graph)
    place = iter(range(len(outputs)))
    positions = [None if value is None else next(place) for value in results]
    return Joint(
        graph,
        tuple(positions[:num_fwd_outputs]),
        tuple(positions[num_fwd_outputs:]),
        tuple(values[node] for node in primals),
        given,
        held,
        device,
        nodes,
        frozenset(value for value, node in nodes.items() if node in again),
        frozenset(value for value, node in nodes.items() if node in once),
    )


def checkpointed(joint: fx.GraphModule) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes that the user's checkpointing recomputes, and those that it must save, from dynamo's tags.

    At the boundary between two checkpointed blocks a value is saved, as in torch's own partitioners.
    """
    tags = {node: node.meta["recompute"] for node in joint.graph.nodes if "recompute" in node.meta}
    own = {node for node in tags if "ac_graph_id" in node.meta}
    if not own:
        return set(), set()
    cleanup_recompute_tags(joint, is_default_partition=True)
    again = {node for node in own if must_recompute(node)}
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
        if node in tags:
            node.meta["recompute"] = tags[node]
    return again, {node for node in own if tags[node] is CheckpointPolicy.MUST_SAVE}


def _run_nodes(graph: fx.Graph, env: dict[fx.Node, Any]) -> None:
    """Run every node in order, and store the results in ``env``.

    Batch norms run as in eager mode, with in-place updates of running statistics, since only this form can be
    recomputed without a second update.
    """
    in_place = {node for node in graph.nodes if node.target is BATCH_NORM and _updates_itself(node)}
    for node in graph.nodes:
        if node.op != "call_function" or node in env:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node in in_place:
            out = torch.ops.aten.native_batch_norm.default(*args)
            env[node] = (*out, *(args[position] for position in STATISTICS))
        elif _stores_statistics(node, in_place):
            env[node] = args[0]
        else:
            env[node] = node.target(*args, **kwargs)


def _updates_itself(norm: fx.Node) -> bool:
    """Return True if a batch norm's updated statistics are copied back to their buffers and not read elsewhere.

    The batch norm's backward takes them as arguments but, in training, does not read them.
    """
    if norm.args[5] is not True or not all(isinstance(norm.args[at], fx.Node) for at in STATISTICS):
        return False
    stored = set()
    for item in norm.users:
        at = item.args[1]
        if item.target is not operator.getitem or not isinstance(at, int) or at not in STATISTICS:
            continue
        for user in item.users:
            if user.target is torch.ops.aten.copy_.default and user.args == (norm.args[at], item):
                stored.add(at)
            elif user.target is not torch.ops.aten.native_batch_norm_backward.default:
                return False
    return stored == set(STATISTICS)


def _stores_statistics(node: fx.Node, norms: set[fx.Node]) -> bool:
    """Return True if a node copies updated statistics of one of the batch norms back to their buffer."""
    if node.target is not torch.ops.aten.copy_.default or not isinstance(node.args[1], fx.Node):
        return False
    source = node.args[1]
    return source.target is operator.getitem and source.args[0] in norms and source.args[1] in STATISTICS


def _with_turn(graph: Graph, results: tuple[int, ...], tangents: tuple[int, ...]) -> Graph:
    """Return the graph reordered: forward, `magis.turn`, backward, each part in program order."""
    forward = _forward_ops(graph, results, tangents)
    first = [op for op in graph.ops if op.id in forward]
    rest = [op for op in graph.ops if op.id not in forward]
    version = {GENERATOR: 0} | {graph.values[value].storage: 0 for value in graph.inputs}
    version.update(pair for op in first for pair in op.writes)
    taken = tuple(dict.fromkeys(results))
    storages = {graph.values[value].storage for value in taken}
    written = {storage for op in first for storage, _ in op.writes}
    met = sorted((storage, version.get(storage, 0)) for storage in {*storages, *written, GENERATOR})
    turn = Op(0, TURN, (tuple(Ref(value) for value in taken),), (), tangents, many=True, reads=tuple(met))
    made = {graph.values[value].storage for value in tangents}
    phases = [*((op, "forward") for op in first), *((op, "backward") for op in (turn, *rest))]
    known = {
        key: Storage(key, storage.nbytes, "temporary") if key in made else storage
        for key, storage in graph.storages.items()
    }
    return replace(
        graph,
        ops=tuple(replace(op, id=number, phase=phase) for number, (op, phase) in enumerate(phases)),
        storages=known,
        inputs=tuple(value for value in graph.inputs if value not in tangents),
    )


def _forward_ops(graph: Graph, results: tuple[int, ...], tangents: tuple[int, ...]) -> set[int]:
    """Return the ids of operators that must precede the turn: those that results need, and those with side effects
    (writes, random numbers) that need no tangent."""
    late = set(tangents)
    late_ops = set()
    for op in graph.ops:
        if not late.isdisjoint(op.inputs()):
            late.update(op.made())
            late_ops.add(op.id)
    wanted = set(results)
    versions: set[tuple[int, int]] = set()
    found = set()
    for op in reversed(graph.ops):
        effect = op.random or any(graph.storages[storage].persistent for storage, _ in op.writes)
        needed = not wanted.isdisjoint(op.made()) or not versions.isdisjoint(op.writes)
        if needed or (effect and op.id not in late_ops):
            found.add(op.id)
            wanted.update(op.inputs())
            versions.update(op.reads)
            versions.update((storage, version - 1) for storage, version in op.writes)
    if not found.isdisjoint(late_ops):
        raise CaptureError("a result of the forward depends on a gradient")
    return found
