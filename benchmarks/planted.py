"""What the gate sees on a machine without GPU: real changes of real networks, planted one at a time.

    python benchmarks/planted.py [device] [network,...]         (default: sim:h200 bert,resnet50)

Each network, at the sizes of the paper, is stored as a baseline and then gated as it is and with each change, by the
plugin itself in a process of its own, as `pytest --magis-models=planted:bert --magis-device=sim:h200` would do it.
Changes are made to the module, as a commit would make them: parts that run a second time without gradients (slower, the
peak stays), a wider layer (more memory, hardly slower). The devices' constants are never touched.

Printed: `benchmarks/results/planted_h200.txt`. The optimized step is another plan after any change, whose own figures
may move by more than what was planted; they are gated as well. Runs that must stay green although something changed are
therefore those of the eager step alone.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lib.program import arguments
from torch import Tensor, nn

from magis.extensions.models.presets import recipe
from magis.models import Workload

HERE = Path(__file__).resolve().parent
PLANT = "MAGIS_PLANTED"
"""Variable of the environment that names the change to make."""
NONE = "unchanged"


@dataclass(frozen=True)
class Changes:
    """Of one network, the parts that are changed."""

    slower: tuple[str, ...]
    """Paths that run twice: about 3% more simulated latency."""
    hardly: tuple[str, ...]
    """The same, less than the tolerance of 1%."""
    wider: Callable[[nn.Module], None]
    """About 1% more memory."""


def run_again(module: nn.Module, paths: Sequence[str]) -> None:
    """Run these parts a second time without gradients, as a teacher is run, and add the mean to what they return."""

    def hook(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch.no_grad():
            output.add_(part.forward(*inputs).mean())

    for path in paths:
        module.get_submodule(path).register_forward_hook(hook)


def widen_feed_forward(path: str, inner: int, module: nn.Module) -> None:
    part: Any = module.get_submodule(path)
    part.up = nn.Linear(part.up.in_features, inner)
    part.down = nn.Linear(inner, part.down.out_features)


def widen_bottleneck(path: str, inner: int, module: nn.Module) -> None:
    part: Any = module.get_submodule(path)
    branch = part.branch
    branch[0] = nn.Conv2d(branch[0].in_channels, inner, 1, bias=False)
    branch[3] = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
    branch[1], branch[4] = nn.BatchNorm2d(inner), nn.BatchNorm2d(inner)
    branch[6] = nn.Conv2d(inner, branch[6].out_channels, 1, bias=False)


CHANGES = {
    "bert": Changes(
        slower=("layers.0", "layers.1.feed_forward", "layers.1.attention.out", "layers.2.attention.out"),
        hardly=("layers.0.attention.out",),
        wider=partial(widen_feed_forward, "layers.3.feed_forward", 3072 + 1152),
    ),
    "resnet50": Changes(
        slower=("stem", *(f"blocks.{block}.branch.{part}" for block in (1, 2) for part in (3, 6))),
        hardly=("blocks.1.branch.3",),
        wider=partial(widen_bottleneck, "blocks.1", 82),
    ),
}


def network(name: str) -> Workload:
    """A network at the paper's sizes, with the change that the environment names."""
    made = recipe(name, "paper")(0)
    changes = CHANGES[name]
    plants: dict[str, Callable[[nn.Module], None]] = {
        "slower": lambda module: run_again(module, changes.slower),
        "hardly": lambda module: run_again(module, changes.hardly),
        "wider": changes.wider,
        NONE: lambda _module: None,
    }
    plants[os.environ.get(PLANT, NONE)](made.module)
    return made


def bert() -> Workload:
    return network("bert")


def resnet50() -> Workload:
    return network("resnet50")


Row = dict[str, str]


def gated(folder: Path, device: str, name: str, plant: str, *options: str) -> tuple[int, list[Row]]:
    """Exit code and rows of one run of the gate."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_magis.plugin"),
        *(f"--magis-models=planted:{name}", f"--magis-device={device}", "--magis-memory-ratios=0.8", *options),
    ]
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", PLANT: plant}
    results = folder / "results.csv"
    results.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    if not results.exists():
        sys.exit(f"the gate did not run:\n{done.stdout}{done.stderr}")
    with results.open(newline="", encoding="utf-8") as stream:
        return done.returncode, list(csv.DictReader(stream))


def runs() -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """What is gated: change, further options, and whether it must be red."""
    eager = "--magis-strategies=eager"
    yield NONE, (), False
    yield "slower", (), True
    yield "wider", (), True
    yield "hardly", (eager,), False
    yield "slower", (eager, "--magis-latency-tolerance=0.05"), False
    yield "wider", (eager, "--magis-memory-tolerance=0.02"), False


def planted(now: Row, before: Row) -> str:
    """By how much the original changed."""
    latency = float(now["ori-simul-latency"]) / float(before["ori-simul-latency"]) - 1
    memory = int(now["ori peak bytes"]) / int(before["ori peak bytes"]) - 1
    return f"latency {latency:+.2%}, memory {memory:+.2%}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("device", nargs="?", default="sim:h200")
    parser.add_argument("names", nargs="?", default="bert,resnet50")
    asked = parser.parse_args()
    device, wrong = asked.device, 0
    for name in asked.names.split(","):
        with tempfile.TemporaryDirectory() as folder:
            _, base = gated(Path(folder), device, name, NONE, "--magis-update=new")
            for change, options, red in runs():
                code, rows = gated(Path(folder), device, name, change, *options)
                said = "red" if code == 1 else "green" if code == 0 else f"exit code {code}"
                wrong += said != ("red" if red else "green")
                print(f"{name} on {device}, {' '.join([change, *options])}: {planted(rows[0], base[0])} -> {said}")
                for row in rows:
                    print(f"    {row['strategy']:6} {row['verdict']:12} {row['note']}", flush=True)
    print(f"{wrong} verdicts were not as expected")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
