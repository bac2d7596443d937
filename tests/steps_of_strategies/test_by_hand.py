"""The strategy "by-hand": eager's numbers, in less memory than with checkpointed blocks alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import magis
from magis.capture.workload import Workload
from magis.errors import UsageError
from magis.models.model_specs import from_function
from magis.ops.optimizers import OptimizerSpec, ParameterGroup
from magis.results import Case, CaseResult
from magis.runtime.steps import EagerStep
from magis.strategies import chunked_loss
from magis.strategies.single_device import blocks_of, local
from tests.api.nets import Block

WORDS, WIDTH = 2000, 32
Loss = Callable[..., Tensor]


class Net(nn.Module):
    """A small language model; `labels` make it compute its own loss from its scores, by `loss`."""

    def __init__(self, loss: Loss | None = None, *, tied: bool = False) -> None:
        super().__init__()
        self.word, self.loss = nn.Embedding(WORDS, WIDTH), loss
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.word.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.word(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None or self.loss is None:
            return logits
        return {"loss": self.loss(logits, labels), "logits": logits}


def padded(logits: Tensor, labels: Tensor, items: int | None = None) -> Tensor:
    """As Hugging Face's causal language models compute it."""
    logits = logits.float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    total = F.cross_entropy(logits.view(-1, WORDS), shifted.view(-1), reduction="sum" if items else "mean")
    return total / items if items else total


def sliced(logits: Tensor, labels: Tensor) -> Tensor:
    """On the scores of all words but the last."""
    scores = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    return F.cross_entropy(scores, labels[..., 1:].reshape(-1), label_smoothing=0.1)


def weighted_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Each word's loss with a weight of its own."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (each * torch.linspace(0, 1, len(each))).sum()


