"""Networks in plain torch as papers' code has them: graphs with scattered sums, recurrence, spectra, sets, adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own documents call it so)

from benchmarks.census_lib.network import Batch, Network, squares, try_eagerly

SHARED = ("peft", "transformers.models.llama.modeling_llama")
"""Loaded once, before processes are split off."""

NODES, EDGES, WIDTH, CLASSES, ROWS, LENGTH, WORDS = 64, 256, 32, 5, 4, 24, 64


def families() -> list[str]:
    return sorted(KINDS)


def network(family: str) -> Network:
    found = KINDS[family](family)
    try_eagerly(found)
    return found


# --- graphs ----------------------------------------------------------------------------------------------------


def _graph() -> Batch:
    edges = torch.randint(0, NODES, (2, EDGES))
    return (torch.randn(NODES, WIDTH), edges), (torch.randint(0, CLASSES, (NODES,)),)


class _Summed(nn.Module):
    """Messages along edges, summed by `index_add` (GCN, GIN) or averaged with `scatter_reduce` (GraphSAGE)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.message = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        degree = torch.zeros(NODES).index_add(0, target, torch.ones(EDGES)).clamp(min=1)
        for message, own in zip(self.message, self.own, strict=True):
            sent = message(x)[source]
            if self.how == "gcn":
                sent = sent * (degree[source] * degree[target]).rsqrt().unsqueeze(1)
                got = torch.zeros_like(x).index_add_(0, target, sent)
            elif self.how == "gin":
                got = torch.zeros_like(x).index_add(0, target, sent)
            elif self.how == "scatter_add":
                got = torch.zeros_like(x).scatter_add(0, target.unsqueeze(1).expand_as(sent), sent)
            else:
                got = torch.zeros_like(x).scatter_reduce(
                    0, target.unsqueeze(1).expand_as(sent), sent, self.how, include_self=False
                )
            x = F.dropout(F.relu(own(x) + got), 0.1, self.training)
        return self.head(x)


class _Attended(nn.Module):
    """Graph attention: a softmax over the edges of each node, by scattered maxima and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        value = self.value(x)
        score = F.leaky_relu(self.score(torch.cat([value[source], value[target]], 1))).squeeze(1)
        highest = torch.full((NODES,), -1e9).scatter_reduce(0, target, score, "amax")
        weight = (score - highest[target]).exp()
        whole = torch.zeros(NODES).index_add(0, target, weight)[target]
        sent = value[source] * (weight / whole).unsqueeze(1)
        return self.head(F.elu(torch.zeros(NODES, WIDTH).index_add(0, target, sent)))


class _EdgeConv(nn.Module):
    """Points and their nearest neighbours (DGCNN): distances, top-k, gathered features, maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        x = points
        for layer in (self.first, self.second):
            nearest = torch.cdist(x, x).topk(8, largest=False).indices
            rows = torch.arange(x.shape[0]).view(-1, 1, 1)
            near = x[rows, nearest]
            own = x.unsqueeze(2).expand_as(near)
            x = layer(torch.cat([own, near - own], -1)).relu().amax(2)
        return self.head(x.amax(1))


def _on_graph(make: Callable[[], nn.Module]) -> Callable[[str], Network]:
    return lambda name: Network(name, make, _graph, F.cross_entropy)


def _points(name: str) -> Network:
    return Network(
        name, _EdgeConv, lambda: ((torch.randn(ROWS, 48, 3),), (torch.randint(0, CLASSES, (ROWS,)),)), F.cross_entropy
    )


# --- recurrence, words, sound ------------------------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        cell: Any = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.cell = cell(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1, bidirectional=kind == "lstm")
        self.head = nn.Linear(WIDTH * (2 if kind == "lstm" else 1), WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(ids))[0]).transpose(1, 2)


class _Speech(nn.Module):
    """An LSTM over a spectrogram, trained by CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(16, WIDTH, 5, 2, 2)
        self.cell = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, sound: Tensor) -> Tensor:
        return self.head(self.cell(self.stem(sound).relu().transpose(1, 2))[0]).log_softmax(-1).transpose(0, 1)


def _ctc(scores: Tensor, target: Tensor) -> Tensor:
    lengths = torch.full((ROWS,), scores.shape[0], dtype=torch.long)
    return F.ctc_loss(scores, target, lengths, torch.full((ROWS,), target.shape[1], dtype=torch.long))


def _ids() -> Batch:
    return (torch.randint(0, WORDS, (ROWS, LENGTH)),), (torch.randint(0, WORDS, (ROWS, LENGTH)),)


class _Bags(nn.Module):
    """A recommender: bags of words beside a small tower."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode=how)
        self.tower = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.bag(ids))


# --- spectra, mixtures, odd layers ---------------------------------------------------------------------------------


