"""How well simulated GPUs predict what others have measured; fits their shares of the peaks.

    python benchmarks/calibrate.py [--fit] [--cells] [--devices rtx3090 a100] [--output table.txt]

`benchmarks/calibration/training.csv` holds published speeds of training, with the source of each, `products.csv` those
of matrix products. Every step is captured at the published sizes (nothing is computed), and its time on the device's
model is set beside the published one. Half of a device's cells are for fitting, the others for judging: every second
one by precision, layout, network and batch. `--fit` looks for the shares (`magis.cost.devices.Fitted`) that suit the
first half best and judges these; without it, those in the code are judged. `--cells` prints every cell.

Eager's host issues one operator after the other, views too, at a fixed cost by kind, while the device runs what has
come in: a step takes as long as the later of the two. A program that reads a number off the device before its update
waits there. Cells of so few pictures that the host is the bound are in neither half.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import groupby
from math import exp, log
from pathlib import Path

import numpy as np
from lib.program import arguments, head, printed
from lib.published_steps import step
from scipy.optimize import least_squares

from magis.capture import capture
from magis.capture.hollow import Hollow, hollow
from magis.capture.python_state import caches_kept
from magis.cost.devices import FITTED, DeviceModel, Fitted, find_device, gpu_rates
from magis.cost.flops import OperatorWork, work
from magis.cost.operator_latency import roofline_ns, work_ns
from magis.graph import Op, Ref, Value, every_op

FOLDER = Path(__file__).parent / "calibration"
CLASSES = (("rtx3090",), ("v100",), ("a100",), ("h100", "h200"))
"""Devices that share all but the bandwidth."""
HOST_NS = {"conv": 105_000, "conv_backward": 105_000, "batch_norm": 105_000, "view": 5_000, "none": 5_000}
"""Of eager's host, for a call of cuDNN with its module and its part of autograd, and for one that runs nothing on the
device. Set by three of the cells of 12 pictures: ResNet-50 and 152 and DenseNet-121 in half precision."""
OTHER_NS = 15_000
"""For any other call."""
DRAWN = Fitted(0.8, 0.75, 0.75, 0.6, 0.75, 0.65)
"""Where shares are drawn to that few cells depend on; those of single precision are drawn to those of half."""
SPREAD, OFF = 0.25, 0.06
"""Standard deviations of the logarithms: of a share around that, of a cell around its prediction."""


@dataclass(frozen=True)
class Calls:
    """What eager issues, in order: each distinct piece of work once, which of them each call is, and the number of
    calls before the update."""

    distinct: tuple[OperatorWork, ...]
    order: tuple[int, ...]
    before_update: int


Key = tuple[str, int, int, str, str]
Steps = Mapping[Key, Calls]


@dataclass(frozen=True)
class Cell:
    """A published measurement."""

    model: str
    batch: int
    size: int
    precision: str
    layout: str
    device: str
    samples_per_s: float

    @property
    def ms(self) -> float:
        return self.batch / self.samples_per_s * 1e3

    @property
    def key(self) -> Key:
        """What the captured step depends on: single precision is one step, on tensor cores or not."""
        precision = "fp32" if self.precision == "tf32" else self.precision
        return self.model, self.batch, self.size, precision, self.layout

    @property
    def waits(self) -> bool:
        """NVIDIA's BERT for SQuAD reads the norm of all gradients before it updates."""
        return self.model.startswith("bert")

    @property
    def is_small(self) -> bool:
        """Whether the host is the bound, whatever the device."""
        return self.batch == 12

    @property
    def order(self) -> tuple[str, str, str, str, int]:
        return self.device, self.precision, self.layout, self.model, self.batch


def cells() -> list[tuple[Cell, str]]:
    """All, and what each is for: "fit", "judge", or "host" where the host is the bound.

    Of a class's second device those are for fitting that are for judging of the first.
    """
    with (FOLDER / "training.csv").open(encoding="utf-8", newline="") as file:
        found = sorted((_cell(row) for row in csv.DictReader(file)), key=lambda cell: cell.order)
    second = {device for devices in CLASSES for device in devices[1:]}
    large = [
        (cell, "judge" if (position + (device in second)) % 2 else "fit")
        for device, of_device in groupby((cell for cell in found if not cell.is_small), key=lambda cell: cell.device)
        for position, cell in enumerate(of_device)
    ]
    return [*large, *((cell, "host") for cell in found if cell.is_small)]


def _cell(row: Mapping[str, str]) -> Cell:
    return Cell(
        row["model"], int(row["batch"]), int(row["size"]), row["precision"], row["memory_format"], row["device"],
        float(row["samples_per_s"]),
    )  # fmt: skip


def calls(key: Key) -> Calls:
    model, batch, size, precision, layout = key
    with caches_kept() as caches, hollow(Hollow(made=caches.made)):
        made = step(model, batch, size, precision, layout)
        caches.forget(*made.module.parameters(), *made.module.buffers(), *made.inputs, *made.targets)
    captured = capture(
        *made.parts,
        device="cuda",
        explicit_attention=True,
        autocast="float16" if precision == "amp" else None,
        settled=False,
    )
    issued = list(every_op(captured.original.graph))
    before = next((position for position, (op, _) in enumerate(issued) if op.phase == "update"), len(issued))
    numbers: dict[OperatorWork, int] = {}
    order = tuple(numbers.setdefault(work(op, values), len(numbers)) for op, values in issued)
    return Calls(tuple(numbers), order, before)


