"""The decoder of pytorch#197838, and the memory that a step of it needs under torch's activation budget and ours.

The issue takes a Llama of Hugging Face's at width 256 without its head, the sum of the last hidden states for a loss,
and 16, 24 and 32 layers on two sequences of 512, 768 and 1024 tokens. Ours has torch's own RMS norm.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

from magis.extensions.compile.compile_options import CompileReport
from magis.extensions.compile.dynamo_backend import magis
from magis.runtime.measure import window_peak

from .llama import Llama, Sizes

BATCH, WIDTH, INNER, HEADS, VOCABULARY = 2, 256, 688, 8, 1000
SOLVERS = ("dp", "ilp")
"""Torch's, of the knapsack that says which operators run again."""


@dataclass(frozen=True)
class Decoder:
    """A network and its batch."""

    name: str
    module: nn.Module
    token_ids: Tensor

    @property
    def held_bytes(self) -> int:
        """Of what is there before the step: parameters, buffers and batch."""
        return sum(each.nbytes for each in (*self.module.parameters(), *self.module.buffers(), self.token_ids))

    @property
    def gradient_bytes(self) -> int:
        """Of what is there after it besides."""
        return sum(each.nbytes for each in self.module.parameters())

    def loss(self, token_ids: Tensor) -> Tensor:
        """Scalar."""
        out: Tensor = self.module(token_ids).sum()
        return out


def decoder(layers: int, length: int) -> Decoder:
    """The network of so many layers, on sequences of so many tokens."""
    torch.manual_seed(0)
    module = Llama(layers, Sizes(length, WIDTH, INNER, HEADS, HEADS, VOCABULARY))
    module.register_module("head", nn.Identity())
    half = WIDTH // HEADS // 2
    angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(half) / half)
    module.cos.copy_(angles.cos().repeat(1, 2))
    module.sin.copy_(angles.sin().repeat(1, 2))
    return Decoder(f"{layers}x{length}", module, torch.randint(0, VOCABULARY, (BATCH, length)))


@dataclass(frozen=True)
class Measured:
    """One forward and backward on the CPU, as the allocator logs it."""

    peak_bytes: int
    """Parameters, buffers, batch and gradients included."""
    saved_bytes: int
    """What the forward leaves for the backward, above what was there before it."""
    cpu_s: float
    gradients: tuple[Tensor, ...]
    report: CompileReport | None = None


def by_torch(net: Decoder, budget: float, solver: str) -> Measured:
    """Under torch's activation memory budget, 0 to 1; at 1 no solver is asked."""
    with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
        return _measured(net, torch.compile(net.loss, backend="aot_eager", dynamic=False))


def by_magis(net: Decoder, limit_bytes: int, **options: Any) -> Measured:
    """Under a limit of the peak. Where no plan is found within it, the leanest one found is measured."""
    reports: list[CompileReport] = []
    asked = {"memory_limit": limit_bytes, "report": reports.append, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="magis: no plan found")  # the report says so
        return _measured(net, torch.compile(net.loss, backend=magis, options=asked, dynamic=False), reports)


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    module.zero_grad(set_to_none=True)
    yield
    module.zero_grad(set_to_none=True)


def _measured(net: Decoder, run: Callable[[Tensor], Tensor], reports: list[CompileReport] | None = None) -> Measured:
    torch.compiler.reset()
    run(net.token_ids)  # compiles
    saved_bytes = window_peak(lambda: run(net.token_ids)).kept_bytes
    seconds = []

    def step() -> None:
        begin = time.process_time()
        run(net.token_ids).backward()
        seconds.append(time.process_time() - begin)

    with _without_gradients(net.module):
        peak_bytes = net.held_bytes + window_peak(step).peak_bytes
        gradients = tuple(each.grad for each in net.module.parameters() if each.grad is not None)
    return Measured(peak_bytes, saved_bytes, seconds[0], gradients, reports[0] if reports else None)
