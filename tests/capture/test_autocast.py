"""Autocast by a GPU's rules on CPU tensors, operator by operator: the data types are those of torch's own CUDA kernels,
which fake CUDA tensors reach without a GPU."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from magis.capture import OptimizerSpec, capture
from magis.capture.autocast import BANNED, FP32, LOWER, OPTIONAL_DTYPE, PROMOTED, autocast, cuda_rules, installed
from tests.ops.samples import operators, samples

SGD = OptimizerSpec("sgd", lr=0.1)
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@contextmanager
def on_fake_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Torch's own rules: kernels for CUDA tensors, none of which holds data."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


@contextmanager
def ours(name: str) -> Iterator[None]:
    with FakeTensorMode(), torch.no_grad(), cuda_rules(), autocast(name):
        yield


def test_every_rule_of_the_installed_torch_is_known_once() -> None:
    tables = (LOWER, FP32, OPTIONAL_DTYPE, PROMOTED, BANNED)
    assert sum(map(len, tables)) == len(frozenset.union(*tables))
    # CUDA builds have a rule for a kernel of cuDNN, which tensors on a CPU do not reach; torch 2.11 has named tensors
    elsewhere = re.compile(r"_cudnn_rnn|.*\.(dim_)?[dD]im(n|N)ame(List)?|norm\.names_.*")
    found = {name for name in installed("AutocastCUDA") if not elsewhere.fullmatch(name)}
    assert found <= frozenset.union(*tables)


def outcome(operator: Any, sample: Any, types: tuple[torch.dtype, ...], device: str) -> Any:
    """The data types that come out, or the error; of tensors that have the given types by turns."""
    turns = cycle(types)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = next(turns) if leaf.is_floating_point() else leaf.dtype
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device=device)

    try:
        first, args, kwargs = pytree.tree_map(made, (sample.input, sample.args, sample.kwargs))
        with warnings.catch_warnings(action="ignore"):  # of torch, on forms that go
            results = pytree.tree_leaves(operator.op(first, *args, **kwargs))
        return [result.dtype for result in results if isinstance(result, Tensor)]
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)


@functools.cache
def cases() -> dict[str, tuple[Any, Any]]:
    """A sample of every operator that a rule names, by torch's own catalogue of operators."""
    ruled = {rule.split("::")[-1].split(".")[0] for rule in LOWER | FP32 | OPTIONAL_DTYPE | PROMOTED}
    known = [each for each in operators() if {each.name.split(".")[-1], each.name.replace(".", "_")} & ruled]
    found = {f"{each.name} {each.variant_test_name}": (each, sample) for each in known for sample in samples(each, 1)}
    return {name: case for name, case in found.items() if getattr(case[1].input, "layout", None) == torch.strided}


@pytest.mark.parametrize("name", TYPES)
def test_each_operator_gives_the_types_that_it_gives_on_a_gpu(name: str) -> None:
    known = cases()  # made here: no data is drawn inside
    for types in ((torch.float32,), (TYPES[name],), (TYPES[name], torch.float32)):
        with on_fake_cuda(TYPES[name]):
            expected = {key: outcome(*case, types, "cuda") for key, case in known.items()}
        with ours(name):
            assert {key: outcome(*case, types, "cpu") for key, case in known.items()} == expected
        typed = [outcomes for outcomes in expected.values() if isinstance(outcomes, list)]
        assert len(typed) > 60, "the samples reach too few operators"


# fake CUDA tensors do not reach these without a GPU: what torch documents
@pytest.mark.parametrize("types", list(product((torch.float32, torch.bfloat16), repeat=2)))
def test_what_is_promoted_takes_the_widest_type(types: tuple[torch.dtype, torch.dtype]) -> None:
    first = torch.zeros(1, dtype=torch.int64)
    with cuda_rules(), autocast("bfloat16"):
        a, b = (torch.ones(4, 4, dtype=each) for each in types)
        found = [
            torch.dot(a[0], b[0]),
            torch.vdot(a[0], b[0]),
            a.index_put((first,), b[:1]),
            torch.cross(a[:3], b[:3], dim=0),
        ]
    wider = torch.promote_types(*types)
    assert [tensor.dtype for tensor in found] == [wider] * len(found)


