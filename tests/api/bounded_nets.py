"""Networks whose steps are far too large to be run here, and ones that planning must not build a second time."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

MADE: list[str] = []
"""What factories were called, time by time."""


class Decoder(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 4, rows: int = 100, *, check: bool = False, table: bool = False):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        layers = (nn.TransformerEncoderLayer(width, 4, width, 0.1, batch_first=True) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, rows)
        self.check, self.table = check, table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.table:
            x = x * ramp(ids.shape[1]).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        if self.check and not torch.isfinite(x).all():
            raise ValueError("not finite")
        return self.head(x).flatten(0, 1)


@lru_cache
def ramp(length: int) -> torch.Tensor:
    return torch.linspace(0, 1, length)


def language(net: nn.Module, batch: int, length: int):
    ids = torch.randint(0, 100, (batch, length))
    return net, ids, ids.clone().flatten(), functional.cross_entropy


def long():
    return language(Decoder(), 1, 131072)


def wide():
    return language(Decoder(width=2048, blocks=12), 4, 512)


def checks():
    return language(Decoder(check=True), 512, 2048)


def keeps_tables():
    return language(Decoder(table=True), 512, 2048)


def reads_lengths():
    net, ids, targets, loss = language(Decoder(), 2048, 2048)
    lengths = torch.randint(1024, 2048, (2048,))

    def shorter(logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return loss(logits[: int(lengths.max())], targets[: int(lengths.max())])

    return net, ids, (targets, lengths), shorter


def pictures():
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 2, 3, padding=1))
    return net, torch.randn(8, 3, 2048, 2048), torch.randint(0, 2, (8, 2048, 2048)), functional.cross_entropy


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(512, 512, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


def recurrent():
    return Recurrent(), torch.randn(256, 1024, 512), torch.randn(256, 1024, 512), functional.mse_loss


def single_batch():
    MADE.append("single_batch")
    return nn.Linear(8, 8), (torch.randn(4, 8),), functional.mse_loss


def a_list():
    MADE.append("a_list")
    return [nn.Linear(8, 8), torch.randn(4, 8)]


def text_for_inputs():
    MADE.append("text_for_inputs")
    return nn.Linear(8, 8), ("x",), torch.randn(4, 8), functional.mse_loss


def many_losses():
    MADE.append("many_losses")
    return nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8), functional.cosine_similarity


def wrong_width():
    MADE.append("wrong_width")
    return nn.Linear(9, 8), torch.randn(4, 8), torch.randn(4, 8), functional.mse_loss


class Patches(nn.Module):
    """A transformer over the patches of a picture, each predicted; a condition has as many numbers as a patch has
    features."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.blocks, self.out = nn.Conv2d(4, 512, 2, 2), nn.ModuleList(), nn.Linear(512, 16)
        for _ in range(2):
            self.blocks.append(nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True))

    def forward(self, pictures: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = self.cut(pictures).flatten(2).transpose(1, 2) + condition.unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def patches(loss=functional.mse_loss):
    return Patches(), ((torch.randn(1, 4, 256, 256), torch.randn(1, 512)), torch.randn(1, 128 * 128, 16)), loss
