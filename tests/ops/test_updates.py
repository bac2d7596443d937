"""Weight updates by lists, against torch's own code: operators, numbers, and the bytes of temporaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from magis.capture.workload import Workload
from magis.ops.optimizer_forms import Weight, update
from magis.ops.optimizers import OptimizerSpec, ParameterGroup, new_state, scalars, state_names, torch_optimizer
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.runtime.measure import tensor_peak
from tests.nets import OPTIMIZERS

SIZES = ((40, 30), (30,), (7, 30), (7,))
UPDATES = {name: rule for name, rule in OPTIMIZERS.items() if rule.kind not in ("gradients", "none")}
SETTINGS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def of(name: str, setting: str, **more: Any) -> OptimizerSpec:
    return OptimizerSpec(**{**vars(UPDATES[name]), **SETTINGS[setting], **more})


def parameters(*dtypes: torch.dtype) -> dict[str, nn.Parameter]:
    """Weights with gradients, of all data types in turn."""
    torch.manual_seed(0)
    found = {}
    for index, size in enumerate(SIZES):
        made = nn.Parameter(torch.randn(size).to(dtypes[index % len(dtypes)]))
        made.grad = torch.randn(size).to(made.dtype)
        found[f"p{index}"] = made
    return found


class Log(TorchDispatchMode):
    """Every operator on lists: its name, its lists' shapes and types, its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_lists = str(func).startswith(("aten._foreach_", "aten._fused_"))
        if on_lists and any(each.shape for each in _tensors(args[:1])):  # counters of steps are left out
            self.calls.append((str(func), _plain(args), _plain(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    return [found for part in item for found in _tensors(part)] if isinstance(item, (list, tuple)) else []


def _plain(item: Any) -> Any:
    if isinstance(item, Tensor):
        return tuple(item.shape), str(item.dtype)
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    return [_plain(part) for part in item] if isinstance(item, (list, tuple)) else item


def torchs(rule: OptimizerSpec, params: dict[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, list[Any]]:
    """Torch's optimizer after two steps, and the operators of the second."""
    optimizer = torch_optimizer(rule, params)
    assert optimizer is not None
    optimizer.step()
    with Log() as log:
        optimizer.step()
    return optimizer, log.calls


def ours(rule: OptimizerSpec, params: dict[str, nn.Parameter], how: Callable[..., None]) -> list[Any]:
    """The same by our own code; the operators of the second step."""
    kinds = state_names(rule)
    weights = [Weight(name, p, p.grad, {kind: new_state(kind, p) for kind in kinds}) for name, p in params.items()]
    for step in (1, 2):
        with torch.no_grad(), Log() as log:
            how(rule, weights, scalars(rule, step))
    return log.calls


FORMS = {
    "nesterov": OptimizerSpec("momentum", lr=0.1, momentum=0.9, nesterov=True),
    "nesterov-decay": OptimizerSpec("momentum", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "nesterov-maximize": OptimizerSpec("momentum", lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "dampening": OptimizerSpec("momentum", lr=0.1, momentum=0.9, dampening=0.3),
    "dampening-maximize-decay": OptimizerSpec(
        "momentum", lr=0.1, momentum=0.9, dampening=0.3, maximize=True, weight_decay=0.1
    ),
    "sgd-maximize": OptimizerSpec("sgd", lr=0.1, maximize=True),
    "sgd-maximize-decay": OptimizerSpec("sgd", lr=0.1, maximize=True, weight_decay=0.1),
    "adam-amsgrad": OptimizerSpec("adam", lr=0.1, amsgrad=True),
    "adam-amsgrad-maximize-decay": OptimizerSpec("adam", lr=0.1, amsgrad=True, maximize=True, weight_decay=0.1),
    "adamw-amsgrad-decay": OptimizerSpec("adamw", lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw-maximize": OptimizerSpec("adamw", lr=0.1, maximize=True),
}
"""Options that fused kernels are not captured with."""


RULES = {
    **{f"{name}-{setting}": of(name, setting) for name in UPDATES for setting in SETTINGS},
    **{
        f"groups-{setting}": of(
            "adamw-decay", setting, groups=(ParameterGroup(("p1", "p3"), lr=0.5, weight_decay=0.0, **way),)
        )
        for setting, way in SETTINGS.items()
    },
    **{name: replace(rule, foreach=True) for name, rule in FORMS.items()},
}


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)], ids=["one", "two"])
@pytest.mark.parametrize("name", RULES)
def test_operators_and_numbers_are_torchs_own(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Each group has lists of its own. On short lists, as planned steps for a GPU have them, numbers are the same."""
    rule = RULES[name]
    theirs, mine, short = (parameters(*dtypes) for _ in range(3))
    optimizer, expected = torchs(rule, theirs)
    seen = ours(rule, mine, update)
    assert [call[:2] for call in seen] == [call[:2] for call in expected]
    assert all(call[2].items() >= own[2].items() for call, own in zip(expected, seen, strict=True))
    ours(rule, short, partial(update, device="cuda", most_bytes=1))
    for key, weight in theirs.items():
        assert torch.equal(weight, mine[key])
        assert torch.equal(weight, short[key])
        assert torch.equal(weight.grad, mine[key].grad)  # which nesterov writes to
    assert type(optimizer).__name__ == {"momentum": "SGD", "sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[rule.kind]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", UPDATES)
def test_a_short_list_is_as_long_as_it_may_be(name: str, setting: str) -> None:
    """A weight without a gradient is left alone."""
    rule = of(name, setting)
    whole, short = parameters(torch.float32), parameters(torch.float32)
    whole["p1"].grad = short["p1"].grad = None
    first = ours(rule, whole, update)
    in_parts = partial(update, device="cuda", most_bytes=4 * (40 * 30 + 7 * 30))
    assert len(ours(rule, short, in_parts)) == 2 * len(first)  # p0 and p2 fit into a list, p3 has one of its own
    assert all(torch.equal(whole[key], short[key]) for key in whole)


def temporaries(rule: OptimizerSpec, nbytes: int) -> int:
    """The arithmetic of docs/updates.md: bytes of tensors beside weights, gradients and state, at the worst moment."""
    if rule.fused:
        return 0
    if rule.kind in ("adam", "adamw"):
        return nbytes  # the roots of the second moments
    return nbytes if rule.weight_decay else 0  # gradients with decay


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", UPDATES)
def test_temporaries_of_torchs_code_are_as_documented(name: str, setting: str) -> None:
    rule = of(name, setting)
    params = parameters(torch.float32)
    optimizer, _ = torchs(rule, params)
    nbytes = sum(p.nbytes for p in params.values())
    counters = 4 if rule.foreach and rule.kind in ("adam", "adamw") else 0  # the 1 that the host's counters take
    assert max(counters, temporaries(rule, nbytes)) == tensor_peak(optimizer.step)


WIDTH = 384


def subject(rule: OptimizerSpec) -> Subject:
    """Weights that are far larger than activations: the peak is in the update."""

    def make(seed: int) -> Workload:
        torch.manual_seed(seed)
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        return Workload("net", module, (torch.randn(2, WIDTH),), (torch.randn(2, WIDTH),), F.l1_loss, rule)

    return Subject(Source("net", make, "float32", "sim:h200", 0))


def rounded(*shapes: tuple[int, ...]) -> int:
    """Bytes that the caching allocator hands out for float32 tensors of these shapes."""
    return sum(-(-4 * torch.Size(shape).numel() // 512) * 512 for shape in shapes)


@pytest.mark.parametrize("name", UPDATES)
def test_the_peak_on_a_simulated_gpu_is_the_allocators_arithmetic(name: str) -> None:
    """Weights, gradients, state and temporaries, in blocks of 512 bytes; beside them batch and loss. Nothing is set:
    torch chooses lists on a GPU."""
    rule = UPDATES[name]
    weights = 4 * rounded((WIDTH, WIDTH), (WIDTH,))
    step = subject(rule)
    batch, loss = 2 * rounded((2, WIDTH)), rounded(())
    expected = (2 + len(state_names(rule))) * weights + temporaries(rule, weights) + batch + loss
    if temporaries(rule, weights):
        assert step.original.peak_bytes == expected
        assert step.simulate_graph(step.normal).peak_bytes < expected - weights / 2  # short lists
    else:
        assert expected <= step.original.peak_bytes < expected + weights / 100  # the backward's last call


def test_what_the_user_sets_holds_on_every_device() -> None:
    for device in ("cpu", "cuda"):
        assert (
            OptimizerSpec("adamw", foreach=False).way(device) == OptimizerSpec("sgd", fused=False).way(device) == "loop"
        )
        assert OptimizerSpec("adamw", foreach=True).way(device) == "foreach"
        assert OptimizerSpec("sgd", fused=True).way(device) == "fused"
    assert (OptimizerSpec("sgd").way("cpu"), OptimizerSpec("sgd").way("cuda")) == ("loop", "foreach")
