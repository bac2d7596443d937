"""Small real networks, each with a trait that is easy to get wrong when a step is captured or its memory counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis.capture.workload import Workload
from magis.ops.optimizers import OptimizerSpec

Loss = Callable[..., Tensor]
SGD = OptimizerSpec("sgd", lr=0.1)
ADAMW = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1)
FORWARD = OptimizerSpec("none")


@dataclass(frozen=True)
class Net:
    """One training step to build afresh as often as needed; parameters and batch come from a fixed seed."""

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    targets: Callable[[], tuple[Tensor, ...]] = tuple
    loss_fn: Loss | None = F.mse_loss
    rule: OptimizerSpec = SGD
    explicit_attention: bool = False

    def build(self) -> Built:
        torch.manual_seed(7)
        return Built(self.module(), self.inputs(), self.targets(), self.loss_fn, self.rule, self.explicit_attention)


@dataclass(frozen=True, eq=False)
class Built:
    """What a Net makes: the arguments of ``capture`` and of the steps."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Loss | None
    rule: OptimizerSpec
    explicit_attention: bool = False


def as_built(work: Workload) -> Built:
    """A network of the package as one of the tests."""
    return Built(work.module, work.inputs, work.targets, work.loss_fn, work.optimizer, work.explicit_attention)


class Block(nn.Module):
    """Runs a function of itself and the inputs; sub-modules and parameters are given by name."""

    def __init__(self, run: Callable[..., object], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs: Tensor) -> object:
        return self._run(self, *inputs)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of one random tensor."""
    return lambda: (torch.randn(*shape).to(dtype),)


def labels(count: int, classes: int) -> Callable[[], tuple[Tensor, ...]]:
    """A batch of class numbers."""
    return lambda: (torch.randint(classes, (count,)),)


def mlp(dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5)).to(dtype)


def trained_mlp(rule: OptimizerSpec) -> Net:
    return Net(mlp(), rows(6, 12), labels(6, 5), F.cross_entropy, rule)


OPTIMIZERS = {
    "sgd": SGD,
    "sgd-decay": OptimizerSpec("sgd", lr=0.1, weight_decay=0.05),
    "momentum": OptimizerSpec("momentum", lr=0.1, momentum=0.9),
    "momentum-decay": OptimizerSpec("momentum", lr=0.1, momentum=0.8, weight_decay=0.05),
    "adam": OptimizerSpec("adam", lr=1e-2),
    "adam-decay": OptimizerSpec("adam", lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "adamw": OptimizerSpec("adamw", lr=1e-2),
    "adamw-decay": ADAMW,
    "gradients": OptimizerSpec("gradients"),
    "none": FORWARD,
}


class Attention(nn.Module):
    """Self-attention of two heads, with dropout inside if asked for."""

    def __init__(self, width: int = 16, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(F.silu(self.mix(self.embedding(tokens))))
        return logits.flatten(0, 1)


def tokens(count: int, length: int, words: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(words, (count, length)),)


def conv_net(*, batch_norm: bool, inplace: bool = False) -> nn.Module:
    """Two convolutions with pooling and a linear head."""

    def norm(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if batch_norm else nn.GroupNorm(2, channels)

    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU(inplace=inplace), nn.MaxPool2d(2),
        nn.Conv2d(6, 6, 3, stride=2, groups=2), norm(6), nn.LeakyReLU(0.1, inplace=inplace), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


# --- functions that a Block runs --------------------------------------------------------------------------


def views(block: nn.Module, x: Tensor) -> Tensor:
    h = block.a(x)
    left, right = h.chunk(2, dim=1)
    first, second, rest = right.split([2, 3, 3], dim=1)
    again = torch.cat([first.exp(), second * left[:, :3], rest], dim=1)
    top = again[::2].transpose(0, 1).reshape(-1, 4)
    return block.b(torch.cat([again, left], 1)).sum(1) + top.mean()


def slice_writes(block: nn.Module, x: Tensor) -> Tensor:
    h = block.a(x) * 1.0
    h[:, :4] = block.b(x)[:, :4]
    h[:, 4:].mul_(0.5)
    h[0] += 1.0
    return h.tanh().sum(1)


def stale_views(block: nn.Module, x: Tensor) -> Tensor:
    """A view made before a write and read after it, and the other way round."""
    h = block.a(x) + 1.0
    early = h.view(-1)
    before = h.sum()
    h.mul_(2.0)
    late = h.view(-1)
    return early.sum() + late[::2].sum() * 3.0 + before


def constants(block: nn.Module, x: Tensor) -> Tensor:
    h = block.a(x) * torch.tensor(0.5) + torch.full((16,), 0.25)
    mask = torch.ones(16, 16).triu(1).bool()
    scores = (h[:, :, None] * h[:, None, :]).masked_fill(mask, float("-inf"))
    places = torch.arange(16, dtype=torch.float32) / 16
    return (scores.softmax(-1) @ places) * torch.tensor([2.0, 3.0])[0]


def buffers(block: nn.Module, x: Tensor) -> Tensor:
    block.calls.add_(1)
    h = block.a(x) + block.offset
    with torch.no_grad():
        block.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return (h - block.mean).pow(2).sum(1)


def numbers(block: nn.Module, x: Tensor) -> Tensor:
    """Products with Python numbers, of which eager keeps 8 bytes each until their backward."""
    return (((x * block.p) * 2.0) / 3.0).sigmoid() * 5.0


def transposed_gradient(block: nn.Module, x: Tensor) -> Tensor:
    """The gradient of ``w`` comes out laid out like its transpose: eager copies it into the layout of ``w``."""
    return x @ block.w.t().contiguous().exp()


def shared_gradient(block: nn.Module, x: Tensor) -> Tensor:
    """One tensor is the gradient of two parameters: eager copies it for one of them."""
    return x * (block.v + block.w)


def expanded_gradient(block: nn.Module, x: Tensor) -> Tensor:
    """The gradient is one number repeated: eager makes it dense."""
    return x.sum() * 0.0 + block.w.sum()


def weight_writes(block: nn.Module, x: Tensor) -> Tensor:
    """A parameter changed in the forward, out of autograd's sight."""
    with torch.no_grad():
        block.a.weight.div_(block.a.weight.norm())
    block.a.bias.data.mul_(0.5)
    return block.a(x)


