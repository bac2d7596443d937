"""Which kernel attention takes on a GPU: torch's rules against a second, plain reading, and the bytes that follow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import magis
from magis.capture import capture
from magis.capture.attention_kernels import RELEASES, AttentionCall, chosen_kernel, installed_release
from magis.cost.cost_model import estimated_workspace
from magis.cost.devices import device_names, find_device
from magis.graph import Graph, verify
from tests.nets import SGD

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
H100, A100, RTX3090, V100, L4, RTX5090 = (9, 0), (8, 0), (8, 6), (7, 0), (8, 9), (12, 0)
HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
NOW, NEXT = RELEASES


@dataclass(frozen=True)
class Drawn:
    """Numbers of one call, without tensors."""

    dtype: torch.dtype = HALF
    head: int = 64
    value_head: int = 64
    heads: int = 8
    key_heads: int = 8
    rows: int = 128
    columns: int = 128
    mask: str = ""
    """ "", "2", "3", "4" (dimensions), "grad", "column" (one column, expanded)."""
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    grad: bool = True
    apart: bool = False
    """True if the last dimension is not the one that is dense."""

    def call(self) -> AttentionCall:
        def of(heads: int, length: int, head: int) -> Tensor:
            shape = (2, heads, head, length) if self.apart else (2, heads, length, head)
            made = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=self.grad)
            return made.transpose(2, 3) if self.apart else made

        mask = None
        if self.mask:
            leading = {"3": (self.heads,), "4": (2, 1)}.get(self.mask, ())
            columns = 1 if self.mask == "column" else self.columns
            mask = torch.empty((*leading, self.rows, columns), dtype=self.dtype, device="meta")
            mask = mask.expand(self.rows, self.columns) if self.mask == "column" else mask
            mask.requires_grad_(self.mask == "grad")
        query = of(self.heads, self.rows, self.head)
        key, value = of(self.key_heads, self.columns, self.head), of(self.key_heads, self.columns, self.value_head)
        return AttentionCall(query, key, value, mask, self.dropout, self.causal, self.grouped)


def shared(kernel: SDPBackend, c: Drawn, sm: int, *, later: bool) -> Iterator[str]:
    """Read the filters aloud that all fused kernels have, each as a reason to decline."""
    if not (50 if kernel == EFFICIENT else 80) <= sm <= 121:
        yield "hardware"
    if c.dtype == DOUBLE or (c.dtype == FLOAT and kernel != EFFICIENT) or (c.dtype == BFLOAT and sm < 80):
        yield "data type"
    if c.apart and max(c.rows, c.columns) > 1:
        yield "stride of the last dimension"
    if c.mask == "column" and c.columns > 1:
        yield "stride of the mask"
    alike = c.heads == c.key_heads
    if c.grouped and (kernel != EFFICIENT or later):
        alike = c.heads % c.key_heads == 0
    if not alike and not (later and c.key_heads == 1):
        yield "heads"


def of_flash(c: Drawn, sm: int) -> Iterator[str]:
    if c.mask:
        yield "no mask"
    if c.head != c.value_head or c.head > 256:
        yield "head sizes"
    if sm in (86, 87, 89, 120, 121) and c.grad:
        if 192 < c.head <= 224:
            yield "training with such heads"
        if c.head > 224 and c.dropout > 0:
            yield "training with such heads and dropout"
    if c.causal and c.rows != c.columns:
        yield "causal, not square"


def of_efficient(c: Drawn, sm: int) -> Iterator[str]:
    bits = 16 if c.dtype in (HALF, BFLOAT) else 32
    least = 4 if sm >= 80 else 1
    if sm >= 80 or (sm >= 70 and bits == 16):  # tensor cores
        least = max(least, 128 // bits)
    if c.head % least or c.value_head % least:
        yield "alignment of heads"


def of_cudnn(c: Drawn, sm: int, *, later: bool) -> Iterator[str]:
    if c.mask in ("grad", "3"):
        yield "mask"
    if c.head % 8 or c.value_head % 8:
        yield "multiples of 8"
    most = 256 if sm == 90 else 128
    if later and sm == 90 and (c.head, c.value_head) not in ((192, 128), (256, 256)) and c.grad:
        most = 128
    if max(c.head, c.value_head) > most:
        yield "head sizes"
    if later and (16 * c.dropout) % 1:
        yield "sixteenths"
    if c.columns == 1 or (c.rows == 1 and c.dropout > 0):
        yield "single row"


def expected(c: Drawn, card: tuple[int, int], *, later: bool) -> SDPBackend:
    sm, tried = 10 * card[0] + card[1], [FLASH, EFFICIENT]
    own = {FLASH: of_flash(c, sm), EFFICIENT: of_efficient(c, sm), CUDNN: of_cudnn(c, sm, later=later)}
    order = [CUDNN, *tried] if card[0] in (9, 10) else tried
    return next((each for each in order if not [*shared(each, c, sm, later=later), *own[each]]), MATH)


def drawn(random_: random.Random) -> Drawn:
    def pick(*items: object) -> object:
        return random_.choice(items)

    head, rows = pick(24, 30, 60, 64, 128, 192, 200, 224, 256, 288), pick(1, 100, 128)
    mask = pick("", "", "", "2", "3", "4", "grad", "column")
    return Drawn(
        dtype=pick(HALF, BFLOAT, BFLOAT, FLOAT, DOUBLE), head=head, value_head=pick(head, head, 128, 60, 30),
        heads=8, key_heads=pick(8, 8, 8, 2, 1, 3), rows=rows, columns=pick(rows, rows, 1, 77), mask=mask,
        dropout=pick(0.0, 0.0, 0.1, 0.125), causal=not mask and pick(True, False), grouped=pick(True, False),
        grad=pick(True, True, False), apart=random_.random() < 0.1,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("card", [H100, A100, RTX3090, V100, L4, RTX5090])
def test_the_kernel_is_that_of_a_plain_reading(card: tuple[int, int], release: object) -> None:
    seen = set()
    for seed in range(1500):
        case = drawn(random.Random(seed))
        kernel = chosen_kernel(case.call(), card, release)  # type: ignore[arg-type]
        assert kernel == expected(case, card, later=release == NEXT), (case, card)
        seen.add(kernel)
    assert len(seen) == (4 if card == H100 else 2 if card == V100 else 3)


MLA, GROUPS = Drawn(BFLOAT, 192, 128), Drawn(FLOAT, key_heads=2, grouped=True)
TABLE = [
    (Drawn(), H100, CUDNN), (Drawn(), A100, FLASH), (Drawn(), RTX3090, FLASH), (Drawn(), V100, EFFICIENT),
    (Drawn(BFLOAT), V100, MATH), (Drawn(FLOAT), H100, EFFICIENT), (Drawn(DOUBLE), A100, MATH),
    (MLA, H100, CUDNN), (MLA, A100, EFFICIENT), (replace(MLA, dtype=FLOAT), H100, EFFICIENT),
    (Drawn(HALF, 288, 288), H100, EFFICIENT), (Drawn(HALF, 60, 60), A100, FLASH), (Drawn(HALF, 60, 60), V100, MATH),
    (GROUPS, A100, MATH), (replace(GROUPS, dtype=HALF), A100, FLASH), (replace(GROUPS, dtype=HALF), V100, MATH),
    (Drawn(HALF, 208, 208), RTX3090, EFFICIENT), (Drawn(HALF, 208, 208, grad=False), RTX3090, FLASH),
    (Drawn(HALF, 256, 256), RTX3090, FLASH), (Drawn(HALF, 256, 256, dropout=0.1), RTX3090, EFFICIENT),
    (Drawn(mask="2"), H100, CUDNN), (Drawn(mask="2"), A100, EFFICIENT), (Drawn(mask="grad"), H100, EFFICIENT),
    (Drawn(rows=5, causal=True), A100, EFFICIENT), (Drawn(rows=5, causal=True), H100, CUDNN),
]  # fmt: skip
"""Calls by torch's rules of 2.11 to 2.13."""


