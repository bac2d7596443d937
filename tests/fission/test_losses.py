"""Losses of many forms in parts: trained beside eager, and taken up from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from magis import optimize
from magis.errors import VerifyError
from magis.planner import fission_plan
from tests.training.loops import trained_as_planned

WORDS, LENGTH, WIDTH = 256, 24, 16


class Model(nn.Module):
    """Token numbers and labels [4, length] -> the loss."""

    center: Tensor

    def __init__(self, loss: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss, self.embed = loss, nn.Embedding(WORDS, WIDTH)
        self.head, self.other = (nn.Linear(WIDTH, WORDS, bias=False) for _ in range(2))
        self.register_buffer("center", torch.zeros(WORDS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self, torch.tanh(self.embed(ids)), labels)


def known(scores: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the labels."""
    return scores.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def z_loss_beside_the_whole(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """An operator of the backward, exp(x - logsumexp), waits for no gradient."""
    scores = net.head(x)
    entropy = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
    return (entropy + 1e-2 * scores.logsumexp(-1).square().mean()).exp()


def selected(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities without a softmax."""
    scores = net.head(x).float()
    log = scores.gather(-1, labels[..., None]).squeeze(-1) - scores.logsumexp(-1)
    return -F.logsigmoid(log.mean(1)).mean()


def centered(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """The head reads a buffer that the forward changes ahead of the loss."""
    scores = net.head(x) - net.center
    net.center.mul_(0.9).add_(scores.detach().mean((0, 1)) * 0.1)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten()).exp()


def two_heads(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A fake kernel accepts sizes that broadcast (softplus_backward)."""
    first, second = (known(head(x), labels).sum(-1) for head in (net.head, net.other))
    return F.softplus(first - second).mean()


def transposed(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """One sequence a part: a view (1, 1, -1) of the labels is (4, 1, -1) of all."""
    losses = F.cross_entropy(net.head(x).transpose(1, 2), labels, reduction="none")
    return losses.mean(1).exp().mean()


def clamped(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A gradient that is made in place (logical_and_)."""
    likelihoods = known(net.head(x), labels)
    return -(likelihoods - likelihoods.detach()).exp().clamp(0.8, 1.2).mean()


def sorted_by_loss(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    """A gradient that is made in place (scatter_)."""
    return -known(net.head(x), labels).sort(1).values[:, 10:].mean(1).exp().mean()


def margin(net: Model, x: Tensor, labels: Tensor) -> Tensor:
    top = net.head(x).topk(2, -1).values
    return F.relu(1 - (top[..., 0] - top[..., 1])).mean(1).exp().mean()


LOSSES = (
    (z_loss_beside_the_whole, 0.5), (selected, 0.4), (centered, 0.65), (two_heads, 0.45), (transposed, 0.5),
    (clamped, 0.4), (sorted_by_loss, 0.4), (margin, 0.65),
)  # fmt: skip


def sequences() -> dict[str, Tensor]:
    return {name: torch.randint(WORDS, (4, LENGTH)) for name in ("ids", "labels")}


@pytest.mark.parametrize(("loss", "ratio"), LOSSES, ids=lambda each: getattr(each, "__name__", ""))
def test_it_is_trained_in_parts_and_taken_up_from_a_file(loss: object, ratio: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained_as_planned(Model(loss), sequences(), ratio, tmp_path / "step.plan")  # type: ignore[arg-type]


def test_another_configuration_is_planned_where_a_proof_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def verify(graph: object, original: object = None) -> None:
        if original is not None:
            tried.append(graph)
            if len(tried) == 1:
                raise VerifyError("a made-up failure")

    monkeypatch.setattr(fission_plan, "verify_fission", verify)
    torch.manual_seed(0)
    net = Model(transposed)
    step = optimize(net, sequences(), None, torch.optim.SGD(net.parameters(), 0.1), memory_ratio=0.5)
    assert len(tried) == 2
    assert step.report().fission