class _Spectral(nn.Module):
    """A Fourier neural operator: complex weights on the lowest modes of a real signal."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(2, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 8, dtype=torch.cfloat) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        modes = torch.fft.rfft(x)
        mixed = torch.zeros_like(modes)
        mixed[:, :, :8] = torch.einsum("bim,iom->bom", modes[:, :, :8], self.weight)
        return self.down(F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + x))


class _Mixer(nn.Module):
    """FNet: Fourier transforms in place of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.fft.fft2(x).real
            x = x + layer(x)
        return self.head(x).transpose(1, 2)


class _Rotary(nn.Module):
    """Attention whose positions are complex rotations, as Llama's first code had them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        angles = torch.outer(torch.arange(LENGTH).float(), 1e4 ** (-torch.arange(0, 8, 2) / 8))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def _turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turn).flatten(-2).type_as(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).view(ROWS, LENGTH, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True).transpose(
            1, 2
        ).flatten(2)
        return self.head(x).transpose(1, 2)


class _Experts(nn.Module):
    """A dense mixture: every expert runs, the router weighs the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        best = self.router(x).topk(2)
        gates = torch.zeros(*x.shape[:-1], 4).scatter(-1, best.indices, best.values.softmax(-1))
        x = x + torch.stack(
            [gate * expert(x) for gate, expert in zip(gates.split(1, -1), self.experts, strict=True)]
        ).sum(0)
        return self.head(x).transpose(1, 2)


def _words_to_words(make: Callable[[], nn.Module]) -> Callable[[str], Network]:
    return lambda name: Network(name, make, _ids, F.cross_entropy)


def _classified(
    make: Callable[[], nn.Module], draw: Callable[[], Tensor], classes: int = CLASSES
) -> Callable[[str], Network]:
    return lambda name: Network(name, make, lambda: ((draw(),), (torch.randint(0, classes, (ROWS,)),)), F.cross_entropy)


def _normed() -> nn.Module:
    """Weight and spectral norm, by parametrization."""
    norm = nn.utils.parametrizations
    return nn.Sequential(
        norm.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), norm.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


def _seq2seq() -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.body = nn.Transformer(WIDTH, 4, 2, 2, 64, batch_first=True)
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            return self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True)).transpose(1, 2)

    return Whole()


# --- adapters ------------------------------------------------------------------------------------------------------


def _llama(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def _adapted(kind: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[str], Network]:
    def make() -> nn.Module:
        import peft

        configs: dict[str, Callable[[], Any]] = {
            "lora": lambda: peft.LoraConfig(
                task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
            ),
            "dora": lambda: peft.LoraConfig(
                task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj", "v_proj"]
            ),
            "ia3": lambda: peft.IA3Config(
                task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
            ),
            "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "vera": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]),
            "oft": lambda: peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=8, target_modules=["q_proj", "v_proj"]),
        }
        return peft.get_peft_model(_llama(dtype), configs[kind]())

    def batch() -> Batch:
        ids = torch.randint(0, 128, (ROWS, LENGTH))
        return {"input_ids": ids, "labels": ids.clone()}

    return lambda name: Network(name, make, batch, None)


def _pictures() -> Tensor:
    return torch.randn(ROWS, 3, 32, 32)


def _autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.PReLU(16),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 3, 3, 1, 1), nn.PixelUnshuffle(2),
    )  # fmt: skip


def _solid() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(),
        nn.Linear(8 * 2 * 64, CLASSES),
    )  # fmt: skip


def _speech(name: str) -> Network:
    def batch() -> Batch:
        return (torch.randn(ROWS, 16, 48),), (torch.randint(1, WORDS, (ROWS, 6)),)

    return Network(name, _Speech, batch, _ctc)


def _signals(name: str) -> Network:
    return Network(name, _Spectral, lambda: ((torch.randn(ROWS, 2, 64),), (torch.randn(ROWS, 1, 64),)), F.mse_loss)


KINDS: dict[str, Callable[[str], Network]] = {
    **{f"graph-{how}": _on_graph(partial(_Summed, how)) for how in ("gcn", "gin", "scatter_add", "mean", "amax")},
    "graph-attention": _on_graph(_Attended),
    "points-edgeconv": _points,
    **{kind: _words_to_words(partial(_Recurrent, kind)) for kind in ("lstm", "gru", "rnn")},
    "lstm-ctc": _speech,
    **{f"bags-{how}": _classified(partial(_Bags, how), lambda: _ids()[0][0]) for how in ("sum", "mean", "max")},
    "spectral": _signals,
    "fnet": _words_to_words(_Mixer),
    "complex-rotary": _words_to_words(_Rotary),
    "dense-experts": _words_to_words(_Experts),
    "transformer": _words_to_words(_seq2seq),
    "norms": _classified(_normed, lambda: torch.randn(ROWS, WIDTH)),
    "autoencoder": lambda name: Network(name, _autoencoder, lambda: ((_pictures(),), ()), squares),
    "conv3d": _classified(_solid, lambda: torch.randn(ROWS, 3, 4, 16, 16)),
    **{f"peft-{kind}-bfloat16": _adapted(kind) for kind in ("lora", "dora", "ia3", "prompt", "vera", "oft")},
    "peft-lora-float32": _adapted("lora", torch.float32),
}
