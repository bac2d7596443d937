"""The optimized step at each memory limit and each latency limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magis.errors import UsageError
from magis.results import Case
from pytest_magis.strategies.base import Grid

__all__ = ["Magis"]


@dataclass(frozen=True)
class Magis:
    """One case a limit: `magis-mem0.8` and `magis-lat1.1`, memory limits first; planned by the paper's search,
    `magis-paper-mem0.8`.

    "magis+amp" is the same for the step under autocast, which then is the original, too: limits are shares of its peak.
    """

    name: str = "magis"

    def cases(self, model: str, grid: Grid) -> Iterator[tuple[str, Case]]:
        for search in grid.searches:
            label = self.name if search == "magis" else f"{self.name}-{search}"
            for ratio in grid.memory_ratios:
                yield f"{label}-mem{ratio:.12g}", self._case(search, model, grid, memory_ratio=ratio)
            for ratio in grid.latency_ratios:
                yield f"{label}-lat{ratio:.12g}", self._case(search, model, grid, latency_ratio=ratio)

    def _dtype(self, grid: Grid) -> str | None:
        if self.name == "magis":
            return grid.dtype
        if grid.dtype not in (None, "float32") and not str(grid.dtype).startswith("amp-"):
            raise UsageError(
                f"strategy {self.name!r} casts float32 weights, those asked for are {grid.dtype}",
                hint="leave out --magis-dtype",
            )
        default = "amp-bfloat16" if grid.device == "cpu" else "amp-float16"  # as torch.autocast by itself
        return grid.dtype if grid.dtype not in (None, "float32") else default

    def _case(
        self,
        search: str,
        model: str,
        grid: Grid,
        *,
        memory_ratio: float | None = None,
        latency_ratio: float | None = None,
    ) -> Case:
        return Case(
            model=model,
            strategy=self.name,
            dtype=self._dtype(grid),
            device=grid.device,
            preset=grid.preset,
            memory_ratio=memory_ratio,
            latency_ratio=latency_ratio,
            budget=grid.budget,
            seconds=grid.seconds,
            seed=grid.seed,
            search=search,
        )
