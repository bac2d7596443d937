"""The seed's builders: lazy, checked at once, the seed variants at the paper's sizes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from torch import Tensor
from torch._subclasses import FakeTensorMode

from magis.models import all_names, get
from magis.testing import nn

NAMES = [name.removeprefix("seed-") for name in all_names() if name.startswith("seed-")]


def built(graph: nn.SeedGraph) -> tuple[int, list[tuple[int, ...]]]:
    """Parameters and input shapes of what `graph` describes."""
    with FakeTensorMode():
        made = graph.make(0)
    count = sum(parameter.numel() for parameter in made.module.parameters())
    return count, [tuple(tensor.shape) for tensor in made.inputs]


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_paper_preset_of_the_seed_variant(name: str) -> None:
    graph, output = getattr(nn, name)()
    assert output.graph == graph.name
    with FakeTensorMode():
        expected = get(f"seed-{name}").build("paper", 0)
        made = graph.make(0)
    assert made.name == f"seed-{graph.name}"
    assert made.optimizer.kind == "sgd"
    assert made.explicit_attention

    def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in tensors.items()}

    assert shapes(dict(made.module.named_parameters())) == shapes(dict(expected.module.named_parameters()))
    assert [tensor.shape for tensor in made.inputs] == [tensor.shape for tensor in expected.inputs]


def test_the_first_example_of_the_seed() -> None:
    graph, output = nn.bert("large", batch_size=64)
    assert (graph.name, output.graph, output.what) == ("bert-large", "bert-large", "token logits, sentence logits")
    width = 1024
    expected = (30522 + 2) * width + 24 * 12 * width**2 + 2 * width**2 + 2 * width
    assert built(graph) == (expected, [(64, 512), (64, 512)])
    with pytest.raises(FrozenInstanceError):
        graph.name = "other"  # type: ignore[misc]
