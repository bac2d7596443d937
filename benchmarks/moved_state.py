"""Optimizer state in host memory between updates: `python benchmarks/moved_state.py [model ...] [--card sim:rtx3090]
[--sequences 8 32]`.

Each network (the gate's, and "llama", Hugging Face's, which needs transformers) is trained by AdamW for 20 steps on
this CPU on the first rows of its batch, in eager mode and by a plan that may keep all state in host memory: within the
lowest of some multiples of the bytes of weights and state for which there is a plan without loops (whose sums come in
another order). Weights, state and losses are compared bit by bit; measured bytes are the allocator's in one step with
all that stays on the device.

"llama-8b" is planned, not run: Llama 3 8B, bfloat16, AdamW, one sequence of 2,048 tokens, within what a simulated card
has less CUDA's context, for bytes that its caching allocator reserves. Times are those of the step on a card that had
room. "qwen3-4b" (Hugging Face's, bfloat16 weights, AdamW) is planned with all `--sequences` of 2,048 tokens at once,
within 60% of what the usual loop reserves: one sequence after the other in eager mode, their gradients added up for one
update. That loop is predicted from one and two sequences; times are those of the whole loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from compiled_plans import llama
from lib.llama import Llama, Sizes, in_bfloat16
from lib.program import arguments, head, printed
from torch import Tensor, nn

import magis
from magis.capture import Workload
from magis.capture.workload import own_loss
from magis.errors import UsageError
from magis.extensions.models.network_names import GATE_NAMES
from magis.models import from_function, get
from magis.models.step_parts import recipe_of
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench
from magis.planner.planning import plan, within_reserved
from magis.planner.subject import Subject
from magis.results import Case
from magis.rewrite.moved_state import host_bytes
from magis.runtime.measure import usable_memory, window_peak
from magis.runtime.swap_streams import is_on_host
from magis.units import MIB

STEPS = 20
MULTIPLES = (0.65, 0.8, 0.95, 1.2, 1.6, 2.4, 4.0)
"""Limits, as multiples of the bytes of weights and state."""
SHARE, QUICK = 0.6, 3000
"""Limit of a plan for micro-batches, as a share of what their loop reserves, and the budget of its search."""
COLUMNS = ("weights", "+ state", "eager", "limit", "measured", "planned", "on host")
HEAD = f"{'model':9} {' '.join(f'{name:>8}' for name in COLUMNS)}  numbers"


def of_adamw(name: str, rows: int) -> Workload:
    """A network with the first rows of its batch, its loss, and AdamW."""
    work = llama() if name == "llama" else get(name).build("small", 0)
    inputs, targets = (tuple(each[:rows].clone() for each in some) for some in (work.inputs, work.targets))
    return replace(work, inputs=inputs, targets=targets, optimizer=OptimizerSpec("adamw", lr=1e-4))


def row(name: str, rows: int, failed: list[str]) -> str:
    """The line of a network that is trained here."""
    work = of_adamw(name, rows)
    weights = sum(each.nbytes for each in work.module.parameters())
    loss = None if work.loss_fn is own_loss else work.loss_fn
    twin = copy.deepcopy(work.module)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (work.module, twin)]
    prepare = partial(
        magis.optimize, work.module, (work.inputs, work.targets), loss, optimizers[0], host_limit="64 GiB"
    )
    step = planned_below(prepare, 3 * weights)
    report = step.report()

    def eager() -> Tensor:
        optimizers[1].zero_grad()
        found = twin(*work.inputs)
        value: Tensor = found if loss is None else loss(found, *work.targets)
        value.backward()
        optimizers[1].step()
        return value.detach()

    alike = True
    for number in range(STEPS):
        torch.manual_seed(number)
        ours = step(work.inputs, work.targets)
        torch.manual_seed(number)
        alike = torch.equal(ours, eager()) and alike
    alike = alike and all(map(torch.equal, work.module.parameters(), twin.parameters()))
    alike = alike and all(map(torch.equal, states(optimizers[0]), states(optimizers[1])))
    held = [*work.module.parameters(), *work.module.buffers(), *work.inputs, *work.targets]
    held += [each for each in states(optimizers[0]) if each.dim() and not is_on_host(each, "cpu")]
    stays = sum(each.nbytes for each in {id(each): each for each in held}.values())
    measured = window_peak(lambda: step(work.inputs, work.targets)).peak_bytes + stays
    sizes = (weights, 3 * weights, report.original_bytes, report.limit_bytes or 0, measured, report.planned_bytes)
    said = "eager's, bit by bit" if alike else "others"
    if not alike or measured != report.planned_bytes:
        failed.append(name)
    return f"{name:9} " + " ".join(f"{each / MIB:8.2f}" for each in (*sizes, report.host_bytes)) + f"  {said}"


def states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The state tensors of an optimizer, in the order of its parameters."""
    every = [each for group in optimizer.param_groups for each in group["params"]]
    return [tensor for each in every for tensor in optimizer.state[each].values()]


