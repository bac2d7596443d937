"""Checks of a network's sizes that no builder of the seed can reach."""

from __future__ import annotations

import pytest

from magis.models.building import SizeError
from magis.models.convnets import ResNetConfig
from magis.models.decoders import GptNeoConfig
from magis.models.encoders import BertConfig


@pytest.mark.parametrize("stages", [(), (3, 0), [3, 4], (3, 4.0)])
def test_stages(stages: object) -> None:
    with pytest.raises(SizeError, match="resnet: stages must be a"):
        ResNetConfig(stages=stages)  # type: ignore[arg-type]


def test_expansion() -> None:
    with pytest.raises(SizeError, match=r"expansion must be 1 .* or 4 .*, not 2"):
        ResNetConfig(expansion=2)


def test_sequences_fit_the_position_table() -> None:
    with pytest.raises(SizeError, match="bert: seq_len 513 exceeds max_positions 512"):
        BertConfig(seq_len=513)
    with pytest.raises(SizeError, match="gpt_neo: seq_len 2049 exceeds max_positions 2048"):
        GptNeoConfig(seq_len=2049)
    assert BertConfig(seq_len=512).seq_len == 512
