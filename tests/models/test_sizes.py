"""Checks of a network's sizes that no builder of the seed can reach."""

from __future__ import annotations

from magis.extensions.models.encoders import BertConfig


def test_a_sequence_may_fill_the_position_table() -> None:
    assert BertConfig(seq_len=512).seq_len == 512
