"""What magis makes of a network, judged from outside: only its public functions and plain eager loops are called."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.census_lib.network import Batch, Network, loss_of, reason_of, seeded
from magis import MagisError, UsageError, optimize, run_case
from magis.api import Bench
from magis.cases.check import check_case
from magis.models import from_function
from magis.results import Case, CaseResult, StepFigures

RATIOS = (0.8, 0.9, 0.95, 1.0)
STEPS = 3
BUDGET = 150
"""Plans per search: enough for small networks."""


@dataclass(frozen=True)
class Found:
    """What became of one way to use a network."""

    outcome: str
    """ "exact", "refused", "wrong", "bytes", "crashed", "no limit" or "not reproducible"."""
    reason: str = ""
    ratio: float | None = None
    in_parts: bool = False
    note: str = ""


def judged(what: Callable[[], Found]) -> Found:
    """Errors that magis raises on purpose are refusals, all others are defects."""
    try:
        return what()
    except MagisError as error:
        return Found("refused", str(error))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a finding)
        return Found("crashed", reason_of(error))


# --- the gate ------------------------------------------------------------------------------------------------


def gate(network: Network) -> Found:
    """The gate's case at the smallest ratio that has a plan, as a marked test is run."""

    def returned() -> tuple[object, ...]:
        module = network.make().train()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        batch = network.batch()
        return (module, batch, optimizer) if network.loss is None else (module, batch, network.loss, optimizer)

    make, bench, note = from_function("census", returned), Bench(), ""
    case = Case("census", "magis", "cpu", "small", memory_ratio=RATIOS[0], budget=BUDGET, timing_rounds=1)
    check_case(case, cache=bench, make=make)
    result = run_case(case, cache=bench, make=make, rough=True)
    note = result.note
    ratio = next((each for each in RATIOS if each >= result.memory_ratio), None)
    problem = "; ".join(_problems(result))
    if problem:
        return Found("wrong" if result.numbers.startswith("differs") else "bytes", problem, ratio, note=note)
    if result.numbers.startswith("not run"):
        return Found("refused", f"numbers: {result.numbers}", ratio, note=note)
    in_parts = bool(result.search.fission)
    return Found("exact" if ratio else "no limit", "", ratio, in_parts, note)


def _problems(result: CaseResult) -> Iterator[str]:
    if result.numbers.startswith("differs"):
        yield f"numbers: {result.numbers}"
    yield from _bytes("original", result.original)
    yield from _bytes("optimized", result.optimized)


def _bytes(name: str, step: StepFigures) -> Iterator[str]:
    if step.measured is None:
        return
    pairs = (
        ("tensor bytes", step.simulated.tensor_bytes, step.measured.tensor_bytes),
        ("peak bytes", step.simulated.peak_bytes, step.measured.peak_bytes),
    )
    for what, simulated, measured in pairs:
        if simulated != measured:
            yield f"{name} {what}: simulated {simulated:,}, measured {measured:,} ({simulated - measured:+,})"
            return


# --- magis.optimize ------------------------------------------------------------------------------------------


def trained(network: Network, least: float) -> Found:
    """`magis.optimize` against a plain loop, both with the same random numbers and other contents at each step."""
    example, *batches = _batches(network)
    for ratio in (each for each in RATIOS if each >= least):
        ours = _Loop(network)
        try:
            step = optimize(
                ours.module, example, network.loss, ours.optimizer, memory_ratio=ratio, budget=BUDGET
            )  # fmt: skip
        except UsageError as error:
            if "no plan found" not in str(error):
                raise
            continue
        in_parts = bool(step.report().fission)
        called: Callable[[Batch], Tensor] = lambda data: step(**data) if isinstance(data, dict) else step(*data)  # noqa: B023, E731
        theirs = _Loop(network)
        mine = ours.run(called, batches)
        plain = theirs.run(theirs.eager, batches)
        difference = _difference(ours, theirs, mine, plain, exactly=not in_parts)
        if difference and _difference(theirs, again := _Loop(network), plain, again.run(again.eager, batches)):
            return Found("not reproducible", "two eager loops differ", ratio)
        return Found("wrong" if difference else "exact", difference, ratio, in_parts)
    return Found("no limit", "no plan found, not even with eager's bytes")


