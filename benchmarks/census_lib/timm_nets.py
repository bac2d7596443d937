"""One network of every module of timm: its smallest entry point, on the smallest pictures that it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.census_lib.network import Batch, Network, NotBuilt, NotRun, reason_of, try_eagerly

ROWS, CLASSES = 2, 10
SIZES = (64, 96, 128, 160, 224, 256)
SMALL = ("test_", "zepto", "atto", "femto", "pico", "nano", "mini", "xxt", "xxs", "xt", "xs", "tiny", "small")
LARGE = ("large", "huge", "giant", "gigantic", "xl", "xxl", "384", "448", "512", "_h_", "_l_", "_g_", "so400m")
MOST_TRIED = 4
SHARED = ("timm",)
"""Loaded once, before processes are split off."""


def families() -> list[str]:
    import timm

    return sorted(timm.list_modules())


def network(family: str) -> Network:
    """Raises NotBuilt with the last reason where no entry point runs."""
    import timm

    names = timm.list_models(module=family)
    if not names:
        raise NotBuilt("no entry points")
    reason: NotBuilt = NotBuilt("no entry points")
    for name in sorted(names, key=_rank)[:MOST_TRIED]:
        for size, keywords in _ways():
            found = Network(f"{name}, {size} px", partial(_make, name, keywords), partial(_batch, size, name), _loss)
            try:
                try_eagerly(found)
            except NotRun:
                raise
            except NotBuilt as error:
                reason = error
                if "parameters" in str(error):
                    break
            else:
                return found
    raise reason


def _rank(name: str) -> tuple[int, int, list[int], str]:
    """Small sizes first, by what their names say."""
    small = next((number for number, word in enumerate(SMALL) if word in name), len(SMALL))
    return (any(word in name for word in LARGE), small, [int(each) for each in re.findall(r"\d+", name)], name)


def _ways() -> Iterator[tuple[int, dict[str, Any]]]:
    for size in SIZES:
        yield size, {"img_size": size}
        yield size, {}


def _make(name: str, keywords: dict[str, Any]) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **keywords)
    except TypeError as error:
        raise NotBuilt(reason_of(error)) from error


def _batch(size: int, name: str) -> Batch:
    import timm

    config = timm.get_pretrained_cfg(name)
    channels = config.input_size[0] if config is not None else 3
    return (torch.randn(ROWS, channels, size, size),), (torch.randint(0, CLASSES, (ROWS,)),)


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output[0] if isinstance(output, (tuple, list)) else output, target)
