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
from benchmarks.census_lib.shrink import shrunken
from benchmarks.census_lib.table import BEGIN, END, causes, outcome, page, totals


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


def test_widths_keep_their_relations() -> None:
    fields = {
        "hidden_size": 768, "num_attention_heads": 12, "head_dim": 64, "num_hidden_layers": 24, "vocab_size": 30522,
        "image_token_id": 29999, "pad_token_id": 0, "layer_types": ["a"] * 20 + ["b", "a", "b", "a"], "image_size": 224,
        "patch_size": 16, "inner": {"model_type": "x", "hidden_size": 1024, "eos_token_id": 50256},
    }  # fmt: skip
    small = shrunken(fields, 16)
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"]
    assert small["layer_types"] == ["a", "b"]
    assert small["num_hidden_layers"] == 2
    assert small["pad_token_id"] == 0
    assert small["image_token_id"] != small["inner"]["eos_token_id"]
    assert max(small["image_token_id"], small["inner"]["eos_token_id"]) < small["vocab_size"]
    assert small["image_size"] % small["patch_size"] == 0


def row(key: str, **more: Any) -> dict[str, Any]:
    exact = {"outcome": "exact", "reason": "", "ratio": 0.8}
    return {"key": key, "stage": "done", "gate": exact, "optimize": exact, **more}


def wrong(said: str) -> dict[str, Any]:
    return {"outcome": "wrong", "reason": said, "ratio": 0.8}


ROWS = [
    row("a/fine"),
    row("a/first", optimize=wrong("loss of step 1: 2.5, eager 2.25")),
    row("a/second", optimize=wrong("loss of step 2: 7.125, eager 7")),
    row("b/dead", stage="gate", died="SIGSEGV", last_words=""),
    row("b/slow", stage="gate", died="time limit", last_words=""),
    {"key": "b/absent", "stage": "not run", "why": "no kernel"},
]


def test_the_worst_of_both_ways_counts() -> None:
    assert [outcome(each) for each in ROWS] == ["exact", "wrong", "wrong", "died", "slow", "not run"]
    assert totals(ROWS).splitlines()[-1].endswith("20.0% of 5")


def test_failures_that_differ_in_numbers_have_one_cause() -> None:
    text = causes(ROWS)
    assert "   2  wrong" in text
    assert "families: first, second" in text
    shown = page(f"head\n{BEGIN}\nold\n{END}\ntail\n", "# today", ROWS)
    assert shown.startswith("head\n")
    assert shown.endswith("tail\n")
    assert "old" not in shown
    assert "b/absent" in shown


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
