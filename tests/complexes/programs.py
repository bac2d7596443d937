"""Programs on complex tensors that train: products, transforms, conjugate and negative views, writes through views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from magis.ops.optimizers import OptimizerSpec
from tests.nets import OPTIMIZERS, Block, Net

SHAPE = (4, 6, 6)
"""Of all tensors of a program: a batch of square matrices."""
RULES = ("sgd", "sgd-decay", "momentum", "adam-decay", "adamw-decay", "gradients")

Line = Callable[[Tensor, Tensor], Tensor]


def _pairs(a: Tensor) -> Tensor:
    return torch.view_as_real(a.resolve_conj())


def _through_pairs(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1.0
    torch.view_as_real(made).mul_(0.5)
    return made * b


def _through_conj(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1.0
    made.conj().mul_(b)
    return made


def _through_parts(a: Tensor, b: Tensor) -> Tensor:
    made = a * 1.0
    made.imag.neg_()
    made.real.add_(b.imag)
    return made


def _into_conj(a: Tensor, b: Tensor) -> Tensor:
    made = torch.zeros_like(a)
    made.conj()[:, 1:3].copy_(b[:, :2])
    return made + a


def _first_modes(a: Tensor, b: Tensor) -> Tensor:
    made = torch.zeros_like(a)
    made[..., :3] = torch.einsum("bij,bjk->bik", a, b[..., :3])
    return made


def _kept_view(a: Tensor, b: Tensor) -> Tensor:
    made = a * b
    view = made.conj()
    return made.tanh() + view @ b


LINES: tuple[Line, ...] = (
    # arithmetic
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a * b.conj(),
    lambda a, b: a.conj() - b,
    lambda a, b: a * (0.5 - 1.5j),
    lambda a, b: (1j - a) / (2 + 1j),
    lambda a, b: a / (1 + b.abs()),
    lambda a, b: a.real * b,
    lambda a, b: a**2,
    lambda a, b: a.tanh(),
    lambda a, b: (a * 0.1).exp(),
    lambda a, b: a.sgn() * b,
    lambda a, b: a.abs() + b,
    lambda a, b: torch.polar(a.abs(), b.angle()),
    lambda a, b: torch.complex(a.real, b.imag),
    lambda a, b: torch.complex(a.conj().imag, b.real.relu()),
    lambda a, b: torch.where(a.real > 0, a, b.conj()),
    lambda a, b: a * torch.tensor([1 + 1j, 0.5, 1j, -1, 2, 0.25j]),
    # products
    lambda a, b: a @ b,
    lambda a, b: a @ b.mH,
    lambda a, b: a.conj() @ b,
    lambda a, b: a.mH @ b.conj(),
    lambda a, b: torch.baddbmm(a, a.mH, b.conj(), alpha=0.5),
    lambda a, b: (a[0].conj() @ b[1].mH).expand_as(a) + a,
    lambda a, b: torch.vdot(a.flatten(), b.flatten()) * a * 0.01,
    lambda a, b: torch.dot(a.flatten().conj(), b.flatten()) * b * 0.01,
    lambda a, b: torch.einsum("bij,bkj->bik", a, b.conj()),
    # views and copies
    lambda a, b: a.conj(),
    lambda a, b: a.mT,
    lambda a, b: a.mH,
    lambda a, b: a.conj().resolve_conj(),
    lambda a, b: torch.view_as_complex((_pairs(a) * _pairs(b)).contiguous()),
    lambda a, b: torch.view_as_complex(torch.stack([b.conj().imag, a.real], -1)),
    lambda a, b: torch.view_as_complex(a.real.contiguous().view(4, 6, 3, 2)).repeat(1, 1, 2) * b,
    lambda a, b: torch.cat([a[:, :2].conj(), b[:, 2:]], 1),
    lambda a, b: a.flip(1).conj(),
    lambda a, b: a.to(torch.complex128).to(torch.complex64),
    lambda a, b: a[:, 2:5].conj().sum(1, keepdim=True) + b,
    lambda a, b: a.mean((0, 2), keepdim=True).conj() * b,
    lambda a, b: a.cumsum(1) * 0.5,
    lambda a, b: a.imag.neg() + b.conj().imag * 1j,
    # transforms
    lambda a, b: torch.fft.fft(a, norm="ortho"),
    lambda a, b: torch.fft.ifft(a.conj(), dim=1, norm="ortho"),
    lambda a, b: torch.fft.fft2(a, norm="ortho"),
    lambda a, b: torch.fft.irfft(a, n=6, norm="ortho") * b,
    lambda a, b: torch.fft.rfft(a.real, n=10, norm="ortho"),
    lambda a, b: torch.fft.irfft2(torch.fft.rfft2(a.imag), s=(6, 6)) - b,
    lambda a, b: torch.fft.hfft(a, n=6, norm="ortho") * b,
    lambda a, b: torch.fft.fftshift(a, dim=2) * b,
    # writes
    _through_pairs, _through_conj, _through_parts, _into_conj, _first_modes, _kept_view,
    lambda a, b: (a * b).mul_(0.5j).add_(b),
    lambda a, b: (a @ b).conj().neg_(),
    lambda a, b: torch._neg_view(a.real).mul(2).neg_() * b,
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, most_lines: int = 9) -> Net:
    """A training step: lines on whatever was made before, with a complex and a real weight, and a real or complex
    batch; the loss is of the tensors made last."""
    place = st.integers(0, 30)
    code = st.integers(0, len(LINES) - 1)
    lines = tuple(draw(st.lists(st.tuples(code, place, place), min_size=1, max_size=most_lines)))
    rule: OptimizerSpec = OPTIMIZERS[draw(st.sampled_from(RULES))]
    return program(lines, rule, conj=draw(st.booleans()))


def program(lines: tuple[tuple[int, int, int], ...], rule: OptimizerSpec, *, conj: bool) -> Net:
    """The step of these lines: number in LINES, and which tensors it takes. ``conj``: the batch is a conjugate view."""

    def run(block: Any, x: Tensor, z: Tensor) -> Tensor:
        pool = [x * block.gain, block.weight * z, z.conj() * block.gain]
        pool = [part.to(torch.complex64) for part in pool]
        for number, i, j in lines:
            pool.append(LINES[number](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]))
        return torch.stack([part.abs().mean() + part.real.mean() for part in pool[-3:]]).sum()

    def batch() -> tuple[Tensor, ...]:
        z = torch.randn(SHAPE, dtype=torch.complex64) * 0.5
        return torch.randn(SHAPE) * 0.5, z.conj() if conj else z

    return Net(
        lambda: Block(
            run, weight=nn.Parameter(torch.randn(SHAPE[1:], dtype=torch.complex64) * 0.5),
            gain=nn.Parameter(torch.randn(SHAPE[1:])),
        ),
        batch, loss_fn=_itself, rule=rule,
    )  # fmt: skip


def _itself(loss: Tensor) -> Tensor:
    return loss
