"""Networks whose steps draw random numbers, and read or set the states of generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from magis.capture.workload import Workload
from magis.ops.optimizers import OptimizerSpec

WIDTH = 24


def block(chance: float = 0.2) -> nn.Sequential:
    """Something to recompute, with dropout."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(chance), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(chance)
    )


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing, dropout between them."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = self.drop(x + checkpoint(each, x, **self.how))
        return x


class Nested(nn.Module):
    """Checkpoints within a checkpoint, noise between them."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.outer, self.inner = nn.Linear(WIDTH, WIDTH), block(), block()
        self.how = how

    def _body(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, self.outer(x) * 1.5, **self.how)
        return y + torch.rand_like(x)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self._body, self.first(x), **self.how)
        return found


class InSegments(nn.Module):
    """``checkpoint_sequential``."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), nn.Sequential(*(block() for _ in range(4)))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint_sequential(self.body, 2, self.first(x), **self.how)
        return found


class Stated(nn.Module):
    """Does by hand what checkpointing does: states are read, set, forked and seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.random.fork_rng():
            torch.manual_seed(-3)
            noise = torch.rand_like(x)
        state = torch.get_rng_state()
        y = self.body(x + noise)
        torch.default_generator.set_state(state)  # the same dropout again
        return y - self.body(x - noise) + torch.randn_like(x) * 0.1


class OwnGenerators(nn.Module):
    """Noise from generators of its own, one of them in a list, beside dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), block()
        self.noise = torch.Generator().manual_seed(5)
        self.more = [torch.Generator().manual_seed(6)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.body(x * torch.rand(x.shape, generator=self.noise))
        return x * torch.empty_like(x).bernoulli_(0.5, generator=self.more[0]) + F.dropout(x, 0.1)


Draw = Callable[[Tensor], Tensor]

DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x * 1.0, 0.3, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout1d(x.unsqueeze(0), 0.3).squeeze(0),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1), 0.3, training=True).squeeze(-1),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu_(x * 1.0, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "attention 4d": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.3)[0, 0],
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x * torch.randint(1, 4, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 4),
    "randint_like from": lambda x: x * torch.randint_like(x, 1, 4),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
    "normal by mean": lambda x: x + torch.normal(x.detach(), 0.1),
    "normal by deviation": lambda x: x + torch.normal(0.0, x.detach().abs()),
    "normal by both": lambda x: x + torch.normal(x.detach(), x.detach().abs()),
    "multinomial": lambda x: x[torch.multinomial(x.detach().abs().sum(1), 5)],
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "bernoulli p": lambda x: x * torch.bernoulli(x.detach(), 0.4),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "binomial": lambda x: x * torch.binomial(torch.full_like(x, 3.0).detach(), torch.sigmoid(x.detach())),
    "gamma": lambda x: x * torch._standard_gamma(x.detach().abs() + 0.5),
    "dirichlet": lambda x: x * torch._sample_dirichlet(x.detach().abs() + 0.5),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(),
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "cauchy_": lambda x: x + torch.empty_like(x).cauchy_().clamp_(-1, 1),
    "geometric_": lambda x: x + torch.empty_like(x).geometric_(0.5),
    "log_normal_": lambda x: x + torch.empty_like(x).log_normal_(),
    "random_": lambda x: x + torch.empty_like(x).random_(),
    "random_ to": lambda x: x + torch.empty_like(x).random_(4),
    "random_ from": lambda x: x + torch.empty_like(x).random_(2, 4),
    "bernoulli_ tensor": lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x.detach())),
    "a view": lambda x: x + _in_a_view(x),
}
"""A call for every random operator that runs on a CPU."""


def _in_a_view(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[:, ::2].normal_()
    noise[1:].t().uniform_()
    return noise


class Drawing(nn.Module):
    """One random call between layers; a dropout behind it shows where it left the generator."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.first, self.body, self.draw = nn.Linear(WIDTH, WIDTH), block(), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.draw(self.first(x)))


NETS: dict[str, Callable[[], nn.Module]] = {
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "checkpoint to the end": lambda: Checkpointed(use_reentrant=False, early_stop=False),
    "checkpoint, other numbers": lambda: Checkpointed(use_reentrant=False, preserve_rng_state=False),
    "checkpoint, reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpoint, reentrant, other numbers": lambda: Checkpointed(use_reentrant=True, preserve_rng_state=False),
    "nested": lambda: Nested(use_reentrant=False),
    "nested, reentrant": lambda: Nested(use_reentrant=True),
    "segments": lambda: InSegments(use_reentrant=False),
    "segments, reentrant": lambda: InSegments(use_reentrant=True),
    "states": Stated,
    "own generators": OwnGenerators,
}


def rows(count: int = 48) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


def work_of(module: nn.Module) -> Workload:
    inputs, targets = rows()
    return Workload("net", module, (inputs,), (targets,), F.l1_loss, OptimizerSpec("adamw"))


def checkpointed() -> Workload:
    return work_of(Checkpointed(use_reentrant=False))


def reentrant() -> Workload:
    return work_of(Checkpointed(use_reentrant=True))


def stated() -> Workload:
    return work_of(Stated())


def generating() -> Workload:
    return work_of(OwnGenerators())
