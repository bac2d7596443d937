"""All neighbours taken away, or one: the core still works, and what a neighbour would have done is one line that names
it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from magis import registry
from magis.errors import UsageError
from tests.layering import NEIGHBOURS, PACKAGES

SMOKE = """
import copy, sys
import pytest, torch
from torch import nn
import magis

def net():
    torch.manual_seed(0)
    module = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())))
    return module, torch.randn(256, 32), torch.randn(256, 32), nn.functional.mse_loss

def main():
    module, x, y, loss = net()
    twin = copy.deepcopy(module)
    step = magis.optimize(module, (x, y), loss, torch.optim.SGD(module.parameters(), lr=.1), memory_ratio=.9)
    update = torch.optim.SGD(twin.parameters(), lr=.1)
    for _ in range(3):
        planned = step(x, y)
        update.zero_grad()
        eager = loss(twin(x), y)
        eager.backward()
        update.step()
        assert torch.equal(planned, eager.detach())
    assert all(map(torch.equal, module.parameters(), twin.parameters()))
    with magis.peak() as peak:
        torch.ones(1000)
    assert peak.tensor_bytes == 4000, peak
    assert magis.estimate(net, device="sim:h100").peak_bytes > 0

if __name__ == "__main__":
    main()
    sys.exit(pytest.main(sys.argv[1:]))
"""
"""A step trained beside eager's, the peak of a block, a prediction for a GPU; `net` is also a factory for the gate."""
GATE = ("--magis-models=smoke:net", "--magis-device=sim:rtx3090", "--magis-memory-ratios=0.8")

ASKED: dict[str, tuple[str, ...]] = {
    "compile": ("-c", "import magis; magis.checkpoint_policy"),
    "models": ("-m", "pytest", "--magis-models=bert"),
    "onnx": ("-m", "pytest", *GATE, "--magis-strategies=ort"),
    "outputs": ("-m", "pytest", *GATE, "--magis-report=page.html"),
    "paper": ("-m", "pytest", *GATE, "--magis-search=paper"),
    "ranks": ("-m", "pytest", *GATE, "--magis-strategies=ddp"),
    "snapshots": ("-m", "pytest", *GATE, "--magis-snapshot=steps"),
    "versions": ("-m", "magis", "bisect", "--", "tests"),
    "why": ("-m", "magis", "why", "smoke:net"),
}
"""What a neighbour would have done."""


@pytest.fixture(scope="module", params=["all", *(f"only {name}" for name in sorted(NEIGHBOURS))])
def without(
    request: pytest.FixtureRequest, repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    """A copy of both packages without one neighbour or any, and the names of those that are missing."""
    asked: str = request.param
    names = sorted(NEIGHBOURS) if asked == "all" else [asked.removeprefix("only ")]
    root = tmp_path_factory.mktemp("without")
    half = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")  # which another worker is about to rename
    for package in PACKAGES:  # compiled kernels are copied, too: times of files stay
        shutil.copytree(repository / package, root / package, ignore=half)
    for entry in (entry for name in names for entry in NEIGHBOURS[name][0]):
        place = root.joinpath(*entry.split("."))
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    (root / "smoke.py").write_text(SMOKE, encoding="utf-8")
    # an editable installation would find what is missing here where it was copied from
    finders = "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'Editable' not in str(each)]\n"
    (root / "sitecustomize.py").write_text(finders, encoding="utf-8")
    return names, root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_the_core_works_without(without: tuple[list[str], Path]) -> None:
    _, root = without
    done = run(root, "smoke.py", *GATE, "--magis-update=new", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_neighbour_would_have_done_is_one_line_that_names_it(without: tuple[list[str], Path]) -> None:
    names, root = without
    for name in names:
        done = run(root, *ASKED[name])
        (line,) = {line for line in (done.stdout + done.stderr).splitlines() if "is not installed" in line}
        assert NEIGHBOURS[name][0][0] in line
        assert "install the whole of pytest-magis" in line
        assert done.returncode == (1 if name == "compile" else 4)


def test_every_row_of_the_registry_loads() -> None:
    for kind in registry._PLACES:
        for name in registry.names(kind):
            assert registry.load(kind, name) is not None


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no search is called 'greedy'.*known are paper"):
        registry.load("search", "greedy")
