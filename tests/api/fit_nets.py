"""Factories whose size is to be found."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.capture.workload import Workload
from magis.ops.optimizers import OptimizerSpec


def stack(batch_size: int = 6) -> tuple[nn.Module, Tensor, Tensor, object]:
    """Layers with something to recompute, which take any batch."""
    body = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(32, 32), nn.GELU())), nn.Linear(32, 5))
    return body, torch.randn(batch_size, 32), torch.randint(5, (batch_size,)), F.cross_entropy


def normed() -> tuple[nn.Module, Tensor, Tensor, object]:
    """Batch statistics: a batch of 1 is refused."""
    body = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 1))
    return body, torch.randn(4, 128), torch.randn(4, 1), F.mse_loss


class Positions(nn.Module):
    """Takes sequences of up to 24 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(50, 16), nn.Embedding(24, 16)
        self.layer = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.place.weight[: tokens.shape[1]]
        result: Tensor = self.layer(torch.tanh(self.word(tokens) + places))
        return result


def tokens() -> Workload:
    """Two sequences of 8."""
    text = torch.randint(50, (2, 8))
    loss = lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())  # noqa: E731
    return Workload("tokens", Positions(), (text,), (text.clone(),), loss, OptimizerSpec("adam"))


def counted() -> tuple[nn.Module, Tensor, Tensor, object]:
    """Looks at its data, which fake tensors do not have."""
    data = torch.randn(4, 32)
    assert float(data.sum()) < 1e9
    return nn.Linear(32, 5), data, torch.randint(5, (4,)), F.cross_entropy
