"""Autocast by a GPU's rules on CPU tensors, operator by operator: the data types are those of torch's own CUDA kernels,
which fake CUDA tensors reach without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from magis.capture import OptimizerSpec, capture
from magis.capture.autocast import BANNED, FP32, LOWER, OPTIONAL_DTYPE, PROMOTED, autocast, cuda_rules, installed

SGD = OptimizerSpec("sgd", lr=0.1)
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Make = Callable[..., Tensor]
Call = Callable[[Make, str], Any]


def square(make: Make, *types: torch.dtype) -> list[Tensor]:
    return [make(4, 4, dtype=each) for each in types]


def labels(device: str, *shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device=device)


A = torch.ops.aten
POINTWISE = (
    *("acos", "asin", "cosh", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
    *("erfinv", "sin", "cos", "tanh", "sigmoid", "relu", "abs", "neg", "sqrt", "mean", "amax", "trace", "std", "var"),
)
# what each takes; t(*shape) makes a tensor of the type under test, d is the device
CALLS: dict[str, Call] = {
    "mm": lambda t, d: A.mm(t(4, 4), t(4, 4)),
    "matmul": lambda t, d: t(4, 4) @ t(4, 4),
    "bmm": lambda t, d: A.bmm(t(2, 4, 4), t(2, 4, 4)),
    "addmm": lambda t, d: A.addmm(t(4), t(4, 4), t(4, 4)),
    "baddbmm": lambda t, d: A.baddbmm(t(2, 4, 4), t(2, 4, 4), t(2, 4, 4)),
    "addbmm": lambda t, d: A.addbmm(t(4, 4), t(2, 4, 4), t(2, 4, 4)),
    "mv": lambda t, d: A.mv(t(4, 4), t(4)),
    "addmv": lambda t, d: A.addmv(t(4), t(4, 4), t(4)),
    "addr": lambda t, d: A.addr(t(4, 4), t(4), t(4)),
    "linear": lambda t, d: F.linear(t(4, 4), t(4, 4), t(4)),
    "einsum": lambda t, d: torch.einsum("ij,jk->ik", t(4, 4), t(4, 4)),
    "chain_matmul": lambda t, d: torch.linalg.multi_dot([t(4, 4), t(4, 4), t(4, 4)]),
    "linalg_vecdot": lambda t, d: torch.linalg.vecdot(t(4, 4), t(4, 4)),
    "prelu": lambda t, d: F.prelu(t(4, 4), t(1)),
    "conv1d": lambda t, d: F.conv1d(t(2, 4, 8), t(4, 4, 3)),
    "conv2d": lambda t, d: F.conv2d(t(2, 4, 8, 8), t(4, 4, 3, 3), t(4)),
    "conv2d same": lambda t, d: F.conv2d(t(2, 4, 8, 8), t(4, 4, 3, 3), padding="same"),
    "conv3d": lambda t, d: F.conv3d(t(2, 4, 8, 8, 8), t(4, 4, 3, 3, 3)),
    "conv_transpose1d": lambda t, d: F.conv_transpose1d(t(2, 4, 8), t(4, 4, 3)),
    "conv_transpose2d": lambda t, d: F.conv_transpose2d(t(2, 4, 8, 8), t(4, 4, 3, 3)),
    "rnn_tanh_cell": lambda t, d: A.rnn_tanh_cell(t(4, 4), t(4, 4), t(4, 4), t(4, 4)),
    **{name: lambda t, d, name=name: getattr(torch, name)(t(4, 4)) for name in POINTWISE},
    "gelu": lambda t, d: F.gelu(t(4, 4)),
    "silu": lambda t, d: F.silu(t(4, 4)),
    "softplus": lambda t, d: F.softplus(t(4, 4)),
    "pow": lambda t, d: t(4, 4) ** 2,
    "pow of a number": lambda t, d: 2.0 ** t(4, 4),
    "pow of tensors": lambda t, d: t(4, 4) ** t(4, 4),
    "reciprocal of a number": lambda t, d: 1 / t(4, 4),
    "add": lambda t, d: t(4, 4) + t(4, 4),
    "mul by a number": lambda t, d: t(4, 4) * 2.0,
    "cat": lambda t, d: torch.cat([t(4, 4), t(4, 4)]),
    "stack": lambda t, d: torch.stack([t(4, 4), t(4, 4)]),
    "layer_norm": lambda t, d: F.layer_norm(t(4, 4), (4,), t(4), t(4)),
    "rms_norm": lambda t, d: F.rms_norm(t(4, 4), (4,), t(4)),
    "group_norm": lambda t, d: F.group_norm(t(2, 4, 8, 8), 2, t(4), t(4)),
    "softmax": lambda t, d: F.softmax(t(4, 4), dim=-1),
    "softmax method": lambda t, d: t(4, 4).softmax(-1),
    "softmax to a type": lambda t, d: F.softmax(t(4, 4), dim=-1, dtype=torch.bfloat16),
    "log_softmax": lambda t, d: F.log_softmax(t(4, 4), dim=-1),
    "sum": lambda t, d: t(4, 4).sum(),
    "sum over a dimension": lambda t, d: t(4, 4).sum(1),
    "sum to a type": lambda t, d: t(4, 4).sum(1, dtype=torch.float16),
    "sum of numbers": lambda t, d: labels(d, 4).sum(),
    "prod": lambda t, d: t(4, 4).prod(),
    "prod over a dimension": lambda t, d: t(4, 4).prod(1),
    "cumsum": lambda t, d: t(4, 4).cumsum(1),
    "cumprod": lambda t, d: t(4, 4).cumprod(1),
    "norm": lambda t, d: A.norm.Scalar(t(4, 4)),
    "norm over a dimension": lambda t, d: A.norm.ScalarOpt_dim(t(4, 4), 2, [1]),
    "torch.norm": lambda t, d: torch.norm(t(4, 4), dim=1),
    "vector_norm": lambda t, d: torch.linalg.vector_norm(t(4, 4)),
    "matrix_norm": lambda t, d: torch.linalg.matrix_norm(t(4, 4)),
    "normalize": lambda t, d: F.normalize(t(4, 4)),
    "logsumexp": lambda t, d: torch.logsumexp(t(4, 4), 1),
    "dist": lambda t, d: torch.dist(t(4, 4), t(4, 4)),
    "cdist": lambda t, d: torch.cdist(t(4, 4), t(4, 4)),
    "cosine_similarity": lambda t, d: F.cosine_similarity(t(4, 4), t(4, 4)),
    "renorm": lambda t, d: torch.renorm(t(4, 4), 2, 0, 1.0),
    "mse_loss": lambda t, d: F.mse_loss(t(4, 4), t(4, 4)),
    "l1_loss": lambda t, d: F.l1_loss(t(4, 4), t(4, 4)),
    "smooth_l1_loss": lambda t, d: F.smooth_l1_loss(t(4, 4), t(4, 4)),
    "huber_loss": lambda t, d: F.huber_loss(t(4, 4), t(4, 4)),
    "kl_div": lambda t, d: F.kl_div(t(4, 4), t(4, 4), reduction="sum"),
    "cross_entropy": lambda t, d: F.cross_entropy(t(4, 4), labels(d, 4)),
    "cross_entropy with probabilities": lambda t, d: F.cross_entropy(t(4, 4), t(4, 4)),
    "nll_loss": lambda t, d: F.nll_loss(t(4, 4), labels(d, 4)),
    "nll_loss2d": lambda t, d: F.nll_loss(t(2, 4, 3, 3), labels(d, 2, 3, 3)),
    "bce with logits": lambda t, d: F.binary_cross_entropy_with_logits(t(4, 4), t(4, 4)),
    "soft_margin_loss": lambda t, d: F.soft_margin_loss(t(4, 4), t(4, 4)),
    "poisson_nll_loss": lambda t, d: F.poisson_nll_loss(t(4, 4), t(4, 4)),
    "interpolate": lambda t, d: F.interpolate(t(2, 4, 4, 4), scale_factor=2, mode="bilinear"),
    "interpolate nearest": lambda t, d: F.interpolate(t(2, 4, 4, 4), scale_factor=2),
    "max_pool2d": lambda t, d: F.max_pool2d(t(2, 4, 4, 4), 2),
    "avg_pool2d": lambda t, d: F.avg_pool2d(t(2, 4, 4, 4), 2),
    "avg_pool3d": lambda t, d: F.avg_pool3d(t(2, 4, 4, 4, 4), 2),
    "reflection pad": lambda t, d: F.pad(t(2, 4, 4, 4), (1, 1, 1, 1), mode="reflect"),
    "embedding": lambda t, d: F.embedding(labels(d, 4), t(4, 4)),
    "attention": lambda t, d: F.scaled_dot_product_attention(t(2, 2, 4, 8), t(2, 2, 4, 8), t(2, 2, 4, 8)),
}
# of two tensors, each of a type of its own
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mm": torch.mm,
    "cat": lambda a, b: torch.cat([a, b]),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(b, a, b),
    "atan2": torch.atan2,
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "scatter_add": lambda a, b: a.scatter_add(0, torch.zeros(4, 4, dtype=torch.int64, device=a.device), b),
    "mse_loss": F.mse_loss,
    "pow": torch.pow,
}


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
    assert installed("AutocastCUDA") <= frozenset.union(*tables)


def outcome(run: Call, dtype: torch.dtype, device: str) -> Any:
    """The data type that comes out, or that it is an error; of tensors of a type, unless the call names another one."""
    try:
        return run(lambda *s, t=dtype: torch.empty(*s, dtype=t, device=device), device).dtype
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)


def on_a_gpu(name: str, cases: Mapping[Any, tuple[Call, torch.dtype]]) -> dict[Any, Any]:
    """Outcomes under autocast on a GPU, which those by our rules equal."""
    with on_fake_cuda(TYPES[name]):
        expected = {key: outcome(*case, "cuda") for key, case in cases.items()}
    with ours(name):
        assert {key: outcome(*case, "cpu") for key, case in cases.items()} == expected
    return expected


@pytest.mark.parametrize("name", TYPES)
def test_each_operator_gives_the_type_that_it_gives_on_a_gpu(name: str) -> None:
    types = (torch.float32, TYPES[name], torch.float64)
    found = on_a_gpu(name, {(call, given): (CALLS[call], given) for call in CALLS for given in types})
    assert all(isinstance(what, torch.dtype) for (_, given), what in found.items() if given != torch.float64)


def test_of_two_types_the_wider_one_or_none() -> None:
    def run(call: str, types: tuple[torch.dtype, ...], make: Make, device: str) -> Tensor:
        return PAIRS[call](*(make(4, 4, t=each) for each in types))

    pairs = product(PAIRS, product((torch.float32, torch.bfloat16), repeat=2))
    on_a_gpu("bfloat16", {(call, types): (partial(run, call, types), types[0]) for call, types in pairs})


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
        torch.trace(half).dtype,
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
            assert torch.mm(*square(torch.ones, torch.float32, torch.float32)).dtype == torch.float32


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