@pytest.mark.parametrize(("case", "card", "kernel"), TABLE)
def test_the_kernel_of_known_calls(case: Drawn, card: tuple[int, int], kernel: SDPBackend) -> None:
    assert chosen_kernel(case.call(), card, NOW) == kernel


def test_releases_differ_in_grouped_heads() -> None:
    assert (chosen_kernel(GROUPS.call(), A100, NOW), chosen_kernel(GROUPS.call(), A100, NEXT)) == (MATH, EFFICIENT)
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/sdp_utils_cpp.h"
    assert ("supports_mqa" in header.read_text(encoding="utf-8")) == installed_release().groups


def test_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Drawn().call()
    for kernel in (MATH, FLASH, EFFICIENT, CUDNN):
        with sdpa_kernel([kernel]):
            assert chosen_kernel(call, H100) == chosen_kernel(call, A100) == kernel
    with sdpa_kernel([EFFICIENT, FLASH], set_priority=True):
        assert chosen_kernel(call, H100) == EFFICIENT
    with sdpa_kernel([FLASH]), pytest.raises(RuntimeError, match="No available kernel"):
        chosen_kernel(Drawn(FLOAT).call(), H100)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen_kernel(call, H100) == FLASH
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED")
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen_kernel(call, H100) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_simulated_gpu_has_a_compute_capability() -> None:
    cards = {name: find_device(name).capability for name in device_names() if name != "cpu"}
    assert cards == {
        "sim:rtx3090": (8, 6), "sim:v100": (7, 0), "sim:a100": (8, 0), "sim:h100": (9, 0), "sim:h200": (9, 0),
    }  # fmt: skip
    assert find_device("cpu").capability is find_device("cuda", "NVIDIA H200").capability is None


