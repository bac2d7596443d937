"""Batches that hold more than tensors: containers within each other, numbers, texts and None, as eager takes them."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from magis import UsageError, checkpoint_policy, estimate, fit, optimize
from magis.capture.workload import as_batch
from tests.training.loops import BUDGET, Loops, assert_same, gate, net


class Encoding(UserDict[str, Any]):
    """As tokenizers return them: a mapping that is no dictionary, with an attribute of its own."""

    def __init__(self, data: dict[str, Any], scale: float = 2.0) -> None:
        super().__init__(data)
        self.scale = scale


class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class Sample:
    x: Tensor
    scale: float
    more: dict[str, Any]


class Pair(NamedTuple):
    x: Tensor
    kind: Tensor | None


class Reads(nn.Module):
    """Takes what `read` finds in its arguments."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.read, self.body = read, net(8, 3)

    def forward(self, *args: Any, **keywords: Any) -> Tensor:
        return self.body(self.read(*args, **keywords))


def rows(seed: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


def read_sample(sample: Sample) -> Tensor:
    return sample.x * sample.scale + (sample.more["bias"] if sample.more["kind"] == "with bias" else 0)


def read_encoding(encoding: Encoding) -> Tensor:
    return encoding["x"] * encoding.scale if encoding["mask"] is None else encoding["x"] * encoding["mask"]


Make = Callable[[int], Any]
FORMS: dict[str, tuple[Callable[..., Tensor], Make]] = {
    "none": (lambda x, mask: x if mask is None else x * mask, lambda seed: (rows(seed), None)),
    "text": (lambda x, kind: x.relu() if kind == "relu" else x, lambda seed: (rows(seed), "relu")),
    "number": (lambda x, scale, whole, flag: x * scale**whole if flag else x, lambda s: (rows(s), 0.5, 2, True)),
    "enum": (lambda x, mode: x if mode is Mode.MEAN else 2 * x, lambda seed: (rows(seed), Mode.SUM)),
    "data type": (lambda x, dtype: x.to(dtype).float(), lambda seed: (rows(seed), torch.bfloat16)),
    "dictionary": (lambda d: d["a"]["x"] + d["a"]["y"][1], lambda s: {"a": {"x": rows(s), "y": [None, rows(s + 9)]}}),
    "list": (lambda xs, sizes: sum(xs) * len(sizes), lambda seed: ([rows(seed), rows(seed + 9)], [3, 4])),
    "ordered": (lambda d: d["x"] + d["y"], lambda seed: OrderedDict(y=rows(seed), x=rows(seed + 1))),
    "named tuple": (lambda p: p.x if p.kind is None else p.kind, lambda seed: (Pair(rows(seed), None),)),
    "record": (read_sample, lambda s: Sample(rows(s), 0.5, {"bias": rows(s + 9), "kind": "with bias"})),
    "mapping": (read_encoding, lambda seed: (Encoding({"x": rows(seed), "mask": None}),)),
}


@pytest.mark.parametrize("name", FORMS)
def test_inputs(name: str) -> None:
    read, make = FORMS[name]
    loops = Loops(Reads(read), torch.optim.AdamW, example=(make(0), rows(100)))
    for seed in range(3):
        loops.agree_on(make(seed), rows(seed + 100), seed=seed)
    loops.same()
    assert len(loops.step._entries) == 1


@pytest.mark.parametrize("name", ["dictionary", "list", "named tuple", "record", "mapping", "none"])
def test_targets(name: str) -> None:
    read, make = FORMS[name]

    def loss_fn(output: Tensor, *wanted: Any) -> Tensor:
        return nn.functional.mse_loss(output, read(*wanted))

    loops = Loops(net(8, 3), torch.optim.SGD, loss_fn, (rows(0), make(0)))
    for seed in range(3):
        loops.agree_on(rows(seed), make(seed), seed=seed)
    loops.same()


def test_keywords() -> None:
    """As tokenizers and collators make them, labels in a record, and None for what is not there."""
    module = Reads(lambda x, mask, options: x * options["scale"] if mask is None else x * mask)
    twin = copy.deepcopy(module)
    batches = [Encoding({"x": rows(seed), "mask": None, "options": {"scale": 0.5, "name": "a"}}) for seed in range(3)]
    step = optimize(module, batches[0], lambda out: out.square().mean(), None, memory_ratio=0.95, budget=BUDGET)
    for each in batches:
        loss = twin(**each).square().mean()
        loss.backward()
        assert torch.equal(step(each), loss)
    step(**batches[0])
    twin(**batches[0]).square().mean().backward()
    assert_same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1.0, 2.0), (1, 1.0), (1, True), (0.0, -0.0), ("a", "b"), ("a", None), ([1], (1,)), ({"a": 1}, {"b": 1})],
    ids=repr,
)
def test_another_constant_is_another_kind_of_batch(one: Any, other: Any) -> None:
    first, second = (as_batch(((rows(0), constant), rows(1))) for constant in (one, other))
    assert first.key() != second.key()
    assert first.key() == as_batch(((rows(5), one), rows(6))).key()


