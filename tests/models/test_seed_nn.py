"""The seed's builders: lazy, checked at once, the seed variants at the paper's sizes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from torch import Tensor
from torch._subclasses import FakeTensorMode

from magis.errors import MagisError
from magis.extensions.models.encoders import BERT_SIZES, VIT_SIZES
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


@pytest.mark.parametrize("size", BERT_SIZES)
def test_bert_sizes(size: str) -> None:
    layers, width, _ = BERT_SIZES[size]
    graph, _ = nn.bert(size, batch_size=2, seq_len=1024, vocab_size=100)
    expected = (100 + 2) * width + layers * 12 * width**2 + 2 * width**2 + 2 * width
    assert built(graph) == (expected, [(2, 1024), (2, 1024)])


@pytest.mark.parametrize("size", VIT_SIZES)
def test_vit_sizes(size: str) -> None:
    layers, width, inner, _, patch = VIT_SIZES[size]
    graph, _ = nn.vit(size, batch_size=3, image_size=4 * patch, classes=10)
    expected = 3 * patch**2 * width + width + layers * (4 * width**2 + 2 * width * inner) + 10 * width
    assert built(graph) == (expected, [(3, 3, 4 * patch, 4 * patch)])


def test_own_sizes() -> None:
    assert built(nn.mlp(8, inputs=5, hidden=7, layers=2)[0]) == (5 * 7 + 7 * 7 + 7 * 1000, [(8, 5)])
    assert built(nn.resnet50(2, image_size=32, width=8)[0])[1] == [(2, 3, 32, 32)]
    assert built(nn.densenet121(2, image_size=32, growth=4)[0])[1] == [(2, 3, 32, 32)]
    assert built(nn.vgg11(2, image_size=32, width=8)[0])[1] == [(2, 3, 32, 32)]
    assert built(nn.unet(2, image_size=32, width=4, levels=2)[0])[1] == [(2, 3, 32, 32)]
    assert built(nn.unetpp(2, image_size=32, width=4, levels=2)[0])[1] == [(2, 3, 32, 32)]
    small = {"batch_size": 2, "seq_len": 4096, "layers": 1, "width": 8, "heads": 2, "vocab_size": 9}
    assert built(nn.gpt_neo(**small)[0]) == (9 * 8 + 12 * 8 * 8, [(2, 4096)])
    assert built(nn.btlm(**small, inner=10)[0]) == (9 * 8 + 4 * 8 * 8 + 3 * 8 * 10, [(2, 4096)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [0, -4, 2.0, "8", True, None])
def test_bad_batch_sizes_are_refused_at_once(name: str, wrong: object) -> None:
    with pytest.raises(MagisError) as caught:
        getattr(nn, name)(batch_size=wrong)
    text = str(caught.value)
    assert text.endswith(f": batch_size must be a whole number of at least 1, not {wrong!r}")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.bert("huge"), "bert: unknown size 'huge'; choose one of tiny, mini, small, medium, base, large"),
        (lambda: nn.bert(64), "bert: unknown size 64; choose one of tiny"),
        (lambda: nn.bert(["base"]), "bert: unknown size ['base']; choose"),
        (lambda: nn.vit("base"), "vit: unknown size 'base'; choose one of tiny-16, small-16, base-16"),
        (lambda: nn.vit("base-16", image_size=100), "vit: image_size must be a multiple of patch_size = 16, not 100"),
        (lambda: nn.bert("base", seq_len=0), "bert: seq_len must be a whole number of at least 1, not 0"),
        (lambda: nn.gpt_neo(width=100), "gpt_neo: width must be a multiple of heads = 16, not 100"),
        (lambda: nn.btlm(width=100), "btlm: width must be a multiple of heads = 32, not 100"),
        (lambda: nn.unet(image_size=100), "unet: image_size must be a multiple of 2 ** levels = 16, not 100"),
        (lambda: nn.unetpp(image_size=8), "unetpp: image_size must be a multiple of 2 ** levels = 16, not 8"),
        (lambda: nn.vgg16(image_size=16), "vgg: image_size must be at least 32, not 16"),
        (lambda: nn.mlp(layers=0), "mlp: layers must be a whole number of at least 1, not 0"),
        (lambda: nn.densenet169(growth="a"), "densenet: growth must be a whole number of at least 1, not 'a'"),
    ],
)
def test_bad_sizes(call: object, message: str) -> None:
    with pytest.raises(MagisError) as caught:
        call()  # type: ignore[operator]
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
