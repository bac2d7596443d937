"""Limits that a step is known to meet, and what plans make of them: `python benchmarks/refusals.py --networks 40`.

    python benchmarks/refusals.py [--networks 40] [--seed 0] [--output FILE]

Each network is drawn by its seed: blocks of a kind, widths, a loss, an optimizer, a type, a simulated GPU. Two points
of it are known ahead: eager's, and the step by hand, every block checkpointed. Each gives two limits: its peak for the
memory, its latency for the time. A fifth limit is drawn. A plan falls short

* "refused": where no plan is found, though eager, the step by hand or another limit's plan meets the limit;
* "slower": where the limit is eager's own peak, and the plan is slower than eager;
* "worse": where eager, the step by hand or another limit's plan meets the limit and is better by more than 0.1%.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lib.large_steps import Block as AttentionBlock
from lib.program import arguments, head, printed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import magis
from magis.cost.devices import device_names
from magis.models import from_function
from magis.results import Case
from magis.units import MIB

DEVICES = [name for name in device_names() if name.startswith("sim:")]
NEAR = 1.001
"""Ratios that count as equal."""


class WrittenOut(nn.Module):
    """Attention with its scores and its dropout written out, behind a norm."""

    def __init__(self, width: int, *, share: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.share = width // 64, share

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = F.dropout((query @ key.mT / 8).softmax(-1), self.share, self.training)
        mixed: Tensor = x + self.out((scores @ value).transpose(1, 2).flatten(2))
        return mixed


class Residual(nn.Module):
    """Layers whose output is added to their input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.layers(x)
        return added


class Gated(nn.Module):
    """A gated MLP behind a norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(width), nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        added: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return added


class Blocks(nn.Module):
    """Blocks between a first layer and a head; ``by_hand``, each block is checkpointed."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], head: nn.Module, *, by_hand: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.head, self.by_hand = first, nn.ModuleList(blocks), head, by_hand

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand else block(x)
        scores: Tensor = self.head(x)
        return scores


