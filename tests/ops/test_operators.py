"""Rows name what exists, nobody else keeps such tables, and forms that write over an argument compute the same bits."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from magis.ops.call import resolve
from magis.ops.fake_results import laid_out
from magis.ops.operators import OPERATORS, op_info
from magis.ops.splits import rule_of
from tests.layering import load

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (5,), (3, 16, 8))
SEEDS = range(12)
NUMBERS = {"mul": 0.003129890453834116, "threshold": 0.2}
TARGETS = [
    f"aten.{name}.{overload}"
    for name, row in OPERATORS.items()
    for overload in (*row.in_place, *(["default"] if row.out else []))
    if not row.view
]
PAIRS = [(target, form) for target in TARGETS if (form := op_info(target).in_place_form(target)) is not None]


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
        elif argument.name == "index":
            made.append(torch.zeros(shape, dtype=torch.int64))
        elif kind in ("Tensor", "Optional[Tensor]"):
            made.append(drawn())
        elif kind == "bool":
            made.append(False)
        elif argument.name == "dim":
            made.append(-1)
        elif argument.name == "input_dtype":
            made.append(dtype)
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
@pytest.mark.parametrize("functional", [target for target in TARGETS if op_info(target).out])
def test_out_forms_compute_the_same_over_each_argument(functional: str, dtype: torch.dtype) -> None:
    target, keyword = op_info(functional).out_form(functional) or ("", "")
    for shape in SHAPES[1:]:
        for seed in SEEDS:
            given = arguments(functional, shape, dtype, seed)
            wanted = resolve(functional)(*copied(given))
            for position, argument in enumerate(given):
                if isinstance(argument, Tensor) and argument.dtype == wanted.dtype and argument.shape == wanted.shape:
                    mine = copied(given)
                    assert torch.equal(resolve(target)(*mine, **{keyword: mine[position]}), wanted)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.rand(2, 3, 4),
    "planes": lambda: torch.rand(4, 2, 3).permute(1, 2, 0),
    "part": lambda: torch.rand(2, 3, 6)[..., :4],
    "spread": lambda: torch.rand(1, 3, 4).expand(2, 3, 4),
    "across": lambda: torch.rand(3, 2).T[..., None],
    "number": lambda: torch.rand(()),
}


def tensors_of(target: str) -> int:
    return sum(str(argument.type) == "Tensor" for argument in resolve(target)._schema.arguments)


TWO = [
    f"aten.{name}.{overload}"
    for name, row in OPERATORS.items()
    if row.split == "reductions.pointwise" and name not in ("_prelu_kernel_backward", "rrelu_with_noise_backward")
    for overload in getattr(torch.ops.aten, name).overloads()
    if overload in ("default", "Tensor", "Tensor_Tensor", "Scalar", "self")
    if tensors_of(f"aten.{name}.{overload}") == 2
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("target", TWO)
def test_results_lie_as_the_kernels_lay_them_out(target: str, dtype: torch.dtype | None) -> None:
    """From operands of all layouts, and of two types."""
    for one, other in itertools.product(LAYOUTS.values(), repeat=2):
        given = arguments(target, (), torch.float32, 0)
        places = [at for at, each in enumerate(given) if isinstance(each, Tensor)]
        types = (dtype or torch.float32, dtype or torch.bfloat16)
        for at, make, each in zip(places, (one, other), types, strict=True):
            kept = given[at].dtype if given[at].dtype == torch.bool else each
            given[at] = (make() + 0.5).to(kept)
        try:
            made = resolve(target)(*given)
        except RuntimeError:  # takes no operands of these types or shapes
            continue
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in given]
            found = laid_out(target, fakes, resolve(target)(*fakes))
        assert found.stride() == made.stride(), [given[at].stride() for at in places]


def test_forms_lead_back() -> None:
    assert all((op_info(own).functional_form(own), own) in PAIRS for _, own in PAIRS)
    assert all(op_info(own).in_place_form(own) is None for _, own in PAIRS)


def test_rows_name_operators_and_rules_that_exist() -> None:
    """A misspelt row would silently charge nothing for its arithmetic."""
    known = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    assert set(OPERATORS) - {name.split(".")[0].removesuffix("_") for name in known} == set()
    for row in OPERATORS.values():
        assert callable(rule_of(row.split)) if row.split else row.split == ""
        assert not (row.split and row.never_split)


def test_what_is_known_needs_no_torch(fresh_python: Callable[[str], str]) -> None:
    program = "import sys, magis.ops.operators; print(*(name for name in ('torch', 'numpy') if name in sys.modules))"
    assert fresh_python(program).split() == []


# What is known of an operator stands in its row (docs/extending.md). These say something else.
OF_OTHERS = {
    "magis.capture.autocast": "the rules of torch's own autocast on a GPU, by the names they are registered under",
    "magis.capture.schemas": "comparisons, as words",
    "magis.capture.traced_numbers": "arguments of which autograd computes further numbers",
    "magis.cost.devices": "measured constants of one device",
    "magis.fission.part_sums": "how parts combine",
    "magis.fission.loss_suffix": "where the head of a loss may begin",
    "magis.graph.loop_rules": "how parts combine",
    "magis.ops.eager_only": "calls that autograd's engine makes in place while nobody watches",
    "magis.ops.raising": "kernels that look at the contents of their tensors, and find them wrong",
    "magis.ops.splits.products": "how parts combine",
    "magis.ops.splits.labels": "how parts combine",
    "magis.rewrite.flat_rows": "which operators work on each row by itself",
    "magis.fission.recomputed_head": "where the head of a loss may begin",
    "magis.rewrite.short_rows": "where a slice of rows may pass",
    "magis.rewrite.rules.operator_forms": "the words in which rewrite rules are written",
    "magis.runtime.codegen": "how parts combine, as code",
    "magis.runtime.scratch": "kinds of operators",
    "magis.extensions.compile.fused_stretches": "what compiled code leaves to torch, and what takes a number",
    "magis.extensions.onnx.functional_trace": "operators that ONNX lacks, written in others",
    "magis.extensions.onnx.onnx_operators": "how an operator is written in ONNX",
    "magis.strategies.chunked_loss": "operators that write their left side in place",
    "magis.strategies.single_device": "what a strategy of others keeps",
    "magis.extensions.ranks.strategies.vocabulary": "functions that leave distributed tensors in parts",
}


def test_no_other_module_keeps_a_table_of_operators(repository: Path) -> None:
    found = {name for name, module in load(repository).items() for node in ast.walk(module.tree) if is_table(node)}
    assert found == {"magis.ops.operators", *OF_OTHERS}


def is_table(node: ast.AST) -> bool:
    """Whether a literal lists three operators or more, mostly: targets of calls, torch's objects, or names."""
    match node:
        case ast.Dict(keys=items) | ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items):
            keys = [key for key in items if key is not None]
        case ast.Constant(value=str(text)):
            keys = [ast.Constant(word) for word in text.split()]
        case _:
            return False
    return len(keys) > 2 and sum(map(names_operator, keys)) >= max(3, len(keys) // 2)


def names_operator(key: ast.expr) -> bool:
    if isinstance(key, ast.Attribute):
        return re.search(r"\b_?aten\.\w+\.\w+$", ast.unparse(key), re.IGNORECASE) is not None
    return (
        isinstance(key, ast.Constant)
        and str(key.value).removeprefix("aten").lstrip(".:").split(".")[0].removesuffix("_") in OPERATORS
    )
