"""`torch.compile(backend="magis")` beside eager mode and torch's own `aot_eager`, measured on the CPU.

    python benchmarks/compile.py [ratio [model ...]] [--link 0]
                (default: 0.7; mlp, resnet50, bert, gpt_neo and a module written as Hugging Face's are, with dropout)

Peaks are the allocator's bytes of one forward and backward, with parameters, buffers and batch: as planned and as
measured, and what eager and `aot_eager` (torch's min-cut partition) need. "equal" says whether loss, gradients and
buffers are those of eager, bit for bit, from the same random numbers. Search time is that of a busy machine.
`--link` is a host link in bytes per second that plans may use (25e9 is a PCIe 4.0 link): "swapped" are then the bytes
that they copy to host memory and back, which the CPU does, though it wins nothing by it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lib.program import arguments
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.extensions.compile.compile_options import CompileReport
from magis.extensions.compile.dynamo_backend import magis
from magis.models import get
from magis.runtime.measure import window_peak
from magis.units import format_bytes

NAMES = ("mlp", "resnet50", "bert", "gpt_neo", "hf-like")


@dataclass(frozen=True)
class Step:
    """A module, its batch, its loss."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[..., Tensor]


class Layer(nn.Module):
    """A transformer layer with dropout in the places in which Hugging Face's BERT has it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.qkv(hidden).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = parts[0] @ parts[1].transpose(-1, -2) / (width // self.heads) ** 0.5 + mask
        context = self.drop(scores.softmax(-1)) @ parts[2]
        attended = self.out(context.transpose(1, 2).reshape(rows, length, width))
        hidden = self.first(hidden + self.drop(attended))
        return self.second(hidden + self.drop(self.down(F.gelu(self.up(hidden)))))


class Model(nn.Module):
    """Embeddings, layers and a head, returning logits; the attention mask is computed from the tokens."""

    def __init__(self, words: int = 1000, width: int = 128, depth: int = 4, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4, 0.1) for _ in range(depth))
        self.head = nn.Linear(width, words)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens == 0)[:, None, None, :].to(torch.float32) * torch.finfo(torch.float32).min
        hidden = self.drop(self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(hidden)


def made(name: str) -> Step:
    """The step of a name."""
    if name != "hf-like":
        work = get(name).build("small", 0)
        return Step(work.module, work.inputs, work.targets, work.loss_fn)
    torch.manual_seed(0)
    tokens, labels = torch.randint(1, 1000, (16, 64)), torch.randint(0, 1000, (16, 64))
    return Step(Model(), (tokens,), (labels,), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))


def measured(step: Step, backend: Any, **options: Any) -> tuple[int, list[Tensor]]:
    """Peak bytes of one forward and backward, and its loss, gradients and buffers."""
    torch.compiler.reset()
    module = copy.deepcopy(step.module)

    def forward(*batch: Tensor) -> Tensor:
        return step.loss_fn(module(*batch[: len(step.inputs)]), *batch[len(step.inputs) :])

    batch = (*step.inputs, *step.targets)
    run = forward if backend is None else torch.compile(forward, backend=backend, dynamic=False, **options)
    run(*batch).backward()
    module.zero_grad(set_to_none=True)
    held = {id(each): each.nbytes for each in (*module.parameters(), *module.buffers(), *batch)}
    torch.manual_seed(1)
    peak = sum(held.values()) + window_peak(lambda: run(*batch).backward()).peak_bytes
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return peak, [*gradients, *module.buffers()]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("ratio", nargs="?", type=float, default=0.7)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--link", type=float, default=0.0)
    asked = parser.parse_args()
    ratio = asked.ratio
    warnings.filterwarnings("ignore", message="The .grad attribute")
    print(f"memory ratio {ratio}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'model':9} {'eager':>11} {'aot_eager':>11} {'planned':>11} {'measured':>11} {'/eager':>7} {'/aot':>7}"
          f" {'latency':>8} {'again':>6} {'swapped':>11} {'search':>7}  equal")  # fmt: skip
    for name in asked.names:
        step = made(name)
        reports: list[CompileReport] = []
        eager, theirs = measured(step, None)
        aot, _ = measured(step, "aot_eager")
        options = {"memory_ratio": ratio, "link": asked.link, "report": reports.append}
        ours, found = measured(step, magis, options=options)
        (report,) = reports
        equal = all(torch.equal(a, b) for a, b in zip(theirs, found, strict=True))
        print(
            f"{name:9} {format_bytes(eager):>11} {format_bytes(aot):>11} {format_bytes(report.planned_bytes):>11}"
            f" {format_bytes(ours):>11} {ours / eager:7.3f} {ours / aot:7.3f} {report.latency_ratio:8.3f}"
            f" {len(report.recomputed):6} {format_bytes(report.swapped_bytes):>11} {report.seconds:5.1f} s"
            f"  {'yes' if equal else 'NO'}"
            f"{'' if ours == report.planned_bytes else f' (off by {ours - report.planned_bytes} bytes)'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