def view_writes(block: nn.Module, x: Tensor) -> Tensor:
    h = block.a(x) + 0
    pairs = h.view(2, -1)
    pairs.add_(1)
    pairs[0].mul_(3.0)
    h.t().add_(2.0)
    return h.pow(2).sum(1)


def gradient_penalty(block: nn.Module, x: Tensor) -> Tensor:
    """A gradient taken in the forward and differentiated once more."""
    y = block.a(x)
    (grad,) = torch.autograd.grad(y.pow(2).sum(), block.a.weight, create_graph=True)
    return y + grad.pow(2).sum()


def indexing(block: nn.Module, x: Tensor) -> Tensor:
    """Backward formulas that scatter into zeros of their own, in place if nobody watches."""
    h = block.a(x)
    picked = torch.cat([h[torch.arange(3) * 2], h.gather(1, torch.arange(8).expand(3, 8) % 5)], 1)
    order, _ = picked.sort(1)
    return order.sum(1) + order.topk(2)[0].cumsum(1)[:, 1] + torch.where(picked > 0, picked, picked * 0.1).amax(1)


def doubled(x: Tensor) -> Tensor:
    return x.add_(x)


def fan_out(block: nn.Module, x: Tensor) -> Tensor:
    """Gradients of tensors with several readers: added in place, but for those that somebody else holds, too."""
    h = block.a(x)
    wide = [h @ h.t(), h.exp(), (h + 1).sin(), h]
    return sum((part.sum(1) for part in wide), start=h.sum(1)) + torch.stack([r.sin() for r in h.unbind(1)]).sum(0)


def scaled_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * 0.5 + F.smooth_l1_loss(output, target) / 2


def probability_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(output.sigmoid(), target.sigmoid())


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