def test_batches_of_other_kinds_by_turns() -> None:
    """Each is planned when it first comes."""
    loops = Loops(
        Reads(lambda x, scale: x if scale is None else x * scale), torch.optim.SGD, example=((rows(0), 2.0), rows(1))
    )
    for seed, scale in enumerate((2.0, None, 3, 2.0, None, rows(50))):
        loops.agree_on((rows(seed), scale), rows(seed + 100))
    loops.same()


def test_a_smaller_batch_may_need_what_a_larger_one_was_allowed() -> None:
    """An epoch's last batch, whose weights leave nothing to give up: the limit of the loop is kept all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 5))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
    optimizer.register_step_post_hook(lambda *_: None)  # so that it runs behind the step
    batches = {rows: (torch.randn(rows, 16), torch.randint(0, 5, (rows,))) for rows in (256, 8)}
    with pytest.raises(UsageError, match="no plan found that needs at most"):
        optimize(model, batches[8], nn.functional.cross_entropy, optimizer, memory_ratio=0.9, budget=BUDGET)
    step = optimize(model, batches[256], nn.functional.cross_entropy, optimizer, memory_ratio=0.9, budget=BUDGET)
    limit = step.report().limit_bytes
    loss = nn.functional.cross_entropy(model(batches[8][0]), batches[8][1])
    assert torch.equal(step(*batches[8]), loss.detach())
    assert step.report().planned_bytes <= step.report().original_bytes
    assert step.report().limit_bytes == limit


@pytest.mark.parametrize("wrong", [object(), {1, 2}, {rows(0): 1}, {object(): 1}, torch.Generator(), net])
def test_what_is_no_constant_is_refused_in_one_line(wrong: Any) -> None:
    for given in ((wrong, rows(0)), ((rows(0), [wrong]), rows(0)), (rows(0), {"a": wrong}), {"x": wrong}):
        with pytest.raises(UsageError, match=r"(inputs|targets|the batch) hold") as error:
            as_batch(given)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="the batch has a key that is no name"):
        as_batch({1: rows(0)})


def test_no_batch_is_kept_alive_by_its_form() -> None:
    for _, make in FORMS.values():
        batch = as_batch((make(0), rows(1)))
        assert batch.form is not None
        made = [torch.zeros(16, 8) for _ in batch.inputs]
        tensors = [each for each in torch.utils._pytree.tree_leaves(batch.form.make(made)) if isinstance(each, Tensor)]
        assert not {each.data_ptr() for each in tensors} & {each.data_ptr() for each in batch.inputs}


def record_net() -> tuple[object, ...]:
    read, make = FORMS["record"]
    return Reads(read), make(0), rows(1), nn.functional.mse_loss


@pytest.mark.parametrize("name", ["none", "record", "dictionary"])
def test_the_gate_and_the_other_doors(name: str) -> None:
    read, make = FORMS[name]
    parts = Reads(read), (make(0), rows(1)), nn.functional.mse_loss
    assert gate(copy.deepcopy(parts)).optimized.measured.peak_bytes
    assert estimate(lambda: copy.deepcopy(parts), device="sim:rtx3090").fits()
    policy = checkpoint_policy(parts[0], parts[1], nn.functional.mse_loss, memory_ratio=1.0, blocks=["body.0"])
    assert policy


def test_the_largest_batch_of_records() -> None:
    found = fit(f"{__name__}:record_net", memory_limit="1 MiB", device="sim:rtx3090", budget=BUDGET)
    assert found.eager is not None
    assert found.eager.size > len(rows(0))