# -- bytes ----------------------------------------------------------------------------------------------------------

ROWS, HEADS = 512, 4


class Attends(nn.Module):
    """Attention over `ROWS` rows with heads of any sizes."""

    def __init__(self, case: Drawn, only: SDPBackend | None = None) -> None:
        super().__init__()
        self.case, self.only = case, only
        sizes = (HEADS * case.head, case.key_heads * case.head, case.key_heads * case.value_head)
        self.parts = nn.ModuleList(nn.Linear(32, size, dtype=case.dtype) for size in sizes)
        self.bias = nn.Parameter(torch.zeros(ROWS, ROWS, dtype=case.dtype)) if case.mask == "grad" else None

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        heads = (HEADS, case.key_heads, case.key_heads)
        query, key, value = (
            part(x).unflatten(2, (count, -1)).transpose(1, 2) for part, count in zip(self.parts, heads, strict=True)
        )
        mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril() if case.mask == "2" else self.bias
        with nullcontext() if self.only is None else sdpa_kernel([self.only]):
            return F.scaled_dot_product_attention(
                query, key, value, mask, case.dropout, case.causal, enable_gqa=case.grouped
            )


def step(case: Drawn, card: tuple[int, int], only: SDPBackend | None = None) -> Graph:
    case = replace(case, key_heads=HEADS if case.key_heads == 8 else case.key_heads)
    inputs = (torch.randn(1, ROWS, 32, dtype=case.dtype),)
    graph = capture(
        Attends(case, only), inputs, (), lambda made: made.float().sum(), SGD, device="cuda", capability=card
    ).graph
    verify(graph)
    return graph


def kernels(graph: Graph) -> list[str]:
    start = "aten._scaled_dot_product_"
    return [op.target.removeprefix(start).split("_")[0] for op in graph.ops if op.target.startswith(start)]


def holds_scores(graph: Graph) -> bool:
    return any(value.shape[-2:] == (ROWS, ROWS) and value.numel >= HEADS * ROWS**2 for value in graph.values.values())


@pytest.mark.parametrize(
    ("case", "card", "kernel"),
    [
        (MLA, H100, "cudnn"), (MLA, A100, "efficient"), (MLA, V100, ""), (Drawn(HALF, 288, 288), H100, "efficient"),
        (Drawn(), V100, "efficient"), (GROUPS, H100, "efficient" if installed_release().groups else ""),
        (Drawn(BFLOAT, key_heads=2, grouped=True), A100, "flash"),
        (Drawn(BFLOAT, key_heads=2, grouped=True), H100, "cudnn"), (Drawn(BFLOAT, dropout=0.5), H100, "cudnn"),
        (Drawn(BFLOAT, mask="2"), A100, "efficient"), (Drawn(BFLOAT, mask="2"), H100, "cudnn"),
        (Drawn(HALF, 60, 60), A100, "flash"),
    ],
)  # fmt: skip
def test_fused_kernels_hold_no_scores(case: Drawn, card: tuple[int, int], kernel: str) -> None:
    graph = step(case, card)
    assert kernels(graph) == ([kernel, kernel] if kernel else [])
    expanded = case.mask and kernel  # a view of the mask
    assert holds_scores(graph) == (not kernel or bool(expanded))
    drawing = [op for op in graph.ops if op.random]
    assert bool(drawing) == (case.dropout > 0)
    if kernel:
        (saved,) = {graph.values[op.made()[1]] for op in graph.ops if op.target.endswith(f"{kernel}_attention.default")}
        assert (saved.dtype, saved.numel) == ("float32", HEADS * ROWS)


