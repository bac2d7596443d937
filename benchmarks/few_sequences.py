"""Decoders on one or few sequences, beside the step that people write by hand: `python benchmarks/few_sequences.py`.

    python benchmarks/few_sequences.py [NAME ...] [--device sim:h200] [--width 1024] [--depth 4]

By hand, every block is checkpointed, and so are head and loss, in chunks of 1,024 tokens. The losses: cross-entropy on
scores (``flat``), inside of the module on shifted labels (``inside``), or on sliced scores (``shifted``); the
preference of the first sequence to the second (``preferred``, DPO), each in a pass of its own (``apart``); clipped
ratios weighted by rewards (``rewarded``, GRPO); the divergence from a teacher's scores (``distilled``). The planned
step has the latency of that step as its limit. Columns: eager's peak, the peak by hand and its latency over eager's,
ours and its latency, our peak over the one by hand, and what runs in parts. All figures are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from lib.by_hand import Part, in_chunks, summed_entropy
from lib.program import arguments, head, printed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import magis
from magis.results import Case, CaseResult
from magis.units import MIB

CHUNK = 1024


@dataclass(frozen=True)
class Setting:
    """Sequences, tokens of each, words, and the loss."""

    rows: int
    length: int
    words: int
    loss: str


SETTINGS = {
    "eight": Setting(8, 1024, 32_000, "flat"),
    "one": Setting(1, 8192, 32_000, "flat"),
    "one-inside": Setting(1, 8192, 32_000, "inside"),
    "one-shifted": Setting(1, 8192, 32_000, "shifted"),
    "two-inside": Setting(2, 2048, 32_000, "inside"),
    "two-preferred": Setting(2, 4096, 32_000, "preferred"),
    "two-apart": Setting(2, 4096, 32_000, "apart"),
    "four-rewarded": Setting(4, 2048, 32_000, "rewarded"),
    "one-distilled": Setting(1, 4096, 32_000, "distilled"),
    "many-words": Setting(1, 4096, 152_064, "inside"),
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

    def __init__(self, given: Setting, width: int, depth: int, *, by_hand: bool) -> None:
        super().__init__()
        self.loss, self.by_hand = given.loss, by_hand
        self.embed = nn.Embedding(given.words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, given.words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.loss == "apart" and labels is not None:
            first, second = (self._known(self._hidden(ids[n : n + 1]), labels[n : n + 1]).sum() for n in (0, 1))
            return -F.logsigmoid(0.1 * (first - second))
        x = self._hidden(ids)
        if labels is None:
            scores: Tensor = self.head(x).flatten(0, 1)
            return scores
        if self.loss == "preferred":
            known = self._known(x, labels).sum(1)
            return -F.logsigmoid(0.1 * (known[0] - known[1]))
        if self.loss == "rewarded":
            known = self._known(x, labels)
            rewards = torch.linspace(-1, 1, len(ids))[:, None]
            ratio, mask = (known - known.detach()).exp(), (labels[:, 1:] != 0).float()
            gain = torch.min(ratio * rewards, ratio.clamp(0.8, 1.2) * rewards) - 0.04 * known.square()
            return -((gain * mask).sum(1) / mask.sum(1)).mean()
        if self.loss == "distilled":
            return torch.stack(self._chunks(self._divergence, x, labels)).sum() / labels.shape[1]
        if self.loss == "shifted" and not self.by_hand:
            return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        if not self.by_hand:
            return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        return torch.stack(self._chunks(summed_entropy(self.head), x, targets)).sum() / (targets != -100).sum()

    def _hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.by_hand else layer(x)
        normed: Tensor = self.norm(x)
        return normed

    def _known(self, x: Tensor, labels: Tensor) -> Tensor:
        """Log-likelihoods of the next tokens."""
        return torch.cat(self._chunks(self._likelihoods, x[:, :-1], labels[:, 1:]), 1)

    def _chunks(self, part: Part, x: Tensor, labels: Tensor) -> list[Tensor]:
        """The parts of a loss by chunks of tokens, by hand; else one for all."""
        if not self.by_hand:
            return [part(x, labels)]
        return in_chunks(part, x, labels, CHUNK // len(x))

    def _likelihoods(self, x: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = self.head(x).float()
        return scores.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)

    def _divergence(self, x: Tensor, teacher: Tensor) -> Tensor:
        ours, theirs = self.head(x).float().log_softmax(-1), teacher.float().softmax(-1)
        return F.kl_div(ours, theirs, reduction="sum")


def run(name: str, width: int, depth: int, case: Case, *, by_hand: bool) -> CaseResult:
    """One case of a setting."""

    def build() -> tuple[object, ...]:
        given = SETTINGS[name]
        net = Decoder(given, width, depth, by_hand=by_hand).bfloat16()
        ids = torch.randint(given.words, (given.rows, given.length))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        if by_hand or given.loss != "flat":
            scores = (given.rows, given.length, given.words)
            labels = torch.randn(scores).bfloat16() if given.loss == "distilled" else ids.clone()
            return net, {"ids": ids, "labels": labels}, optimizer
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
