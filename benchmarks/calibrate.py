"""How well simulated GPUs predict what others have measured; fits their shares of the peaks.

    python benchmarks/calibrate.py [--fit] [--cells] [--devices rtx3090 a100] [--output table.txt]

`benchmarks/calibration/training.csv` holds published speeds of training, with the source of each, `products.csv` those
of matrix products. Every step is captured at the published sizes (nothing is computed), and its time on the device's
model is set beside the published one. Half of a device's cells are for fitting, the others for judging: every second
one by precision, layout, network and batch. `--fit` looks for the shares (`magis.cost.devices.Fitted`) that suit the
first half best and judges these; without it, those in the code are judged. `--cells` prints every cell.

Cells of so few pictures that the host is the bound are in neither half.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from math import exp, log
from pathlib import Path

import numpy as np
from lib.program import arguments, head, printed
from lib.published_training import CLASSES, Calls, Cell, Key, calls, cells, predicted_ms, product_ratio, product_rows
from scipy.optimize import least_squares

from magis.cost.devices import FITTED, DeviceModel, Fitted, find_device, gpu_rates

Steps = Mapping[Key, Calls]
DRAWN = Fitted(0.8, 0.75, 0.75, 0.6, 0.75, 0.65)
"""Where shares are drawn to that few cells depend on; those of single precision are drawn to those of half."""
SPREAD, OFF = 0.25, 0.06
"""Standard deviations of the logarithms: of a share around that, of a cell around its prediction."""


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
    parser = arguments(__doc__, fit=False, cells=False, devices=every, output=Path)
    asked = parser.parse_args()
    if unknown := sorted(set(asked.devices) - set(every)):
        parser.error(f"no published speeds of {', '.join(unknown)}; there are {', '.join(every)}")
    printed(table(refit=asked.fit, every=asked.cells, devices=asked.devices), asked.output)


if __name__ == "__main__":
    main()
