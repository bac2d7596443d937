"""What the seed variant of every network leaves out, in one place: layers are made through a Style.

| | real | seed |
| --- | --- | --- |
| BatchNorm, biases, affine LayerNorm, position embeddings, dropout | as in the original network | none |
| activation of transformers | GELU | ReLU |
| attention | `F.scaled_dot_product_attention` | matmul, softmax, matmul |
| weight update | AdamW | plain SGD |
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from magis.models.workload import OptimizerSpec

__all__ = ["REAL", "SEED", "WRITTEN_OUT", "Style"]


@dataclass(frozen=True)
class Style:
    """Makes the layers of one variant; `seed` chooses the column of the table above.

    `written_out`: attention as the seed's has it, the rest as it is: as networks were written before fused kernels.
    """

    seed: bool
    written_out: bool = False

    @property
    def optimizer(self) -> OptimizerSpec:
        return OptimizerSpec("sgd", lr=1e-3) if self.seed else OptimizerSpec("adamw", lr=1e-4, weight_decay=0.01)

    @property
    def positions(self) -> bool:
        """Whether positions are embedded (learned tables, ALiBi)."""
        return not self.seed

    @property
    def explicit_attention(self) -> bool:
        return self.seed or self.written_out

    def bias(self, wanted: bool = True) -> bool:
        """Whether a layer has a bias, given whether the original one has."""
        return wanted and not self.seed

    def linear(self, inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
        """Linear layer [..., inputs] -> [..., outputs]."""
        return nn.Linear(inputs, outputs, bias=self.bias(bias))

    def conv(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
        """Convolution with padding kernel // 2 over [batch, inputs, height, width]."""
        return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=self.bias(bias))

    def batch_norm(self, channels: int) -> nn.Module:
        return nn.Identity() if self.seed else nn.BatchNorm2d(channels)

    def layer_norm(self, width: int, eps: float = 1e-5) -> nn.LayerNorm:
        return nn.LayerNorm(width, eps=eps, elementwise_affine=not self.seed)

    def relu(self) -> nn.ReLU:
        """In place in the real networks, as their originals have it; a fresh tensor in the seed's."""
        return nn.ReLU(inplace=not self.seed)

    def gelu(self, approximate: str = "none") -> nn.Module:
        return nn.ReLU() if self.seed else nn.GELU(approximate=approximate)

    def dropout(self, probability: float) -> nn.Module:
        return nn.Identity() if self.seed or probability == 0 else nn.Dropout(probability)


REAL = Style(seed=False)
SEED = Style(seed=True)
WRITTEN_OUT = Style(seed=False, written_out=True)
