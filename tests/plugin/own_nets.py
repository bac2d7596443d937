"""A user's own networks, copied into inner runs as a module: sound ones, and one of each kind of mistake."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from magis.capture.contents import is_hollow
from magis.models import OptimizerSpec, Workload


def workload(module, width=16):
    return module, (torch.randn(64, width),), (torch.randn(64, width),), functional.mse_loss


class Function(nn.Module):
    """Applies a function of a linear layer and the input."""

    def __init__(self, run):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.run = run

    def forward(self, x):
        return self.run(self.linear, x)


def tower(width=64, wide=None):
    """Eight layers, of which `wide` is twice as wide inside."""
    parts = []
    for index in range(8):
        inner = 2 * width if index == wide else width
        parts += [nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width), nn.Tanh()]
    return nn.Sequential(*parts)


def sound():
    return workload(tower(), 64)


def converts():
    """Converted while it is built, with a tied weight."""
    net = tower().double().to("cpu")
    net[4].weight = net[0].weight
    return workload(net.bfloat16().float(), 64)


def in_type(dtype):
    module, (x,), (y,), loss = workload(tower(), 64)
    return module.to(dtype), x.to(dtype), y.to(dtype), loss


def in_bfloat16():
    return in_type(torch.bfloat16)


def in_float16():
    return in_type(torch.float16)


def in_float64():
    return in_type(torch.float64)


class Scaled(nn.Module):
    """Keeps a float64 buffer, beside a constant of that type, that never meet a parameter in a matrix product."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) * self.scale + torch.ones(16, dtype=torch.float64)


def wide_buffer():
    return Scaled(), torch.randn(64, 16), torch.randn(64, 16, dtype=torch.float64), functional.mse_loss


def without_parameters():
    return workload(nn.Sequential(nn.ReLU(), nn.Tanh()))


def frozen():
    return workload(nn.Linear(16, 16).requires_grad_(False))


def inference():
    parts = without_parameters()
    return Workload("relu", *parts, optimizer=OptimizerSpec("none"))


def reads_data():
    """Its batch comes from numpy, and the number of its classes from its batch."""
    x = torch.from_numpy(np.ones((64, 16), dtype=np.float32))
    y = torch.arange(64) % 5
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, int(y.max()) + 1)), x, y, functional.cross_entropy


MADE_BEFORE = tower(), torch.randn(64, 64)
CONVERTED = tower()


def made_before():
    net, x = MADE_BEFORE
    return net, 2 * x, x, functional.mse_loss


def converted_before():
    x = MADE_BEFORE[1].bfloat16()
    return CONVERTED.bfloat16(), x, x, functional.mse_loss


def branches():
    return workload(Function(lambda linear, x: linear(x) * x.sum().item()))


def on_meta():
    return workload(nn.Linear(16, 16, device="meta"))


def on_two_devices():
    return workload(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, device="meta")))


def across_devices():
    return workload(Function(lambda linear, x: linear(x) + torch.ones(16, device="meta")))


def two_types():
    return workload(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, dtype=torch.float64)))


def mixed_product():
    return workload(Function(lambda linear, x: linear(x) @ torch.ones(16, 16, dtype=torch.float64)))


def mixed_conv():
    def run(linear, x):
        return functional.conv1d(linear(x).double().unsqueeze(1), torch.ones(1, 1, 3), padding=1).squeeze(1)

    return workload(Function(run))


def other_input():
    return nn.Linear(16, 16), (torch.randn(64, 16).double(),), (torch.randn(64, 16),), functional.mse_loss


def whole_input():
    return nn.Linear(16, 16), (torch.ones(64, 16, dtype=torch.int64),), (torch.randn(64, 16),), functional.mse_loss


def embeds():
    """Whole numbers in, masks on the way, and a factor of another type: eager takes all of it."""

    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(32, 16)
            self.out = nn.Linear(16, 32)

        def forward(self, index):
            found = self.table(index)
            found = torch.where(found > 0, found, 0.1 * found) * (index > 3).unsqueeze(1)
            return self.out(found * torch.ones(16, dtype=torch.bfloat16))

    return Embeds(), torch.arange(32), torch.arange(32), functional.cross_entropy


def mixed_norm():
    # fake kernels take this; the real one does not
    return workload(Function(lambda linear, x: functional.layer_norm(linear(x).double(), (16,), linear.bias)))


def raises():
    raise OSError("no such checkpoint\nanywhere")


def raises_for_real():
    if not is_hollow(torch.empty(1)):
        raise OSError("no such data")
    return sound()


def leaves():
    raise SystemExit("this factory gives up")


class Oddity(BaseException):
    pass


def odd():
    raise Oddity("neither an error nor an exit")


def returns_nothing():
    return None


@torch.library.custom_op("magis_own_nets::swirl", mutates_args=())
def swirl(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * x


@swirl.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("magis_own_nets::swirl_backward", mutates_args=())
def swirl_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad * (torch.cos(x) * x + torch.sin(x))


@swirl_backward.register_fake
def _(grad, x):
    return torch.empty_like(x)


swirl.register_autograd(
    lambda ctx, grad: swirl_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Swirl(nn.Module):
    def forward(self, x):
        return swirl(x)


def undeclared():
    """Uses an operator that no table of magis knows."""
    return workload(nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), Swirl()))), 64)
