"""Modules as users build them: converted while they are built, of other data types, without parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from magis.capture.workload import fake_tensors

APPLY = nn.Module._apply


class Tied(nn.Module):
    """Two layers that share a weight, a buffer, and a recurrent layer, whose class converts in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)
        self.rnn = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.rnn(self.b(self.a(x)))[0])  # type: ignore[no-any-return]


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "type": lambda m: m.type(torch.float64),
    "to device": lambda m: m.to("cpu"),
    "to both": lambda m: m.to("cpu", torch.bfloat16),
    "twice": lambda m: m.double().to(torch.bfloat16),
    "part": lambda m: setattr(m, "a", m.a.double()) or m,  # type: ignore[func-returns-value, operator]
    "apply": lambda m: m.apply(lambda part: part.double()),
    "layout": lambda m: m.to(memory_format=torch.channels_last),
}


def facts(module: nn.Module) -> list[tuple[object, ...]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    found: list[tuple[object, ...]] = [(n, t.dtype, t.shape, t.stride(), t.requires_grad, t.device) for n, t in tensors]
    return [*found, *((n, p.grad.dtype) for n, p in module.named_parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("trained", [False, True], ids=["new", "with-gradients"])
def test_conversions_do_on_fake_tensors_what_they_do_on_real_ones(name: str, trained: bool) -> None:
    def build() -> nn.Module:
        module = Tied()
        first = module.a.weight
        if trained:
            module(torch.randn(3, 4)).sum().backward()
        module = CONVERSIONS[name](module)  # type: ignore[assignment]
        assert module.a.weight is module.b.weight is first
        return module

    real = facts(build())
    with fake_tensors():
        fake = build()
        assert facts(fake) == real
        if name not in ("half", "part"):
            fake(torch.randn(3, 4, dtype=fake.a.weight.dtype)).sum().backward()  # type: ignore[union-attr, arg-type]


def test_torch_is_left_as_it_was() -> None:
    with pytest.raises(KeyError), fake_tensors():
        {}["stop"]
    assert nn.Module._apply is APPLY
    assert type(torch.ones(1)) is Tensor
