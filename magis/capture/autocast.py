"""Operators and autocast rules of the target device, while a step is traced on CPU tensors.

Autocast is implemented in torch's dispatcher, by one kernel per operator and device type. The rules for CUDA differ
from the CPU's: softmax, layer norm, sums, powers and losses run in float32. CPU tensors dispatch to the CPU's kernels,
so these are replaced by CUDA's rules while a step is traced. Unlike a `TorchFunctionMode`, kernels also see methods,
calls inside composite functions, and code that disables autocast (`torch.autocast(x.device.type, enabled=False)`).

The tables are those of `ATen/autocast_mode.h`, documented by torch as "CUDA Ops that can autocast"; a test compares
them with the installed torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.overrides import TorchFunctionMode

from magis.capture.attention_kernels import AttentionCall, Capability, attention_on_cuda
from magis.capture.flex_kernels import flex_on_gpu
from magis.ops.eager_only import layers_as_eager


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _names(
    """_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell
    _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
    cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
    rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention"""
)
"""Operators that run in the lower-precision dtype."""

FP32 = _names(
    """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div
    l1_loss layer_norm linalg_matrix_sqrth log log10 log1p log2 logsumexp margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim
    pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh
    smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"""
)
"""Operators that run in float32."""

OPTIONAL_DTYPE = _names(
    """cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int norm.Scalar
    norm.ScalarOpt_dim prod prod.dim_int softmax.int sum sum.dim_IntList"""
)
"""Operators that return float32, by their own `dtype` argument, unless the caller gives another dtype."""

PROMOTED = _names("addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot")
"""Operators that run in the widest dtype of their inputs."""

BANNED = _names("binary_cross_entropy")

_NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Overloads of `norm` that take a dtype."""

_FUSED = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}
"""Kernels that read float16 and write float32 on a GPU, without a copy of the input."""

_KEY = "AutocastCPU"


def installed(key: str) -> frozenset[str]:
    """Return the operators that have an autocast kernel for a dispatch key in the installed torch, without "aten::"."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name.removeprefix("aten::") for name in names if has(name, key))


def autocast(dtype: str | None) -> AbstractContextManager[Any]:
    """Autocast CPU tensors to "bfloat16" or "float16", by the rules in force; do nothing for None."""
    return nullcontext() if dtype is None else torch.autocast("cpu", getattr(torch, dtype))


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let autocast on CPU tensors follow the rules of CUDA, also for `torch.autocast("cuda")`. This patches the whole
    process, hence should last for a short time only."""
    kind: Any = torch.amp.autocast_mode.autocast
    plain = kind.__init__

    def renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.get_autocast_dtype("cuda")
        plain(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    with cuda_rules():
        kind.__init__ = renamed
        try:
            yield
        finally:
            kind.__init__ = plain


@contextmanager
def cuda_rules() -> Iterator[None]:
    """Install CUDA's autocast kernels for CPU tensors, in the whole process."""
    library = Library("aten", "IMPL")
    ours = (LOWER | FP32 | OPTIONAL_DTYPE | PROMOTED | BANNED) & installed("AutocastCUDA")
    theirs = installed(_KEY)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that kernels are overridden
            for name in sorted(theirs - ours):
                library.impl(name, fallthrough_kernel, _KEY, allow_override=True)
            # Operators in the lower dtype on both devices keep the CPU's kernel, with its cache of weights.
            for name in sorted((ours - theirs) | (ours - LOWER)):
                library.impl(name, _kernel(name), _KEY, allow_override=True)
        yield
    finally:
        library._destroy()


def _kernel(name: str) -> Callable[..., Any]:
    family, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, family), overload or "default")
    if name in BANNED:
        return _banned
    if name in OPTIONAL_DTYPE:
        return _with_dtype(name, operator)
    chosen = _lower if name in LOWER else _float32 if name in FP32 else _widest

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = chosen((*args, *kwargs.values()))
        with _excluded():
            cast = [_cast(arg, wanted) for arg in args]
            return operator(*cast, **{key: _cast(value, wanted) for key, value in kwargs.items()})

    return run


