"""From a name or a factory to a model that can be built."""

from __future__ import annotations

import pytest
import torch

from magis.models import from_factory, get

HERE = "tests.models.factories"


def test_the_seed_decides_weights_and_batch_and_leaves_no_trace() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, same, other = (get("vit").build("small", seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one.module.parameters(), same.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.std() == 0 or (a == a.flatten()[0]).all() or not torch.equal(a, c)
    assert torch.equal(one.inputs[0], same.inputs[0])
    assert not torch.equal(one.inputs[0], other.inputs[0])
    assert torch.equal(one.targets[0], same.targets[0])
    assert not torch.equal(one.targets[0], other.targets[0])


@pytest.mark.parametrize("factory", ["as_tuple", "Maker.make"])
def test_a_tuple_becomes_a_workload(factory: str) -> None:
    path = f"{HERE}:{factory}"
    made = get(path).build("paper", 0)
    assert made.name == path
    assert made.module.training
    assert [tuple(tensor.shape) for tensor in (*made.inputs, *made.targets)] == [(3, 4), (3, 2)]
    assert (made.optimizer.kind, made.optimizer.lr) == ("sgd", 1e-3)
    assert made.loss_fn(made.module(*made.inputs), *made.targets).shape == ()


def test_a_factory_is_called_with_the_seed_set() -> None:
    one, same, other = (from_factory(f"{HERE}:as_tuple").build("small", seed) for seed in (1, 1, 2))
    assert torch.equal(one.inputs[0], same.inputs[0])
    assert not torch.equal(one.inputs[0], other.inputs[0])
