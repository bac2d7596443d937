"""Shares of a run for several machines: each gets some of the models, with all of their cases."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """The share `number` (1, 2, ...) of `count`."""

    number: int
    count: int

    @classmethod
    def read(cls, text: str) -> Self:
        """The shard of "1/4". Raises ValueError for anything else."""
        if not re.fullmatch(r"[1-9][0-9]{0,5}/[1-9][0-9]{0,5}", text):
            raise ValueError(text)
        number, count = map(int, text.split("/"))
        if number > count:
            raise ValueError(text)
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, names: Iterable[str]) -> frozenset[str]:
        """The names of this share: dealt out one after another in sorted order, so that the order in which they were
        asked for, and repeats, change nothing. Together the shares have every name, each once."""
        return frozenset(sorted(set(names))[self.number - 1 :: self.count])
