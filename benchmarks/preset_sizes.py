"""What the presets amount to: real eager steps of every model at preset "small", one line each.

    python benchmarks/preset_sizes.py [name or glob ...]

Columns: parameters; persistent MB (parameters, buffers, optimizer state, batch); peak MB (persistent + the
window's peak, from the profiler's memory events, so with the operators' workspace); "fixed":
(persistent + gradients) / peak; "bound": lower bound / peak (persistent + the largest working set of one
operator); "random": the share of the peak that random operators made, which only a restored generator can
recompute; milliseconds of one step (the fastest of several); the first and the last loss.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magis.capture.workload import Workload
from magis.models import model_specs
from magis.ops.optimizers import OptimizerSpec

RANDOM = ("bernoulli", "native_dropout", "rand", "normal", "uniform")


@dataclass(frozen=True)
class Sizes:
    """One workload's bytes and milliseconds."""

    name: str
    parameters: int
    """Their number, not bytes."""
    gradient_bytes: int
    persistent_bytes: int
    peak_bytes: int
    working_set_bytes: int
    random_bytes: int
    milliseconds: float
    losses: tuple[float, ...]

    @property
    def fixed_ratio(self) -> float:
        """(persistent + gradients) / peak."""
        return (self.persistent_bytes + self.gradient_bytes) / self.peak_bytes

    @property
    def lower_bound_ratio(self) -> float:
        """(persistent + the largest working set of one operator) / peak."""
        return (self.persistent_bytes + self.working_set_bytes) / self.peak_bytes

    @property
    def random_ratio(self) -> float:
        return self.random_bytes / self.peak_bytes


def optimizer_of(spec: OptimizerSpec, parameters: list[Tensor]) -> torch.optim.Optimizer | None:
    """The unfused, non-foreach `torch.optim` optimizer that `spec` describes, None for inference."""
    if spec.kind in ("sgd", "momentum"):
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )
    if spec.kind in ("adam", "adamw"):
        kind = torch.optim.Adam if spec.kind == "adam" else torch.optim.AdamW
        return kind(
            parameters,
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )
    return None


def stepper(workload: Workload) -> tuple[Callable[[], float], Callable[[], list[Tensor]]]:
    """(one eager step that returns the loss, the persistent tensors as they are now)."""
    optimizer = optimizer_of(workload.optimizer, list(workload.module.parameters()))

    def step() -> float:
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        loss = workload.loss_fn(workload.module(*workload.inputs), *workload.targets)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    def persistent() -> list[Tensor]:
        state = [] if optimizer is None else tree_leaves(optimizer.state_dict()["state"])
        owned = [
            *workload.module.parameters(),
            *workload.module.buffers(),
            *workload.inputs,
            *workload.targets,
        ]
        return [*owned, *(leaf for leaf in state if isinstance(leaf, Tensor))]

    return step, persistent


class WorkingSets(TorchDispatchMode):
    """Watches every operator: the largest inputs + outputs beyond the persistent ones, and random bytes."""

    def __init__(self, persistent: list[Tensor]) -> None:
        super().__init__()
        self.persistent = {tensor.untyped_storage().data_ptr() for tensor in persistent}
        self.largest = 0
        self.random = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run the operator and count the distinct storages that it touched."""
        out = func(*args, **(kwargs or {}))
        touched: dict[int, int] = {}
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.persistent:
                    touched[storage.data_ptr()] = storage.nbytes()
        self.largest = max(self.largest, sum(touched.values()))
        if any(func.__name__.startswith(kind) for kind in RANDOM):
            self.random += sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


@contextmanager
def quiet() -> Iterator[None]:
    """Silence file descriptors 1 and 2: the profiler's library writes there, past Python's own streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (*saved, null):
            os.close(descriptor)


def window_peak(step: Callable[[], object]) -> int:
    """Peak bytes that the allocator held during `step` beyond what it held before."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        change = event.nbytes()
        held += change
        peak = max(peak, held)
    return peak


def measure(name: str, preset: str = "small", *, rounds: int = 3, enough_ms: float = 0.0) -> Sizes:
    """Build `name`, step it eagerly and measure it; stops timing once a step took at most `enough_ms`."""
    workload = model_specs.get(name).build(preset, 0)
    step, persistent = stepper(workload)
    losses = [step()]
    workload.module.zero_grad(set_to_none=True)
    owned = persistent()
    peak = window_peak(step)
    workload.module.zero_grad(set_to_none=True)
    with WorkingSets(owned) as sets:
        losses.append(step())
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        losses.append(step())
        best = min(best, 1000 * (time.perf_counter() - begin))
        if best <= enough_ms:
            break
    persistent_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in owned}.values())
    count = sum(parameter.numel() for parameter in workload.module.parameters())
    return Sizes(
        name=name,
        parameters=count,
        gradient_bytes=0 if workload.optimizer.kind == "none" else 4 * count,
        persistent_bytes=persistent_bytes,
        peak_bytes=persistent_bytes + peak,
        working_set_bytes=sets.largest,
        random_bytes=sets.random,
        milliseconds=best,
        losses=tuple(losses),
    )


def main() -> None:
    from lib.program import arguments  # beside this program: tests import the rest of it

    """Print the table."""
    parser = arguments(__doc__, names=["all", "seed"])
    parser.add_argument("--preset", default="small", choices=model_specs.PRESETS)
    asked = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    widths = {"params": 10, "persist": 8, "peak MB": 8, "fixed": 6, "bound": 6, "random": 6, "ms": 7}
    print(f"{'name':24}", *(f"{head:>{width}}" for head, width in widths.items()), " losses")
    for name in model_specs.resolve(asked.names):
        sizes = measure(name, asked.preset)
        print(
            f"{name:24} {sizes.parameters:10} {sizes.persistent_bytes / 1e6:8.2f}",
            f"{sizes.peak_bytes / 1e6:8.2f} {sizes.fixed_ratio:6.3f} {sizes.lower_bound_ratio:6.3f}",
            f"{sizes.random_ratio:6.3f} {sizes.milliseconds:7.1f}  {sizes.losses[0]:.4f} -> {sizes.losses[-1]:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
