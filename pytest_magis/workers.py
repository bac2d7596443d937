"""Runs under pytest-xdist: all cases of a model go to one worker, which then captures and measures it once."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_magis.plan import PREFIX

__all__ = ["group_by_model"]


def group_by_model(config: pytest.Config, log: Any) -> object | None:
    """A scheduler for `-n` and `--dist=loadgroup`; None leaves other distributions to xdist.

    Tests other than the gate's are spread as `loadgroup` spreads them: by their mark, else each on its own.
    """
    if config.getoption("dist") not in ("load", "loadgroup"):
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class ModelScheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(PREFIX):
                return nodeid.partition("[")[0]
            return str(super()._split_scope(nodeid))

    return ModelScheduling(config, log)
