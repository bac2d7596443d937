"""Sparse tensors and transforms of functions in a step: eager's numbers, or a refusal of one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F  # noqa: N812

import magis
from magis.errors import CaptureError

Between = Callable[[Any, Tensor], Tensor]
OUTSIDE = torch.eye(8).to_sparse()


class Net(nn.Module):
    """Two layers, something between them, and a matrix that is kept as a buffer or as a plain attribute."""

    def __init__(
        self, between: Between = lambda _net, h: h, near: Tensor | None = None, *, plain: bool = False
    ) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 5)
        self.between = between
        if near is not None and plain:
            self.near = near
        elif near is not None:
            self.register_buffer("near", near)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.between(self, torch.tanh(self.one(x))))


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def dual(_net: Net, h: Tensor) -> Tensor:
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        tangent: Tensor = forward.unpack_dual(forward.make_dual(h, torch.ones_like(h)).sin()).tangent
    return tangent


def curved(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target) + hessian(cubes)(torch.ones(3) * out.mean()).sum()


TRANSFORMS: dict[str, Between] = {
    "jvp": lambda _net, h: jvp(torch.sin, (h,), (torch.ones_like(h),))[1],
    "vjp": lambda _net, h: vjp(torch.sin, h)[1](torch.ones_like(h))[0],
    "vmap of grad": lambda _net, h: vmap(grad(cubes))(h),
    "hessian": lambda _net, h: h * hessian(cubes)(h.mean(1)).sum(),
    "jacrev": lambda _net, h: h * jacrev(torch.sin)(h.mean(1)).sum(),
    "dual numbers": dual,
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=drawn), torch.randint(0, 5, (8,), generator=drawn)


@pytest.mark.filterwarnings("ignore")  # torch's own, of batching rules
@pytest.mark.parametrize("name", [*TRANSFORMS, "hessian in the loss"])
def test_transforms_train_as_eager_does(name: str) -> None:
    loss = F.cross_entropy if name in TRANSFORMS else curved
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Net(TRANSFORMS.get(name, lambda _net, h: h)))
    ours, theirs = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
    step = magis.optimize(nets[0], batch(0), loss, ours, memory_ratio=1.0, budget=200)
    for number in range(3):
        x, y = batch(number)
        theirs.zero_grad()
        expected = loss(nets[1](x), y)
        expected.backward()
        theirs.step()
        assert torch.equal(step(x, y), expected.detach())
    assert all(torch.equal(one, other) for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    assert magis.estimate(nets[0], batch(0), loss, "sgd", device="cpu").peak_bytes > 0


def mixed(net: Net, h: Tensor) -> Tensor:
    return net.near @ h


EYE = torch.eye(8)
SPARSE: dict[str, tuple[Callable[[], Net], Callable[..., Tensor]]] = {
    **{
        f"{layout} {where}": (
            lambda to=to, plain=where == "attribute": Net(mixed, to(EYE), plain=plain),
            F.cross_entropy,
        )
        for layout, to in (("coo", Tensor.to_sparse), ("csr", Tensor.to_sparse_csr), ("csc", Tensor.to_sparse_csc))
        for where in ("buffer", "attribute")
    },
    "outside": (lambda: Net(lambda _net, h: torch.sparse.mm(OUTSIDE, h)), F.cross_entropy),
    "in the loss": (Net, lambda out, target: F.cross_entropy(torch.sparse.mm(OUTSIDE, out), target)),
    "made of activations": (
        lambda: Net(lambda _net, h: torch.sparse_coo_tensor(torch.arange(8).expand(2, 8), h[:, 0], (8, 8)) @ h),
        F.cross_entropy,
    ),
    "made, by rows": (
        lambda: Net(
            lambda _net, h: torch.sparse_csr_tensor(torch.arange(9), torch.arange(8), torch.ones(8), (8, 8)) @ h
        ),
        F.cross_entropy,
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's own, of layouts that it calls a beta
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_refused_in_one_line(name: str) -> None:
    make, loss = SPARSE[name]
    net = make()
    with pytest.raises(CaptureError, match=r"sparse.*only dense") as found:
        magis.optimize(net, batch(0), loss, torch.optim.SGD(net.parameters(), lr=0.1), memory_ratio=1.0)
    assert "\n" not in str(found.value)
    for call in (
        lambda: magis.estimate(make(), batch(0), loss, "sgd", device="cpu"),
        lambda: magis.checkpoint_policy(nn.Sequential(nn.Sequential(make())), batch(0), loss, memory_ratio=0.9),
    ):
        with pytest.raises(CaptureError, match=r"sparse.*only dense"):
            call()
