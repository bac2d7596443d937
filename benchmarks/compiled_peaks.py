"""Peaks of compiled steps: predicted by `magis.estimate(..., compiled=...)` beside those of inductor's code as it runs.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/compiled_peaks.py [network ...] [--compiled model loss step]
        [--output FILE]

Plain training steps on the CPU (forward, loss, backward, AdamW): the network is compiled, or network and loss as one
function, or (*step*) the update, too. The peak is that of one step with all that stays, by the allocator's events;
*eager* is the same step not compiled. *s* are the seconds of a prediction, capture included, then those of inductor's
first two steps, with whatever is in its cache. Networks are those of `benchmarks/lib/compiled_nets.py`, and built-in
ones at preset small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from lib.program import arguments, head, printed

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the plugin does; before torch is loaded

import torch
from lib.compiled_nets import NETS

import magis
from magis.capture import Workload
from magis.extensions.compile.compiled_step import COMPILED
from magis.extensions.ranks.strategies.distributed import held_by, make_optimizer, trained
from magis.models import get
from magis.models.custom import as_workload
from magis.runtime.measure import collector_spared, window_peak

BUILT_IN = ("mlp", "gpt", "bert", "vit", "unet", "gpt_neo", "resnet34", "vgg11")
TITLE = (
    f"{'network':15} {'compiled':8} {'eager':>13} {'measured':>13} {'predicted':>13} {'off':>7} {'s':>5} {'s':>5}  note"
)
CLOSE, FAR = 0.03, 0.10


def workload(name: str) -> Workload:
    """The training step of a name."""
    torch.manual_seed(0)
    return as_workload(name, NETS[name](), "adamw", who=name) if name in NETS else get(name).build("small", 0)


def measured(work: Workload, what: str) -> int:
    """Bytes of a step with all that stays; ``what`` is compiled, "" for nothing."""
    module = work.module
    optimizer = make_optimizer(work, trained(module), "compiled peaks")
    call: Callable[..., Any] = torch.compile(module, dynamic=False) if what == "model" else module

    def whole() -> Any:
        return call(*work.inputs) if work.loss_fn is None else work.loss_fn(call(*work.inputs), *work.targets)

    run = torch.compile(whole, dynamic=False) if what in ("loss", "step") else whole

    update = torch.compile(optimizer.step) if what == "step" else optimizer.step

    def step() -> None:
        run().backward()
        update()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    held = {id(tensor): tensor.nbytes for _, tensor in held_by(module, optimizer, work)}
    with collector_spared():
        return sum(held.values()) + window_peak(step).peak_bytes


def row(name: str, what: str, errors: list[float]) -> str:
    """The line of a network; how far the prediction is off is noted."""
    torch.compiler.reset()
    eager = measured(workload(name), "")
    begun = time.perf_counter()
    found = magis.estimate(partial(workload, name), compiled=what, device="cpu")
    predicted_in = time.perf_counter() - begun
    torch.compiler.reset()
    begun = time.perf_counter()
    seen = measured(workload(name), what)
    compiled_in = time.perf_counter() - begun
    errors.append(found.peak_bytes / seen - 1)
    figures = f"{eager:13,} {seen:13,} {found.peak_bytes:13,} {errors[-1]:+7.2%} {predicted_in:5.0f} {compiled_in:5.0f}"
    return f"{name:15} {what:8} {figures}  {found.result.note}"


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(__doc__, names=[*BUILT_IN, *NETS], output=Path)
    parser.add_argument("--compiled", nargs="*", choices=COMPILED, default=["model", "loss"])
    asked = parser.parse_args()
    errors: list[float] = []

    def rows() -> Iterator[str]:
        for name in asked.names:
            for what in asked.compiled:
                try:
                    yield row(name, what, errors)
                except Exception as error:  # noqa: BLE001 (a line of the table)
                    yield f"{name:15} {what:8} {type(error).__name__}: {str(error).splitlines()[0]}"

    def told() -> Iterator[str]:
        close, far = (sum(abs(each) <= most for each in errors) for most in (CLOSE, FAR))
        yield f"within {CLOSE:.0%}: {close} of {len(errors)}; within {FAR:.0%}: {far} of {len(errors)}"

    printed(chain(head(f"{torch.get_num_threads()} threads"), (TITLE,), rows(), told()), asked.output)


if __name__ == "__main__":
    main()