def queued_ns(issues: Iterable[tuple[int, int]], wait_at: int | None = None) -> int:
    """When the device has run calls of so many nanoseconds each, which the host issues in so many, one by one.

    Before call number `wait_at` the host stands still until the device has caught up.
    """
    issued = done = 0
    for position, (ns, host_ns) in enumerate(issues):
        if position == wait_at:
            issued = max(issued, done)
        issued += host_ns
        if ns:
            done = max(done, issued) + ns
    return max(issued, done)


def predicted_ms(cell: Cell, issued: Calls, device: DeviceModel) -> float:
    """Of a step, which ends when host and device are both through."""
    times = [work_ns(device, each) for each in issued.distinct]
    host = [HOST_NS.get(each.kind, OTHER_NS) for each in issued.distinct]
    wait_at = issued.before_update if cell.waits else None
    ordered = ((times[number], host[number]) for number in issued.order)
    return queued_ns(ordered, wait_at) / 1e6


def fit(devices: Sequence[str], given: Sequence[Cell], steps: Steps) -> dict[str, Fitted]:
    """Shares that suit the cells best (least squares of logarithms): one set, but for each device's bandwidth."""
    names = [field.name for field in fields(Fitted) if field.name != "bandwidth"]
    drawn = np.log([*(getattr(DRAWN, name) for name in names), *(DRAWN.bandwidth for _ in devices)])

    def shares(found: np.ndarray) -> dict[str, Fitted]:
        values = [float(each) for each in np.exp(found)]
        common = dict(zip(names, values, strict=False))
        return {
            device: Fitted(**common, bandwidth=values[len(names) + number]) for number, device in enumerate(devices)
        }

    def residuals(found: np.ndarray) -> np.ndarray:
        models = {device: with_shares(device, each) for device, each in shares(found).items()}
        off = [log(predicted_ms(cell, steps[cell.key], models[cell.device]) / cell.ms) / OFF for cell in given]
        off += [log(ratio) / OFF for device in devices for ratio in _products(device, models[device])]
        away = found - drawn
        away[[0, 2]] = found[[0, 2]] - found[[1, 3]]
        return np.array([*off, *(away / SPREAD)])

    return shares(least_squares(residuals, drawn, diff_step=1e-3).x)  # times are whole nanoseconds


def with_shares(device: str, fitted: Fitted) -> DeviceModel:
    return replace(find_device(f"sim:{device}"), rates=gpu_rates(fitted))


def _products(name: str, device: DeviceModel) -> Iterator[float]:
    """Predicted / published time of square matrix products."""
    for row in product_rows():
        if row["device"] == name:
            yield product_ratio(row, device)


def product_rows() -> list[dict[str, str]]:
    with (FOLDER / "products.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def product_ratio(row: Mapping[str, str], device: DeviceModel) -> float:
    size = int(row["size"])
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(row["precision"], "float32")
    values = {number: Value(number, (size, size), (size, 1), dtype, number) for number in range(3)}
    ns = roofline_ns(device, Op(0, "aten.mm.default", (Ref(0), Ref(1)), (), (2,)), values)
    return ns / (2 * size**3 / float(row["tflops"]) / 1e3)


def table(*, refit: bool, every: bool, devices: Sequence[str]) -> Iterator[str]:
    """Lines of the report."""
    yield from head()
    chosen = [(cell, half) for cell, half in cells() if cell.device in devices]
    steps = {key: calls(key) for key in dict.fromkeys(cell.key for cell, _ in chosen)}
    shares = dict(FITTED)
    if refit:
        for members in CLASSES:
            asked = [device for device in members if device in devices]
            given = [cell for cell, half in chosen if half == "fit" and cell.device in asked]
            shares |= fit(asked, given, steps) if asked else {}
    names = [field.name for field in fields(Fitted)]
    yield "shares: " + ", ".join(names)
    for device in devices:
        yield f"{device:8} " + ", ".join(f"{value:.2f}" for value in astuple(shares[device]))
    ratios = {
        cell: predicted_ms(cell, steps[cell.key], with_shares(cell.device, shares[cell.device])) / cell.ms
        for cell, _ in chosen
    }
    if every:
        yield "half   device   network                batch precision layout published ms  predicted/published"
        for cell, half in chosen:
            yield (
                f"{half:6} {cell.device:8} {cell.model:22} {cell.batch:5} {cell.precision:9} "
                f"{cell.layout:6} {cell.ms:12.1f} {ratios[cell]:8.2f}"
            )
        for row in product_rows():
            if row["device"] in devices:
                ratio = product_ratio(row, with_shares(row["device"], shares[row["device"]]))
                yield f"       {row['device']:8} product of {row['size']:>5}, {row['precision']:5} {ratio:36.2f}"
    yield "device    half   cells  geometric mean  median error  range"
    for members in (*((device,) for device in devices), *(each for each in CLASSES if len(each) > 1), devices):
        name = "all" if members is devices else "+".join(members)
        for half in ("fit", "judge", "host"):
            if found := [ratios[cell] for cell, each in chosen if each == half and cell.device in members]:
                yield f"{name:9} {half:5} {summary(found)}"


def summary(ratios: Sequence[float]) -> str:
    mean = exp(statistics.mean(map(log, ratios)))
    median = statistics.median(abs(ratio - 1) for ratio in ratios)
    return f"{len(ratios):6} {mean:14.3f} {median:13.1%}   {min(ratios):.2f}-{max(ratios):.2f}"


def main() -> None:
    """Print the table."""
    every = [device for members in CLASSES for device in members]
    asked = arguments(__doc__, fit=False, cells=False, devices=every, output=Path).parse_args()
    printed(table(refit=asked.fit, every=asked.cells, devices=asked.devices), asked.output)


if __name__ == "__main__":
    main()