def planned_below(prepare: Any, nbytes: int) -> Any:
    """The step planned without loops for the lowest multiple of so many bytes."""
    for multiple in MULTIPLES:
        try:
            step = prepare(memory_limit=int(multiple * nbytes))
        except UsageError:
            continue
        if not step.report().fission:
            return step
    raise SystemExit("no multiple has a plan without loops")


class Decoder(nn.Module):
    """Llama 3 8B with the loss of its next tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.net = Llama(32, Sizes(length, 4096, 14336, 32, 8, 128256))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out = self.net(ids)
        return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def decoder(length: int) -> tuple[Any, ...]:
    """A Llama 3 8B in bfloat16, and one sequence."""
    net = in_bfloat16(partial(Decoder, length))
    tokens = torch.zeros(1, length, dtype=torch.long)
    return net, {"ids": tokens, "labels": tokens}


def on_a_card(card: str, length: int) -> Iterator[str]:
    """The lines of the step that is planned for a simulated card."""
    make = from_function("llama-8b", partial(decoder, length), "adamw")
    limit = usable_memory(card)
    for host in (0, 1 << 50):
        subject = Bench().subject(Case("llama-8b", "magis", card, "paper", host_limit=host), make)

        def search(target: int, left: float | None, subject: Subject = subject) -> Any:
            return plan(
                subject, memory_limit=target, latency_limit_ns=None, budget=None, seconds=left, seed=0, stored=None
            )

        found = within_reserved(subject, limit, None, search)
        nbytes, eager = (subject.reserved_bytes(each) or 0 for each in (found.graph, subject.captured.original))
        yield (
            f"llama-8b on {card}, {length} tokens, {host_bytes(found.graph) / MIB:,.0f} MiB of state on the host:"
            f" reserved {nbytes / MIB:,.0f} MiB of {limit / MIB:,.0f} (eager {eager / MIB:,.0f}), allocated"
            f" {found.peak / MIB:,.0f}, x{found.latency_ns / subject.original_ns:.3f} of the time"
            f"{'' if found.feasible else ': no plan within the card'}, {found.seconds:.0f} s"
        )


def qwen(sequences: int, length: int) -> tuple[Any, ...]:
    """Qwen3-4B in bfloat16, and its sequences."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    net = in_bfloat16(partial(Qwen3ForCausalLM, config))
    tokens = torch.zeros(sequences, length, dtype=torch.long)
    return net, {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(net.parameters())


def beside_micro_batches(card: str, length: int, sequences: int) -> str:
    """The line of a plan for all sequences beside the loop over micro-batches of one."""
    one, two = (magis.estimate(partial(qwen, 1, length), device=card, accumulate=count) for count in (1, 2))
    loop_ms = one.latency_ms + (sequences - 1) * (two.latency_ms - one.latency_ms)
    eager = max(each.reserved_bytes or 0 for each in (one, two) if sequences > 1 or each is one)
    case = Case(
        "qwen3-4b", "magis", card, "paper", memory_limit=int(SHARE * eager), memory_limit_of="reserved",
        host_limit=1 << 40, budget=QUICK,
    )  # fmt: skip
    found = magis.run_case(case, make=recipe_of("qwen3-4b", partial(qwen, sequences, length))[1])
    step, nbytes = found.optimized, found.optimized.reserved_bytes or 0
    return (
        f"qwen3-4b on {card}, {sequences} x {length} tokens: reserved {nbytes / MIB:,.0f} MiB, {nbytes / eager:.3f} of"
        f" the loop's {eager / MIB:,.0f}; {found.search.swapped_bytes / MIB:,.0f} MiB to the host and back;"
        f" {step.simulated_ms:,.0f} ms, x{step.simulated_ms / loop_ms:.3f} of the loop's {loop_ms:,.0f}"
        f"{'' if found.search.feasible else ': no plan'}; {found.search.seconds:.0f} s"
    )


def main() -> None:
    """Print a line for each network; exit with 1 if one has other numbers, or bytes, than it should."""
    parser = arguments(
        __doc__, names=[*GATE_NAMES, "llama", "llama-8b", "qwen3-4b"], card="sim:rtx3090", length=2048, rows=1
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[2, 8, 32])
    asked = parser.parse_args()
    failed: list[str] = []
    printed(head("MiB"))
    printed([HEAD])
    for name in asked.names:
        if name == "qwen3-4b":
            printed(beside_micro_batches(asked.card, asked.length, each) for each in asked.sequences)
        else:
            printed(on_a_card(asked.card, asked.length) if name == "llama-8b" else [row(name, asked.rows, failed)])
    if failed:
        raise SystemExit(f"not as they should be: {', '.join(failed)}")


if __name__ == "__main__":
    main()
