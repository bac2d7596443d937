"""One network of every family of torchvision: classification, segmentation, detection, video, optical flow."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.census_lib.network import Batch, Network, NotBuilt, NotRun, squares, try_eagerly

ROWS, CLASSES = 2, 10
SIZES = (64, 96, 128, 224, 299)
MOST_PARAMETERS = 80_000_000
SHARED = ("torchvision",)
"""Loaded once, before processes are split off."""


def families() -> list[str]:
    from torchvision import models

    return sorted({_family(name) for name in models.list_models()})


def _family(name: str) -> str:
    """The module of its builder, and for segmentation and detection which of them."""
    from torchvision import models

    return models.get_model_builder(name).__module__.removeprefix("torchvision.models.")


def network(family: str) -> Network:
    from torchvision import models

    names = [name for name in models.list_models() if _family(name) == family]
    reason: NotBuilt = NotBuilt("no entry points")
    for name in sorted(names, key=_rank)[:2]:
        for found in _ways(family, name):
            try:
                try_eagerly(found, MOST_PARAMETERS)
            except NotRun:
                raise
            except NotBuilt as error:
                reason = error
            else:
                return found
    raise reason


def _rank(name: str) -> tuple[int, str]:
    """By the parameters that the weights on offer have; nothing is fetched."""
    from torchvision import models

    counts = [weights.meta.get("num_params", MOST_PARAMETERS) for weights in models.get_model_weights(name)]
    return min(counts, default=MOST_PARAMETERS), name


def _ways(family: str, name: str) -> Iterator[Network]:
    for size in SIZES:
        plain = f"{name}, {size} px"
        if family.startswith("detection"):
            keywords: dict[str, Any] = {"weights_backbone": None, "num_classes": CLASSES, "min_size": size}
            yield Network(plain, partial(_detector, name, keywords), partial(_boxes, size), None)
            keywords.pop("min_size")
            yield Network(plain, partial(_detector, name, keywords), partial(_boxes, size), None)
        elif family.startswith("segmentation"):
            keywords = {"weights_backbone": None, "num_classes": CLASSES, "aux_loss": True}
            yield Network(plain, partial(_plain, name, keywords), partial(_masks, size), _segmented)
        elif family.startswith("optical_flow"):
            yield Network(plain, partial(_plain, name, {}), partial(_flows, size), squares)
        elif family.startswith("video"):
            for frames in (4, 16):
                what = f"{plain}, {frames} frames"
                yield Network(
                    what, partial(_plain, name, {"num_classes": CLASSES}), partial(_video, size, frames), _classes
                )
        else:
            for keywords in ({"num_classes": CLASSES, "image_size": size}, {"num_classes": CLASSES}):
                yield Network(plain, partial(_plain, name, keywords), partial(_pictures, size), _classes)


def _plain(name: str, keywords: dict[str, Any]) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, **keywords)


class _Detector(nn.Module):
    """Takes tensors, as a batch for detection is stored; gives the sum of the losses."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
        losses = self.detector(list(images), targets)
        return torch.stack(list(losses.values())).sum()


def _detector(name: str, keywords: dict[str, Any]) -> nn.Module:
    return _Detector(_plain(name, keywords))


def _pictures(size: int) -> Batch:
    return (torch.randn(ROWS, 3, size, size),), (torch.randint(0, CLASSES, (ROWS,)),)


def _video(size: int, frames: int) -> Batch:
    return (torch.randn(ROWS, 3, frames, size, size),), (torch.randint(0, CLASSES, (ROWS,)),)


def _masks(size: int) -> Batch:
    return (torch.randn(ROWS, 3, size, size),), (torch.randint(0, CLASSES, (ROWS, size, size)),)


def _flows(size: int) -> Batch:
    return (torch.randn(1, 3, 2 * size, 2 * size), torch.randn(1, 3, 2 * size, 2 * size)), ()


def _boxes(size: int) -> Batch:
    corner = torch.rand(ROWS, 2, 2) * size / 2
    boxes = torch.cat([corner, corner + 4 + torch.rand(ROWS, 2, 2) * (size / 2 - 5)], dim=-1)
    return {"images": torch.rand(ROWS, 3, size, size), "boxes": boxes, "labels": torch.randint(1, CLASSES, (ROWS, 2))}


def _classes(output: Any, target: Tensor) -> Tensor:
    """With the auxiliary outputs that Inception and GoogLeNet have while they train."""
    parts = [output] if isinstance(output, Tensor) else [part for part in output if part is not None]
    return torch.stack([nn.functional.cross_entropy(part, target) for part in parts]).sum()


def _segmented(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return torch.stack([nn.functional.cross_entropy(part, target) for part in output.values()]).sum()
