"""The kernel that scaled_dot_product_attention takes on a GPU, by torch's own rules, and the call of it.

torch tries kernels in an order and takes the first whose conditions hold. All fused kernels want four dimensions,
lengths above 0, one batch size, one data type, and a last dimension (the mask's, too) of stride 1; beside that:

| | flash | memory-efficient | cuDNN |
| --- | --- | --- | --- |
| compute capability | 8.0 to 12.1 | 5.0 to 12.1 | 8.0 to 12.1 |
| data types | float16, bfloat16 | float16, float32; bfloat16 from 8.0 on | float16, bfloat16 |
| mask | none | any | one that needs no gradient, of 2 or 4 dimensions |
| head sizes | equal, up to 256, padded to 8 | query's is key's; multiples: `_multiple` | `_cudnn_sizes` |
| causal | equal lengths | any | any |
| grouped heads | yes | `Release.groups` | yes |
| else | on 8.6 to 8.9 and 12.x not in training with heads of 193 to 224, nor above 224 with dropout | | no key \
length of 1; not under deterministic algorithms |

Sources: `cuda/sdp_utils.cpp`, `sdp_utils_cpp.h` and `attention.cpp` in `aten/src/ATen/native/transformers` of torch:
the header as installed with 2.13, the others as of 2.11 to 2.12, and as of the branch after 2.13. Between 2.11 and
2.13 nothing of the table is known to differ; `RELEASES` has what came later.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Capability = tuple[int, int]
"""Compute capability of a GPU, as `torch.cuda.get_device_capability` returns it: (9, 0) for an H100."""

_HALF = (torch.float16, torch.bfloat16)
_LAST = (12, 1)
"""Last compute capability for which torch's fused kernels are built."""
_DEFAULT_ORDER = [each.value for each in (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION,
)]  # fmt: skip
_CUDNN = 91500
"""cuDNN must be newer to come first. The wheels of torch 2.11 and later on PyPI are (9.19), builds for CUDA 12 not."""


@dataclass(frozen=True, slots=True)
class Release:
    """Rules of one release of torch that another release has otherwise."""

    first: tuple[int, int]
    groups: bool = False
    """True if the memory-efficient kernel takes grouped heads, and every fused kernel a single key head for all."""
    aligned: bool = False
    """True if the memory-efficient kernel wants aligned storage offsets from compute capability 8.0 on."""
    cudnn_by_size: bool = False
    """True if cuDNN takes head sizes over 128 only in pairs for which it has a backward, dropout by sixteenths only,
    and at most 65,535 sequences and heads."""


RELEASES = (Release((2, 11)), Release((2, 14), groups=True, aligned=True, cudnn_by_size=True))
"""Releases with rules of their own: 2.11 to 2.13, and 2.14 (grouped heads: pytorch #191085; cuDNN: #185553)."""


