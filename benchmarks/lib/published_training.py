"""Published speeds of training, and what a device's model predicts for the same steps.

Eager's host issues one operator after the other, views too, at a fixed cost by kind, while the device runs what has
come in: a step takes as long as the later of the two.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from magis.capture import capture
from magis.capture.hollow import Hollow, hollow
from magis.capture.python_state import caches_kept
from magis.cost.devices import DeviceModel
from magis.cost.flops import OperatorWork, work
from magis.cost.operator_latency import roofline_ns, work_ns
from magis.graph import Op, Ref, Value, every_op

from .published_steps import step

__all__ = ["CLASSES", "Calls", "Cell", "Key", "calls", "cells", "predicted_ms", "product_ratio", "product_rows"]

FOLDER = Path(__file__).parent.parent / "calibration"
CLASSES = (("rtx3090",), ("v100",), ("a100",), ("h100", "h200"))
"""Devices that share all but the bandwidth."""
HOST_NS = {"conv": 105_000, "conv_backward": 105_000, "batch_norm": 105_000, "view": 5_000, "none": 5_000}
"""Of eager's host, for a call of cuDNN with its module and its part of autograd, and for one that runs nothing on the
device. Set by three of the cells of 12 pictures: ResNet-50 and 152 and DenseNet-121 in half precision."""
OTHER_NS = 15_000
"""For any other call."""


@dataclass(frozen=True)
class Calls:
    """What eager issues, in order: each distinct piece of work once, which of them each call is, and the number of
    calls before the update."""

    distinct: tuple[OperatorWork, ...]
    order: tuple[int, ...]
    before_update: int


Key = tuple[str, int, int, str, str]


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


def product_rows() -> list[dict[str, str]]:
    with (FOLDER / "products.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def product_ratio(row: Mapping[str, str], device: DeviceModel) -> float:
    size = int(row["size"])
    dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(row["precision"], "float32")
    values = {number: Value(number, (size, size), (size, 1), dtype, number) for number in range(3)}
    ns = roofline_ns(device, Op(0, "aten.mm.default", (Ref(0), Ref(1)), (), (2,)), values)
    return ns / (2 * size**3 / float(row["tflops"]) / 1e3)
