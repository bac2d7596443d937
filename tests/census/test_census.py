"""The census (benchmarks/census.py): what it says of networks, processes and rows; a handful of real ones in `soak`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.census_lib.judge import gate, judged, trained
from benchmarks.census_lib.network import Network, NotBuilt, squares, try_eagerly
from benchmarks.census_lib.table import outcome


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Drawing(Layers):
    """Draws from a generator that no graph holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * (1 + os.urandom(1)[0])


def network(make: Callable[[], nn.Module]) -> Network:
    return Network("layers", make, lambda: ((torch.randn(32, 16),), ()), squares)


def test_a_plain_network_is_exact_in_both_ways() -> None:
    try_eagerly(network(Layers))
    found = gate(network(Layers))
    assert (found.outcome, found.reason) == ("exact", "")
    assert found.ratio is not None
    again = trained(network(Layers), found.ratio)
    assert (again.outcome, again.reason) == ("exact", "")


def test_a_number_that_a_plan_froze_is_not_called_exact() -> None:
    assert judged(lambda: trained(network(Drawing), 1.0)).outcome in ("wrong", "refused")


def test_a_network_that_eager_does_not_run_is_not_built() -> None:
    with pytest.raises(NotBuilt, match="depends on no parameter"):
        try_eagerly(Network("frozen", Layers, lambda: ((torch.randn(2, 16),), ()), lambda out: squares(out.detach())))


WORKS = """
import os, signal, time
from benchmarks.census_lib.apart import Limits, rows

def told(tell): tell({"stage": "done"})
def killed(tell): tell({"stage": "gate"}); os.kill(os.getpid(), signal.SIGSEGV)
def raises(tell): raise ValueError("so")
def endless(tell):
    tell({"stage": "optimize"})
    while True: pass
def hungry(tell): tell({"stage": "gate"}); bytearray(2**31)

works = [(f.__name__, f) for f in (told, killed, raises, endless, hungry)]
import json; print(json.dumps(dict(rows(works, Limits(1.0, 2**30), 2))))
"""


def test_each_work_has_a_process_of_its_own(fresh_python: Callable[[str], str]) -> None:
    found = json.loads(fresh_python(WORKS))
    assert "died" not in found["told"]
    assert (found["killed"]["died"], found["killed"]["stage"]) == ("SIGSEGV", "gate")
    assert found["raises"]["last_words"] == "ValueError: so"
    assert found["endless"]["died"] == "time limit"
    assert found["hungry"]["last_words"] == "MemoryError"


def wrong(said: str) -> dict[str, Any]:
    return {"outcome": "wrong", "reason": said, "ratio": 0.8}


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_a_handful_of_the_libraries_networks(repository: Path, tmp_path: Path, seed: int) -> None:
    for library in ("transformers", "timm", "diffusers", "peft"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs the extra census: {library} is not installed")
    file = tmp_path / "found"
    command = [sys.executable, "benchmarks/census.py", "--first", "12", "--seed", str(seed), "--json", str(file)]
    subprocess.run(command, cwd=repository, check=True, capture_output=True, timeout=3000)
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(found) == 12
    assert [each for each in found if outcome(each) in ("wrong", "bytes", "died", "crashed", "slow")] == []