def test_a_mask_with_a_gradient_takes_the_memory_efficient_kernel() -> None:
    graph = step(Drawn(BFLOAT, mask="grad"), H100)
    assert kernels(graph) == ["efficient", "efficient"]
    (backward,) = (op for op in graph.ops if "efficient_attention_backward" in op.target)
    assert graph.values[backward.made()[3]].shape == (1, HEADS, ROWS, ROWS)


def test_a_kernel_that_the_user_chose_is_taken() -> None:
    for only, kernel in ((MATH, ""), (EFFICIENT, "efficient"), (FLASH, "flash")):
        assert set(kernels(step(Drawn(BFLOAT), H100, only))) == ({kernel} if kernel else set())


def test_saved_rows_are_padded_as_the_kernels_do() -> None:
    """The memory-efficient kernel pads its logsumexp to 32 rows, and a mask's rows to 8 elements; flash pads heads."""
    query = torch.empty(1, 2, 70, 60, dtype=BFLOAT)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(query).requires_grad_()
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        assert efficient(fake, fake, fake, None, True)[1].shape == (1, 2, 96)
        assert efficient(fake, fake, fake, None, False)[1].shape == (1, 2, 0)
    graph = step(Drawn(HALF, 60, 60), A100)
    (flash,) = (op for op in graph.ops if op.target == "aten._scaled_dot_product_flash_attention.default")
    assert {graph.values[number].shape[-1] for number in flash.inputs()[:3]} == {64}


@pytest.mark.parametrize("device", ["sim:h100", "sim:a100"])
def test_an_estimate_holds_no_scores_with_heads_of_two_sizes(device: str) -> None:
    def peak(only: SDPBackend | None) -> int:
        net, x = Attends(replace(MLA, key_heads=HEADS), only), torch.randn(1, ROWS, 32, dtype=BFLOAT)
        found = magis.estimate(net, (x, torch.zeros(1, HEADS, ROWS, 128, dtype=BFLOAT)), F.mse_loss, device=device)
        return found.peak_bytes

    scores = 2 * HEADS * ROWS**2
    assert peak(None) + 3 * scores < peak(MATH)


@pytest.mark.parametrize("device", ["sim:h100", "sim:a100"])
@pytest.mark.parametrize(
    "layer",
    [
        partial(nn.MultiheadAttention, 64, HEADS, dropout=0.1, batch_first=True),
        partial(nn.TransformerEncoderLayer, 64, HEADS, 64, batch_first=True),
        partial(nn.TransformerDecoderLayer, 64, HEADS, 64, batch_first=True),
    ],
)
def test_layers_of_torch_hold_no_scores(layer: Callable[[], nn.Module], device: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.layer, nn.MultiheadAttention):
                return self.layer(x, x, x, need_weights=False)[0]
            out: Tensor = self.layer(x, x) if isinstance(self.layer, nn.TransformerDecoderLayer) else self.layer(x)
            return out

    x = torch.randn(4, 2 * ROWS, 64)
    found = magis.estimate(Net(), (x, x.clone()), F.mse_loss, device=device, dtype="bfloat16")
    assert found.peak_bytes < 2 * 4 * HEADS * (2 * ROWS) ** 2  # of the scores alone


def test_grouped_gradients_are_made_for_each_head_of_the_query() -> None:
    for card, shared in product((A100, H100), (False, True)):
        case = Drawn(BFLOAT, key_heads=2 if shared else HEADS, grouped=shared)
        graph = step(case, card)
        (backward,) = (op for op in graph.ops if op.target.endswith("attention_backward.default"))
        workspace = estimated_workspace(backward, graph.values, gpu=True)
        rows = HEADS * ROWS
        plain = 4 * rows + 4 * rows * 64
        assert workspace == plain + (2 * 2 * rows * 64 if shared and card == A100 else 0)
