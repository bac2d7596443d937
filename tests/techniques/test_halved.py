"""Half precision with float32 masters: the update is the optimizer's own on the masters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magis.errors import UsageError
from magis.ops.optimizers import OptimizerSpec, torch_optimizer
from magis.strategies.distributed import Masters
from magis.strategies.distributed_names import group_of, is_distributed, technique


def test_masters_move_as_float32_weights_would_and_the_weights_are_their_copies() -> None:
    torch.manual_seed(0)
    half = nn.Linear(5, 3).to(torch.bfloat16)
    alone = [nn.Parameter(p.detach().float()) for p in half.parameters()]
    rule = OptimizerSpec("adamw", lr=1e-2, weight_decay=0.1)
    ours = Masters(dict(half.named_parameters()), lambda given: torch_optimizer(rule, dict(given)))
    theirs = torch_optimizer(rule, {str(index): p for index, p in enumerate(alone)})
    assert theirs is not None
    for _ in range(4):
        half(torch.randn(2, 5, dtype=torch.bfloat16)).float().square().sum().backward()
        for weight, master in zip(half.parameters(), alone, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        ours.step()
        theirs.step()
        assert all(weight.grad is None for weight in half.parameters())
    masters = [tensor for kind, tensor in ours.held() if kind == "master weights"]
    for master, expected, weight in zip(masters, alone, half.parameters(), strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master, expected)
        assert torch.equal(weight, expected.to(torch.bfloat16))
    small = [float((m - w.float()).detach().abs().max()) for m, w in zip(masters, half.parameters(), strict=True)]
    assert max(small) > 0, "the masters are no finer than the weights"


@pytest.mark.parametrize(("name", "group"), [("half+ddp", 1), ("half+tp4", 4), ("half+tp2+pp2", 4), ("half+pp", 2)])
def test_names(name: str, group: int) -> None:
    assert is_distributed(name)
    assert (technique(name).group, group_of(name)) == (group, group)


@pytest.mark.parametrize("name", ["half+zero1", "half+oss", "half+fsdp", "half+amp+ddp", "half+half+ddp", "half+"])
def test_what_has_half_precision_of_its_own_or_shards_its_optimizer_is_not_halved(name: str) -> None:
    assert not is_distributed(name)
    with pytest.raises(UsageError):
        technique(name)