def installed_release() -> Release:
    """Return the rules of the installed torch."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return [each for each in RELEASES if each.first <= (major, minor) or each is RELEASES[0]][-1]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """Arguments of a call that the choice of its kernel depends on."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    """The argument `enable_gqa`."""

    @property
    def trains(self) -> bool:
        """True if query, key or value need a gradient, which makes the kernels keep their logsumexp."""
        return torch.is_grad_enabled() and any(each.requires_grad for each in (self.query, self.key, self.value))


def chosen_kernel(
    call: AttentionCall, capability: Capability | None = None, release: Release | None = None
) -> SDPBackend:
    """Return the kernel that torch takes on a GPU of a compute capability; None: the GPU of this machine, or an A100.

    The settings in force count: `torch.nn.attention.sdpa_kernel` and `torch.backends.cuda.enable_flash_sdp` with its
    siblings. Raises RuntimeError, as torch does, if they leave no kernel.
    """
    rules = release or installed_release()
    if capability is None:
        here = torch.cuda.is_available()
        card = torch.cuda.get_device_capability() if here else (8, 0)
        version = (torch.backends.cudnn.version() or 0) if here else 0
    else:
        card, version = capability, _CUDNN + 1
    allowed: dict[SDPBackend, Callable[[], bool]] = {
        SDPBackend.CUDNN_ATTENTION: lambda: torch.backends.cuda.cudnn_sdp_enabled() and _cudnn(call, card, rules),
        SDPBackend.FLASH_ATTENTION: lambda: torch.backends.cuda.flash_sdp_enabled() and _flash(call, card, rules),
        SDPBackend.EFFICIENT_ATTENTION: lambda: (
            torch.backends.cuda.mem_efficient_sdp_enabled() and _efficient(call, card, rules)
        ),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    for backend in _order(card, version):
        if allowed[backend]():
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(card: Capability, version: int) -> Iterator[SDPBackend]:
    """Yield the kernels in the order in which they are tried: that of `sdpa_kernel(..., set_priority=True)`, else
    cuDNN's first on Hopper and data-center Blackwell."""
    order = [number for number in torch._C._get_sdp_priority_order() if number in _DEFAULT_ORDER]
    first = version > _CUDNN and card[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    if order == _DEFAULT_ORDER and first:
        order = [SDPBackend.CUDNN_ATTENTION.value, *order[:-1]]
    return map(SDPBackend, order)


def _fused(call: AttentionCall, dtypes: tuple[torch.dtype, ...], *, single: bool = True) -> bool:
    """Return True if the conditions that all fused kernels share hold. With `single`, heads of size 1 may have any
    stride."""
    parts, mask = (call.query, call.key, call.value), call.mask
    if any(each.dim() != 4 or each.dtype != call.query.dtype for each in parts) or call.query.dtype not in dtypes:
        return False
    batches, lengths = {each.shape[0] for each in parts}, (call.query.shape[2], call.key.shape[2])
    rows = all(each.stride(-1) == 1 for each in parts) or (single and call.query.shape[3] == 1)
    return len(batches) == 1 and 0 not in lengths and rows and (mask is None or mask.stride(-1) == 1)


def _heads(call: AttentionCall, rules: Release, *, groups: bool = True, same: bool = True) -> bool:
    """Return True if a kernel that takes ``groups`` of heads takes these; ``same``: key and value have the same number
    of heads."""
    heads, keys, values = (each.shape[1] for each in (call.query, call.key, call.value))
    if rules.groups and keys == values == 1:
        return True
    if call.grouped and groups:
        return (keys == values or not same) and heads % keys == 0 and heads % values == 0
    return heads == keys == values


def _sizes(call: AttentionCall) -> tuple[int, int, int]:
    return call.query.shape[-1], call.key.shape[-1], call.value.shape[-1]


def _flash(call: AttentionCall, card: Capability, rules: Release) -> bool:
    if not (8, 0) <= card <= _LAST or call.mask is not None or not _fused(call, _HALF) or not _heads(call, rules):
        return False
    size = call.query.shape[-1]
    if {size} != set(_sizes(call)) or size > 256:
        return False
    little = (8, 6) <= card <= (8, 9) or (12, 0) <= card <= (12, 1)  # shared memory, which the backward needs
    if little and call.trains and size > 192 and (size <= 224 or call.dropout > 0):
        return False
    return not call.causal or call.query.shape[2] == call.key.shape[2]


def _efficient(call: AttentionCall, card: Capability, rules: Release) -> bool:
    dtypes = (*_HALF, torch.float32) if card >= (8, 0) else (torch.float16, torch.float32)
    if not (5, 0) <= card <= _LAST or not _fused(call, dtypes, single=False):
        return False
    (query, key, value), multiple = _sizes(call), _multiple(call.query.dtype, card)
    if query != key or any(size == 0 or size % multiple for size in (query, value)):
        return False
    offsets = (each.storage_offset() for each in (call.query, call.key, call.value) if each.numel())
    if rules.aligned and card >= (8, 0) and any(offset % multiple for offset in offsets):
        return False
    return _heads(call, rules, groups=rules.groups)


def _multiple(dtype: torch.dtype, card: Capability) -> int:
    """Return the number of elements that the memory-efficient kernel loads at once, of which heads are multiples."""
    if dtype in _HALF:
        return 8 if card >= (7, 0) else 1
    return 4 if card >= (8, 0) else 1


def _cudnn(call: AttentionCall, card: Capability, rules: Release) -> bool:
    certain = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not (8, 0) <= card <= _LAST or certain or not _fused(call, _HALF) or not _heads(call, rules, same=False):
        return False
    if call.mask is not None:
        batch, heads, rows, columns = *call.query.shape[:3], call.key.shape[2]
        whole = (batch, heads, rows, columns)[-call.mask.dim() :]
        fits = all(one in (1, size) for one, size in zip(call.mask.shape, whole, strict=False))
        if call.mask.requires_grad or call.mask.dim() not in (2, 4) or not fits:
            return False
    if rules.cudnn_by_size and (call.dropout * 16 % 1 or max(call.query.shape[:2]) > 65535):
        return False
    rows, columns = call.query.shape[2], call.key.shape[2]
    return _cudnn_sizes(call, card, rules) and columns != 1 and not (rows == 1 and call.dropout)


def _cudnn_sizes(call: AttentionCall, card: Capability, rules: Release) -> bool:
    """Return True if cuDNN takes the head sizes: multiples of 8 up to 128; on an H100 up to 256, on data-center
    Blackwell also 192 with values of 128. Later releases: on both, pairs with a backward."""
    query, _, value = _sizes(call)
    if query % 8 or value % 8:
        return False
    if max(query, value) <= 128:
        return True
    if rules.cudnn_by_size:
        pairs = (query, value) in ((192, 128), (256, 256)) or (not call.trains and max(query, value) <= 256)
        return (card == (9, 0) or card[0] == 10) and pairs
    return (card == (9, 0) and max(query, value) <= 256) or (card[0] == 10 and (query, value) == (192, 128))


def attention_on_cuda(
    plain: Callable[..., Tensor], call: AttentionCall, scale: float | None, capability: Capability | None
) -> Tensor:
    """Call the kernel that torch takes on a GPU; ``plain`` is scaled_dot_product_attention."""
    query, key, value, mask, dropout, causal = (
        call.query, call.key, call.value, call.mask, call.dropout, call.causal,
    )  # fmt: skip
    if any(each.is_nested for each in (query, key, value)):
        return plain(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=call.grouped)
    kernel = chosen_kernel(call, capability)
    if kernel == SDPBackend.MATH:
        with sdpa_kernel(SDPBackend.MATH):
            return plain(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=call.grouped)
    factor, size = scale if scale is not None else 1 / math.sqrt(query.shape[-1]), query.shape[-1]
    if kernel == SDPBackend.FLASH_ATTENTION:
        missing = -size % 8
        if missing:
            query, key, value = (functional.pad(each, (0, missing)) for each in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout, causal, False, scale=factor)[0]
        return out[..., :size] if missing else out
    bias = None
    if mask is not None:
        bias = _bias(mask, query, key, cudnn=kernel == SDPBackend.CUDNN_ATTENTION)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, bias, call.trains, dropout, causal, False, scale=factor)[0]  # type: ignore[no-any-return]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, call.trains, dropout, causal, scale=factor)[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor, *, cudnn: bool) -> Tensor:
    """Return a mask as the kernels take it: added to the scores, and expanded to (batch, heads, queries, keys).

    The memory-efficient kernel wants rows that begin at multiples of 8 elements: others are copied to longer rows.
    """
    if mask.dtype == torch.bool:
        lowest = torch.scalar_tensor(-65504.0 if cudnn else -math.inf, dtype=query.dtype)
        mask = torch.where(mask, 0.0, lowest)
    if not cudnn and any(mask.stride(at) % 8 for at in range(mask.dim() - 1)):
        length = mask.shape[-1]
        mask = functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
