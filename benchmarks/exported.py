"""Plans that other programs carry out: torchtitan's debug model trained three steps by each, beside eager.

    python benchmarks/exported.py [--ratio 0.7] [--batch 4] [--length 256] [--output FILE.txt]

It needs `pip install torchtitan torch_remat triton`; torchtitan imports triton, which runs nothing here. The model is
`llama3_debugmodel` with torchtitan's own `ScaledDotProductAttention`, since its flex attention is no ATen operator.

"saved" rows are tags of `magis.tag_joint_graph`: bytes that stay from forward to backward, arguments and results not
counted; of the unplanned step, of the plan, of its tags, and measured. torch's partitioners split AOTAutograd's joint
graph; `selective_activation_remat_pass` is what torchtitan's graph trainer runs on its trace of a step. "peak" rows are
policies of `magis.checkpoint_policy`: bytes of forward and backward with parameters, buffers, batch and gradients.
"bits": losses, gradients and weights of three steps of AdamW equal eager's.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.nn import functional

import magis
from magis.runtime.measure import collector_spared, window_peak

HEADING = f"{'carried out by':35} {'bytes':6} {'unplanned':>11} {'plan':>11} {'export':>11} {'measured':>11} bits"
BUDGET = 3000
Loss = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, ratio=0.7, batch=4, length=256, output=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    printed(table(asked.ratio, asked.batch, asked.length), asked.output)


def table(ratio: float, batch: int, length: int) -> Iterator[str]:
    """A row per consumer."""
    yield from head(f"{torch.get_num_threads()} threads", "llama3_debugmodel of torchtitan")
    yield HEADING
    model = debug_model()
    ids = torch.randint(0, 2048, (batch, length), generator=torch.Generator().manual_seed(1))
    given = ids, ids.roll(-1, 1)
    for partitioner in (min_cut_rematerialization_partition, default_partition):
        yield partitioned(Twins(model, given), partitioner, ratio)
    yield traced(Twins(model, given), ratio)
    for library in ("torch", "torch_remat"):
        yield checkpointed(Twins(model, given), library, ratio)


def debug_model() -> nn.Module:
    """Six layers of width 256; token numbers [batch, length] -> logits [batch, length, 2048]."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model: nn.Module = config.build()
    model.init_states()  # type: ignore[operator]
    return model


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits."""
    return functional.cross_entropy(out.flatten(0, 1).float(), targets.flatten())


@dataclass
class Twins:
    """A model to be trained by a plan, and eager's copy of it, each with an optimizer."""

    start: nn.Module
    batch: tuple[Tensor, Tensor]
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.start)
        self._other = copy.deepcopy(self.start)
        self._optimizers = [torch.optim.AdamW(each.parameters(), lr=8e-4) for each in (self.model, self._other)]

    def trained(self, backward: Callable[[], Tensor]) -> str:
        """Three steps of both; `backward` leaves gradients in the first model and returns the loss."""
        same = True
        for _ in range(3):
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss = backward()
            expected = loss_of(self._other(self.batch[0]), self.batch[1])
            expected.backward()  # type: ignore[no-untyped-call]
            pairs = list(zip(self.model.parameters(), self._other.parameters(), strict=True))
            same &= torch.equal(loss, expected) and all(
                a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs
            )
            for optimizer in self._optimizers:
                optimizer.step()
            same &= all(torch.equal(a, b) for a, b in pairs)
        return "equal" if same else "DIFFER"


def partitioned(twins: Twins, partitioner: Any, ratio: float) -> str:
    """AOTAutograd, split by a partitioner of torch's."""
    tags: list[Any] = []
    plain: list[int] = []
    measured: list[int] = []

    def split(tagged: bool) -> Loss:
        def partition(joint: fx.GraphModule, inputs: Sequence[Any], **further: Any) -> Any:
            if tagged:
                joint.graph = fx_graph_cse(joint.graph)  # as the min-cut does itself
                count = further["num_fwd_outputs"]
                tags.append(magis.tag_joint_graph(joint, num_fwd_outputs=count, memory_ratio=ratio, budget=BUDGET))
            return (partitioner if tagged else default_partition)(joint, inputs, **further)

        backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
        torch.compiler.reset()
        compiled: Loss = torch.compile(lambda x, y: loss_of(twins.model(x), y), backend=backend, fullgraph=True)
        return compiled

    def backward(call: Loss, noted: list[int]) -> Tensor:
        loss = call(*twins.batch)
        held = (*twins.model.parameters(), *twins.model.buffers(), *twins.batch, loss)
        noted.append(storage_bytes(loss.grad_fn.saved_tensors, held))  # type: ignore[union-attr]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    backward(split(tagged=False), plain)
    call = split(tagged=True)
    bits = twins.trained(lambda: backward(call, measured))
    (found,) = tags
    return row(partitioner.__name__, "saved", plain[0], found.plan.saved_bytes, found.saved_bytes, measured[-1], bits)


