"""Names of distributed strategies: what they stand for, and that listing them costs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from magis.errors import UsageError
from magis.strategies.distributed_names import (
    distributed_strategy,
    group_of,
    is_distributed,
)


@pytest.mark.parametrize(
    ("name", "full", "group"),
    [
        ("ddp", "ddp", 1),
        ("amp+oss+sdp", "amp+oss+sdp", 1),
        ("amp+zero2", "amp+zero2", 1),
        ("fsdp", "fsdp", 1),
        ("tp", "tp2", 2),
        ("amp+pp4", "amp+pp4", 4),
        ("tp+pp", "tp2+pp2", 4),
        ("tp+sp", "tp2+sp", 2),
        ("amp+tp4+sp", "amp+tp4+sp", 4),
        ("tp4+pp4", "tp4+pp4", 16),
        ("amp+tp3+pp", "amp+tp3+pp2", 6),
        ("half+ddp", "half+ddp", 1),
        ("half+tp4", "half+tp4", 4),
        ("half+tp2+pp2", "half+tp2+pp2", 4),
        ("half+pp", "half+pp2", 2),
        ("pp+interleaved", "pp2+interleaved", 2),
        ("amp+pp4+zb", "amp+pp4+zb", 4),
        ("half+tp+pp+zbv", "half+tp2+pp2+zbv", 4),
        ("accumulate4+pp+zb", "accumulate4+pp2+zb", 2),
    ],
)
def test_a_name_says_precision_kind_and_group(name: str, full: str, group: int) -> None:
    found = distributed_strategy(name)
    assert is_distributed(name)
    assert (found.name, found.group, group_of(name)) == (full, group, group)
    assert distributed_strategy(found.name) == found


WRONG = (
    "dpd",
    "zero4",
    "tp1",
    "tp+",
    "+pp",
    "pp+tp",
    "tppp",
    "amp+",
    "",
    "amp+amp+ddp",
    "tp2pp2",
    "sp",
    "pp+sp",
    "tp+sp+pp",
    "zb",
    "tp+zb",
    "pp+zb+zbv",
    "pp+zbb",
    "pp1+zb",
)
NOT_HALVED = ("half+zero1", "half+oss", "half+fsdp", "half+amp+ddp", "half+half+ddp", "half+")
"""Those that have half precision of their own, or shard their optimizer."""


@pytest.mark.parametrize("name", [*WRONG, *NOT_HALVED])
def test_an_unknown_name_is_one_clear_line(name: str) -> None:
    assert not is_distributed(name)
    with pytest.raises(UsageError, match=r"is no distributed strategy") as caught:
        distributed_strategy(name)
    assert "\n" not in str(caught.value)


def test_names_are_told_without_torch() -> None:
    code = (
        "import sys; from magis.strategies import DISTRIBUTED, check_world; "
        "from magis.strategies.distributed_names import is_distributed; assert is_distributed('zero1'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
