"""Decoders on one or few sequences, beside the step that people write by hand: `python benchmarks/few_sequences.py`.

    python benchmarks/few_sequences.py [NAME ...] [--device sim:h200] [--width 1024] [--depth 4]

By hand, every block is checkpointed, and so are head and loss, in chunks of 1,024 tokens. The planned step has the
latency of that step as its limit. Columns: eager's peak, the peak by hand and its latency over eager's, ours and its
latency, our peak over the one by hand, and what runs in parts. All figures are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from lib.program import arguments, head, printed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import magis
from magis.results import Case, CaseResult
from magis.units import MIB

CHUNK = 1024


@dataclass(frozen=True)
class Setting:
    """Sequences, tokens of each, words; and whether the labels are given to the module, which shifts them."""

    rows: int
    length: int
    words: int
    inside: bool


SETTINGS = {
    "eight": Setting(8, 1024, 32_000, inside=False),
    "one": Setting(1, 8192, 32_000, inside=False),
    "one-inside": Setting(1, 8192, 32_000, inside=True),
    "two-inside": Setting(2, 2048, 32_000, inside=True),
    "many-words": Setting(1, 4096, 152_064, inside=True),
}


class Layer(nn.Module):
    """Causal attention in heads of 128 features, and a gated MLP of three times the width, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.raise_ = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.lower = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.before(x)).unflatten(-1, (3, -1, 128)).permute(2, 0, 3, 1, 4)
        x = x + self.mix(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.lower(F.silu(self.gate(y)) * self.raise_(y))


class Decoder(nn.Module):
    """A stack of layers between an embedding and a head; ``by_hand``, checkpointed as the module's text says."""

    def __init__(self, words: int, width: int, depth: int, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum", ignore_index=-100)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.by_hand else layer(x)
        x = self.norm(x)
        if labels is None:
            scores: Tensor = self.head(x).flatten(0, 1)
            return scores
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        if not self.by_hand:
            return F.cross_entropy(self.head(x).float().flatten(0, 1), targets, ignore_index=-100)
        pairs = zip(x.flatten(0, 1).split(CHUNK), targets.split(CHUNK), strict=True)
        chunks = [checkpoint(self._loss, some, their, use_reentrant=False) for some, their in pairs]
        return torch.stack(chunks).sum() / (targets != -100).sum()


def run(name: str, width: int, depth: int, case: Case, *, by_hand: bool) -> CaseResult:
    """One case of a setting."""

    def build() -> tuple[object, ...]:
        given = SETTINGS[name]
        net = Decoder(given.words, width, depth, by_hand=by_hand).bfloat16()
        ids = torch.randint(given.words, (given.rows, given.length))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        if by_hand or given.inside:
            return net, {"ids": ids, "labels": ids.clone()}, optimizer
        return net, (ids, ids.flatten()), F.cross_entropy, optimizer

    return magis.run_case(case, make=magis.models.from_function(name, build))


def rows(names: list[str], device: str, width: int, depth: int) -> Iterator[str]:
    """The lines of the table."""
    yield "| step | eager, MiB | by hand, MiB | latency | ours, MiB | latency | ours / by hand | in parts |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in names:
        eager, hand = (
            run(name, width, depth, Case(name, "eager", device, "paper"), by_hand=by_hand).original
            for by_hand in (False, True)
        )
        limit = max(1.0, hand.simulated_ms / eager.simulated_ms)
        case = Case(name, "magis", device, "paper", latency_ratio=limit)
        ours = run(name, width, depth, case, by_hand=False)
        peak, latency = ours.optimized.simulated.peak_bytes, ours.optimized.simulated_ms / eager.simulated_ms
        yield (
            f"| {name} | {eager.simulated.peak_bytes / MIB:.0f} | {hand.simulated.peak_bytes / MIB:.0f} | x{limit:.3f} "
            f"| {peak / MIB:.0f} | x{latency:.3f} | {peak / hand.simulated.peak_bytes:.3f} | {ours.search.fission} |"
        )


def main() -> None:
    asked = arguments(__doc__, names=list(SETTINGS), device="sim:h200", width=1024, depth=4).parse_args()
    printed((*head(), *rows(asked.names, asked.device, asked.width, asked.depth)))


if __name__ == "__main__":
    main()
