"""`magis.tag_joint_graph`: torch's partitioners save what tags say, to the byte; gradients are eager's, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from magis import tag_joint_graph
from magis.extensions.compile.joint_tags import JointTags
from tests.compile.nets import fresh_dynamo
from tests.compile.tag_nets import Subject, convnet, dropouts, llama

PARTITIONERS: tuple[Any, ...] = (min_cut_rematerialization_partition, default_partition)
ONE_GRAPH = "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_dynamo():
        yield


class Tagged:
    """A module and its copy. The forward of the first is split by a partitioner of torch's, by tags where ``settings``
    are given; the second is eager."""

    def __init__(self, subject: Subject, partitioner: Any, *, merged: bool = True, **settings: Any) -> None:
        self.module, self.batch, loss_fn = subject
        self.other = copy.deepcopy(self.module)
        self.tags: list[JointTags] = []
        self.eager = lambda x, y: loss_fn(self.other(x), y)

        def partition(joint: fx.GraphModule, inputs: Sequence[Any], **further: Any) -> Any:
            if partitioner is min_cut_rematerialization_partition and merged:
                joint.graph = fx_graph_cse(joint.graph)  # as it does itself, before it looks at tags
            if settings:
                count = further["num_fwd_outputs"]
                self.tags.append(tag_joint_graph(joint, num_fwd_outputs=count, budget=300, **settings))
            return partitioner(joint, inputs, **further)

        backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
        self.split = torch.compile(lambda x, y: loss_fn(self.module(x), y), backend=backend, fullgraph=True)

    def step(self, seed: int) -> int:
        """Both take a step of gradient descent; losses, gradients, weights, buffers and generators agree bit by bit.
        Returns the bytes that autograd kept for the backward of the first."""
        seen: list[list[Tensor]] = []
        kept = 0
        for module, forward in ((self.module, self.split), (self.other, self.eager)):
            module.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            loss: Tensor = forward(*self.batch)
            kept = kept or self._kept(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            with torch.no_grad():
                for p in module.parameters():
                    p.sub_(0.1 * p.grad if p.grad is not None else 0)
            seen.append([loss.detach(), torch.get_rng_state(), *gradients, *module.state_dict().values()])
        assert len(seen[0]) == len(seen[1])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*seen, strict=True))
        return kept

    def _kept(self, loss: Tensor) -> int:
        given = (*self.module.parameters(), *self.module.buffers(), *self.batch, loss)
        held = {each.untyped_storage().data_ptr() for each in given}
        return storage_bytes(loss.grad_fn.saved_tensors, held)  # type: ignore[union-attr]


def storage_bytes(tensors: Sequence[Tensor], held: set[int]) -> int:
    """Of the storages under tensors, each once, but for those that are held anyway."""
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.data_ptr() not in held}.values())


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=("min_cut", "default"))
@pytest.mark.parametrize("ratio", [0.8, 0.5])
@pytest.mark.parametrize("make", [llama, convnet])
def test_what_is_saved_is_what_was_planned(make: Callable[[], Subject], ratio: float, partitioner: Any) -> None:
    tagged = Tagged(make(), partitioner, memory_ratio=ratio)
    kept = [tagged.step(seed) for seed in range(3)]
    (tags,) = tagged.tags
    assert kept == [tags.saved_bytes] * 3
    # Plans have a batch norm's new statistics in its buffers; torch makes them, and hands them to its backward.
    norms = [part for part in tagged.module.modules() if isinstance(part, nn.BatchNorm2d)]
    most = sum(each.nbytes for part in norms for each in (part.running_mean, part.running_var) if each is not None)
    assert 0 <= tags.saved_bytes - tags.plan.saved_bytes <= most
    assert tags.recomputed
    torch.compiler.reset()
    assert tags.saved_bytes < Tagged(make(), default_partition).step(0)


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=("min_cut", "default"))
def test_dropout_that_runs_again_draws_the_same_numbers(partitioner: Any) -> None:
    tagged = Tagged(dropouts(), partitioner, memory_ratio=0.3)
    kept = {tagged.step(seed) for seed in range(2)}
    (tags,) = tagged.tags
    assert any("dropout" in name for name in tags.recomputed)
    assert kept == {tags.saved_bytes}


def whole_step(subject: Subject) -> tuple[fx.GraphModule, list[Tensor]]:
    """Forward, loss and gradients as one graph, and what it takes."""
    module, batch, loss_fn = subject
    state = {name: weight.detach().clone().requires_grad_() for name, weight in module.named_parameters()}
    count = len(state)
    state.update(module.named_buffers())

    def step(*given: Tensor) -> list[Tensor]:
        *held, x, y = given
        loss = loss_fn(torch.func.functional_call(module, dict(zip(state, held, strict=True)), (x,)), y)
        return [loss, *torch.autograd.grad(loss, held[:count])]

    given = [*state.values(), *batch]
    traced = make_fx(step, tracing_mode="fake")(*given)
    begin = next(node for node in traced.graph.nodes if node.target is torch.ops.aten.ones_like.default)
    nodes = list(traced.graph.nodes)
    for node in nodes[nodes.index(begin) + 1 : -1]:
        node.meta["autograd_backward"] = True  # as tracers of trainers mark it
    return traced, [each.detach() for each in given]


class Kept(fx.Interpreter):
    """Runs a whole step and notes the bytes that its backward takes from before its first operator."""

    nbytes = 0

    def run_node(self, n: fx.Node) -> Any:
        nodes = list(self.module.graph.nodes)  # type: ignore[union-attr,arg-type]
        first = next(node for node in nodes if node.meta.get("autograd_backward"))
        if n is first:
            later = {each for node in nodes[nodes.index(first) : -1] for each in node.all_input_nodes}
            held = [value for node, value in self.env.items() if node.op == "placeholder"]
            held += [self.env[nodes[-1].args[0][0]]]
            held += [value for node, value in self.env.items() if node.target is torch.ops.aten.ones_like.default]
            taken = [value for node, value in self.env.items() if node in later and isinstance(value, Tensor)]
            self.nbytes = storage_bytes(taken, {each.untyped_storage().data_ptr() for each in held})
        return super().run_node(n)


@pytest.mark.parametrize("make", [llama, convnet])
def test_a_whole_step_in_one_graph(make: Callable[[], Subject]) -> None:
    again = pytest.importorskip(ONE_GRAPH).remat_using_tags_for_fwd_loss_bwd_graph
    module, batch, loss_fn = make()
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()  # which writes nothing
    graph, given = whole_step((module, batch, loss_fn))
    tags = tag_joint_graph(graph, num_fwd_outputs=1, memory_ratio=0.6, budget=300, save_random=True)
    assert not any("recompute" in node.meta for node in graph.graph.nodes if node.meta.get("autograd_backward"))
    run = Kept(again(graph), garbage_collect_values=False)
    with torch.no_grad():
        loss, *gradients = run.run(*given)
    expected = loss_fn(module(batch[0]), batch[1])
    theirs = torch.autograd.grad(expected, list(module.parameters()))
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, theirs, strict=True))
    assert tags.recomputed
    assert run.nbytes == tags.saved_bytes


def test_every_operator_of_the_forward_has_one_tag() -> None:
    graph, _ = whole_step(llama())
    next(iter(graph.graph.nodes)).meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    tags = tag_joint_graph(graph, num_fwd_outputs=1, memory_ratio=0.6, budget=100)
    found = {node.name: node.meta.get("recompute") for node in graph.graph.nodes}
    assert {found[name] for name in tags.saved} == {CheckpointPolicy.MUST_SAVE}
    assert {found[name] for name in tags.recomputed} == {CheckpointPolicy.MUST_RECOMPUTE}
    assert next(iter(found.values())) is None
    assert set(found.values()) == {None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE}
    assert "recomputed" in str(tags)