def scaled(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((logits / 2).flatten(0, 1), labels.flatten())


def written(logits: Tensor, labels: Tensor) -> Tensor:
    """In place, and read through the first name."""
    logits.div_(2)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def copied_first(logits: Tensor, labels: Tensor) -> Tensor:
    """On a copy, which the write in place leaves as it is."""
    scores = logits[:, :-1].contiguous()
    logits.mul_(2)
    return F.cross_entropy(scores.view(-1, WORDS), labels[:, 1:].flatten())


def cast_first(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits.view(-1, WORDS).to(torch.float64)
    logits[:, 0] = 0
    return F.cross_entropy(scores, labels.flatten())


def copy_written(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits[:, :-1].contiguous()
    scores /= 2
    return F.cross_entropy(scores.view(-1, WORDS), labels[:, 1:].flatten())


def looked_at(logits: Tensor, labels: Tensor) -> Tensor:
    """Read without gradients before the loss."""
    with torch.no_grad():
        right = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + right


def of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """With a weight for each class."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=torch.linspace(0.5, 1, WORDS))


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (2, 128))
    labels = ids.clone()
    labels[0, :50] = -100
    return ids, labels


def rule(name: str = "adamw") -> OptimizerSpec:
    return OptimizerSpec(name, lr=1e-2, momentum=0.9, groups=(ParameterGroup(("head.weight",), lr=1e-3),))


def work_of(net: Net, optimizer: OptimizerSpec | None = None) -> Workload:
    ids, labels = batch()
    inside = net.loss is not None
    return Workload(
        "net",
        net,
        (ids, labels) if inside else (ids,),
        () if inside else (labels,),
        (lambda output: output["loss"]) if inside else padded,
        optimizer or OptimizerSpec("adamw", lr=1e-2),
    )


def steps_of(name: str, work: Workload) -> list[float]:
    strategy = local(name, "cpu")
    with strategy.wrapped(work.module, blocks_of(work)):
        step, losses = strategy.step(work), []
        for seed in range(3):
            torch.manual_seed(seed)
            step.prepare()
            losses.append(float(step.run()))
        assert all(parameter.grad is None for parameter in work.module.parameters())
    return losses


def compare(work: Workload, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare three steps with eager's, losses and weights; return the number of chunks of each step's loss."""
    twin, parts = copy.deepcopy(work.module), list[int]()

    def counted(*given: Any, **options: Any) -> Any:
        parts.append(len(given[1]))
        return checkpoint(*given, **options)

    monkeypatch.setattr(chunked_loss, "checkpoint", counted)
    found = steps_of("by-hand", work)
    eager = EagerStep(twin, *work.parts[1:])
    for seed, loss in enumerate(found):
        torch.manual_seed(seed)
        eager.prepare()
        assert float(eager.run()) == pytest.approx(loss, rel=1e-5)
    for ours, theirs in zip(work.module.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    return len(parts) // 3


LOSSES = [None, padded, lambda logits, labels: padded(logits, labels, 100), sliced, weighted_rows]


@pytest.mark.parametrize("loss", LOSSES, ids=["outside", "inside", "sum", "sliced", "none"])
@pytest.mark.parametrize("tied", [False, True])
def test_numbers_are_eagers(loss: Loss | None, monkeypatch: pytest.MonkeyPatch, *, tied: bool) -> None:
    torch.manual_seed(0)
    assert compare(work_of(Net(loss, tied=tied)), monkeypatch) == chunked_loss.CHUNKS


@pytest.mark.parametrize("loss", [scaled, written, copy_written, looked_at, of_classes])
def test_scores_that_are_used_otherwise_are_computed_whole(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert compare(work_of(Net(loss)), monkeypatch) == 0


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_each_weight_is_updated_by_the_rule_of_its_group(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert compare(work_of(Net(padded), rule(kind)), monkeypatch)


class OwnLoss(torch.autograd.Function):
    """A sum with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return scores.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand_as(ctx.saved_tensors[0])


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="by-hand is not compiled; leave out compile"):
        local("by-hand+compile", "cpu")
    with pytest.raises(UsageError, match="checkpoint and by-hand exclude each other"):
        local("checkpoint+by-hand", "cpu")
    with pytest.raises(UsageError, match="autograd function of the user's own"):
        steps_of("by-hand", work_of(Net(lambda logits, _labels: OwnLoss.apply(logits))))  # type: ignore[no-untyped-call]
    for loss in (copied_first, cast_first):
        with pytest.raises(UsageError, match="written in place after a copy of them was taken"):
            steps_of("by-hand", work_of(Net(loss)))


def case(strategy: str, device: str = "cpu", optimizer: type[Any] = torch.optim.AdamW, dtype: str = "") -> CaseResult:
    def build() -> tuple[object, ...]:
        net, (ids, labels) = Net(padded), batch()
        return net, {"ids": ids, "labels": labels}, optimizer(net.parameters())

    asked = Case("net", strategy, device, "small", dtype or None, timing_rounds=1)
    return magis.run_case(asked, make=from_function("net", build))


def test_a_case_needs_less_than_checkpointed_blocks_and_exactly_what_is_simulated() -> None:
    checkpointed, ours = case("checkpoint"), case("by-hand")
    assert ours.numbers.startswith("another order of sums: loss within ")
    assert ours.optimized.measured is not None
    assert ours.optimized.measured.tensor_bytes == ours.optimized.simulated.tensor_bytes
    persistent = ours.persistent_bytes
    assert ours.memory.tensor_bytes - persistent < 0.5 * (checkpointed.memory.tensor_bytes - persistent)
    assert not ours.note


def test_a_gpu_is_priced() -> None:
    checkpointed, ours = case("checkpoint", "sim:h100"), case("by-hand", "sim:h100")
    assert ours.memory.tensor_bytes < 0.7 * checkpointed.memory.tensor_bytes
    assert ours.is_predicted
    assert ours.latency_ratio > checkpointed.latency_ratio


@pytest.mark.parametrize(
    ("strategy", "device", "optimizer", "who"),
    [
        ("by-hand", "cpu", torch.optim.RMSprop, "RMSprop"),
        ("amp+by-hand", "sim:h100", torch.optim.AdamW, "a GradScaler"),
    ],
)
def test_an_update_behind_the_backward_is_said(strategy: str, device: str, optimizer: type[Any], who: str) -> None:
    result = case(strategy, device, optimizer)
    assert f"by-hand updates weights behind the backward: {who} may look at all gradients" in result.note
    assert "differs" not in result.numbers


@pytest.mark.parametrize(
    ("strategy", "dtype"), [("amp+by-hand", ""), ("by-hand", "amp-bfloat16"), ("by-hand", "bfloat16")]
)
def test_lower_precision_is_compared_and_simulated_exactly(strategy: str, dtype: str) -> None:
    result = case(strategy, dtype=dtype)
    assert "differs" not in result.numbers
    assert result.optimized.measured is not None
    assert result.optimized.measured.tensor_bytes == result.optimized.simulated.tensor_bytes
