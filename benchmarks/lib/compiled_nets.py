"""Small training steps to compile: decoders, convolutions, mixers, graphs, recurrence, checkpointed and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import graph_break
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .llama import Llama, Sizes, turned

Parts = tuple[Any, ...]
"""Module, (inputs, targets), loss; or module and batch where the module returns its loss."""

HEAD_WIDTH = 32


class _NanoLayer(nn.Module):
    """[batch, length, width] -> the same: rotary positions, normalized queries and keys, squared ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.query, self.key, self.value, self.out = (linear(width, width) for _ in range(4))
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = functional.rms_norm(x, (x.shape[-1],))
        query, key, value = (
            each(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, key = (each * cos + turned(each) * sin for each in (query, key))
        query, key = (functional.rms_norm(each, (HEAD_WIDTH,)) for each in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = functional.rms_norm(x, (x.shape[-1],))
        out: Tensor = x + self.down(functional.relu(self.up(y)).square())
        return out


class NanoGpt(nn.Module):
    """Decoder as in nanochat: token numbers and targets -> loss, with softcapped logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layers: int, width: int, length: int, words: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width)
        self.layers = nn.ModuleList(_NanoLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = functional.rms_norm(self.word(tokens), (self.word.embedding_dim,))
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = 15 * torch.tanh(self.head(functional.rms_norm(x, (x.shape[-1],))) / 15)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Residual(nn.Module):
    """Adds a module's input to its output; recomputed in the backward if ``again``."""

    def __init__(self, inner: nn.Module, *, again: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.inner, self.again, self.breaks = inner, again, breaks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        if self.breaks:
            graph_break()
        return x + y


class Turned(nn.Module):
    """Runs a module with the last two dimensions exchanged."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return out


class Summed(nn.Module):
    """Messages along the edges of a graph, summed by `index_add`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for message, own in zip(self.message, self.own, strict=True):
            got = torch.zeros_like(x).index_add(0, edges[1], message(x)[edges[0]])
            x = functional.silu(own(x) + got)
        return x


class Variational(nn.Module):
    """Convolutional autoencoder with a random code: images -> images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        down, up = (
            partial(nn.Conv2d, kernel_size=4, stride=2, padding=1),
            partial(nn.ConvTranspose2d, kernel_size=4, stride=2, padding=1),
        )
        self.encoder = nn.Sequential(down(3, width), nn.ReLU(), down(width, 2 * width), nn.ReLU(), down(2 * width, 32))
        self.decoder = nn.Sequential(up(16, 2 * width), nn.ReLU(), up(2 * width, width), nn.ReLU(), up(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = self.encoder(x).chunk(2, dim=1)
        out: Tensor = self.decoder(mean + torch.randn_like(mean) * (0.5 * scale).exp()).sigmoid()
        return out


class Experts(nn.Module):
    """Mixture of experts in which every expert sees every row."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(_feed_forward(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        out: Tensor = sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))
        return out


class Attention(nn.Module):
    """Attention written out, with a matrix of all scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.taken, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.taken(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        out: Tensor = self.out((functional.dropout(scores, 0.1) @ value).transpose(1, 2).flatten(2))
        return out


class Recurrent(nn.Module):
    """GRU cell unrolled over a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            state = self.cell(token, state)
        out: Tensor = self.head(state)
        return out


class Lstm(nn.Module):
    """Two layers of torch's LSTM, which dynamo leaves to eager mode."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(width, width, 2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(functional.gelu(self.body(functional.gelu(x))[0]).mean(1))
        return out


def _feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _words(batch: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, words, (batch, length)), torch.randint(0, words, (batch, length))


def _of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanochat() -> Parts:
    tokens, targets = _words(4, 256, 4096)
    return NanoGpt(4, 256, 256, 4096), {"tokens": tokens, "targets": targets}


def llama(batch: int = 4, length: int = 256) -> Parts:
    return Llama(4, Sizes(length, 256, 688, 8, 4, 4096)), _words(batch, length, 4096), _of_words


def llama_bfloat16() -> Parts:
    module, batch, loss = llama()
    return module.to(torch.bfloat16), batch, loss


def encoder() -> Parts:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True, activation="gelu")
    module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return module, (torch.randn(8, 128, 256), torch.randn(8, 128, 256)), functional.mse_loss


def mixer() -> Parts:
    blocks = (block for _ in range(4) for block in (Turned(Residual(_feed_forward(196))), Residual(_feed_forward(192))))
    return nn.Sequential(*blocks), (torch.randn(16, 196, 192), torch.randn(16, 196, 192)), functional.mse_loss


def convnext() -> Parts:
    def block() -> nn.Module:
        wide = nn.Sequential(nn.Conv2d(64, 256, 1), nn.GELU(), nn.Conv2d(256, 64, 1))
        return Residual(nn.Sequential(nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.GroupNorm(1, 64), *wide))

    module = nn.Sequential(nn.Conv2d(3, 64, 4, 4), *(block() for _ in range(3)), nn.Flatten(), nn.LazyLinear(10))
    images = torch.randn(8, 3, 96, 96)
    module(images)  # makes the lazy weights
    return module, (images, torch.randint(0, 10, (8,))), functional.cross_entropy


def graph() -> Parts:
    edges = torch.randint(0, 4096, (2, 16384))
    return Summed(64, 4), ((torch.randn(4096, 64), edges), torch.randn(4096, 64)), functional.mse_loss


def variational() -> Parts:
    images = torch.rand(16, 3, 64, 64)
    return Variational(48), (images, images.clone()), functional.binary_cross_entropy


def experts() -> Parts:
    module = nn.Sequential(*(Residual(Experts(128, 4)) for _ in range(2)))
    return module, (torch.randn(16, 128, 128), torch.randn(16, 128, 128)), functional.mse_loss


def attention() -> Parts:
    module = nn.Sequential(*(Residual(part) for _ in range(3) for part in (Attention(128, 4), _feed_forward(128))))
    return module, (torch.randn(8, 256, 128), torch.randn(8, 256, 128)), functional.mse_loss


def recurrent() -> Parts:
    return Recurrent(256), (torch.randn(64, 12, 256), torch.randint(0, 10, (64,))), functional.cross_entropy


def lstm() -> Parts:
    return Lstm(256), (torch.randn(64, 32, 256), torch.randint(0, 10, (64,))), functional.cross_entropy


def checkpointed() -> Parts:
    module = nn.Sequential(*(Residual(_feed_forward(256), again=True) for _ in range(6)))
    return module, (torch.randn(2048, 256), torch.randn(2048, 256)), functional.mse_loss


def broken() -> Parts:
    module = nn.Sequential(*(Residual(_feed_forward(256), breaks=number == 1) for number in range(4)))
    return module, (torch.randn(2048, 256), torch.randn(2048, 256)), functional.mse_loss


def pointwise() -> Parts:
    """A long chain of pointwise operators on a large tensor: eager keeps every one for the backward."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(512))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = torch.tanh(x * self.scale).exp() + torch.sin(x)
            return x

    return Chain(), (torch.randn(4096, 512), torch.randn(4096, 512)), functional.mse_loss


NETS: dict[str, Callable[[], Parts]] = {
    each.__name__: each
    for each in (
        nanochat, llama, llama_bfloat16, encoder, mixer, convnext, graph, variational, experts, attention, recurrent,
        lstm, checkpointed, broken, pointwise,
    )
}  # fmt: skip
"""Networks by name; each function builds a step."""
