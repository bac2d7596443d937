"""Whether two tensors hold the same numbers, where no number is one as well: a loss of nan is eager's if eager's is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["agreeing", "furthest", "off_by", "same"]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether every element of one is that of the other, or both are nan."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(ours, theirs) or bool(agreeing(ours, theirs).all())


def agreeing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Element by element."""
    return (ours == theirs) | (ours.isnan() & theirs.isnan())


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two elements that do not agree; nan where one of them is no number."""
    wide = torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64
    apart = ~agreeing(ours, theirs)
    difference = (ours[apart].to(wide) - theirs[apart].to(wide)).abs()
    return float(difference.max()) if difference.numel() else 0.0


def off_by(ours: float, theirs: float) -> float:
    """By which share of `theirs` a number is off; infinite where only one of them is finite."""
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    difference = abs(ours - theirs) / max(abs(theirs), 1e-12)
    return difference if math.isfinite(difference) else math.inf
