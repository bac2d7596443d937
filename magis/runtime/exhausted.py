"""How an error says that memory ran out."""

from __future__ import annotations

import torch

_SAID = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""By errors that are no `torch.OutOfMemoryError`: of the CPU, of CUDA (pinned memory), of its libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU's allocator says so by the error's type; CUDA, its libraries and the CPU's allocator in words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)
