"""Adapters on a frozen Llama 3 8B, one long sequence: `python benchmarks/long_sequences.py [LENGTH ...]`.

    python benchmarks/long_sequences.py 8192 32768 131072 [--device sim:h100] [--layers 32] [--rank 16]

Everything is bfloat16; every linear layer of a block has an adapter (LoRA), which AdamW trains. By hand, each block is
checkpointed, and so are head and loss, in chunks of 1,024 tokens; with the blocks' inputs offloaded, their bytes but
for two blocks' are gone from the peak, and the step takes no longer (a lower bound of what offloading costs). The
planned step has the latency of the step by hand as its limit. Columns: what is allocated beside weights and optimizer
state, at the peak, in MiB, latency over eager's, and the seconds of planning. All figures are simulated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from lib.by_hand import in_chunks, summed_entropy
from lib.llama import Llama, Sizes
from lib.program import arguments, head, printed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import magis
from magis.results import Case, CaseResult
from magis.units import MIB

CHUNK = 1024


class Adapter(nn.Module):
    """A frozen linear layer, and a trained product of two thin ones beside it."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + 2.0 * self.up(self.down(x))
        return out


class Trained(nn.Module):
    """The decoder with adapters and its loss on shifted labels; ``by_hand``, checkpointed as the module's text says."""

    def __init__(self, layers: int, length: int, rank: int, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.net = Llama(layers, Sizes(length, 4096, 14336, 32, 8, 128256)).requires_grad_(requires_grad=False)
        for layer in self.net.layers:
            for name, each in list(layer.named_children()):
                if isinstance(each, nn.Linear):
                    setattr(layer, name, Adapter(each, rank))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        net = self.net
        x = net.word(ids)
        for layer in net.layers:
            of_layer = (x, net.cos, net.sin)
            x = checkpoint(layer, *of_layer, use_reentrant=False) if self.by_hand else layer(*of_layer)
        x, targets = net.norm(x), F.pad(labels, (0, 1), value=-100)[:, 1:]
        if not self.by_hand:
            return F.cross_entropy(net.head(x).float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        parts = in_chunks(summed_entropy(net.head), x, targets, CHUNK)
        return torch.stack(parts).sum() / (targets != -100).sum()


def run(case: Case, layers: int, length: int, rank: int, *, by_hand: bool) -> CaseResult:
    """One case of a length."""

    def build() -> tuple[object, ...]:
        net = Trained(layers, length, rank, by_hand=by_hand).bfloat16()
        ids = torch.randint(128256, (1, length))
        optimizer = torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=1e-4)
        return net, {"ids": ids, "labels": ids.clone()}, optimizer

    return magis.run_case(case, make=magis.models.from_function(case.model, build))


def rows(lengths: list[str], device: str, layers: int, rank: int) -> Iterator[str]:
    """The lines of the table."""
    yield "| tokens | eager | by hand | latency | offloaded | ours | latency | ours / better | seconds | in parts |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for length in map(int, lengths):
        name = f"llama-{length}"
        eager, hand = (
            run(Case(name, "eager", device, "paper"), layers, length, rank, by_hand=by_hand).original
            for by_hand in (False, True)
        )
        limit = max(1.0, hand.simulated_ms / eager.simulated_ms)
        started = time.perf_counter()
        ours = run(Case(name, "magis", device, "paper", latency_ratio=limit), layers, length, rank, by_hand=False)
        seconds, step = time.perf_counter() - started, ours.optimized
        kept = ours.persistent_bytes
        offloaded = hand.simulated.peak_bytes - kept - (layers - 2) * length * 4096 * 2
        peak = step.simulated.peak_bytes - kept
        yield (
            f"| {length} | {(eager.simulated.peak_bytes - kept) / MIB:.0f} "
            f"| {(hand.simulated.peak_bytes - kept) / MIB:.0f} | x{limit:.3f} | {offloaded / MIB:.0f} "
            f"| {peak / MIB:.0f} | x{step.simulated_ms / eager.simulated_ms:.3f} | {peak / offloaded:.3f} "
            f"| {seconds:.0f} | {ours.search.fission} |"
        )


def main() -> None:
    defaults = {"names": ["8192", "32768", "131072"], "device": "sim:h100", "layers": 32, "rank": 16}
    asked = arguments(__doc__, **defaults).parse_args()
    printed((*head(), *rows(asked.names, asked.device, asked.layers, asked.rank)))


if __name__ == "__main__":
    main()
