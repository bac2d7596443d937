"""Forms of operators that write over an argument compute the same bits as those that do not, in every type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from magis.ops.call import resolve
from magis.ops.facts import FUNCTIONAL_FORM, IN_PLACE_FORM, OUT_FORM

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (5,), (3, 16, 8))
SEEDS = range(12)
NUMBERS = {"mul": 0.003129890453834116, "threshold": 0.2}
PAIRS = sorted({*IN_PLACE_FORM.items(), *((functional, own) for own, functional in FUNCTIONAL_FORM.items())})


def arguments(target: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Any]:
    """Random tensors, and numbers that no half-precision type holds exactly, for what has no default."""
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.1).to(dtype)

    made: list[Any] = []
    for argument in resolve(target)._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or argument.has_default_value():
            continue
        if argument.name == "mask":
            made.append(drawn() > 0.5)
        elif argument.name == "value" and kind == "Tensor":
            made.append(torch.tensor(0.3137, dtype=dtype))
        elif kind in ("Tensor", "Optional[Tensor]"):
            made.append(drawn())
        elif kind == "bool":
            made.append(False)
        else:
            made.append(NUMBERS.get(target.split(".")[1].partition("_")[0], 0.3137) * (1 + seed))
    return [*made, 0.25] if target == "aten.clamp.default" else made


def copied(items: list[Any]) -> list[Any]:
    return [item.clone() if isinstance(item, Tensor) else item for item in items]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("functional", "in_place"), PAIRS)
def test_in_place_forms_compute_the_same(functional: str, in_place: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for seed in SEEDS:
            given = arguments(functional, shape, dtype, seed)
            assert torch.equal(resolve(functional)(*copied(given)), resolve(in_place)(*copied(given)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("functional", sorted(OUT_FORM))
def test_out_forms_compute_the_same_over_each_argument(functional: str, dtype: torch.dtype) -> None:
    target, keyword = OUT_FORM[functional]
    for shape in SHAPES[1:]:
        for seed in SEEDS:
            given = arguments(functional, shape, dtype, seed)
            wanted = resolve(functional)(*copied(given))
            for position, argument in enumerate(given):
                if isinstance(argument, Tensor) and argument.dtype == wanted.dtype and argument.shape == wanted.shape:
                    mine = copied(given)
                    assert torch.equal(resolve(target)(*mine, **{keyword: mine[position]}), wanted)