def storage_bytes(tensors: Sequence[Tensor], held: Sequence[Tensor]) -> int:
    """Of storages, each once, but for those that are held anyway."""
    known = {each.untyped_storage().data_ptr() for each in held}
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(size for place, size in found.items() if place not in known)


class Kept(fx.Interpreter):
    """Runs a traced step, and notes the bytes that its backward takes from before its first operator."""

    nbytes = 0

    def run_node(self, n: fx.Node) -> Any:
        nodes = list(n.graph.nodes)
        first = next(node for node in nodes if node.meta.get("autograd_backward"))
        if n is first:
            later = {each for node in nodes[nodes.index(first) : -1] for each in node.all_input_nodes}
            tensors = {node: value for node, value in self.env.items() if isinstance(value, Tensor)}
            held = [value for node, value in tensors.items() if node.op == "placeholder" or "ones_like" in node.name]
            held.append(tensors[nodes[-1].args[0][0]])
            self.nbytes = storage_bytes([value for node, value in tensors.items() if node in later], held)
        return super().run_node(n)


def traced(twins: Twins, ratio: float) -> str:
    """The trace of torchtitan's graph trainer, and its pass that recomputes by tags."""
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

    import_module("torch._functorch._activation_offloading.offload_ops")  # which the pass looks for

    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = loss_of(twins.model(x), y)
        return [loss, *torch.autograd.grad(loss, list(twins.model.parameters()))]  # the tracer's stand-ins

    found = minimal_fx_tracer(step, module=twins.model)(*twins.batch)
    original = copy.deepcopy(found.gm)
    tags = magis.tag_joint_graph(found.gm, num_fwd_outputs=1, memory_ratio=ratio, budget=BUDGET, save_random=True)
    found.gm = selective_activation_remat_pass(found.gm)
    found.gm.recompile()
    run = run_traced(found, module=twins.model)
    given: list[Any] = []
    own = found.gm.forward

    def forward(*args: Any) -> Any:
        given[:] = args[0] if len(args) == 1 and isinstance(args[0], list) else args
        return own(*args)

    found.gm.forward = forward

    def backward() -> Tensor:
        loss, *gradients = run(*twins.batch)
        for weight, gradient in zip(twins.model.parameters(), gradients, strict=True):
            weight.grad = gradient
        return loss  # type: ignore[no-any-return]

    bits = twins.trained(backward)
    sizes = []
    for graph in (original, found.gm):
        meter = Kept(graph, garbage_collect_values=False)
        with torch.no_grad():
            meter.run(*(each.detach() if isinstance(each, Tensor) else each for each in given))
        sizes.append(meter.nbytes)
    name = "selective_activation_remat_pass"
    return row(name, "saved", sizes[0], tags.plan.saved_bytes, tags.saved_bytes, sizes[1], bits)


def checkpointed(twins: Twins, library: Literal["torch", "torch_remat"], ratio: float) -> str:
    """Layers under checkpointing, by a policy."""
    blocks = [f"layers.{name}" for name, _ in twins.model.get_submodule("layers").named_children()]
    policy = magis.checkpoint_policy(
        twins.model, twins.batch, loss_of, memory_ratio=ratio, blocks=blocks, library=library
    )

    def backward() -> Tensor:
        loss = loss_of(twins.model(twins.batch[0]), twins.batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    handle = policy.apply(twins.model)
    bits = twins.trained(backward)
    twins.model.zero_grad(set_to_none=True)
    held = sum(each.nbytes for each in (*twins.model.parameters(), *twins.model.buffers(), *twins.batch))
    with collector_spared():
        measured = held + window_peak(backward).peak_bytes
    handle.remove()
    name = "torch.utils.checkpoint" if library == "torch" else library
    return row(name, "peak", policy.original_bytes, policy.planned_bytes, policy.planned_bytes, measured, bits)


def row(name: str, what: str, *sizes: int | str) -> str:
    """One line."""
    *numbers, bits = sizes
    return f"{name:35} {what:6} " + " ".join(f"{each:>11,}" for each in numbers) + f" {bits}"


if __name__ == "__main__":
    main()
