"""Small modules drawn at random: linear, convolution, norm, attention, embedding, shared weights, skips, in-place."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTHS = (4, 8, 12, 16)


@dataclass(frozen=True)
class Drawn:
    """A module with a batch and a loss, and what it is made of."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Any
    optimizer: Any
    parts: tuple[str, ...]


class Residual(nn.Module):
    """Adds its input, or joins it in memory."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body = body
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if self.how == "add":
            return x + out
        if self.how == "add_":
            return out.add_(x)
        return x * torch.sigmoid(out)


class Twice(nn.Module):
    """One layer used two times: shared weights."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.tanh(self.body(x)))


class Attention(nn.Module):
    """Self-attention written out, or torch's own."""

    def __init__(self, width: int, *, fused: bool, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.fused, self.causal = fused, causal

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal).squeeze(1)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return (scores.softmax(-1) @ value).squeeze(1)


class Pooled(nn.Module):
    """Pictures to rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


def draw(seed: int) -> Drawn:
    """The module of a seed."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kind = chance.choice(("rows", "rows", "pictures", "tokens"))
    width, rows = chance.choice(WIDTHS), chance.choice((2, 4, 6, 8))
    parts: list[str] = [kind]
    first: list[nn.Module] = []
    if kind == "tokens":
        inputs = torch.randint(0, 20, (rows, 6))
        first = [nn.Embedding(20, width, padding_idx=chance.choice((None, 0)))]
    elif kind == "pictures":
        inputs = torch.randn(rows, 3, 8, 8)
        first = [nn.Conv2d(3, width, 3, padding=1)]
    else:
        inputs = torch.randn(rows, 6, width)
    body = [_part(chance, width, kind, parts) for _ in range(chance.randint(1, 5))]
    last: list[nn.Module] = [Pooled()] if kind == "pictures" else []
    classes = 5
    module = nn.Sequential(*first, *body, *last, nn.Linear(width, classes))
    if chance.random() < 0.2:
        for parameter in list(module.parameters())[: chance.randint(1, 2)]:
            parameter.requires_grad_(False)
        parts.append("frozen")
    length = 64 if kind == "pictures" else 6
    if chance.random() < 0.5:
        targets = torch.randint(0, classes, (rows * length,))
        loss = _cross_entropy
    else:
        targets = torch.randn(rows, length, classes)
        loss = chance.choice((F.mse_loss, F.l1_loss, F.smooth_l1_loss))
    return Drawn(module, (inputs,), (targets,), loss, _optimizer(chance), tuple(parts))


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets)


def _optimizer(chance: random.Random) -> Any:
    kind = chance.choice(("sgd", "momentum", "adam", "adamw", "rmsprop", "groups"))
    decay = chance.choice((0.0, 0.1))

    def make(module: nn.Module) -> torch.optim.Optimizer:
        params: Any = [p for p in module.parameters() if p.requires_grad]
        if kind == "groups":
            params = [{"params": params[:1]}, {"params": params[1:], "lr": 1e-3, "weight_decay": 0.05}]
        if kind in ("sgd", "momentum", "groups"):
            return torch.optim.SGD(params, lr=0.05, momentum=0.9 * (kind == "momentum"), weight_decay=decay)
        if kind == "rmsprop":
            return torch.optim.RMSprop(params, lr=1e-3)
        return (torch.optim.Adam if kind == "adam" else torch.optim.AdamW)(params, lr=1e-2, weight_decay=decay)

    return make


def _part(chance: random.Random, width: int, kind: str, parts: list[str]) -> nn.Module:
    """One part that keeps shapes, perhaps within a skip, or used twice."""
    name = chance.choice(_PICTURES if kind == "pictures" else _ROWS)
    part = _made(name, chance, width)
    around = chance.choice(("", "", "add", "add_", "gate", "twice"))
    parts.append(f"{around} {name}".strip())
    if around == "twice":
        return Twice(part)
    return Residual(part, around) if around else part


_ROWS = ("linear", "norm", "attention", "fused", "causal", "dropout", "relu_", "gelu", "rms", "expand")
_PICTURES = ("conv", "depthwise", "batch", "group", "dropout", "relu_", "pool", "average")


def _made(name: str, chance: random.Random, width: int) -> nn.Module:
    match name:
        case "linear":
            return nn.Linear(width, width, bias=chance.random() < 0.7)
        case "expand":
            return nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        case "norm":
            return nn.LayerNorm(width, elementwise_affine=chance.random() < 0.7)
        case "rms":
            return nn.RMSNorm(width)
        case "attention" | "fused" | "causal":
            return Attention(width, fused=name != "attention", causal=name == "causal")
        case "conv":
            return nn.Conv2d(width, width, chance.choice((1, 3)), padding="same")
        case "depthwise":
            return nn.Conv2d(width, width, 3, padding=1, groups=width)
        case "batch":
            return nn.BatchNorm2d(width)
        case "group":
            return nn.GroupNorm(2, width)
        case "pool":
            return nn.MaxPool2d(3, stride=1, padding=1)
        case "average":
            return nn.AvgPool2d(3, stride=1, padding=1)
        case "dropout":
            return nn.Dropout(chance.choice((0.1, 0.5)))
        case "relu_":
            return _InPlace()
        case _:
            return nn.GELU()


class _InPlace(nn.Module):
    """Writes over a copy of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.0).relu_()
