"""Steps in which torch asks who watches; checks that only raise; what others train, detached; wrapped tensors.

Each is planned, trains eager's numbers bit by bit, and is planned once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Independent, Laplace, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.optim import AdamW
from torch.utils._python_dispatch import _get_current_dispatch_mode

from magis import CaptureError
from magis.capture.autocast import device_forms
from magis.runtime.time_slices import Watched
from tests.nets import Block
from tests.training.loops import Loops

CLASSES, ROWS = 5, 24
WEIGHTS = torch.linspace(0.2, 1.7, CLASSES)
TEACHER = nn.Linear(16, CLASSES)
JUDGE = nn.Sequential(nn.Linear(CLASSES, 4), nn.Tanh(), nn.Linear(4, 1)).requires_grad_(False)
SHARPNESS = nn.Parameter(torch.tensor(0.7))
LENGTHS = torch.tensor([0, 5, 6, 14, 24])

Forward = Callable[[nn.Module, Tensor], Any]
Loss = Callable[[Any, Tensor], Tensor]


def plain(m: nn.Module, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.body(x)))


def frozen(make: Callable[[], nn.Module], m: nn.Module, x: Tensor) -> Tensor:
    """Features of a frozen encoder in evaluation mode, which eager runs in fused kernels."""
    sequences = x.view(4, 6, 16)
    with torch.no_grad():
        seen = m.encoder.eval()(sequences)
    return m.head(torch.tanh(m.body(seen.reshape(ROWS, 16))))


class Attended(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Padded(nn.TransformerEncoder):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        padded = torch.arange(x.shape[1]) >= torch.tensor([[6], [4], [5], [6]])
        return super().forward(x, src_key_padding_mask=padded).nan_to_num()


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", norm_first=True, batch_first=True)


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": layer,
    "encoder": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "padded encoder": lambda: Padded(layer(), 2, enable_nested_tensor=False),
    "attention": lambda: Attended(16, 4, batch_first=True),
}


def smoothed(out: Tensor, target: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(out, target, WEIGHTS, label_smoothing=0.15, **how)


def smoothed_pixels(out: Tensor, target: Tensor) -> Tensor:
    pixels = out.view(2, 3, 4, CLASSES).permute(0, 3, 1, 2)
    return smoothed(pixels, target.view(2, 3, 4), ignore_index=1)


def checked_by_hand(m: nn.Module, x: Tensor) -> Tensor:
    if (x.abs() > 1e6).any():
        raise ValueError("too large")
    torch._assert(bool(x.isfinite().all()), "not finite")
    assert (x > 0).sum() > 0
    return plain(m, x)


def dice(out: Tensor, target: Tensor) -> Tensor:
    if (target < 0).any() or target.max() >= CLASSES:
        raise ValueError("no such class")
    return 1 - (F.one_hot(target, CLASSES) * out.softmax(-1)).mean()


def routed(m: nn.Module, x: Tensor) -> Tensor:
    routes = m.body(x).argmax(-1)
    return m.head(m.body(x) * F.one_hot(routes, 16).sum(-1, keepdim=True))


def counted(out: Tensor, target: Tensor) -> Tensor:
    shares = torch.bincount(target, minlength=CLASSES) / target.numel()
    return (F.cross_entropy(out, target, reduction="none") * shares[target]).mean()


def variational(out: Tensor, target: Tensor) -> Tensor:
    codes = Normal(out[:, :2], F.softplus(out[:, 2:4]) + 1e-3)
    drawn = Laplace(codes.rsample(), 1.0).log_prob(target[:, None].float())
    return (kl_divergence(codes, Normal(torch.zeros(2), torch.ones(2))) - drawn).mean()


def spread(out: Tensor, target: Tensor) -> Tensor:
    where = MultivariateNormal(out[:, :2], torch.eye(2)).log_prob(torch.stack([target, target], 1).float())
    return -(where + Independent(Laplace(out, 1.0), 1).log_prob(F.one_hot(target, CLASSES).float())).mean()


def bounded(out: Tensor, target: Tensor) -> Tensor:
    share = Beta(F.softplus(out[:, 0]) + 0.1, F.softplus(out[:, 1]) + 0.1).log_prob((target.float() + 0.5) / CLASSES)
    return -(share + Categorical(logits=out).log_prob(target)).mean()


def with_input(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return plain(m, x), x


def distilled(pair: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    out, x = pair
    return F.cross_entropy(out, target) + F.mse_loss(out, TEACHER(x).detach())


def judged(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target) + F.softplus(-JUDGE(out)).mean()


def sharpened(out: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        doubled = 2 * SHARPNESS
    return F.cross_entropy(out * SHARPNESS.detach() * doubled, target)


def biased(bias: Callable[[int, int], Tensor], m: nn.Module, x: Tensor) -> Tensor:
    heads = m.body(x).view(2, 12, 2, 8).transpose(1, 2)
    seen = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias(12, 12))
    return m.head(seen.transpose(1, 2).reshape(ROWS, 16))


def jagged(m: nn.Module, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x, LENGTHS)
    return m.head(F.layer_norm(torch.tanh(m.body(rows)), (16,))).values()


def of_lengths(m: nn.Module, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor([x[a:b] for a, b in pairwise(LENGTHS.tolist())], layout=torch.jagged)
    return plain(m, parts).to_padded_tensor(0.0).sum(1).repeat_interleave(ROWS // 4, 0)


CASES: dict[str, tuple[Forward, Loss]] = {
    "weights and smoothing": (plain, smoothed),
    "weights, smoothing, ignored": (plain, partial(smoothed, ignore_index=3)),
    "weights, smoothing, summed": (plain, partial(smoothed, ignore_index=3, reduction="sum")),
    "pixels": (plain, smoothed_pixels),
    "checked by hand": (checked_by_hand, F.cross_entropy),
    "dice": (plain, dice),
    "routes": (routed, F.cross_entropy),
    "bincount": (plain, counted),
    "variational": (plain, variational),
    "spread": (plain, spread),
    "bounded": (plain, bounded),
    "distilled": (with_input, distilled),
    "judged": (plain, judged),
    "sharpened": (plain, sharpened),
    "lower right": (partial(biased, causal_lower_right), F.cross_entropy),
    "upper left": (partial(biased, causal_upper_left), F.cross_entropy),
    "jagged": (jagged, F.cross_entropy),
    "of lengths": (of_lengths, F.cross_entropy),
} | {name: (partial(frozen, make), F.cross_entropy) for name, make in ENCODERS.items()}


def batches(count: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randn(ROWS, 16, generator=generator),
            torch.randint(0, CLASSES, (ROWS,), generator=generator),
        )
        for _ in range(count)
    ]


def loops(name: str) -> Loops:
    forward, loss_fn = CASES[name]
    torch.distributions.Distribution.set_default_validate_args(True)  # torch.compile turns it off for the process
    torch.manual_seed(2)
    parts = {"body": nn.Linear(16, 16), "head": nn.Linear(16, CLASSES)}
    if name in ENCODERS:
        parts["encoder"] = ENCODERS[name]().requires_grad_(False)
    limits = {"memory_ratio": None, "latency_ratio": 1.5}
    return Loops(Block(forward, **parts), partial(AdamW, lr=1e-2), loss_fn, batches(1)[0], **limits)


@pytest.mark.parametrize("name", CASES)
def test_is_as_eager_runs_it_and_planned_once(name: str) -> None:
    both = loops(name)
    for seed, one in enumerate(batches()):
        both.agree_on(*one, seed=seed)
    both.same()
    assert len(both.step._entries) == 1


@pytest.mark.filterwarnings("ignore:a batch takes another way")
@pytest.mark.parametrize("name", ["checked by hand", "dice", "variational"])
def test_a_check_that_fails_raises_eagers_own_error(name: str) -> None:
    both = loops(name)
    x, target = batches(1)[0]
    wrong = (x, target + CLASSES) if name == "dice" else (x * math.nan, target)
    both.agree_on(x, target, seed=0)
    messages = []
    for step in (both.step, both.eager):
        with pytest.raises((ValueError, AssertionError, RuntimeError)) as raised:
            step(*wrong)
        messages.append((raised.type, str(raised.value)))
    assert messages[0] == messages[1]
    both.agree_on(x, target, seed=1)
    both.same()


def test_a_gradient_for_a_tensor_of_others_is_refused() -> None:
    CASES["attached"] = plain, lambda out, target: F.cross_entropy(out * SHARPNESS, target)
    with pytest.raises(CaptureError, match="requires a gradient is used"):
        loops("attached")
    assert SHARPNESS.grad is None


class Watchful(torch.autograd.Function):
    """Computes another gradient where a mode is in force."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad * (3.0 if _get_current_dispatch_mode() is None else 3.0 + 2**-20)


def test_numbers_that_depend_on_who_watches_are_refused() -> None:
    forward: Forward = lambda m, x: plain(m, Watchful.apply(m.body(x)))  # noqa: E731
    CASES["watchful"] = forward, F.cross_entropy
    with pytest.raises(CaptureError, match=r"other numbers where nobody watches: the gradient of body\.weight"):
        loops("watchful")


@pytest.mark.parametrize("mode", [partial(device_forms, "cuda"), partial(Watched, lambda *_: None)])
def test_function_modes_leave_layers_that_eager_fuses(mode: Callable[[], AbstractContextManager[object]]) -> None:
    fused, x = layer().eval().requires_grad_(False), torch.randn(2, 5, 16)
    with torch.autograd.profiler.profile() as profile, torch.no_grad(), mode():
        fused(x)
    assert "aten::_transformer_encoder_layer_fwd" in {event.name for event in profile.function_events}
