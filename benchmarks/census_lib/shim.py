"""Lets torchvision be imported where its compiled operators do not load (a build for another torch or for CUDA).

torchvision registers shapes of operators that its binary defines, and fails where that did not load. Their schemas are
enough to import it; networks that call the operators still cannot run.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Of the operators that torchvision needs declared when it is imported; the others it leaves out by itself."""


def torchvision_operators() -> torch.library.Library | None:
    """Declare them unless the binary does. What is returned must stay alive as long as torchvision is used."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    with suppress(OSError, ImportError):
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    return library
