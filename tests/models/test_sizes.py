"""Checks of a network's sizes that no builder of the seed can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from magis.extensions.models.building import SizeError
from magis.extensions.models.convnets import ResNetConfig
from magis.extensions.models.decoders import GptConfig, GptNeoConfig
from magis.extensions.models.encoders import BertConfig


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        *((ResNetConfig, {"stages": stages}, "resnet: stages must be a") for stages in ((), (3, 0), [3, 4], (3, 4.0))),
        (ResNetConfig, {"expansion": 2}, r"resnet: expansion must be 1 .* or 4 .*, not 2"),
        (BertConfig, {"seq_len": 513}, "bert: seq_len 513 exceeds max_positions 512"),
        (GptNeoConfig, {"seq_len": 2049}, "gpt_neo: seq_len 2049 exceeds max_positions 2048"),
        (GptConfig, {"seq_len": 8, "max_positions": 7}, "gpt: seq_len 8 exceeds max_positions 7$"),
        (GptConfig, {"width": 8, "heads": 3}, "gpt: width must be a multiple of heads = 3, not 8$"),
        (GptConfig, {"gelu": "relu"}, "gpt: unknown gelu 'relu'; choose one of tanh, erf$"),
        (GptConfig, {"layers": 0}, "gpt: layers must be a whole number of at least 1, not 0$"),
    ],
)
def test_sizes_that_cannot_be_built(config: Callable[..., object], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(SizeError, match=f"^{message}"):
        config(**sizes)


def test_a_sequence_may_fill_the_position_table() -> None:
    assert BertConfig(seq_len=512).seq_len == 512
