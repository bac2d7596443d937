"""Module, batch, loss and optimizer in one order and under the same names, wherever a training step is taken."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import magis
from magis.models.step_parts import ORDER

DOORS = (magis.optimize, magis.estimate, magis.fit, magis.pareto, magis.checkpoint_policy)
ASKED: dict[str, dict[str, Any]] = {
    "optimize": {"memory_ratio": 0.9, "budget": 20},
    "estimate": {"device": "sim:h100"},
    "fit": {"device": "sim:h100", "memory_limit": "4 MiB", "budget": 10, "most": 512},
    "pareto": {"device": "sim:h100", "budget": 10, "points": 2},
    "checkpoint_policy": {"memory_ratio": 0.95},
}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x if labels is None else functional.mse_loss(x, labels)


def parts() -> tuple[nn.Module, Any, Callable[..., Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Blocks()
    return (
        module,
        (torch.randn(64, 16), torch.randn(64, 16)),
        functional.mse_loss,
        torch.optim.AdamW(module.parameters()),
    )


def figure(door: str, made: Any) -> Any:
    """A figure of what a function returns, the same for the same step."""
    if door == "optimize":
        return made.report().planned_bytes
    if door == "estimate":
        return made.peak_bytes
    if door == "fit":
        return made.eager.size
    return made.planned_bytes if door == "checkpoint_policy" else [point.peak_bytes for point in made.points]


def called(door: str, *given: Any, **named: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return figure(door, getattr(magis, door)(*given, **named, **ASKED[door]))


@pytest.fixture(scope="module", params=[door.__name__ for door in DOORS])
def door(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected(door: str) -> Any:
    return called(door, *parts())


def test_the_signatures_are_one() -> None:
    for each in DOORS:
        found = inspect.signature(each).parameters.values()
        assert tuple(p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD) == ORDER


def test_by_name(door: str, expected: Any) -> None:
    assert called(door, **dict(zip(ORDER, parts(), strict=True))) == expected


def test_a_tuple_and_a_factory(door: str, expected: Any) -> None:
    assert called(door, parts()) == expected
    assert called(door, parts) == expected
    module, (inputs, targets), loss, optimizer = parts()
    assert called(door, (module, inputs, targets, loss, optimizer)) == expected


def test_no_loss_where_the_module_returns_it(door: str) -> None:
    module, (inputs, targets), _, optimizer = parts()
    batch = {"x": inputs, "labels": targets}
    assert called(door, module, batch, None, optimizer)
    assert called(door, (copy.deepcopy(module), batch))


@pytest.mark.parametrize(
    ("door", "old"),
    [
        ("optimize", lambda m, b, lo, o: ((m, lo, o, b), {})),
        ("optimize", lambda m, b, lo, o: ((m, lo, o), {"example_batch": b})),
        ("optimize", lambda m, b, lo, o: ((), {"model": m, "loss_fn": lo, "optimizer": o, "example_batch": b})),
        ("estimate", lambda m, b, lo, o: ((m, o, b, lo), {})),
        ("estimate", lambda m, b, lo, o: ((m, o), {"batch": b, "loss": lo})),
        ("checkpoint_policy", lambda m, b, lo, _: ((m, b), {"loss_fn": lo})),
    ],
    ids=["positions", "mixed", "names", "positions", "mixed", "names"],
)
def test_old_orders_work_with_one_line(door: str, old: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    given, named = old(*parts())
    with pytest.warns(DeprecationWarning, match=f"magis.{door}: the order is module, batch, loss, optimizer") as found:
        made = getattr(magis, door)(*given, **named, **ASKED[door])
    assert [each.filename for each in found] == [__file__]
    assert figure(door, made) == called(door, *parts())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"module": nn.Linear}, "is the class Linear"),
        ({"loss": nn.MSELoss}, "is the class MSELoss"),
        ({"batch": None}, "a module needs a batch"),
        ({"module": parts}, "a function brings its own batch and loss"),
        ({"module": (Blocks(),), "batch": None, "loss": None, "optimizer": None}, "tuple of 1"),
    ],
)
def test_wrong_parts_are_one_line(door: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(magis.UsageError, match=said) as raised:
        getattr(magis, door)(**{**dict(zip(ORDER, parts(), strict=True)), **change}, **ASKED[door])
    assert "\n" not in str(raised.value)


AMOUNTS: list[tuple[str, dict[str, Any], str]] = [
    ("estimate", {"memory_limit": 0}, "memory_limit=0; give a whole number that is at least 1"),
    ("estimate", {"memory_limit": 1.5}, "memory_limit=1.5; give a whole number"),
    ("estimate", {"memory_limit": "24"}, "a memory limit of 24 bytes; write its unit: 24GiB"),
    ("estimate", {"accumulate": "4"}, "accumulate='4'; give a whole number that is at least 1"),
    ("estimate", {"seed": "x"}, "seed='x'; give a whole number that is at least 0"),
    ("estimate", {"device": "sim:h10"}, "unknown device 'sim:h10'; did you mean sim:h100"),
    ("estimate", {"dtype": torch.float16}, "unknown data type torch.float16; did you mean float16"),
    ("estimate", {"optimizer": "AdamW"}, "the optimizer is 'AdamW'; did you mean adamw"),
    ("fit", {"dim": "rows"}, "dim='rows'; give a whole number that is at least 0"),
    ("fit", {"precision": 2}, "precision=2; give a share from 0 up to 1"),
    ("pareto", {"points": "many"}, "points='many'; give a whole number that is at least 2"),
    ("pareto", {"budget": "quick"}, "budget='quick'; give a whole number that is at least 1"),
    ("checkpoint_policy", {"blocks": ["block"]}, "the module has no block 'block'; did you mean blocks"),
]


@pytest.mark.parametrize(("door", "change", "said"), AMOUNTS)
def test_wrong_amounts_are_one_line(door: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(magis.UsageError, match=re.escape(said)) as raised:
        getattr(magis, door)(**{**dict(zip(ORDER, parts(), strict=True)), **ASKED[door], **change})
    assert "\n" not in str(raised.value)


def test_a_compiled_module_is_one_line(door: str) -> None:
    module, *others = parts()
    module.compile()
    with pytest.raises(
        magis.UsageError, match=r"is compiled by torch.compile \(module '\(root\)'\); give it uncompiled"
    ):
        getattr(magis, door)(module, *others, **ASKED[door])


def test_a_step_says_what_it_is_and_helps_a_loop_that_is_ported() -> None:
    module, batch, loss, optimizer = parts()
    step = magis.optimize(lambda: (module, batch, loss, optimizer), memory_ratio=0.9, budget=20)
    assert step.module is module
    assert step.optimizer is optimizer
    found = repr(step)
    assert found.startswith("<magis.OptimizedStep of Blocks: ")
    assert " in eager mode; update part of the step>" in found
    assert "\n" not in found
    for name, way_out in (("backward", "forward, backward and update"), ("train", "step.module"), ("xyz", "no 'xyz'$")):
        with pytest.raises(AttributeError, match=way_out):
            getattr(step, name)