def test_cells_of_recurrent_networks_run_in_the_lower_type() -> None:
    with ours("float16"):
        x, w = torch.empty(4, 4), torch.empty(12, 4)
        assert torch.ops.aten.gru_cell(x, x, w, w).dtype == torch.float16


def types_on_cpu() -> list[torch.dtype]:
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    return [
        torch.exp(half).dtype,
        F.layer_norm(half, (4,)).dtype,
        F.mse_loss(half, half).dtype,
        F.pad(half, (1, 1), mode="reflect").dtype,
    ]


def test_the_rules_of_the_cpu_are_back_afterwards() -> None:
    with autocast("bfloat16"):
        before = types_on_cpu()
        with cuda_rules():
            assert types_on_cpu() != before
        assert types_on_cpu() == before
        with pytest.raises(RuntimeError, match="stop"), cuda_rules():
            raise RuntimeError("stop")
        assert types_on_cpu() == before


def test_without_autocast_the_rules_change_nothing() -> None:
    with cuda_rules():
        assert torch.exp(torch.ones(4, dtype=torch.bfloat16)).dtype == torch.bfloat16
        with autocast("bfloat16"), torch.autocast("cpu", enabled=False):
            assert torch.mm(torch.ones(4, 4), torch.ones(4, 4)).dtype == torch.float32


def test_binary_cross_entropy_is_refused_as_on_a_gpu() -> None:
    with cuda_rules(), autocast("float16"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.ones(4), torch.ones(4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.second(self.first(self.first(x))))
        return out


def targets(device: str, dtype: str | None) -> list[tuple[str, str]]:
    """Operators of a captured forward with the type of their first result."""
    x = torch.ones(4, 8)
    graph = capture(Net(), (x,), (x,), F.mse_loss, SGD, device=device, autocast=dtype).graph
    forward = [op for op in graph.ops if op.phase == "forward"]
    return [(op.target, graph.values[op.outputs[0]].dtype) for op in forward if op.outputs[0] is not None]


def test_a_step_is_captured_by_the_rules_of_its_device() -> None:
    cpu, cuda = targets("cpu", "bfloat16"), targets("cuda", "bfloat16")
    assert ("aten.native_layer_norm.default", "bfloat16") in cpu
    assert ("aten.native_layer_norm.default", "float32") in cuda
    assert ("aten.addmm.default", "bfloat16") in cuda
    assert ("aten._to_copy.default", "float32") in cuda
    assert all(dtype == "float32" for _, dtype in targets("cuda", None))


def test_a_weight_that_is_used_twice_is_cast_once() -> None:
    # the input, two weights and two biases
    forward = [target for target, dtype in targets("cuda", "bfloat16") if dtype == "bfloat16"]
    assert forward.count("aten._to_copy.default") == 1 + 2 * 2


class Within(nn.Module):
    """Casts by itself, as code for GPUs does: by the device's name."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", **self.how):
            return self.layer(x)


@pytest.mark.parametrize(
    ("how", "around", "expected"),
    [
        ({"enabled": False}, "bfloat16", "float32"),
        ({"dtype": torch.bfloat16}, None, "bfloat16"),
        ({}, None, "float16"),  # what autocast on a GPU casts to by default
        ({"dtype": torch.float16}, "bfloat16", "float16"),
    ],
)
def test_a_module_may_name_the_gpu(how: dict[str, object], around: str | None, expected: str) -> None:
    plain = torch.amp.autocast_mode.autocast.__init__
    inputs, targets = (torch.randn(3, 4),), (torch.randn(3, 4),)
    loss = nn.functional.mse_loss
    found = capture(Within(**how), inputs, targets, loss, OptimizerSpec("sgd"), device="cuda", autocast=around)
    products = [op for op in found.graph.ops if op.target == "aten.addmm.default"]
    assert [found.graph.values[op.made()[0]].dtype for op in products] == [expected]
    assert torch.amp.autocast_mode.autocast.__init__ is plain