NETS: dict[str, Net] = {
    "linear": Net(lambda: nn.Linear(4, 3), rows(5, 4), rows(5, 3)),
    "tied": Net(Tied, tokens(3, 5, 11), labels(15, 11), F.cross_entropy, ADAMW),
    "shared-module": Net(
        lambda: Block(lambda m, x: m.f(m.f(x).relu()).sum(1), f=nn.Linear(10, 10)), rows(4, 10), rows(4), rule=ADAMW
    ),
    "inplace-relu": Net(
        lambda: nn.Sequential(nn.Linear(9, 20), nn.ReLU(inplace=True), nn.Linear(20, 9), nn.ReLU(inplace=True)),
        rows(7, 9), rows(7, 9),
    ),
    "dropout": Net(
        lambda: nn.Sequential(nn.Linear(9, 40), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 9)),
        rows(40, 9), rows(40, 9), rule=ADAMW,
    ),
    "inplace-dropout": Net(
        lambda: nn.Sequential(nn.Linear(9, 40), nn.Dropout(0.3, inplace=True), nn.Linear(40, 9)),
        rows(40, 9), rows(40, 9),
    ),
    "batch-norm": Net(
        lambda: conv_net(batch_norm=True), rows(4, 3, 8, 8), labels(4, 4), F.cross_entropy, OPTIMIZERS["momentum"]
    ),
    "conv-inplace": Net(
        lambda: conv_net(batch_norm=True, inplace=True), rows(4, 3, 8, 8), labels(4, 4), F.cross_entropy
    ),
    "conv-group-norm": Net(
        lambda: conv_net(batch_norm=False), rows(4, 3, 8, 8), labels(4, 4), F.cross_entropy, ADAMW
    ),
    "batch-norm-twice": Net(
        lambda: Block(lambda m, x: m.norm(x).relu() + m.norm(x * 2.0 + 1.0), norm=nn.BatchNorm1d(7)),
        rows(8, 7),
        rows(8, 7),
    ),
    "batch-norm-evaluated": Net(
        lambda: conv_net(batch_norm=True).eval(), rows(4, 3, 8, 8), labels(4, 4), F.cross_entropy
    ),
    "embedding": Net(
        lambda: nn.Sequential(nn.Embedding(12, 6, padding_idx=0), nn.LayerNorm(6), nn.Flatten(), nn.Linear(24, 3)),
        tokens(5, 4, 12), labels(5, 3), F.cross_entropy,
    ),
    "attention": Net(
        lambda: nn.Sequential(nn.LayerNorm(16), Attention()), rows(2, 6, 16), rows(2, 6, 16), rule=ADAMW
    ),
    "attention-causal": Net(lambda: Attention(causal=True), rows(2, 6, 16), rows(2, 6, 16)),
    "attention-explicit": Net(Attention, rows(2, 6, 16), rows(2, 6, 16), explicit_attention=True),
    "attention-dropout": Net(
        lambda: Attention(dropout=0.2), rows(4, 16, 16), rows(4, 16, 16), explicit_attention=True
    ),
    "encoder-layer": Net(
        lambda: nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), rows(4, 26, 16), rows(4, 26, 16), rule=ADAMW
    ),
    "views": Net(lambda: Block(views, a=nn.Linear(6, 16), b=nn.Linear(16, 4)), rows(8, 6), rows(8)),
    "slice-writes": Net(lambda: Block(slice_writes, a=nn.Linear(6, 8), b=nn.Linear(6, 8)), rows(3, 6), rows(3)),
    "stale-views": Net(lambda: Block(stale_views, a=nn.Linear(6, 8)), rows(3, 6), rows(())),
    "constants": Net(lambda: Block(constants, a=nn.Linear(6, 16)), rows(3, 6), rows(3, 16)),
    "buffers": Net(
        lambda: Block(
            buffers, a=nn.Linear(6, 8), offset=torch.randn(8), mean=torch.zeros(8), calls=torch.tensor(0)
        ),
        rows(5, 6), rows(5),
    ),
    "numbers": Net(lambda: Block(numbers, p=parameter(40)), rows(30, 40), rows(30, 40)),
    "unused-parameter": Net(
        lambda: Block(lambda m, x: m.used(x), used=nn.Linear(6, 4), unused=nn.Linear(50, 50)), rows(3, 6), rows(3, 4),
        rule=ADAMW,
    ),
    "frozen-parameter": Net(
        lambda: nn.Sequential(nn.Linear(6, 9).requires_grad_(False), nn.Linear(9, 9), nn.Linear(9, 4)),
        rows(3, 6), rows(3, 4), rule=ADAMW,
    ),
    "transposed-gradient": Net(lambda: Block(transposed_gradient, w=parameter(9, 12)), rows(5, 12), rows(5, 9)),
    "shared-gradient": Net(lambda: Block(shared_gradient, v=parameter(64), w=parameter(64)), rows(64), rows(64)),
    "expanded-gradient": Net(
        lambda: Block(expanded_gradient, w=parameter(40, 40)), rows(4), rows(()), rule=OPTIMIZERS["adam"]
    ),
    "weight-writes": Net(lambda: Block(weight_writes, a=nn.Linear(6, 8)), rows(5, 6), rows(5, 8)),
    "view-writes": Net(lambda: Block(view_writes, a=nn.Linear(6, 8)), rows(6, 6), rows(6)),
    "gradient-penalty": Net(lambda: Block(gradient_penalty, a=nn.Linear(6, 8)), rows(5, 6), rows(5, 8)),
    "indexing": Net(lambda: Block(indexing, a=nn.Linear(6, 8)), rows(6, 6), rows(3)),
    "fan-out": Net(lambda: Block(fan_out, a=nn.Linear(6, 8)), rows(6, 6), rows(6)),
    "scaled-loss": Net(lambda: nn.Linear(4, 30), rows(50, 4), rows(50, 30), scaled_loss),
    "probability-loss": Net(lambda: nn.Linear(4, 3), rows(5, 4), rows(5, 3), probability_loss),
    "weight-norm": Net(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), rows(6, 6), rows(6, 8), rule=ADAMW
    ),
    "spectral-norm": Net(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), rows(6, 6), rows(6, 8), rule=ADAMW
    ),
    "upsampling": Net(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.PReLU(),
            nn.Upsample(scale_factor=2, mode="bilinear"), nn.ConvTranspose2d(4, 2, 2, stride=2),
        ),
        rows(2, 2, 6, 6), rows(2, 2, 24, 24),
    ),
    "recurrent": Net(
        lambda: Block(lambda m, x: m.r(x)[0], r=nn.GRU(5, 6, batch_first=True)), rows(3, 4, 5), rows(3, 4, 6),
        rule=ADAMW,
    ),
    "multi-head": Net(
        lambda: Block(lambda m, x: m.r(x, x, x)[0], r=nn.MultiheadAttention(8, 2, batch_first=True)),
        rows(3, 4, 8), rows(3, 4, 8),
    ),
    "channels-last": Net(
        lambda: conv_net(batch_norm=True).to(memory_format=torch.channels_last),
        lambda: (torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last),),
        labels(4, 4), F.cross_entropy, ADAMW,
    ),
    "unfold": Net(
        lambda: Block(lambda m, x: F.unfold(m.a(x)[None, None], 2).sum(1), a=nn.Linear(6, 8)), rows(6, 6), rows(1, 35)
    ),
    "views-written-to": Net(  # what is written is seen in another shape than what was made
        lambda: Block(lambda m, x: doubled(m.a(x).view(4, 3, 8)).sin().exp(), a=nn.Linear(6, 8)),
        rows(12, 6), rows(4, 3, 8), rule=ADAMW,
    ),
    "noisy-activations": Net(
        lambda: nn.Sequential(nn.Linear(5, 40), nn.RReLU(), nn.AlphaDropout(0.1), nn.Linear(40, 2)),
        rows(40, 5), rows(40, 2),
    ),
    "empty-batch": Net(lambda: nn.Linear(3, 3), rows(0, 3), loss_fn=lambda output: output.sum()),
    "scalar": Net(lambda: Block(lambda m, x: m.p * x, p=nn.Parameter(torch.tensor(2.0))), rows(()), rows(())),
    "loss-inside": Net(
        lambda: Block(lambda m, x, unused: m.a(x).sum(), a=nn.Linear(3, 3)),
        lambda: (torch.randn(2, 3), torch.randn(99)), loss_fn=None,
    ),
    "bfloat16": Net(
        mlp(torch.bfloat16), rows(6, 12, dtype=torch.bfloat16), labels(6, 5), F.cross_entropy, ADAMW
    ),
    "float16": Net(mlp(torch.float16), rows(6, 12, dtype=torch.float16), labels(6, 5), F.cross_entropy),
    "float64": Net(mlp(torch.float64), rows(6, 12, dtype=torch.float64), labels(6, 5), F.cross_entropy, ADAMW),
    "returns-tuple": Net(
        lambda: Block(lambda m, x: (m.a(x), (x * 2.0, m.a(x).relu())), a=nn.Linear(4, 4)), rows(3, 4),
        loss_fn=None, rule=FORWARD,
    ),
    "returns-dict": Net(
        lambda: Block(lambda m, x: {"a": m.a(x), "b": [x + 1.0]}, a=nn.Linear(4, 4)), rows(3, 4),
        loss_fn=None, rule=FORWARD,
    ),
    "returns-input": Net(lambda: Block(lambda m, x: (x, x[1:])), rows(3, 4), loss_fn=None, rule=FORWARD),
    **{f"optimizer-{name}": trained_mlp(rule) for name, rule in OPTIMIZERS.items()},
}  # fmt: skip
"""Every trait by name."""