@dataclass(frozen=True)
class Network:
    """A drawn network with its batch, loss, optimizer and device."""

    kind: str
    device: str
    depth: int
    width: int
    batch: int
    size: int
    """Tokens of a sequence, or pixels of a side."""
    classes: int
    half: bool
    rule: str

    def build(self, *, by_hand: bool) -> tuple[object, ...]:
        """Return module, batch, loss and optimizer."""
        width, classes = self.width, self.classes
        if self.kind in ("mlp", "gated"):
            x, made = torch.randn(self.batch * self.size, width), _vectors(self.kind, width, self.depth)
            net = Blocks(nn.Linear(width, width), made, nn.Linear(width, classes), by_hand=by_hand)
            targets = torch.randint(classes, (len(x),))
        elif self.kind in ("decoder", "encoder", "written"):
            x, made = torch.randint(classes, (self.batch, self.size)), _tokens(self.kind, width, self.depth)
            top = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes), nn.Flatten(0, 1))
            net, targets = Blocks(nn.Embedding(classes, width), made, top, by_hand=by_hand), x.flatten()
        else:
            x, made = torch.randn(self.batch, 3, self.size, self.size), _pictures(self.kind, width // 4, self.depth)
            top = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width // 4, classes))
            net = Blocks(nn.Conv2d(3, width // 4, 4, 4), made, top, by_hand=by_hand)
            targets = torch.randint(classes, (self.batch,))
        if self.half:
            net, x = net.bfloat16(), x.bfloat16() if x.is_floating_point() else x
        optimizer: Any = (
            torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            if self.rule == "sgd"
            else torch.optim.AdamW(net.parameters())
        )
        return net, (x, targets), F.cross_entropy, optimizer


def _vectors(kind: str, width: int, depth: int) -> list[nn.Module]:
    if kind == "gated":
        return [Gated(width, 3 * width) for _ in range(depth)]
    parts = (
        partial(nn.Linear, width, 4 * width),
        nn.GELU,
        partial(nn.Dropout, 0.1),
        partial(nn.Linear, 4 * width, width),
    )
    return [Residual(nn.LayerNorm(width), *(part() for part in parts)) for _ in range(depth)]


def _tokens(kind: str, width: int, depth: int) -> list[nn.Module]:
    if kind == "written":
        pairs = ((WrittenOut(width, share=0.1), Gated(width, 2 * width)) for _ in range(depth))
        return list(itertools.chain.from_iterable(pairs))
    return [AttentionBlock(width, width // 64, 4 * width, causal=kind == "decoder") for _ in range(depth)]


def _pictures(kind: str, width: int, depth: int) -> list[nn.Module]:
    if kind == "wide":
        conv = partial(nn.Conv2d, width, width, 7, padding=3, groups=width)
        mixed = partial(nn.Conv2d, width, 4 * width, 1), nn.GELU, partial(nn.Conv2d, 4 * width, width, 1)
        return [Residual(conv(), nn.GroupNorm(1, width), *(part() for part in mixed)) for _ in range(depth)]
    same = partial(nn.Conv2d, width, width, 3, padding=1, bias=False), partial(nn.BatchNorm2d, width), nn.ReLU
    return [Residual(*(part() for part in same), *(part() for part in same)) for _ in range(depth)]


def drawn(seed: int) -> Network:
    """Return the network of a seed."""
    draw = random.Random(seed)
    kind = draw.choice(("mlp", "gated", "decoder", "encoder", "written", "conv", "wide"))
    pictures = kind in ("conv", "wide")
    return Network(
        kind,
        draw.choice(DEVICES),
        depth=draw.choice((2, 3, 4, 6, 8)),
        width=draw.choice((256, 512, 1024)),
        batch=draw.choice((1, 2, 4, 8, 16)),
        size=draw.choice((64, 128, 224)) if pictures else draw.choice((128, 512, 1024)),
        classes=draw.choice((10, 1000, 8000)) if pictures else draw.choice((1000, 32_000, 151_936)),
        half=draw.random() < 0.5,
        rule=draw.choice(("sgd", "adamw")),
    )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A step of a network, ours under a limit ("memory" or "latency") or another one: bytes and milliseconds."""

    name: str
    peak: int
    ms: float
    kind: str = ""
    bound: float = 0.0
    found: bool = True

    def meets(self, other: Point) -> bool:
        """Return True if this step meets another one's limit."""
        return self.found and (self.peak if other.kind == "memory" else self.ms) <= other.bound

    def better(self, other: Point) -> float:
        """Return how many times larger the other step's figure is, of what its limit leaves free."""
        return other.ms / self.ms if other.kind == "memory" else other.peak / self.peak


def points(network: Network, draw: random.Random) -> tuple[list[Point], list[Point]]:
    """Return eager's step and the one by hand, then ours under five limits."""

    def run(*, by_hand: bool = False, **limit: Any) -> Any:
        case = Case("drawn", "magis" if limit else "eager", network.device, "paper", **limit)
        build = partial(network.build, by_hand=by_hand)
        return magis.run_case(case, make=from_function("drawn", build))

    known = []
    for name in ("eager", "by hand"):
        step = run(by_hand=name == "by hand").original
        known.append(Point(name, step.simulated.peak_bytes, step.simulated_ms))
    eager = known[0]
    limits = [(kind, point.peak if kind == "memory" else point.ms) for point in known for kind in ("memory", "latency")]
    kind, ratio = draw.choice((("memory", draw.uniform(0.4, 0.98)), ("latency", draw.uniform(1.0, 1.4))))
    limits.append((kind, ratio * (eager.peak if kind == "memory" else eager.ms)))
    ours = []
    for kind, asked in limits:
        of_eager = eager.peak if kind == "memory" else eager.ms
        bound = int(asked) if kind == "memory" else max(asked, eager.ms)
        result = run(memory_limit=bound) if kind == "memory" else run(latency_ratio=bound / eager.ms)
        peak, ms = result.optimized.simulated.peak_bytes, result.optimized.simulated_ms
        ours.append(Point(f"{kind} {bound / of_eager:.3f}", peak, ms, kind, bound, result.search.feasible))
    return known, ours


def faults(known: list[Point], ours: list[Point]) -> Iterator[str]:
    """Yield the ways in which plans fall short, a line each."""
    eager = known[0]
    for point in ours:
        for other in (*known, *ours):
            if other is point or not other.meets(point):
                continue
            if not point.found:
                yield f"refused: {point.name}, met by {other.name}"
                break
            if other is eager and point.kind == "memory" and point.bound == eager.peak and point.ms > NEAR * eager.ms:
                yield f"slower: {point.name}, x{point.ms / eager.ms:.3f}"
            elif other.better(point) > NEAR:
                yield f"worse: {point.name}, by {other.better(point):.4f} than {other.name}"


def rows(networks: int, seed: int) -> Iterator[str]:
    """Yield the lines of the table and, at the end, the counts."""
    pairs, counts, started = 0, dict.fromkeys(("refused", "slower", "worse"), 0), time.perf_counter()
    for number in range(seed, seed + networks):
        network = drawn(number)
        known, ours = points(network, random.Random(number))
        pairs += len(ours)
        eager = known[0]
        told = ", ".join(f"{p.name}: {p.peak / eager.peak:.3f} x{p.ms / eager.ms:.3f}" for p in (*known, *ours))
        yield f"{number} {network.kind} {network.device} {eager.peak / MIB:.0f} MiB {told}"
        for fault in faults(known, ours):
            counts[fault.partition(":")[0]] += 1
            yield f"    {fault}"
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    yield f"== {pairs} pairs of a network and a limit: {told} ({time.perf_counter() - started:.0f} s)"


def main() -> int:
    """Print the table; 1 where a limit that is met is refused, or eager's own is slower than eager."""
    asked = arguments(__doc__, networks=40, seed=0, output=Path).parse_args()
    lines = printed((*head(),), asked.output)
    lines += printed(rows(asked.networks, asked.seed))
    if asked.output:
        asked.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return any(line.startswith(("    refused", "    slower")) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
