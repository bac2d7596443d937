"""The networks themselves: published sizes, what the two variants differ in, masks, positions, blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from magis.extensions.models.building import REAL, SEED, SelfAttention, alibi_slopes, causal_mask
from magis.extensions.models.decoders import Btlm, BtlmConfig, GptNeo, GptNeoConfig
from magis.extensions.models.encoders import VIT_SIZES, BertConfig, VitConfig, bert, vit
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


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def operators(name: str) -> tuple[Workload, set[str]]:
    with FakeTensorMode(), Operators() as seen:
        made = get(name).build("small", 0)
        seen.names.clear()
        made.loss_fn(made.module(*made.inputs), *made.targets)
    return made, seen.names


@pytest.mark.parametrize("name", [name for name in all_names() if name.startswith("seed-")])
def test_what_the_seed_leaves_out(name: str) -> None:
    made, seen = operators(name)
    assert list(made.module.named_parameters())
    assert [key for key, _ in made.module.named_parameters() if key.endswith("bias")] == []
    assert not any(isinstance(part, (nn.BatchNorm2d, nn.Dropout, nn.GELU)) for part in made.module.modules())
    norms = [part for part in made.module.modules() if isinstance(part, nn.LayerNorm)]
    assert all(norm.weight is None for norm in norms)
    assert not [key for key, _ in made.module.named_parameters() if "position" in key]
    left = {"native_batch_norm", "gelu", "bernoulli_", "native_dropout", "relu_"}
    assert not [op for op in seen if op in left or "scaled_dot_product" in op]
    assert made.explicit_attention
    if name.removeprefix("seed-") in ("bert", "vit", "gpt_neo", "btlm"):
        assert norms
        assert {"bmm", "_softmax"} <= seen


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet50", {"native_batch_norm", "relu_", "max_pool2d_with_indices"}),
        ("unet", {"native_batch_norm", "relu_", "nll_loss2d_forward"}),
        ("unetpp", {"native_batch_norm", "upsample_bilinear2d", "binary_cross_entropy_with_logits"}),
        ("bert", {"bernoulli_", "gelu", "tanh", "native_layer_norm", "embedding"}),
        ("vit", {"_scaled_dot_product_flash_attention_for_cpu", "gelu", "native_layer_norm"}),
        ("gpt_neo", {"_scaled_dot_product_flash_attention_for_cpu", "gelu", "embedding"}),
        ("btlm", {"_scaled_dot_product_flash_attention_for_cpu", "silu"}),
        ("vgg16", {"relu_", "bernoulli_"}),
        ("densenet121", {"native_batch_norm", "cat", "avg_pool2d"}),
    ],
)
def test_what_the_real_networks_have(name: str, expected: set[str]) -> None:
    made, seen = operators(name)
    assert expected - seen == set()
    assert not made.explicit_attention


def test_dropout_is_that_of_the_originals() -> None:
    made = fake(lambda: get("bert").build("paper", 0))
    rates = {part.p for part in made.module.modules() if isinstance(part, nn.Dropout)}
    rates |= {part.dropout for part in made.module.modules() if isinstance(part, SelfAttention)}
    assert rates == {0.1}


def test_bert_decodes_with_its_word_embedding() -> None:
    config = BertConfig(batch_size=2, seq_len=4, layers=1, width=8, heads=2, vocab_size=11, max_positions=4)
    made = bert(config, SEED, "seed-bert", 0)
    tokens, sentence = made.module(*made.inputs)
    assert (tuple(tokens.shape), tuple(sentence.shape)) == ((2, 4, 11), (2, 2))
    (gradient,) = torch.autograd.grad(tokens[0, 0, 10], made.module.get_parameter("embeddings.word.weight"))
    assert gradient[10].abs().sum() > 0
    parts = [nn.functional.cross_entropy(tokens.flatten(0, 1), made.targets[0].flatten())]
    parts.append(nn.functional.cross_entropy(sentence, made.targets[1]))
    assert torch.equal(made.loss_fn((tokens, sentence), *made.targets), parts[0] + parts[1])


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


def test_masks() -> None:
    inf = float("inf")
    assert causal_mask(3).tolist() == [[0, -inf, -inf], [0, 0, -inf], [0, 0, 0]]
    assert causal_mask(4, 2).tolist()[3] == [-inf, -inf, 0, 0]
    assert causal_mask(4, 9).tolist() == causal_mask(4).tolist()


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16)[:2] == [2**-0.5, 2**-1]
    # 12 heads: those of 8, then every other one of 16
    assert alibi_slopes(12) == [*alibi_slopes(8), *alibi_slopes(16)[0:8:2]]


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


def test_btlm_is_causal_and_its_bias_falls_with_distance() -> None:
    config = BtlmConfig(1, 6, layers=2, width=8, inner=12, heads=2, vocab_size=9, mup_base_width=4)
    real, seed = Btlm(config, REAL), Btlm(config, SEED)
    assert seed.mask.tolist() == causal_mask(6).tolist()
    assert tuple(real.mask.shape) == (1, 2, 6, 6)
    for head, slope in enumerate(alibi_slopes(2)):
        assert real.mask[0, head, 5].tolist() == [-slope * (5 - column) for column in range(6)]
        assert torch.equal(real.mask[0, head].isinf(), causal_mask(6).isinf())
    logits = real(torch.tensor([[1, 2, 3, 4, 5, 6]]))
    changed = real(torch.tensor([[1, 2, 3, 4, 5, 7]]))
    assert torch.equal(logits[:, :5], changed[:, :5])
    assert not torch.equal(logits[:, 5], changed[:, 5])
    # muP: doubling the output scale doubles the logits
    scaled = Btlm(replace(config, output_scale=2 * config.output_scale), REAL)
    scaled.load_state_dict(real.state_dict())
    torch.testing.assert_close(scaled(torch.tensor([[1, 2, 3]]).repeat(1, 2)), 2 * real(torch.tensor([[1, 2, 3] * 2])))


def test_next_tokens_are_the_inputs_shifted_by_one() -> None:
    made = get("gpt_neo").build("small", 0)
    assert torch.equal(made.inputs[0][:, 1:], made.targets[0][:, :-1])
