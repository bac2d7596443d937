"""Predictions beside real ranks: processes on this machine, the same step on the same batch (benchmarks/ranks.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magis.strategies.distributed_names import DISTRIBUTED, group_of


def table(repository: Path, *options: str, seconds: float) -> dict[tuple[str, str, int], tuple[int, int, float]]:
    """Model, strategy and ranks -> predicted and measured bytes of the highest rank, relative difference of losses."""
    command = [sys.executable, "-W", "error", str(repository / "benchmarks" / "ranks.py"), *options]
    env = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=env, cwd=repository)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split() for line in run.stdout.splitlines() if not line.startswith(("#", "model "))]
    return {(r[0], r[1], int(r[2])): (int(r[3]), int(r[4]), float(r[6])) for r in rows}


def test_two_ranks_hold_what_was_predicted_and_train_as_one_does(repository: Path) -> None:
    strategies = ("ddp", "tp", "magis+ddp")  # the others, and larger networks: the soak
    found = table(repository, "--models=tiny-bert", "--sizes=2", f"--strategies={','.join(strategies)}", seconds=600)
    assert [name for _, name, _ in found] == list(strategies)
    for (_, name, _), (predicted, measured, loss) in found.items():
        assert predicted == measured, name
        assert loss < 1e-6, name
    assert found["tiny-bert", "magis+ddp", 2][1] < found["tiny-bert", "ddp", 2][1]
    assert len({measured for _, measured, _ in found.values()}) == len(strategies), "some are the same"


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", ["bert", "gpt_neo"])
def test_every_strategy_at_small_sizes(repository: Path, model: str, size: int) -> None:
    found = table(repository, f"--models={model}", f"--sizes={size}", seconds=900)
    assert len(found) == sum(size % group_of(name) == 0 for name in DISTRIBUTED)
    for (_, name, _), (predicted, measured, loss) in found.items():
        assert abs(predicted / measured - 1) <= 0.02, name
        assert loss <= 1e-5, name


@pytest.mark.soak
def test_mixed_precision_on_two_ranks(repository: Path) -> None:
    names = ("ddp", "oss", "oss+sdp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp", "pp+interleaved", "pp+zbv")
    strategies = ",".join([*(f"amp+{name}" for name in names), "half+ddp", "half+tp", "half+pp", "half+pp+zb"])
    found = table(repository, "--models=tiny-bert", "--sizes=2", f"--strategies={strategies}", seconds=600)
    for (_, name, _), (predicted, measured, loss) in found.items():
        assert abs(predicted / measured - 1) <= 0.02, name
        assert loss < 0.01, name
