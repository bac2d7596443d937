"""Training steps that others have published the speed of, built as they ran them.

Networks of this project where it has them; timm's for the rest; heads of BERT as NVIDIA's examples have them. Attention
is written out, since all of these measurements are of programs without a fused kernel for it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from magis.capture import Workload
from magis.extensions.models.building import WRITTEN_OUT, SelfAttention, labels, training_step
from magis.extensions.models.convnets import (
    DENSENETS,
    RESNETS,
    VGGS,
    DenseNetConfig,
    ResNetConfig,
    VggConfig,
    densenet,
    resnet,
    vgg,
)
from magis.extensions.models.encoders import BERT_SIZES, Bert, BertConfig, VitConfig, vit
from magis.ops.optimizers import OptimizerSpec

__all__ = ["step"]

VITS = {
    # layers, width, heads, patch
    "vit_tiny_patch16_224": (12, 192, 3, 16),
    "vit_small_patch16_224": (12, 384, 6, 16),
    "vit_base_patch32_224": (12, 768, 12, 32),
    "vit_base_patch16_224": (12, 768, 12, 16),
    "vit_large_patch16_224": (24, 1024, 16, 16),
}
MOMENTUM = OptimizerSpec("momentum", lr=1e-3, momentum=0.9)


def step(model: str, batch: int, size: int, precision: str, layout: str) -> Workload:
    """One training step: of pictures of `size` pixels, or of sequences of `size` tokens.

    `precision` is "fp32", "tf32", "amp" (autocast to float16), "fp16" (float32 weights, copied to float16 before the
    forward) or "half" (nothing but float16, and no optimizer); `layout` "nhwc" or "nchw".
    """
    if model.startswith("bert"):
        return _sequences(model, batch, size, halved=precision == "fp16")
    made = _pictures(model, batch, size)
    if layout == "nhwc":
        made = replace(made, inputs=tuple(_channels_last(each) for each in made.inputs))
        made.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return made.to("float16") if precision == "half" else made


def _channels_last(picture: Tensor) -> Tensor:
    return picture.contiguous(memory_format=torch.channels_last)


def _pictures(model: str, batch: int, size: int) -> Workload:
    made: Workload
    if model in RESNETS:
        stages, expansion, widening = RESNETS[model]
        config = ResNetConfig(batch, size, stages=stages, expansion=expansion, widening=widening)
        made = resnet(config, WRITTEN_OUT, model, 0)
    elif model in VGGS:
        made = vgg(VggConfig(batch_size=batch, image_size=size, stages=VGGS[model]), WRITTEN_OUT, model, 0)
    elif model in DENSENETS:
        made = densenet(
            DenseNetConfig(batch_size=batch, image_size=size, stages=DENSENETS[model]), WRITTEN_OUT, model, 0
        )
    else:
        layers, width, heads, patch = VITS[model]
        made = vit(VitConfig(batch, size, patch, layers, width, 4 * width, heads), WRITTEN_OUT, model, 0)
        _scored(made.module, masked=False)
    return replace(made, optimizer=MOMENTUM)


class Scores(SelfAttention):
    """Attention that scales its scores instead of the queries; BERT's also adds a mask of tokens to leave out."""

    masked = False

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        if self.masked:
            scores = scores + torch.zeros(q.shape[0], 1, 1, q.shape[2], dtype=q.dtype)
        weights = torch.softmax(scores, dim=-1)
        return torch.matmul(functional.dropout(weights, self.dropout, self.training), v)


def _scored(module: nn.Module, *, masked: bool) -> None:
    """Let every attention of a network be of that kind."""
    for part in module.modules():
        if isinstance(part, SelfAttention):
            part.__class__ = Scores
            part.masked = masked  # type: ignore[assignment]


class Halved(nn.Module):
    """Runs a network on float16 copies of its float32 weights, as apex does at its level O2."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Tensor:
        halves = {name: weight.half() for name, weight in self.network.named_parameters()}
        out: Tensor = torch.func.functional_call(self.network, halves, inputs)
        return out


class Spans(nn.Module):
    """BERT for SQuAD: the first and last token of an answer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = _body(config)
        _scored(self.bert, masked=True)
        self.head = nn.Linear(config.width, 2)

    def forward(self, token_ids: Tensor, type_ids: Tensor) -> Tensor:
        out: Tensor = self.head(_encoded(self.bert, token_ids, type_ids))
        return out


def _body(config: BertConfig) -> Bert:
    """BERT without the parts that only pre-training uses."""
    made = Bert(config, WRITTEN_OUT)
    for name in ("pooler", "transform", "transform_activation", "transform_norm", "next_sentence", "decoder_bias"):
        delattr(made, name)
    return made


def _encoded(bert: Bert, token_ids: Tensor, type_ids: Tensor) -> Tensor:
    x: Tensor = bert.embeddings(token_ids, type_ids)
    for layer in bert.layers:
        x = layer(x)
    return x


def _span_loss(logits: Tensor, start: Tensor, end: Tensor) -> Tensor:
    first, last = logits.split(1, dim=-1)
    cross = functional.cross_entropy
    return (cross(first.squeeze(-1), start) + cross(last.squeeze(-1), end)) / 2


def _sequences(model: str, batch: int, length: int, *, halved: bool) -> Workload:
    layers, width, heads = BERT_SIZES[model.split("_")[1]]
    config = BertConfig(batch, length, layers, width, heads)

    def network() -> nn.Module:
        return Halved(Spans(config)) if halved else Spans(config)

    def sentences() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs = labels(config.vocab_size, batch, length), labels(2, batch, length)
        return inputs, (labels(length, batch), labels(length, batch))

    rule = OptimizerSpec("adam", lr=1e-4, foreach=False, fused=halved)
    return training_step(model, WRITTEN_OUT, 0, network, sentences, _span_loss, (), rule)
