"""The networks themselves: published sizes, what the two variants differ in, masks, positions, blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from magis.extensions.models.building import REAL, SEED, SelfAttention, causal_mask
from magis.extensions.models.decoders import GptNeo, GptNeoConfig
from magis.extensions.models.encoders import VIT_SIZES, VitConfig, vit
from magis.extensions.models.network_names import GATE_NAMES, SEED_NAMES
from magis.models import Workload, all_names, get

# Published: torchvision's model tables; Hugging Face BertForPreTraining and GPT-Neo-1.3B; milesial's U-Net (two
# classes, transposed convolutions) and the usual U-Net++ (three channels in, one out). GPT: the vendor's 1.3B.
PUBLISHED = {
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "densenet121": 7_978_856,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "bert": 110_106_428,
    "vit": 86_567_656,
    "gpt": 1_313_722_368,
    "gpt_neo": 1_315_575_808,
    # 32 layers of attention (packed, biased), SwiGLU and two norms; a tied embedding; no position table
    "btlm": 2_646_255_744,
    "unet": 31_037_698,
    "unetpp": 9_163_329,
}

# Table 2 of the paper
BATCHES = {
    "resnet50": (64, 3, 224, 224),
    "bert": (32, 512),
    "vit": (64, 3, 224, 224),
    "unet": (32, 3, 256, 256),
    "unetpp": (16, 3, 256, 256),
    "gpt_neo": (32, 512),
    "btlm": (32, 512),
}


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fake(build: Callable[[], Workload]) -> Workload:
    with FakeTensorMode():
        return build()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    assert parameters(fake(lambda: get(name).build("paper", 0)).module) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("size", "count"),
    [("base-32", 88_224_232), ("large-16", 304_326_632), ("large-32", 306_535_400), ("huge-14", 632_045_800)],
)
def test_published_counts_of_the_other_vits(size: str, count: int) -> None:
    layers, width, inner, heads, patch = VIT_SIZES[size]
    config = VitConfig(1, 224, patch, layers, width, inner, heads)
    assert parameters(fake(lambda: vit(config, REAL, size, 0)).module) == count


@pytest.mark.parametrize("name", [*GATE_NAMES, *SEED_NAMES])
def test_paper_sizes_allocate_nothing_and_run_under_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        made = get(name).build("paper", 0)
        tensors = [*made.module.parameters(), *made.module.buffers(), *made.inputs, *made.targets]
        assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
        assert tuple(made.inputs[0].shape) == BATCHES[name.removeprefix("seed-")]
        loss = made.loss_fn(made.module(*made.inputs), *made.targets)
        assert loss.shape == ()
        assert loss.requires_grad


@pytest.mark.parametrize(
    ("name", "dtype"),
    # float16 convolutions are slow on a CPU: one network stands for them
    [*((name, "bfloat16") for name in GATE_NAMES), *((name, "float16") for name in ("bert", "unet", "btlm"))],
)
def test_other_data_types(name: str, dtype: str) -> None:
    reference = get(name).build("small", 0)
    made = get(name).build("small", 0).to(dtype)
    with torch.no_grad():
        expected, loss = (one.loss_fn(one.module(*one.inputs), *one.targets) for one in (reference, made))
    assert {value.dtype for value in made.module.parameters()} == {getattr(torch, dtype)}
    torch.testing.assert_close(loss.float(), expected, rtol=0.05, atol=0)


# one of each family whose members differ only in depth: the backward takes time even on fake tensors
FAMILIES = [name for name in all_names() if not name.endswith(("101", "152", "101_2", "13", "16", "19", "169", "201"))]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_small_network_has_a_loss_and_reaches_every_parameter(name: str) -> None:
    with FakeTensorMode():
        made = get(name).build("small", 0)
        assert made.name == name
        assert made.module.training
        made.loss_fn(made.module(*made.inputs), *made.targets).backward()
        assert [key for key, value in made.module.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize("name", all_names())
def test_blocks_are_disjoint_and_hold_most_of_the_network(name: str) -> None:
    made = fake(lambda: get(name).build("small", 0))
    blocks = [made.module.get_submodule(path) for path in made.blocks]
    assert len(blocks) >= 4
    held = [parameter for block in blocks for parameter in block.parameters()]
    assert len({id(parameter) for parameter in held}) == len(held)
    assert sum(parameter.numel() for parameter in held) > 0.6 * parameters(made.module)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_written_out_attention_equals_the_fused_kernel(packed: bool, window: int | None) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(REAL, 12, 3, packed=packed, causal=True).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = causal_mask(7, window).double()
    fused = attention(x, mask)
    if window is None:
        torch.testing.assert_close(attention(x), fused)
    attention.explicit = True
    torch.testing.assert_close(attention(x, mask), fused)
    attention.scale *= 2
    assert not torch.allclose(attention(x, mask), fused)


def influence(module: nn.Module, layers: nn.ModuleList, x: Tensor, *masks: Tensor | None) -> Tensor:
    """[row, column] is True where output token `row` depends on input token `column`."""
    x = x.requires_grad_()
    for layer, mask in zip(layers, masks, strict=True):
        x_out = layer(x, mask)
    rows = [torch.autograd.grad(x_out[0, i].sum(), x, retain_graph=True)[0][0].abs().sum(-1) for i in range(6)]
    return torch.stack(rows) > 0


@pytest.mark.parametrize("style", [REAL, SEED])
def test_gpt_neo_alternates_between_global_and_local_causal_attention(style: object) -> None:
    torch.manual_seed(0)
    seed = style is SEED
    config = GptNeoConfig(1, 6, layers=2, width=8, heads=2, window=2, vocab_size=9, max_positions=6)
    net = GptNeo(config, SEED if seed else REAL)
    masks: list[Tensor | None] = []
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda _, given: masks.append(given[1]))
    net(torch.zeros(1, 6, dtype=torch.long))
    causal = torch.ones(6, 6).tril().bool()
    near = causal & ~torch.ones(6, 6).tril(-2).bool()
    x = torch.randn(1, 6, 8)
    for layer, mask, expected in zip(net.layers, list(masks), (causal, near), strict=True):
        assert torch.equal(influence(net, nn.ModuleList([layer]), x, mask), expected)