def _batches(network: Network) -> list[Batch]:
    """An example and the batches to train on, each with contents of its own."""
    found = []
    for seed in range(STEPS + 1):
        seeded(100 + seed)
        found.append(network.batch())
    return found


@dataclass(frozen=True)
class _Seen:
    loss: Tensor
    generators: tuple[bytes, str, str]


class _Loop:
    """A network of its own and its optimizer."""

    def __init__(self, network: Network) -> None:
        seeded(0)
        self.network = network
        self.module: nn.Module = network.make().train()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def run(self, step: Callable[[Batch], Tensor], batches: list[Batch]) -> list[_Seen]:
        seeded(7)
        return [_Seen(step(batch).detach().clone(), _generators()) for batch in batches]

    def eager(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.network, self.module, batch)
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {**self.module.state_dict()}
        plain = self.optimizer.state_dict()
        numbers["the optimizer's groups"] = plain["param_groups"]
        named = dict(enumerate(name for name, _ in self.module.named_parameters()))
        for index, values in plain["state"].items():
            for key, value in values.items():
                numbers[f"{key} of {named.get(index, index)}"] = value
        return numbers


def _generators() -> tuple[bytes, str, str]:
    theirs = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), repr(theirs), repr(random.getstate())


GENERATORS = ("torch's", "numpy's", "Python's")


def _difference(
    ours: _Loop, theirs: _Loop, mine: list[_Seen], plain: list[_Seen], *, exactly: bool = True
) -> str:  # fmt: skip
    """Where the two loops differ first, in words; empty: nowhere."""
    for number, (left, right) in enumerate(zip(mine, plain, strict=True)):
        if not _same(left.loss, right.loss, exactly=exactly):
            return f"loss of step {number}: {left.loss.item():.9g}, eager {right.loss.item():.9g}"
        for name, our, their in zip(GENERATORS, left.generators, right.generators, strict=True):
            if our != their:
                return f"{name} generator is in another state after step {number}"
    state, expected = ours.state(), theirs.state()
    if state.keys() != expected.keys():
        odd = sorted(state.keys() ^ expected.keys())
        return f"state: {odd[0]} is {'missing' if odd[0] in expected else 'too much'} ({len(odd)} such)"
    different = [name for name, value in expected.items() if not _alike(name, state[name], value, exactly=exactly)]
    if different:
        return f"state: {len(different)} of {len(expected)} differ, first {different[0]}"
    return ""


def _alike(name: str, our: Any, their: Any, *, exactly: bool) -> bool:
    if isinstance(their, Tensor):
        if not exactly and not name.startswith("exp_avg of"):
            return our.shape == their.shape  # Adam makes of rounding in a vanishing gradient a whole step
        return _same(our, their, exactly=exactly)
    if isinstance(their, Mapping):
        return our.keys() == their.keys() and all(_alike(name, our[k], v, exactly=exactly) for k, v in their.items())
    if isinstance(their, (list, tuple)):
        pairs = zip(our, their, strict=False)
        return len(our) == len(their) and all(_alike(name, *pair, exactly=exactly) for pair in pairs)
    return bool(our == their)


def _same(our: Tensor, their: Tensor, *, exactly: bool) -> bool:
    """Every bit, but that a NaN is a NaN; or closely, of results that were summed in another order."""
    if our.shape != their.shape or our.dtype != their.dtype:
        return False
    if exactly or not their.is_floating_point():
        return bool(((our == their) | ((our != our) & (their != their))).all())  # noqa: PLR0124
    eps = torch.finfo(their.dtype).eps
    left, right = our.double(), their.double()
    return bool((left - right).norm() <= 2e4 * eps * right.norm() + 1e-5)


def whole(network: Network, tell: Callable[[dict[str, Any]], None]) -> None:
    """Judge a network in both ways; `tell` hears what is known so far."""
    started = time.process_time()
    first = judged(lambda: gate(network))
    known = {"gate": vars(first), "gate_s": time.process_time() - started, "stage": "optimize"}
    tell(known)
    started = time.process_time()
    second = judged(lambda: trained(network, first.ratio or RATIOS[0]))
    tell({**known, "optimize": vars(second), "optimize_s": time.process_time() - started, "stage": "done"})
