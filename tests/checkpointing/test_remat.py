"""`magis.checkpoint_policy(..., library="torch_remat")`: eager's numbers, and the predicted peak."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis import checkpoint_policy
from magis.rewrite.realize import GENERATOR_BYTES
from tests.checkpointing.test_policy import made, peak, step
from tests.compile.tag_nets import Decoder, Squeezed

needs_library = pytest.mark.skipif(
    not any((Path(place) / "torch_remat").is_dir() for place in sys.path), reason="torch_remat is not installed"
)


class Decoders(nn.Module):
    """Decoders of a llama in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Decoder(32, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.linspace(0, 3, 8)
        for layer in self.layers:
            x = layer(x, turn)
        return x


def subject(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "llama":
        return Decoders(), (torch.randn(4, 40, 32), torch.randn(4, 40, 32))
    if name == "convnet":
        images = torch.randn(4, 8, 24, 24)
        return nn.Sequential(Squeezed(8, 16), Squeezed(8, 24), Squeezed(8, 16)), (images, torch.randn_like(images))
    return made(norm=name == "batch norms")


@needs_library
@pytest.mark.parametrize("ratio", [0.8, 0.65])
@pytest.mark.parametrize("name", ["llama", "convnet", "layer norms", "batch norms"])
def test_numbers_are_eagers_and_the_peak_is_the_predicted_one(name: str, ratio: float) -> None:
    module, batch = subject(name)
    twin = copy.deepcopy(module)
    policy = checkpoint_policy(module, batch, F.mse_loss, memory_ratio=ratio, library="torch_remat")
    assert policy.regions
    assert policy.planned_bytes <= ratio * policy.original_bytes
    handle = policy.apply(module)
    for _ in range(2):  # statistics are updated once a step
        assert all(torch.equal(a, b) for a, b in zip(step(module, batch), step(twin, batch), strict=True))
    # What is counted besides: the generator's state while a block runs again, which may not be at the peak.
    assert policy.planned_bytes - peak(module, batch) in (0, GENERATOR_BYTES)
    handle.remove()
    assert not any("forward" in vars(each) for each in module.modules())


@needs_library
def test_what_is_kept_does_not_run_again() -> None:
    module, batch = made()
    policy = checkpoint_policy(module, batch, F.mse_loss, memory_ratio=0.8, library="torch_remat")
    ran: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    for region in policy.regions:
        for name, part in module.get_submodule(region.path).named_children():
            path, own = f"{region.path}.{name}", part.forward

            def forward(x: Tensor, path: str = path, own: Callable[..., Tensor] = own) -> Tensor:
                ran[path] += 1
                return own(x)

            part.forward = forward
            expected[path] = 1 if name in region.modules else 2
    with policy.applied(module):
        step(module, batch)
    assert 1 in expected.values()
    assert ran == expected
