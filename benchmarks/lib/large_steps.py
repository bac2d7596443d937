"""Steps with large batches, lengths and pictures, by name: what `benchmarks/simulated_memory.py` plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["STEPS", "make"]

Parts = tuple[Any, ...]


class Block(nn.Module):
    """A block of a decoder with grouped or full attention through SDPA, or of an encoder."""

    def __init__(self, width: int, heads: int, inner: int, *, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.heads, self.causal, self.dropout = heads, causal, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


@lru_cache(maxsize=8)
def rope(length: int, width: int) -> Tensor:
    """A table that a cache of functions keeps."""
    angles = torch.arange(length).unsqueeze(1) / 10_000 ** (torch.arange(width) / width)
    return torch.cos(angles)


class Decoder(nn.Module):
    """A language model; with labels it returns its loss, as Hugging Face's do."""

    def __init__(
        self, width: int, blocks: int, vocabulary: int, *,
        heads: int = 8, dropout: float = 0.0, tied: bool = False, positions: int = 0, table: bool = False,
        check: bool = False, experts: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.ModuleList(Block(width, heads, 4 * width, dropout=dropout) for _ in range(blocks))
        self.experts = Experts(width, experts) if experts else nn.Identity()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.table, self.check = table, check

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        if self.table:
            x = x * rope(ids.shape[1], x.shape[-1]).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(self.experts(x)))
        if self.check and not torch.isfinite(logits).all():
            raise ValueError("the logits are not finite")
        if labels is None:
            return logits
        shifted = logits[:, :-1].float().flatten(0, 1)
        return functional.cross_entropy(shifted, labels[:, 1:].flatten())


