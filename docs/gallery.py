"""Networks of the gallery: a MoCo that keeps graphs, and Stable Diffusion's U-Net. docs/gallery.md has the commands."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def encoder() -> nn.Sequential:
    """Return four strided convolutions with batch norms, and a projection to 128 features."""
    pairs = pairwise((3, 32, 64, 96, 128))
    blocks = (nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairs)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 128))


class MoCo(nn.Module):
    """Momentum contrast (He et al., 2020): queries against a queue of the keys of earlier batches."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.query, self.key, self.fixed = encoder(), encoder(), fixed
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(4096, 128), dim=1))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the loss of a batch of two views."""
        q = F.normalize(self.query(left), dim=1)
        with torch.set_grad_enabled(not self.fixed):  # the bug: without no_grad, keys have a graph
            k = F.normalize(self.key(right), dim=1)
        positive = (q * k.detach()).sum(1, keepdim=True)
        scores = torch.cat([positive, q @ self.queue.detach().T], 1) / 0.2
        self.queue = torch.cat([k, self.queue])[:4096]  # and the queue keeps it, that of every batch so far
        return F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long))


@pytest.mark.magis(strategies=["eager"])
@pytest.mark.parametrize("fixed", [False, True], ids=["bug", "fixed"])
def test_moco(fixed: bool) -> tuple[Callable[[tuple[Tensor, Tensor]], None], tuple[Tensor, Tensor]]:
    """Return a step of MoCo's training loop and its batch."""
    net = MoCo(fixed=fixed)
    optimizer = torch.optim.SGD(net.query.parameters(), 0.03, momentum=0.9)

    def step(views: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        net(*views).backward()
        optimizer.step()
        with torch.no_grad():
            for key, query in zip(net.key.parameters(), net.query.parameters(), strict=True):
                key.lerp_(query, 0.001)

    return step, (torch.randn(256, 3, 64, 64), torch.randn(256, 3, 64, 64))


class Denoiser(nn.Module):
    """The U-Net of Stable Diffusion 1.5 (860 million weights), from diffusers' configuration, without its weights."""

    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        self.net = UNet2DConditionModel(cross_attention_dim=768)

    def forward(self, noisy: Tensor, at: Tensor, text: Tensor) -> Tensor:
        """Return the predicted noise of noisy latents at time steps, for the features of texts."""
        predicted: Tensor = self.net(noisy, at, text).sample
        return predicted


def denoiser(rows: int = 8) -> tuple[Any, ...]:
    """Return the U-Net, a batch of `rows` latents of 64 x 64 with texts of 77 tokens, its loss, and AdamW."""
    net = Denoiser()
    latents, text = torch.randn(2, rows, 4, 64, 64), torch.randn(rows, 77, 768)
    inputs = latents[0], torch.randint(0, 1000, (rows,)), text
    return net, inputs, (latents[1],), nn.functional.mse_loss, torch.optim.AdamW(net.parameters())