def _with_dtype(name: str, operator: Any) -> Callable[..., Any]:
    normed = getattr(torch.ops.aten.norm, _NORMS[name]) if name in _NORMS else None
    fused = getattr(torch.ops.aten, _FUSED[name]) if name in _FUSED else None

    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        with _excluded():
            position = next((i for i, arg in enumerate(args) if isinstance(arg, torch.dtype)), None)
            if not _is_eligible(first) or position is not None or kwargs.get("dtype") is not None:
                return operator(first, *args, **kwargs)
            if fused is not None and first.dtype == torch.float16:
                return fused(first, args[0] if args else kwargs["dim"], True)
            if normed is not None:
                return normed(first, *_all_given(name, args, kwargs), dtype=torch.float32)
            if name.endswith("softmax.int"):  # accepts dtype by position
                return operator(first, args[0] if args else kwargs["dim"], torch.float32)
            return operator(first, *args, **{**kwargs, "dtype": torch.float32})

    return run


def _all_given(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `norm` after the tensor, with defaults for missing ones."""
    names, defaults = (("p",), (2,)) if name == "norm.Scalar" else (("p", "dim", "keepdim"), (None, None, False))
    return tuple(
        args[i] if i < len(args) else kwargs.get(key, default)
        for i, (key, default) in enumerate(zip(names, defaults, strict=True))
    )


def _banned(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast;"
        " use binary_cross_entropy_with_logits"
    )


def _excluded() -> AbstractContextManager[Any]:
    """Exclude the autocast dispatch key, so that calls inside a kernel do not dispatch to the kernel again."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _is_eligible(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point() and item.dtype != torch.float64


def _lower(_items: tuple[Any, ...]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _float32(_items: tuple[Any, ...]) -> torch.dtype:
    return torch.float32


def _widest(items: tuple[Any, ...]) -> torch.dtype:
    tensors = [*(each for item in items if isinstance(item, (list, tuple)) for each in item), *items]
    if any(_is_eligible(tensor) and tensor.dtype == torch.float32 for tensor in tensors):
        return torch.float32
    return torch.get_autocast_dtype("cpu")


def _cast(item: Any, dtype: torch.dtype) -> Any:
    if isinstance(item, (list, tuple)):
        return [_cast(each, dtype) for each in item]
    return item.to(dtype) if _is_eligible(item) else item


# Operators that a GPU would run in place of the CPU's, substituted while a step is traced on CPU tensors.
# Tracing on fake CUDA tensors needs a CUDA build and aborts in autograd without a device. The fused forms have
# autograd formulas of their own and trace well on the CPU.


class _CudaForms(TorchFunctionMode):
    def __init__(self, capability: Capability | None) -> None:
        super().__init__()
        self._forms = _forms(capability)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form = self._forms.get(func)
        if form is not None:
            return form(func, *args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:  # no mode sees the calls within it
            with _calls_replaced(self._forms):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _calls_replaced(forms: Mapping[Any, Callable[..., Tensor]]) -> Iterator[None]:
    """Let functions of `torch.nn.functional` call these forms of each other within the block, in the whole process."""
    before = {func.__name__: func for func in forms}
    vars(F).update({name: partial(forms[func], func) for name, func in before.items()})
    try:
        yield
    finally:
        vars(F).update(before)


@contextmanager
def device_forms(device: str, capability: Capability | None = None) -> Iterator[None]:
    """Replace functional calls by the operators that ``device`` ("cpu" or "cuda") runs, while the context lasts. A GPU
    of a compute capability is meant, or that of this machine."""
    if device != "cuda":
        yield
        return
    with _CudaForms(capability), layers_as_eager(), nullcontext() if capability is None else flex_on_gpu():
        yield


def form_on_cuda(func: Any, capability: Capability | None = None) -> Callable[..., Tensor] | None:
    """Return the form in which a GPU runs a function of `torch.nn.functional`, with that function bound as its first
    argument; None if it has no other form."""
    form = _forms(capability).get(func)
    return None if form is None else partial(form, func)


def _dropout(func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if not training or p in (0.0, 1.0) or inplace:
        return func(input, p, training, inplace)  # type: ignore[no-any-return]
    return torch.native_dropout(input, p, True)[0]


def _forms(capability: Capability | None) -> dict[Any, Callable[..., Tensor]]:
    def attention(
        func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if torch.is_autocast_enabled("cpu"):  # the kernels are called without autocast
            query, key, value, attn_mask = _cast((query, key, value, attn_mask), _lower(()))
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        return attention_on_cuda(func, call, scale, capability)

    return {F.dropout: _dropout, F.scaled_dot_product_attention: attention}