class Experts(nn.Module):
    """All experts see all tokens, weighted by a router."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1).unbind(-1)
        out: Tensor = x + sum(
            share.unsqueeze(-1) * expert(x) for share, expert in zip(shares, self.experts, strict=False)
        )
        return out


class Vit(nn.Module):
    def __init__(self, width: int, blocks: int, patch: int, *, patches: int = 0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, patches, width)) if patches else None
        self.blocks = nn.Sequential(*(Block(width, 8, 4 * width, causal=False) for _ in range(blocks)))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        if self.places is not None:
            x = x + self.places
        out: Tensor = self.head(self.blocks(x).mean(1))
        return out


class Unet(nn.Module):
    def __init__(self, width: int, levels: int, dims: int = 2) -> None:
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.pool = functional.max_pool2d if dims == 2 else functional.max_pool3d
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(conv(a, b, 3, padding=1) for a, b in zip([3, *widths], widths, strict=False))
        pairs = zip(widths[:0:-1], widths[-2::-1], strict=True)
        self.up = nn.ModuleList(conv(below + here, here, 3, padding=1) for below, here in pairs)
        self.head = conv(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, conv in enumerate(self.down):
            x = functional.relu(conv(x if level == 0 else self.pool(x, 2)))
            kept.append(x)
        kept.pop()
        for conv in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = functional.relu(conv(torch.cat([x, kept.pop()], 1)))
        out: Tensor = self.head(x)
        return out


def convnet(width: int, stages: int, conv: type[nn.Module] = nn.Conv2d) -> nn.Module:
    dims = conv.__name__.removeprefix("Conv")
    norm, pool = getattr(nn, f"BatchNorm{dims}"), getattr(nn, f"AdaptiveAvgPool{dims}")
    layers: list[nn.Module] = []
    last = 3
    for stage in range(stages):
        now = width << stage
        layers += [conv(last, now, 3, stride=2, padding=1), norm(now), nn.ReLU()]
        for _ in range(2):
            layers += [conv(now, now, 3, padding=1), norm(now), nn.ReLU()]
        last = now
    return nn.Sequential(*layers, pool(1), nn.Flatten(), nn.Linear(last, 1000))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.cell = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(self.embed(ids))[0]).transpose(1, 2)
        return out


class Crossed(nn.Module):
    """A decoder over few tokens that looks at many."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(8000, width), nn.Embedding(8000, width)
        layer = nn.TransformerDecoderLayer(width, 8, 4 * width, 0.1, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, layers)
        self.head = nn.Linear(width, 8000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.decoder(self.target(target), self.source(source), tgt_mask=mask, tgt_is_causal=True)
        out: Tensor = self.head(x).flatten(0, 1)
        return out


class Pairs(nn.Module):
    """Direct preference optimization: a trained policy beside a frozen reference, on chosen and rejected answers."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.policy, self.reference = Decoder(*sizes), Decoder(*sizes).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        def likely(net: nn.Module, ids: Tensor) -> Tensor:
            logs = functional.log_softmax(net(ids)[:, :-1].float(), -1)
            return logs.gather(-1, ids[:, 1:, None]).sum((1, 2))

        gain = likely(self.policy, chosen) - likely(self.policy, rejected)
        with torch.no_grad():
            base = likely(self.reference, chosen) - likely(self.reference, rejected)
        return -functional.logsigmoid(0.1 * (gain - base)).mean()


class TwoTowers(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(rows, width), nn.Embedding(rows, width)
        self.tower = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        out: Tensor = self.tower(self.users(users)) @ self.tower(self.items(items)).T
        return out


def _lm(batch: int, length: int, *sizes: int, loss: str = "labels", half: bool = True, **more: Any) -> Parts:
    net = Decoder(*sizes, **more)
    net = net.bfloat16() if half else net
    ids = torch.randint(0, sizes[2], (batch, length))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    if loss == "labels":
        return net, {"ids": ids, "labels": ids.clone()}, optimizer
    flat = lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets)  # noqa: E731
    return net, (ids, ids.clone().view(-1)), flat, optimizer


def _pictures(make: Callable[[], nn.Module], batch: int, *size: int, half: bool = False) -> Parts:
    net, x = make(), torch.randn(batch, 3, *size)
    net, x = (net.bfloat16(), x.bfloat16()) if half else (net, x)
    return net, (x, torch.randint(0, 1000, (batch,))), functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1)


def _pixels(make: Callable[[], nn.Module], batch: int, *size: int) -> Parts:
    net = make()
    batches = torch.randn(batch, 3, *size), torch.randint(0, 4, (batch, *size))
    return net, batches, functional.cross_entropy, torch.optim.Adam(net.parameters())


def _recurrent(kind: type[nn.LSTM | nn.GRU], width: int, layers: int, batch: int, length: int) -> Parts:
    ids = torch.randint(0, 256, (batch, length))
    return Recurrent(kind, width, layers), (ids, ids.clone()), functional.cross_entropy


def _crossed(batch: int, source: int, target: int, width: int, layers: int) -> Parts:
    ids = torch.randint(0, 8000, (batch, target))
    given = (torch.randint(0, 8000, (batch, source)), ids), (ids.clone().view(-1),)
    return Crossed(width, layers), given, functional.cross_entropy


def _pairs(batch: int, length: int, *sizes: int) -> Parts:
    chosen, rejected = (torch.randint(0, sizes[2], (batch, length)) for _ in range(2))
    return Pairs(*sizes).bfloat16(), {"chosen": chosen, "rejected": rejected}


def _towers(rows: int, width: int, batch: int) -> Parts:
    given = tuple(torch.randint(0, rows, (batch,)) for _ in range(2))
    return TwoTowers(rows, width), (given, torch.arange(batch)), functional.cross_entropy


def _bag(rows: int, batch: int, length: int) -> Parts:
    net = nn.Sequential(nn.EmbeddingBag(rows, 64), nn.Linear(64, 2))
    return net, (torch.randint(0, rows, (batch, length)), torch.randint(0, 2, (batch,))), functional.cross_entropy


def _mlp(batch: int, width: int, layers: int) -> Parts:
    rows = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*rows), (torch.randn(batch, width), torch.randn(batch, width)), functional.mse_loss


STEPS: dict[str, Callable[[], Parts]] = {
    "lm-1x131072": partial(_lm, 1, 131072, 1024, 4, 32000),
    "lm-1x131072-flat": partial(_lm, 1, 131072, 2048, 8, 32000, loss="flat"),
    "lm-2x65536-dropout": partial(_lm, 2, 65536, 512, 4, 16000, dropout=0.1),
    "lm-8x8192-tied": partial(_lm, 8, 8192, 1024, 8, 151936, tied=True),
    "lm-64x2048-float32": partial(_lm, 64, 2048, 768, 12, 50257, half=False),
    "lm-4x16384-places": partial(_lm, 4, 16384, 1024, 6, 32000, positions=16384),
    "lm-1x32768-7b": partial(_lm, 1, 32768, 4096, 32, 32000, heads=32),
    "lm-512x512": partial(_lm, 512, 512, 768, 6, 30000, loss="flat"),
    "lm-3x4096-odd": partial(_lm, 3, 4093, 1000, 5, 31999),
    "lm-16x4096-tables": partial(_lm, 16, 4096, 1024, 6, 32000, table=True),
    "lm-1x65536-7b-tables": partial(_lm, 1, 65536, 4096, 24, 32000, heads=32, table=True),
    "lm-64x1024-checked": partial(_lm, 64, 1024, 512, 6, 32000, check=True),
    "lm-256x4096-checked": partial(_lm, 256, 4096, 512, 4, 8000, check=True, half=False),
    "moe-8x4096-64": partial(_lm, 8, 4096, 512, 2, 32000, experts=64),
    "moe-4x2048-128-wide": partial(_lm, 4, 2048, 2048, 2, 32000, experts=128),
    "lm-huge-vocabulary": partial(_lm, 2, 2048, 512, 2, 1_000_000),
    "vit-8x4096": partial(_pictures, lambda: Vit(768, 12, 16), 8, 4096, 4096),
    "vit-1x4096-places": partial(_pictures, lambda: Vit(1024, 24, 16, patches=65536), 1, 4096, 4096),
    "vit-1024x384": partial(_pictures, lambda: Vit(768, 12, 16, patches=576), 1024, 384, 384),
    "vit-256x518-half": partial(_pictures, lambda: Vit(1024, 12, 14), 256, 518, 518, half=True),
    "vit-2x2160x3840": partial(_pictures, lambda: Vit(512, 8, 8), 2, 2160, 3840),
    "unet-2x4096": partial(_pixels, lambda: Unet(32, 5), 2, 4096, 4096),
    "unet-16x2048": partial(_pixels, lambda: Unet(64, 4), 16, 2048, 2048),
    "unet-1x2176x3840": partial(_pixels, lambda: Unet(64, 6), 1, 2176, 3840),
    "unet-3d-4x256": partial(_pixels, lambda: Unet(16, 4, 3), 4, 256, 256, 256),
    "convnet-4096x224": partial(_pictures, lambda: convnet(64, 4), 4096, 224, 224),
    "convnet-64x1024": partial(_pictures, lambda: convnet(64, 5), 64, 1024, 1024),
    "convnet-8192x64-half": partial(_pictures, lambda: convnet(96, 4), 8192, 64, 64, half=True),
    "conv3d-64x128": partial(_pictures, lambda: convnet(32, 4, nn.Conv3d), 64, 128, 128, 128),
    "conv3d-16x64x224": partial(_pictures, lambda: convnet(64, 3, nn.Conv3d), 16, 64, 224, 224),
    "conv1d-64x1048576": partial(_pictures, lambda: convnet(32, 6, nn.Conv1d), 64, 1 << 20),
    "lstm-256x1024": partial(_recurrent, nn.LSTM, 1024, 2, 256, 1024),
    "gru-2048x512": partial(_recurrent, nn.GRU, 512, 2, 2048, 512),
    "cross-16x8192x512": partial(_crossed, 16, 8192, 512, 512, 6),
    "cross-2x65536x1024": partial(_crossed, 2, 65536, 1024, 512, 4),
    "dpo-8x4096": partial(_pairs, 8, 4096, 1024, 6, 32000),
    "towers-10m-65536": partial(_towers, 10_000_000, 128, 65536),
    "bag-50m-1m": partial(_bag, 50_000_000, 1 << 20, 64),
    "mlp-1m": partial(_mlp, 1 << 20, 1024, 24),
    "mlp-wide": partial(_mlp, 4096, 32768, 8),
}


def make(name: str) -> Parts:
    """Model, batch, loss and optimizer of a step, as a user's function returns them."""
    return STEPS[name]()
